"""The contextual MDPs of the paper, registered with Gymnasium by `import envs`.

In each of them a context is drawn at every reset and hidden from the observation. It is reported in
`info["context"]`, at reset and at every step, and `reset(options={"context": ...})` fixes it.

    id                            context                                   one file each
    tmaze-passive, tmaze-active   goal above (+1) or below (-1)             tmaze.py
    point-robot                   goal on the unit circle                   point.py
    ant-dir, cheetah-vel          direction to run in, speed to run at      locomotion.py
    walker-param, hopper-param    multipliers of mass, damping, friction    locomotion.py
    ml10, ml10-appendix           one of ten tasks, one of its 50 goals     manipulation.py

`context.py` is what they share. `running.py` and `state.py` are not about environments: they are what the scripts need
around a run, its folder, its checkpoints, so that a script together with this folder is all that there is to copy.
"""

import importlib

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

from envs.state import Restorable

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
gym.register("ant-dir", entry_point="envs.locomotion:AntDir", max_episode_steps=200)
gym.register("cheetah-vel", entry_point="envs.locomotion:CheetahVel", max_episode_steps=200)
gym.register("walker-param", entry_point="envs.locomotion:WalkerParam", max_episode_steps=200)
gym.register("hopper-param", entry_point="envs.locomotion:HopperParam", max_episode_steps=200)
for name in ("ml10", "ml10-appendix"):
    gym.register(name, entry_point="envs.manipulation:MetaWorld", kwargs={"benchmark": name}, max_episode_steps=300)

IDS = [name for name, spec in gym.registry.items() if str(spec.entry_point).startswith("envs.")]


def make_vec(
    env_id: str,
    num_envs: int,
    asynchronous: bool = False,
    video_folder: str | None = None,
    actions: type | None = None,
    **kwargs,
) -> tuple[VectorEnv, int]:
    """`num_envs` copies of any Gymnasium environment, `Id` or `module:Id`, and T, the longest that an episode can be.

    An episode's end and the next one's start fall on the same `step`: it returns the new episode's first observation,
    and the old one's last observation in `infos["final_obs"]`. No step is spent on a reset, unlike Gymnasium's default.
    With `video_folder` the first episode is recorded there. With `actions`, Discrete or Box, an environment that has
    no such actions or no flat observations is refused. T-Maze and point-robot are never asynchronous: as the NumPy
    vectors that they are, they are many times faster.
    """
    try:
        if ":" in env_id:
            module, env_id = env_id.split(":")
            importlib.import_module(module)
        spec = gym.spec(env_id)
    except (gym.error.Error, ImportError, ValueError):
        raise ValueError(f"unknown environment {env_id!r}: try {', '.join(IDS)} or any id of Gymnasium's") from None
    if env_id.startswith("tmaze") and "max_episode_steps" in kwargs:
        raise ValueError("an episode of T-Maze is as long as its corridor asks for: set --corridor-length instead")
    if env_id in IDS and spec.vector_entry_point is not None and video_folder is None:
        vec = gym.make_vec(env_id, num_envs, **kwargs)  # our own vectors reset on the same step
    else:
        wrappers = [Restorable]
        if video_folder is not None:
            kwargs["render_mode"] = "rgb_array"
            wrappers = [lambda env: gym.wrappers.RecordVideo(env, video_folder, episode_trigger=lambda n: n == 0)]
        vec = gym.make_vec(
            env_id,
            num_envs,
            vectorization_mode="async" if asynchronous and video_folder is None else "sync",
            vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
            wrappers=wrappers,
            **kwargs,
        )
    limit = kwargs.get("max_episode_steps") or spec.max_episode_steps or getattr(vec, "horizon", None)
    if limit is None and env_id in IDS:  # T-Maze one at a time
        limit = vec.get_attr("horizon")[0]
    if limit is None:
        vec.close()
        raise ValueError(f"{env_id} does not say how long an episode may be: give it --max-episode-steps")
    if actions is not None:
        check_spaces(env_id, vec.single_observation_space, vec.single_action_space, actions)
    return vec, limit


def check_spaces(env_id, observation_space, action_space, wanted):
    flat = isinstance(action_space, gym.spaces.Box) and len(action_space.shape) == 1 and action_space.is_bounded()
    if wanted is gym.spaces.Discrete and not isinstance(action_space, gym.spaces.Discrete):
        raise ValueError(f"{env_id} has actions {action_space}: Double DQN needs Discrete ones, SAC is for a Box")
    if wanted is gym.spaces.Box and not flat:
        raise ValueError(
            f"{env_id} has actions {action_space}: SAC needs a flat, bounded Box, Double DQN is for Discrete"
        )
    if not isinstance(observation_space, gym.spaces.Box) or len(observation_space.shape) != 1:
        raise ValueError(f"{env_id} has observations {observation_space}: the scripts need a flat Box of numbers")
