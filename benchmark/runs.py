"""What plot.py, probe.py and film.py share: how memories look in figures, CSV files, and episodes of a saved agent."""

import copy
import csv
import importlib
import math
import sys
from collections import namedtuple
from pathlib import Path

import matplotlib
import numpy as np
import torch

# A run is one script on one environment with one seed. corridor_length is T-Maze's, elsewhere None.
Run = namedtuple("Run", "script env_id corridor_length seed")
Look = namedtuple("Look", "label color linestyle marker")
# Colours of Okabe and Ito, which colour-blind readers can tell apart.
COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000"]
LOOKS = {
    "mate": Look("MATE", COLORS[0], "-", "o"),
    "lstm": Look("LSTM", COLORS[1], "-.", "s"),
    "gpt2": Look("GPT-2", COLORS[2], (0, (5, 1)), "^"),
    "markov": Look("no memory", COLORS[7], (0, (3, 2)), "D"),
}
WIDTH = 6.75  # inches, a page of two columns
STYLE = {"font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 8, "ytick.labelsize": 8}
STYLE |= {"legend.fontsize": 8, "legend.title_fontsize": 8, "legend.frameon": False, "lines.linewidth": 1.4}
STYLE |= {"axes.grid": True, "grid.color": "0.9", "axes.axisbelow": True, "lines.markersize": 4}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 200}
matplotlib.rcParams.update(STYLE)


def look(script):
    return LOOKS.get(script.split("_")[-1], Look(script, COLORS[3], ":", "v"))  # else a script of the reader's own


def is_tmaze(run):
    return run.env_id.startswith("tmaze")


def title(run):
    return f"{run.env_id}, L={run.corridor_length}" if is_tmaze(run) else run.env_id


# ----------------------------------------------------------------------------------------------------------- CSV files
def read_csv(path):
    """{run: {column: array}}, an array of strings if not all of its values are numbers."""
    tables = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            script, env_id, length, seed = (row.pop(name) for name in Run._fields)
            columns = tables.setdefault(Run(script, env_id, int(length) if length else None, int(seed)), {})
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
    return {run: {name: to_array(values) for name, values in columns.items()} for run, columns in tables.items()}


def to_array(values):
    try:
        return np.array([float(value or "nan") for value in values])
    except ValueError:
        return np.array(values)


def write_csv(path, tables):
    write_rows(path, [run._asdict() | dict(zip(c, values)) for run, c in tables.items() for values in zip(*c.values())])


def write_rows(path, rows):
    def text(value):
        if value is None or isinstance(value, str):
            return value
        return "" if math.isnan(value) else f"{value:.0f}" if value % 1 == 0 else f"{value:.6g}"

    names = dict.fromkeys(name for row in rows for name in row)
    with open(f"{path}.tmp", "w", newline="") as file:  # beside and renamed: earlier results are never half a file
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows([{name: text(value) for name, value in row.items()} for row in rows])
    path.with_name(f"{path.name}.tmp").replace(path)


# ------------------------------------------------------------------------------------------------------------ episodes
def load(path: Path, num_envs: int) -> tuple:
    """Of model.pt or best.pt: its script, the arguments, the agent, its memory before training, environments and T."""
    torch.set_num_threads(1)  # for small networks threads cost more than they gain, ten times more on a busy machine
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        script = importlib.import_module(saved["script"])
        args = script.Args(**saved["args"])
    except Exception as error:  # missing, damaged or something else
        sys.exit(f"error: cannot load {path}: {type(error).__name__}: {error}".splitlines()[0])
    vec, max_steps = args.make_envs(num_envs)
    torch.manual_seed(0)  # of the untrained memory
    agent = script.Agent(vec.single_observation_space.shape[0], vec.single_action_space, max_steps, args)
    untrained = copy.deepcopy(agent.memory)
    agent.load_state_dict(saved["agent"])
    return script, args, agent, untrained, vec, max_steps


def roll_out(path: Path, episodes: int) -> dict[str, np.ndarray]:
    """Episodes of the agent in model.pt or best.pt, acting deterministically on the seeds of the evaluation.

    reward (E, T), obs (E, T, O), memory (E, T, D), zero after the end of an episode; untrained (E, T, D), the memory
    with random weights on the same episodes; length (E,), context (E, C). If the environment reports them: forward
    (E, T), its forward reward, and task and success (E,).
    """
    script, _, agent, untrained, vec, max_steps = load(path, n := min(episodes, 16))
    rollout = script.Rollout(vec, agent, torch.device("cpu"))
    starts = range(1_000_000, 1_000_000 + episodes, n)
    rounds = [first_episodes(script, rollout, untrained, list(range(i, i + n)), max_steps) for i in starts]
    vec.close()
    return {name: np.concatenate([one[name] for one in rounds])[:episodes] for name in rounds[0]}


@torch.no_grad()
def first_episodes(script, rollout, untrained, seeds, max_steps):
    """roll_out for one episode in each environment."""
    infos, n = rollout.reset(seed=seeds), len(seeds)
    untrained_state, running, steps = untrained.initial_state(n), np.ones(n, dtype=bool), []
    data = {"context": np.reshape(infos.get("context", np.zeros((n, 0))), (n, -1)), "length": np.zeros(n, dtype=int)}
    data |= {name: infos[name] for name in ("task", "success") if name in infos}
    while running.any():
        memories = rollout.agent.memory.read(rollout.state), untrained.read(untrained_state)
        step = rollout.step(rollout.agent.act)
        x = map(rollout.tensor, (step.obs, step.action, step.reward, step.next_obs))
        untrained_state = untrained.step(script.transition(*x), untrained_state)
        values = {"obs": step.obs, "memory": memories[0].numpy(), "untrained": memories[1].numpy()}
        values |= {"reward": step.reward, "forward": info_of(step, "reward_forward")}
        steps.append({name: (running * value.T).T for name, value in values.items()})
        if "success" in data:
            data["success"] = np.maximum(data["success"], running * info_of(step, "success"))
        data["length"] += running
        running &= ~(step.terminated | step.truncated)
    steps += [{name: np.zeros_like(value) for name, value in steps[0].items()}] * (max_steps - len(steps))
    return data | {name: np.stack([step[name] for step in steps], axis=1) for name in steps[0]}


def info_of(step, name):
    """An info of the step itself: where it ended an episode, Gymnasium's infos are already those of the next one."""
    ended, zero = step.terminated | step.truncated, np.zeros(len(step.reward))
    return np.where(ended, step.infos.get("final_info", {}).get(name, zero), step.infos.get(name, zero))
