"""A saved agent in several contexts, in one GIF.

    python -m benchmark.film runs/RUN/best.pt cheetah.gif --contexts 0.5 2.5
    python -m benchmark.film runs/RUN/best.pt ant.gif --contexts 1,0 0,1 -1,0 0,-1 --distance 20 --every 4

Contexts are those of info["context"]: a speed, the two coordinates of a direction or goal, 1 or -1 in T-Maze.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from PIL import Image, ImageDraw

import envs
from benchmark.runs import load


@dataclass
class Args:
    model: tyro.conf.Positional[Path]  # best.pt or model.pt of a run
    output: tyro.conf.Positional[Path]  # the GIF
    contexts: tuple[str, ...]  # one for each panel, numbers separated by commas
    seed: int = 1_000_000  # of the start states
    every: int = 2  # film every second step
    height: int = 200  # of the picture, in pixels
    distance: float | None = None  # MuJoCo: a camera that stands still, so far above the start, instead of the default


@torch.no_grad()
def film(model: Path, context: list[float], args: Args) -> list[Image.Image]:
    """Pictures of one episode of the deterministic policy in this context."""
    script, script_args, agent, *_ = load(model, num_envs=1)
    envs.check_rendering(script_args.env_id)  # sets MuJoCo up for a machine without a screen
    kwargs = {"max_episode_steps": script_args.max_episode_steps}
    if "tmaze-" in script_args.env_id:
        kwargs = {"corridor_length": script_args.corridor_length}
    if args.distance is not None:
        camera = {"distance": args.distance, "elevation": -60, "lookat": np.zeros(3)}
        kwargs |= {"camera_id": -1, "default_camera_config": camera, "width": 480, "height": 480}
    env = gym.make(script_args.env_id, render_mode="rgb_array", **kwargs)
    if args.distance is not None:  # a plain floor: seen from far away, the chequered one hides the robot
        floor = env.unwrapped.model.geom("floor")
        floor.matid, floor.rgba = -1, (0.85, 0.88, 0.9, 1)

    def tensor(value):
        return torch.as_tensor(np.array([value]), dtype=torch.float32)

    obs, _ = env.reset(seed=args.seed, options={"context": context})
    state, ended, frames = agent.memory.initial_state(1), False, [env.render()]
    while not ended:
        action = agent.act(tensor(obs), agent.memory.read(state))
        next_obs, reward, terminated, truncated, _ = env.step(agent.to_env(action.numpy())[0])
        state = agent.memory.step(script.transition(tensor(obs), action, tensor(reward), tensor(next_obs)), state)
        obs, ended = next_obs, terminated or truncated
        frames.append(env.render())
    env.close()
    pictures = [Image.fromarray(frame) for frame in frames[:: args.every]]
    size = args.height * pictures[0].width // pictures[0].height, args.height
    return [label(picture.resize(size), f"context {', '.join(f'{c:g}' for c in context)}") for picture in pictures]


def label(picture, text):
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, picture.width - 1, picture.height - 1), outline="white")
    draw.rectangle((0, 0, 8 + draw.textlength(text), 16), fill="white")
    draw.text((4, 2), text, fill="black")
    return picture


def main():
    args = tyro.cli(Args, description=__doc__)
    try:
        episodes = [film(args.model, [float(c) for c in text.split(",")], args) for text in args.contexts]
    except (ValueError, OSError) as error:  # a context of another shape, a missing file
        sys.exit(f"error: {error}")
    pictures = []
    for t in range(max(map(len, episodes))):  # an episode that has ended shows its last picture
        panels = [np.asarray(episode[min(t, len(episode) - 1)]) for episode in episodes]
        height, width, _ = panels[0].shape
        panels = np.concatenate(panels, axis=0 if width > 2 * height else 1)  # T-Maze is wide: one above the other
        pictures.append(Image.fromarray(panels).quantize(64))
    pictures[0].save(args.output, save_all=True, append_images=pictures[1:], duration=50 * args.every, loop=0)
    print(f"{args.output}: {len(pictures)} pictures, {args.output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
