"""A saved agent in several contexts, in one GIF.

    python -m benchmark.film runs/RUN/best.pt cheetah.gif --contexts 0.5 2.5
    python -m benchmark.film runs/RUN/best.pt ant.gif --contexts 1,0 0,1 -1,0 0,-1 --distance 50 --every 4 --height 400

Contexts are those of info["context"]: a speed, the two coordinates of a direction or goal, 1 or -1 in T-Maze. With
--distance all of them are in one picture: ants that start at its centre, their tracks, and dots where they should go.
"""

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import gymnasium as gym
import numpy as np
import torch
import tyro
from matplotlib.colors import to_rgba
from PIL import Image, ImageDraw

import envs
from benchmark.runs import COLORS, load


@dataclass
class Args:
    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]  # best.pt or model.pt of a run
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="GIF")]  # the file to write
    contexts: tuple[str, ...]  # one for each panel, numbers separated by commas
    seed: int = 1_000_000  # of the start states
    every: int = 2  # film every n-th step
    height: int = 200  # of the picture, in pixels
    distance: float | None = None  # MuJoCo: height of a fixed camera above the start; all contexts in one picture


@torch.no_grad()
def film(script, script_args, agent, context: list[float], color: tuple, args: Args) -> list[Image.Image]:
    """Pictures of one episode of the deterministic policy in this context."""
    kwargs = {"max_episode_steps": script_args.max_episode_steps}
    if "tmaze-" in script_args.env_id:
        kwargs = {"corridor_length": script_args.corridor_length}
    if args.distance is not None:
        camera = {"distance": args.distance, "elevation": -90, "lookat": np.zeros(3)}
        kwargs |= {"camera_id": -1, "camera_name": None, "default_camera_config": camera, "width": 480, "height": 480}
    env = gym.make(script_args.env_id, render_mode="rgb_array", **kwargs)
    if args.distance is not None:  # a plain floor: seen from far away, the chequered one hides the robot
        floor = env.unwrapped.model.geom("floor")
        floor.matid, floor.rgba = -1, (0.85, 0.88, 0.9, 1)

    def tensor(value):
        return torch.as_tensor(np.array([value]), dtype=torch.float32)

    obs, _ = env.reset(seed=args.seed, options={"context": context})
    text = f"context {', '.join(f'{c:g}' for c in context)}"
    state, frames, texts, dots, speeds = agent.memory.initial_state(1), [env.render()], [text], [], []
    if args.distance is not None and len(context) == 2:  # a large dot in the direction to run in
        dots.append({"pos": 0.38 * args.distance * np.array([*context, 0]), "size": np.full(3, 0.5)})
    for t in itertools.count(1):
        action = agent.act(tensor(obs), agent.memory.read(state))
        next_obs, reward, terminated, truncated, info = env.step(agent.to_env(action.numpy())[0])
        state = agent.memory.step(script.transition(tensor(obs), action, tensor(reward), tensor(next_obs)), state)
        obs, ended = next_obs, terminated or truncated
        speeds.append(info.get("x_velocity"))  # shown beside a target speed, averaged over a second
        if args.distance is not None:  # small dots where the robot was, on the floor
            dots.append({"pos": env.unwrapped.data.xpos[1] * (1, 1, 0), "size": np.full(3, 0.08)})
        if t % args.every == 0 or ended:
            for dot in dots:  # the viewer forgets them after each picture
                env.unwrapped.mujoco_renderer.viewer.add_marker(type=2, rgba=color, label="", **dot)  # 2: a sphere
            frames.append(env.render())
            texts.append(f"{text}, speed {np.mean(speeds[-20:]):z.1f}" if "-vel" in script_args.env_id else text)
        if ended:
            break
    env.close()
    pictures = [Image.fromarray(frame) for frame in frames]
    size = args.height * pictures[0].width // pictures[0].height, args.height
    pictures = [picture.resize(size) for picture in pictures]
    return pictures if args.distance is not None else list(map(label, pictures, texts))


def label(picture, text):
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, picture.width - 1, picture.height - 1), outline="white")
    draw.rectangle((0, 0, 8 + draw.textlength(text), 16), fill="white")
    draw.text((4, 2), text, fill="black")
    return picture


def main():
    args = tyro.cli(Args, prog="python -m benchmark.film", description=__doc__)
    if args.output.suffix != ".gif" or not args.output.parent.is_dir():
        sys.exit(f"error: {args.output} must end in .gif, in a folder that exists")
    script, script_args, agent, *_ = load(args.model, num_envs=1)
    if args.distance is not None and not script_args.env_id.endswith(("-dir", "-vel", "-param")):
        sys.exit(f"error: --distance is for MuJoCo robots, not for {script_args.env_id}")
    try:
        envs.check_rendering(script_args.env_id)  # sets MuJoCo up for a machine without a screen
        contexts = [[float(c) for c in text.split(",")] for text in args.contexts]
        colors = itertools.cycle(to_rgba(COLORS[i]) for i in (4, 0, 2, 3))  # dark enough for --distance
        episodes = [film(script, script_args, agent, c, color, args) for c, color in zip(contexts, colors)]
    except ValueError as error:  # a context of another shape
        sys.exit(f"error: {error}")
    pictures = []
    for t in range(max(map(len, episodes))):  # an episode that has ended shows its last picture
        panels = [np.asarray(episode[min(t, len(episode) - 1)]) for episode in episodes]
        height, width, _ = panels[0].shape
        if args.distance is None:
            picture = np.concatenate(panels, axis=0 if width > 2 * height else 1)  # T-Maze is wide: one above the other
        else:
            picture = np.minimum.reduce(panels)  # the floor is light, robots and tracks are dark
        pictures.append(Image.fromarray(picture).quantize(64))
    pictures[0].save(args.output, save_all=True, append_images=pictures[1:], duration=50 * args.every, loop=0)
    print(f"{args.output}: {len(pictures)} pictures, {args.output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
