"""How long an update, a step, a checkpoint and a start take, on one CPU core.

    python -m benchmark.speed                  # everything: about half an hour of an otherwise idle machine
    python -m benchmark.speed update           # an update of every script, small and paper sizes, also with --bf16
    python -m benchmark.speed rollout          # steps per second by number of environments, T = 200
    python -m benchmark.speed steps            # a step of Double DQN against t: MATE and LSTM constant, GPT-2 growing
    python -m benchmark.speed checkpoint       # writing and reading a checkpoint with a full buffer
    python -m benchmark.speed startup          # from the command to the run folder

Writes speed_{name}.json with machine and versions, speed_{name}.md with the table, and figures of rollout and steps.
Candidates are timed in turns, so that a busy moment of the machine hits all of them; numbers are medians.
"""

import copy
import ctypes
import importlib
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from matplotlib.figure import Figure

from benchmark.runs import WIDTH, look

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
SCRIPTS = {"ddqn": ("ddqn_mate", "ddqn_lstm", "ddqn_gpt2"), "sac": ("sac_mate", "sac_lstm", "sac_gpt2", "sac_markov")}
SIZES = {"small": {"memory_dim": 64, "hidden_dim": 128, "batch_size": 32}, "paper": {}}  # the paper's are the defaults
SPACES = {"ddqn": (3, gym.spaces.Discrete(4)), "sac": (17, gym.spaces.Box(-1, 1, (6,)))}  # T-Maze, cheetah-vel


@dataclass
class Args:
    names: tyro.conf.Positional[
        tuple[Literal["update", "rollout", "steps", "checkpoint", "startup"], ...]
    ] = ()  # or all
    output_dir: Path = Path("benchmark/results")
    quick: bool = False  # tiny sizes, to see that it works; the numbers mean nothing


def keep_freed_memory():  # as the scripts do
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX
        ctypes.CDLL(None).mallopt(-1, -1)  # M_TRIM_THRESHOLD


def machine():
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = [line.split(":")[1].strip() for line in lines if line.startswith("model name")] or [platform.processor()]
    machine = {"cpu": cpu[0], "cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    return machine | {name: version(name) for name in ("torch", "numpy", "gymnasium", "mujoco")}


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turns(candidates, budget, rounds=(3, 50)):
    """{name: median seconds} of functions called in turns, for about `budget` seconds each, after one warm-up call."""
    times = {name: [] for name in candidates}
    for i in range(1 + rounds[1]):
        for name, function in candidates.items():
            times[name].append(timed(function))
        if i >= rounds[0] and sum(map(sum, times.values())) > budget * len(candidates):
            break
    return {name: float(np.median(values[1:])) for name, values in times.items()}


# -------------------------------------------------------------------------------------------------------------- update
def make_update(name, size, T, bf16):
    """An update on a full batch of episodes of T steps, as a function without arguments."""
    module, (obs_dim, action_space) = importlib.import_module(name), SPACES[name.split("_")[0]]
    args = module.Args(**SIZES[size], bf16=bf16)
    torch.manual_seed(0)
    agent = module.Agent(obs_dim, action_space, T, args)
    target = copy.deepcopy(agent if name.startswith("ddqn") else agent.critics).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    buffer = module.ReplayBuffer(args.batch_size, 1, T, obs_dim, agent.action_dim)
    buffer.data["obs"][:] = np.random.default_rng(0).normal(size=buffer.data["obs"].shape)
    buffer.data["action"][..., 0] = 1
    buffer.count, buffer.length[:] = args.batch_size, T
    return partial(module.update, agent, target, optimizer, buffer.sample(args.batch_size, CPU), args)


def measure_update(quick):
    for (algorithm, scripts), size in itertools.product(SCRIPTS.items(), SIZES):
        for T in (5,) if quick else (200, 600) if algorithm == "ddqn" else (200,):
            candidates = {(s, bf16): make_update(s, size, T, bf16) for s in scripts for bf16 in (False, True)}
            seconds = in_turns(candidates, 0 if quick else 15)
            for script in scripts:
                float32, bf16 = seconds[script, False], seconds[script, True]
                row = {"script": script, "sizes": size, "T": T, "ms": 1e3 * float32, "ms with --bf16": 1e3 * bf16}
                row["gain of --bf16"] = float32 / bf16
                yield row | {"over MATE": float32 / seconds[f"{algorithm}_mate", False]}


# ------------------------------------------------------------------------------------------------------------- rollout
def make_rollout(name, num_envs, T):
    """Exploring in T-Maze (Double DQN) or point-robot (SAC), NumPy environments that cost little, with T steps."""
    module, ddqn = importlib.import_module(name), name.startswith("ddqn")
    env = {"env_id": "point-robot", "max_episode_steps": T}
    if ddqn:
        env = {"env_id": "tmaze-passive", "corridor_length": T - 1}
    args = module.Args(**env)
    vec, max_steps = args.make_envs(num_envs)
    torch.manual_seed(0)
    agent = module.Agent(vec.single_observation_space.shape[0], vec.single_action_space, max_steps, args)
    rollout = module.Rollout(vec, agent, CPU)
    return rollout, partial(rollout.step, agent.explore, *([0.1] if ddqn else []))  # epsilon


def run_episode(rollout, step, T):
    rollout.reset(seed=0)
    for _ in range(T):
        step()


def measure_rollout(quick):
    T, budget = (5, 0) if quick else (200, 3)
    for scripts, num_envs in itertools.product(SCRIPTS.values(), (1, 4) if quick else (1, 4, 16, 64, 256, 1024)):
        candidates = {script: partial(run_episode, *make_rollout(script, num_envs, T), T) for script in scripts}
        for script, seconds in in_turns(candidates, budget).items():
            yield {"script": script, "environments": num_envs, "steps per second": T * num_envs / seconds}


def measure_steps(quick):
    T, episodes, bins = (20, 2, 4) if quick else (2_000, 5, 40)
    for num_envs in (1, 64):
        rollouts = {script: make_rollout(script, num_envs, T) for script in SCRIPTS["ddqn"]}
        times = {script: np.zeros((1 + episodes, T)) for script in rollouts}
        for episode, (script, (rollout, step)) in itertools.product(range(1 + episodes), rollouts.items()):
            rollout.reset(seed=0)
            for t in range(T):
                times[script][episode, t] = timed(step)
        for script, values in times.items():
            medians = 1e6 * np.median(values[1:].reshape(episodes, bins, -1), axis=(0, 2))  # the first warms up
            for t, value in zip(np.arange(bins) * T // bins, medians):
                row = {"script": script, "environments": num_envs, "t": int(t), "microseconds": float(value)}
                yield row | {"over t = 0": float(value / medians[0])}


def draw(rows, x_name, y_name, groups, **axes):
    """A panel for each group of rows, a line for each script."""
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    for ax, (name, chosen) in zip(figure.subplots(1, len(groups)), groups.items()):
        for script in dict.fromkeys(row["script"] for row in rows if chosen(row)):
            points = [(row[x_name], row[y_name]) for row in rows if chosen(row) and row["script"] == script]
            style = look(script)
            ax.plot(*zip(*points), color=style.color, linestyle=style.linestyle, label=style.label)
        ax.set(title=name, xlabel=x_name, ylabel=y_name, **axes)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def draw_rollout(rows):
    groups = {"Double DQN on T-Maze": lambda row: row["script"] in SCRIPTS["ddqn"]}
    groups["SAC on point-robot"] = lambda row: row["script"] in SCRIPTS["sac"]
    return draw(rows, "environments", "steps per second", groups, xscale="log", yscale="log")


def draw_steps(rows):
    groups = {"1 environment": lambda row: row["environments"] == 1}
    groups["64 environments"] = lambda row: row["environments"] == 64
    return draw(rows, "t", "microseconds", groups, ylim=(0, None))


# ---------------------------------------------------------------------------------------------- checkpoint and start-up
def measure_checkpoint(quick):
    for name, env_id in (("ddqn_mate", "tmaze-passive"), ("sac_mate", "ant-dir")):
        module = importlib.import_module(name)
        args = module.Args(env_id=env_id, **({"buffer_size": 50} if quick else {}))
        vec, T = args.make_envs(args.num_envs)
        obs_dim = vec.single_observation_space.shape[0]
        agent = module.Agent(obs_dim, vec.single_action_space, T, args)
        optimizer = torch.optim.Adam(agent.parameters(), fused=True)
        sum(parameter.sum() for parameter in agent.parameters()).backward()
        optimizer.step()  # makes its state
        buffer = module.ReplayBuffer(args.buffer_size, args.num_envs, T, obs_dim, agent.action_dim)
        for array in buffer.data.values():
            array[:] = np.random.default_rng(0).random(array.shape, dtype=np.float32)
        buffer.length[:], buffer.count = T, args.buffer_size
        rollout = module.Rollout(vec, agent, CPU)
        rollout.reset(seed=0)
        target = agent if name.startswith("ddqn") else agent.critics
        parts = {"agent": agent, "target": target, "optimizer": optimizer, "buffer": buffer, "rollout": rollout}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "checkpoint.pt")

            def write():
                module.save(path, args, **{name: part.state_dict() for name, part in parts.items()})  # noqa: B023

            def read():
                saved = torch.load(path, weights_only=True)  # noqa: B023
                for name, part in parts.items():  # noqa: B023
                    part.load_state_dict(saved[name])

            seconds = in_turns({"write": write, "read": read}, 0)
            size = path.stat().st_size / 1e6
        row = {"script": name, "environment": env_id, "episodes in the buffer": args.buffer_size, "MB": size}
        yield row | {"seconds to write": seconds["write"], "seconds to read": seconds["read"]}


def until_run_folder(script, env_id):
    with tempfile.TemporaryDirectory() as folder:
        start, command = time.perf_counter(), [sys.executable, str(ROOT / f"{script}.py"), "--env-id", env_id]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not list(Path(folder).glob("runs/*/args.json")):
            time.sleep(0.01)
        seconds, ended = time.perf_counter() - start, process.poll() is not None
        process.kill()
        process.wait()
    if ended:
        sys.exit(f"error: {' '.join(command)} ended before its run began")
    return seconds


def measure_startup(quick):
    repeats = 1 if quick else 5
    commands = {"import torch": ("-c", "import torch"), "sac_mate.py --help": (str(ROOT / "sac_mate.py"), "--help")}
    run = partial(subprocess.run, check=True, capture_output=True)
    candidates = {name: partial(run, [sys.executable, *words]) for name, words in commands.items()}
    for name, seconds in in_turns(candidates, 0, rounds=(repeats, repeats)).items():
        yield {"until": name, "seconds": seconds}
    runs = [("ddqn_mate", "tmaze-passive"), ("sac_mate", "ant-dir"), ("sac_mate", "ml10")]
    for script, env_id in runs[:1] if quick else runs:
        seconds = float(np.median([until_run_folder(script, env_id) for _ in range(repeats)]))
        yield {"until": f"run folder of {script}.py --env-id {env_id}", "seconds": seconds}


# ---------------------------------------------------------------------------------------------------------------- main
MEASURES = {"update": measure_update, "rollout": measure_rollout, "steps": measure_steps}
MEASURES |= {"checkpoint": measure_checkpoint, "startup": measure_startup}
FIGURES = {"rollout": draw_rollout, "steps": draw_steps}


def to_text(value):
    return value if isinstance(value, str) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main():
    args = tyro.cli(Args, prog="python -m benchmark.speed", description=__doc__)
    torch.set_num_threads(1)
    keep_freed_memory()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name in args.names or MEASURES:
        rows, lines = [], []
        for row in MEASURES[name](args.quick):
            if not rows:
                lines += ["| " + " | ".join(row) + " |", "| " + " | ".join(["---"] * len(row)) + " |"]
            rows.append(row)
            lines.append("| " + " | ".join(map(to_text, row.values())) + " |")
            print(*(lines if len(rows) == 1 else lines[-1:]), sep="\n", flush=True)
        path = args.output_dir / f"speed_{name}.json"
        path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
        path.with_suffix(".md").write_text("\n".join(lines) + "\n")
        if name in FIGURES:
            FIGURES[name](rows).savefig(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
