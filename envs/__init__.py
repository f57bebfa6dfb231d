"""The contextual MDPs of the paper, registered with Gymnasium by `import envs`.

In each of them a context is drawn at every reset and hidden from the observation (only T-Maze's oracle shows it). It is
reported in `info["context"]`, at reset and at every step, and `reset(options={"context": ...})` fixes it.

    id                            context                                            file
    tmaze-passive, tmaze-active   goal above (+1) or below (-1)                      tmaze.py
    point-robot                   goal on the unit circle                            point.py
    ant-dir, cheetah-vel          direction to run in, speed to run at               locomotion.py
    walker-param, hopper-param    multipliers of mass, inertia, damping, friction    locomotion.py
    ml10, ml10-appendix           one of ten tasks, one of its 50 goals              manipulation.py

`context.py` holds what they share, `state.py` saves and restores unfinished episodes.
"""

import functools
import importlib
import os
import sys
from difflib import get_close_matches

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

from envs.state import Restorable, get_state, set_state

__all__ = ["IDS", "get_state", "make_vec", "set_state"]

# Entry points are strings, so that MuJoCo and Meta-World are imported only when one of their environments is made.
for name, active in {"tmaze-passive": False, "tmaze-active": True}.items():
    gym.register(
        name,
        entry_point="envs.tmaze:TMaze",
        vector_entry_point="envs.tmaze:TMazeVector",
        kwargs={"active": active},  # no max_episode_steps: the horizon is part of the task, reaching it terminates
    )
gym.register(
    "point-robot",
    entry_point="envs.point:PointRobot",
    vector_entry_point="envs.point:PointRobotVector",
    max_episode_steps=50,
)
for name in ("ant-dir", "cheetah-vel", "walker-param", "hopper-param"):
    robot = "".join(word.capitalize() for word in name.split("-"))  # AntDir
    follow = {"camera_name": "track"}  # in videos: by default the camera stands still and the robot runs out of sight
    gym.register(name, entry_point=f"envs.locomotion:{robot}", kwargs=follow, max_episode_steps=200)
for name in ("ml10", "ml10-appendix"):
    gym.register(name, entry_point="envs.manipulation:MetaWorld", kwargs={"benchmark": name}, max_episode_steps=300)

IDS = [name for name, spec in gym.registry.items() if str(spec.entry_point).startswith("envs.")]


def make_vec(
    env_id: str,
    num_envs: int,
    actions: type[gym.Space] | None = None,
    max_episode_steps: int | None = None,
    video_folder: str | None = None,
    render: bool = False,
    **kwargs,
) -> tuple[VectorEnv, int]:
    """`num_envs` copies of any Gymnasium environment, `id` or `module:id`, and T, the maximum length of an episode.

    An episode's last step also starts the next episode: it returns the first observation of the new episode, and the
    last one of the old episode in `infos["final_obs"]`. No step is spent on a reset, unlike in Gymnasium's default.

    `actions` is the kind of action space that the caller can handle, Discrete or Box: a Box must be flat and bounded,
    and observations must be flat. With `video_folder` the first episode is recorded there; `render` only
    checks that rendering works. Further arguments go to the environment. Bad arguments raise a ValueError of one line.
    """
    if ":" in env_id:
        module, env_id = env_id.rsplit(":", 1)
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"cannot import {module}: {error}") from error
    try:
        spec = gym.spec(env_id)
    except gym.error.Error:
        ids = ", ".join(get_close_matches(env_id, IDS, n=1, cutoff=0.75) or IDS)
        raise ValueError(
            f"unknown environment {env_id!r}: try {ids}, any id of Gymnasium's, or your module:id"
        ) from None
    if max_episode_steps is not None:
        if env_id.startswith("tmaze-"):
            raise ValueError("the length of a T-Maze episode follows from corridor_length, not max_episode_steps")
        kwargs["max_episode_steps"] = max_episode_steps
    if render or video_folder is not None:
        check_rendering(env_id)
    if env_id in IDS and spec.vector_entry_point is not None and video_folder is None:
        vec = gym.make_vec(env_id, num_envs, **kwargs)  # our own vectors reset on the same step
    else:
        wrappers = [Restorable]
        if video_folder is not None:
            kwargs["render_mode"] = "rgb_array"
            wrappers = [lambda env: gym.wrappers.RecordVideo(env, str(video_folder), episode_trigger=lambda n: n == 0)]
        same_step = {"autoreset_mode": AutoresetMode.SAME_STEP}
        vec = gym.make_vec(
            env_id, num_envs, vectorization_mode="sync", vector_kwargs=same_step, wrappers=wrappers, **kwargs
        )
    if actions is not None:
        check_spaces(env_id, vec.single_observation_space, vec.single_action_space, actions)
    limit = max_episode_steps or spec.max_episode_steps or getattr(vec, "horizon", None)
    if limit is None and env_id in IDS:  # T-Maze, one at a time
        limit = vec.get_attr("horizon")[0]
    if limit is None:
        raise ValueError(f"{env_id} is registered without a time limit: set max_episode_steps")
    return vec, limit


def check_spaces(env_id, observation_space, action_space, actions):
    if not isinstance(observation_space, gym.spaces.Box) or len(observation_space.shape) != 1:
        raise ValueError(f"{env_id} has observations {observation_space}, a flat Box is needed")
    flat = isinstance(action_space, gym.spaces.Discrete) or len(action_space.shape or ()) == 1
    bounded = not isinstance(action_space, gym.spaces.Box) or action_space.is_bounded()
    if not (isinstance(action_space, actions) and flat and bounded):
        kind = "a flat, bounded Box" if actions is gym.spaces.Box else actions.__name__
        raise ValueError(f"{env_id} has actions {action_space}, {kind} is needed")


@functools.lru_cache  # once per process
def check_rendering(env_id: str) -> None:
    """Renders one picture, so that a missing graphics library is reported before a run begins."""
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen; MuJoCo reads it when it is imported
    env = gym.make(env_id)
    env.close()
    if "rgb_array" not in env.metadata.get("render_modes", []):
        raise ValueError(f"{env_id} cannot be rendered")
    try:
        env = gym.make(env_id, render_mode="rgb_array")
        env.reset()
        env.render()
        env.close()
    except Exception as error:  # the graphics libraries raise errors of many kinds
        raise ValueError(
            f"cannot render {env_id} ({type(error).__name__}). MuJoCo without a screen needs EGL "
            "(Debian and Ubuntu: apt install libegl1 libegl-mesa0 libgl1-mesa-dri) and MUJOCO_GL=egl"
        ) from error
