"""What the test modules share: the scripts by name, ways to run them, a small batch and all that an update takes."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.stem for path in ROOT.glob("*_*.py"))  # ddqn_gpt2, ddqn_lstm, ...
DDQN, SAC = ([name for name in SCRIPTS if name.startswith(algorithm)] for algorithm in ("ddqn", "sac"))

NETWORKS = {"memory_dim": 16, "hidden_dim": 16, "batch_size": 4, "num_envs": 3, "eval_episodes": 4}
TINY = {  # flags of a run that takes a moment
    "ddqn": NETWORKS | {"corridor_length": 4, "total_episodes": 60, "learning_starts": 6, "eval_interval": 25},
    "sac": NETWORKS
    | {"env_id": "point-robot", "max_episode_steps": 20, "total_timesteps": 600, "learning_starts": 150}
    | {"updates_per_step": 0.05, "eval_interval": 300},
}

torch.set_num_threads(1)  # many small runs: threads only cost


def script(name):
    return importlib.import_module(name)


def tiny(name, **changes):
    return TINY[name.split("_")[0]] | changes


# ------------------------------------------------------------------------------------------------------------- running


def flags(**values):
    """{"seed": 2, "cuda": False} as --seed=2 --no-cuda."""
    names = {key: key.replace("_", "-") for key in values}
    words = {key: f"--{names[key]}={value}" for key, value in values.items()}
    words |= {key: f"--{'' if value else 'no-'}{names[key]}" for key, value in values.items() if type(value) is bool}
    return list(words.values())


def main(name, *words):
    """As `python name.py words` in the current folder, but in this process: a short run spends its time on imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        script(name).train(*script(name).parse_args())


def refused(name, *words):
    """The one line with which a script refuses these flags before it has written anything."""
    before = {path: path.stat().st_mtime_ns for path in Path(".").rglob("*")}
    with pytest.raises(SystemExit) as exit:
        main(name, *words)
    assert exit.value.code.startswith("error: ") and "\n" not in exit.value.code  # a text: Python's exit code is 1
    assert {path: path.stat().st_mtime_ns for path in Path(".").rglob("*")} == before
    return exit.value.code


def train_in(folder, name, **values):
    """A run of `name` in this process with these arguments and `runs` in that folder. Returns the run's folder."""
    folder.mkdir(exist_ok=True)
    with contextlib.chdir(folder):
        before = set(Path("runs").glob("*"))
        args = script(name).Args(**values)
        args.check()
        script(name).train(args)
        [new] = set(Path("runs").glob("*")) - before
    return folder / new


def start(name, *words, cwd, pythonpath=ROOT, **options):
    command = [sys.executable, str(ROOT / f"{name}.py"), *map(str, words)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(pythonpath)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, **pipes, **options)


@pytest.fixture
def run(tmp_path):
    """run("ddqn_mate", "--seed", 2) starts a process in an empty folder and returns it with the folders of its runs."""

    def finish(name, *words, code=0, cwd=tmp_path, pythonpath=ROOT):
        process = start(name, *words, cwd=cwd, pythonpath=pythonpath)
        stdout, stderr = process.communicate(timeout=600)
        assert process.returncode == code, stderr + stdout
        return subprocess.CompletedProcess(process.args, code, stdout, stderr), sorted((cwd / "runs").glob("*"))

    return finish


# ------------------------------------------------------------------------------------------------- what a run leaves


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def weights_of(folder, file="model.pt"):
    return torch.load(folder / file, weights_only=True)["agent"]


def scalars_of(folder):
    """{tag: [(step, value), ...]} of a run's TensorBoard events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def equal(a, b):
    """To the bit, through dictionaries, lists, tuples and arrays of objects."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray) and a.dtype != object:
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, (list, tuple, np.ndarray)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


# ------------------------------------------------------------------------------------------- an update and its batch

LENGTHS, T, OBS, A = [6, 2, 5, 1], 6, 3, 3


def make_batch(name, lengths=LENGTHS, T=T, seed=0):
    """Random episodes of these lengths, padded to T with noise, the first of them truncated, the others terminated."""
    g, B = torch.Generator().manual_seed(seed), len(lengths)
    batch = {"obs": torch.randn(B, T + 1, OBS, generator=g), "reward": torch.randn(B, T, generator=g)}
    one_hot = torch.eye(A)[torch.randint(A, (B, T), generator=g)]
    batch["action"] = one_hot if name in DDQN else torch.rand(B, T, A, generator=g) * 2 - 1
    batch["terminated"] = torch.zeros(B, T)
    for b, n in enumerate(lengths[1:], start=1):
        batch["terminated"][b, n - 1] = 1.0
    batch["mask"] = (torch.arange(T) < torch.tensor(lengths)[:, None]).float()
    return {key: value.double() for key, value in batch.items()}


def make_update(name, **changes):
    """An agent, a target that differs from it, and what else `update` takes, in double precision."""
    module = script(name)
    unclipped = {"max_grad_norm": 1e9} if name in DDQN else {}
    args = module.Args(**{"memory_dim": 16, "hidden_dim": 16, "learning_rate": 0.01, "tau": 0.25} | unclipped | changes)
    space = gym.spaces.Discrete(A) if name in DDQN else gym.spaces.Box(-1.0, 1.0, (A,))
    torch.manual_seed(0)
    agent, other = (module.Agent(OBS, space, 11, args).double() for _ in range(2))
    target = (other if name in DDQN else other.critics).requires_grad_(False)
    if name in SAC:  # shift one critic until it is the smaller one at half of the steps
        batch = make_batch(name)
        with torch.no_grad():
            x = module.transition(batch["obs"][:, :-1], batch["action"], batch["reward"], batch["obs"][:, 1:])
            h = agent.features(batch["obs"], agent.memory(x))
            for critics in (agent.critics, target):
                q1, q2 = twin_q(critics, h[:, :-1], batch["action"])
                critics[0][-1].bias.sub_((q1 - q2)[batch["mask"].bool()].median())
    return module, agent, target, torch.optim.Adam(agent.parameters(), lr=args.learning_rate), args


def update(parts, batch, noise=None):
    """One update, in which SAC's policy draws this noise, (B, T+1, A), and is of its precision."""
    module, agent, target, optimizer, args = parts

    def randn_like(mean):
        assert mean.dtype == noise.dtype
        return noise

    with pytest.MonkeyPatch.context() as patch:
        if noise is not None:
            patch.setattr(torch, "randn_like", randn_like)
        return module.update(agent, target, optimizer, batch, args)


def twin_q(critics, h, action):
    return [q(torch.cat([h, action], dim=-1)).squeeze(-1) for q in critics]
