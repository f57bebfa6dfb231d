"""How fast are we? Every number is a ratio or a rate from one run on one machine.

    python benchmark/speed.py envs         the environments over the bare ones that they are built on
    python benchmark/speed.py checkpoint   writing and reading a checkpoint of a full buffer, at the paper's sizes

Prints a table and writes benchmark/results/speed_{what}.json, with the machine and the versions.
"""

import argparse
import importlib
import json
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium as gym
import numpy as np
import torch

import envs
from envs import running


def machine() -> dict:
    info = Path("/proc/cpuinfo")  # Linux only
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    packages = ("torch", "numpy", "gymnasium", "mujoco", "metaworld")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def seconds_per_step(env, actions, reset) -> float:
    """Over one pass of the actions, with the time of resets left out."""
    reset()
    total = 0.0
    for action in actions:
        start = time.perf_counter()
        _, _, terminated, truncated, _ = env.step(action)
        total += time.perf_counter() - start
        if terminated or truncated:
            reset()
    return total / len(actions)


def ratio(ours, reset_ours, bare, reset_bare, blocks=40, steps=500) -> tuple[float, float]:
    """Median over blocks that alternate between the two, so that a busy moment of the machine hits both."""
    ours.action_space.seed(0)
    times = []
    for _ in range(blocks):
        actions = [ours.action_space.sample() for _ in range(steps)]
        times.append((seconds_per_step(ours, actions, reset_ours), seconds_per_step(bare, actions, reset_bare)))
    a, b = np.array(times).T
    return float(np.median(a / b)), float(np.median(b))


def measure_envs() -> list[dict]:
    rows = []
    parents = {"ant-dir": "Ant-v5", "cheetah-vel": "HalfCheetah-v5", "walker-param": "Walker2d-v5"}
    parents["hopper-param"] = "Hopper-v5"
    for name, parent in parents.items():
        ours, bare = gym.make(name), gym.make(parent, max_episode_steps=200)
        # The physics must be the parent's for the comparison: all multipliers 1. Rewards cost the same in any context.
        size = ours.reset(seed=0)[1]["context"].size
        options = {"context": np.ones(size)} if name.endswith("param") else None
        r, base = ratio(ours, lambda: ours.reset(options=options), bare, bare.reset)
        rows.append({"what": f"{name} / {parent}, time per step", "value": r, "aim": "<= 1.10", "bare_us": base * 1e6})

    ours = gym.make("ml10")
    context = [1.0, 0.0]
    ours.reset(seed=0, options={"context": context})
    task = ours.unwrapped.task
    bare = gym.wrappers.TimeLimit(ours.unwrapped.classes[task](), 300)
    bare.unwrapped.set_task(ours.unwrapped.goals[task][0])
    r, base = ratio(ours, lambda: ours.reset(options={"context": context}), bare, bare.reset, blocks=20)
    rows.append({"what": f"ml10 / bare {task}, time per step", "value": r, "aim": "<= 1.10", "bare_us": base * 1e6})

    for name, length in (("tmaze-passive", 200), ("tmaze-active", 20), ("point-robot", None)):
        kwargs = {} if length is None else {"corridor_length": length}
        vec, _ = envs.make_vec(name, 256, **kwargs)
        vec.reset(seed=0)
        vec.action_space.seed(0)
        actions = [vec.action_space.sample() for _ in range(100)]
        rates = []
        for _ in range(20):
            start = time.perf_counter()
            for action in actions:
                vec.step(action)
            rates.append(256 * len(actions) / (time.perf_counter() - start))
        aim = ">= 1,000,000" if length else ""
        size = f", L={length}" if length else ""
        rows.append(
            {"what": f"{name}{size}, steps/s in 256 environments", "value": float(np.median(rates)), "aim": aim}
        )
    return rows


def timed(function, *args):
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def measure_checkpoint() -> list[dict]:
    rows = []
    for name, changes in (("ddqn_mate", {"env_id": "tmaze-passive", "corridor_length": 200}), ("sac_mate", {})):
        module = importlib.import_module(name)
        args = module.Args(**changes)
        vec, max_steps = running.make_envs(args, args.num_envs, None)
        obs_dim = vec.single_observation_space.shape[0]
        agent = module.Agent(obs_dim, vec.single_action_space, max_steps, args)
        target = module.copy.deepcopy(agent if name.startswith("ddqn") else agent.critics)
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
        agent.zero_grad()
        for parameter in agent.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes its state
        rollout = module.Rollout(vec, agent, torch.device("cpu"))
        rollout.reset(seed=0)

        def make_buffer():
            return module.ReplayBuffer(args.buffer_size, args.num_envs, max_steps, obs_dim, agent.action_dim)  # noqa: B023

        buffer = make_buffer()
        for array in buffer.episodes.values():
            array[:] = np.random.default_rng(0).random(array.shape, dtype=np.float32)
        buffer.length[:], buffer.count = max_steps, args.buffer_size
        parts = (args, (0,) * 6, agent, target, optimizer)
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            whole = timed(running.checkpoint, folder, *parts, buffer, rollout)
            buffer.count += 200  # about what ten minutes of the paper's settings collect on a CPU
            new = timed(running.checkpoint, folder, *parts, buffer, rollout)
            size = sum(path.stat().st_size for path in folder.rglob("*.pt"))
            read = timed(
                lambda: running.restore(  # noqa: B023
                    running.load(folder / "checkpoint.pt"), folder, agent, target, optimizer, make_buffer(), rollout
                )
            )
        what = f"{args.env_id}, {args.buffer_size} episodes of {max_steps} steps"
        for title, value, aim in (
            ("write, 200 new episodes, s", new, "<= 2"),
            ("write, all episodes new, s", whole, ""),
            ("read, s", read, ""),
            ("on disk, MB", size / 1e6, ""),
        ):
            rows.append({"what": f"{what}: {title}", "value": value, "aim": aim})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measures = {"envs": measure_envs, "checkpoint": measure_checkpoint}
    parser.add_argument("what", choices=measures)
    parser.add_argument("--output-dir", type=Path, default=ROOT / "benchmark" / "results")
    args = parser.parse_args()
    rows = measures[args.what]()
    for row in rows:
        value = f"{row['value']:,.0f}" if row["value"] > 100 else f"{row['value']:.3f}"
        print(f"{row['what']:<75} {value:>12}   {row['aim']}")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / f"speed_{args.what}.json"
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
