"""What the test modules share: the scripts by name, ways to run them, a small batch and all that an update takes."""

import contextlib
import csv
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from copy_sections import ROOT, SCRIPTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributions import Normal, TanhTransform, TransformedDistribution
from torch.utils._pytree import tree_map

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
def call(function, *words):
    """The function, with these words on the command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", *map(str, words)])
        return function()


def main(name, *words):
    """As `python name.py words` in the current folder, but in this process: a short run spends its time on imports."""
    call(lambda: script(name).train(*script(name).parse_args()), *words)


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def refused(name, *words):
    """The one line with which a script refuses these flags before it has written anything."""
    before = files_of(Path("."))
    with pytest.raises(SystemExit) as exit:
        main(name, *words)
    assert exit.value.code.startswith("error: ") and "\n" not in exit.value.code  # a text: Python's exit code is 1
    assert files_of(Path(".")) == before
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


def start(*words, cwd, threads=1, **options):
    """`python words` as a process in this folder."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *map(str, words)], cwd=cwd, env=env, **pipes, **options)


def spy(monkeypatch, owner, name, look):
    """Before each call of owner.name, `look` gets its arguments. Returns the list of what `look` has returned."""
    seen, original = [], getattr(owner, name)

    def function(*args):
        seen.append(look(*args))
        return original(*args)

    monkeypatch.setattr(owner, name, function)
    return seen


# -------------------------------------------------------------------------------------------------- what a run leaves
def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def weights_of(folder, file="model.pt"):
    return torch.load(folder / file, weights_only=True)["agent"]


def scalars_of(folder):
    """{tag: [(step, value), ...]} of a run's TensorBoard events."""
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


def rows_of(path):  # of a CSV file
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def colours(image):  # how many different ones
    return len(np.unique(image.reshape(-1, image.shape[-1]), axis=0))


# ------------------------------------------------------------------------------------------- agents and their updates
def make_agent(name, **changes):
    """An untrained agent, its script and arguments, an environment for every episode of an evaluation, and T."""
    module, args = script(name), script(name).Args(**tiny(name, **changes))
    vec, max_steps = args.make_envs(args.eval_episodes)
    agent = module.Agent(vec.single_observation_space.shape[0], vec.single_action_space, max_steps, args)
    return module, agent, args, vec, max_steps


LENGTHS, T, OBS, A = [6, 2, 5, 1], 6, 3, 3


def make_batch(name):
    """Random episodes of these lengths, padded to T with noise, the first of them truncated, the others terminated."""
    g, B = torch.Generator().manual_seed(0), len(LENGTHS)
    batch = {"obs": torch.randn(B, T + 1, OBS, generator=g), "reward": torch.randn(B, T, generator=g)}
    one_hot = torch.eye(A)[torch.randint(A, (B, T), generator=g)]
    batch["action"] = one_hot if name in DDQN else torch.rand(B, T, A, generator=g) * 2 - 1
    batch["terminated"] = torch.zeros(B, T)
    for b, n in enumerate(LENGTHS[1:], start=1):
        batch["terminated"][b, n - 1] = 1.0
    batch["mask"] = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).float()
    return {key: value.double() for key, value in batch.items()}


def make_update(name, **changes):
    """An agent, a target that differs from it, and what else `update` takes, in double precision."""
    module = script(name)
    args = module.Args(**{"memory_dim": 16, "hidden_dim": 16, "learning_rate": 0.01, "tau": 0.25} | changes)
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


def walk(batch, *agents):
    """The slow loop: episode by episode and step by step, with the memory carried along by `step` as in a rollout.

    Yields s_t, a_t, r_t, s_{t+1}, each agent's m_t, each one's m_{t+1}, and whether to bootstrap. Sees no padding.
    """
    for b, length in enumerate(LENGTHS):
        states = [agent.memory.initial_state(1) for agent in agents]
        for t in range(length):
            s, s_next, a, r = *batch["obs"][b, t : t + 2], batch["action"][b, t], batch["reward"][b, t]
            before, x = [agent.memory.read(m) for agent, m in zip(agents, states)], torch.cat([s, a, r[None], s_next])
            states = [tree_map(torch.clone, state) for state in states]  # GPT-2 writes into its own
            states = [agent.memory.step(x[None], state) for agent, state in zip(agents, states)]
            after = [agent.memory.read(m) for agent, m in zip(agents, states)]
            yield (b, t), s[None], a, r, s_next[None], before, after, not batch["terminated"][b, t]


def squashed_gaussian(agent, h, noise):
    """SAC's policy by torch.distributions: an action and its log-probability."""
    mean, raw = agent.actor(h).chunk(2, dim=-1)
    base = Normal(mean, (-5 + (2 + 5) / 2 * (raw.tanh() + 1)).exp())
    squashed = TransformedDistribution(base, [TanhTransform(cache_size=1)])
    action = squashed.transforms[0](base.mean + base.stddev * noise)
    return action, squashed.log_prob(action).sum(-1)


def slow_sac(parts, batch, noise):
    """SAC's losses and metrics by the slow loop, in which nothing is detached but the TD target."""
    _, agent, target, _, args = parts
    steps, smaller, truncated = [], set(), 0
    for (b, t), s, a, r, s_next, [m], [m_next], bootstrap in walk(batch, agent):
        h, h_next, y = agent.features(s, m), agent.features(s_next, m_next), r
        if bootstrap:
            next_action, next_log_prob = squashed_gaussian(agent, h_next, noise[b, t + 1])
            y = r + args.gamma * (min(twin_q(target, h_next, next_action)) - args.alpha * next_log_prob).detach()
            truncated += t == LENGTHS[b] - 1
        q1, q2 = twin_q(agent.critics, h, a[None])
        action, log_prob = squashed_gaussian(agent, h, noise[b, t])
        new_q = twin_q(agent.critics, h, action)
        smaller.add(bool(new_q[0] < new_q[1]))
        step = {"qf1_loss": (q1 - y) ** 2, "qf2_loss": (q2 - y) ** 2, "actor_loss": args.alpha * log_prob - min(new_q)}
        steps.append(step | {"qf1_values": q1, "entropy": -log_prob})
    assert truncated == 1, "the batch tells truncation from termination"
    assert smaller == {True, False}, "and either critic is the smaller one somewhere"
    means = {key: torch.cat([step[key] for step in steps]).mean() for key in steps[0]}
    return means | {"alpha_loss": math.log(args.alpha) * (means["entropy"] + A)}
