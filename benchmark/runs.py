"""What plot.py and probe.py share: how memories look in a figure, runs on disk, CSV files, and rolling an agent out."""

import csv
import importlib
import json
import logging
import math
import sys
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib
import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from envs import running

# A run is one script on one environment with one seed. Only T-Maze has a corridor, elsewhere its length is None.
Run = namedtuple("Run", "script env_id corridor_length seed")
Look = namedtuple("Look", "label color linestyle marker")
# Colours of Okabe and Ito, which the colour-blind can tell apart; the line style and the marker do not need colours.
COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000"]
LOOKS = {
    "mate": Look("MATE", COLORS[0], "-", "o"),
    "lstm": Look("LSTM", COLORS[1], "-.", "s"),
    "gpt2": Look("GPT-2", COLORS[2], (0, (5, 1)), "^"),
    "markov": Look("no memory", COLORS[7], (0, (3, 2)), "D"),
}
WIDTH = 6.75  # inches, the width of a page of two columns
STYLE = {"font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 8, "ytick.labelsize": 8}
STYLE |= {"legend.fontsize": 8, "legend.title_fontsize": 8, "legend.frameon": False, "lines.linewidth": 1.3}
STYLE |= {"axes.grid": True, "grid.color": "0.9", "axes.axisbelow": True, "lines.markersize": 4}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 200}
matplotlib.rcParams.update(STYLE)
logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every run that was resumed


def look(script):
    memory = script.split("_")[-1]
    return LOOKS.get(memory, Look(script, COLORS[3], ":", "v"))  # a script of the reader's own


def is_tmaze(env_id):
    return env_id.startswith("tmaze")


def title(run):
    return f"{run.env_id}, L={run.corridor_length}" if is_tmaze(run.env_id) else run.env_id


# -------------------------------------------------------------------------------------------------------- runs on disk
def find(folder):
    """The runs in and below a folder: those with arguments and a log."""
    return [path.parent for path in folder.rglob("args.json") if first_log(path.parent)]


def first_log(folder):
    """Its name begins with the time at which the run was begun, so that runs can be ordered by it."""
    return min((path.name for path in folder.glob("events.out.tfevents.*")), default="")


def identify(folder):
    try:
        args = json.loads((folder / "args.json").read_text())
        env_id, seed, script = args["env_id"].split(":")[-1], args["seed"], args["exp_name"]
    except (KeyError, ValueError, OSError):
        sys.exit(f"{folder / 'args.json'} is not of a run of these scripts")
    for name in ("model.pt", "checkpoint.pt"):  # they know the script, whatever the user has called the experiment
        if (folder / name).exists():
            script = load(folder / name)["script"]
            break
    return Run(script, env_id, args.get("corridor_length") if is_tmaze(env_id) else None, seed)


def load(path):
    saved = running.load(path)
    if not isinstance(saved, dict) or not {"script", "args", "agent"} <= saved.keys():
        sys.exit(f"{path} was not saved by these scripts, or by an older version")
    return saved


def read_evaluations(folder):
    """The columns of curves.csv. How long it took is known of a finished run alone, and stands in its last row."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    steps = sorted(scalars.get("eval/episodic_return", {}))
    logged = scalars.get("charts/updates", {})  # at every hundredth update
    columns = {"step": steps, "updates": [max([logged[s] for s in logged if s <= step], default=0) for step in steps]}
    for name in ("episodic_return", "return_first_quarter", "return_last_quarter", "success_rate"):
        columns[name] = [scalars.get(f"eval/{name}", {}).get(step, math.nan) for step in steps]
    finished = (folder / "results.json").exists()
    columns |= {"seconds": [math.nan] * len(steps), "finished": [finished] * len(steps)}
    if steps and finished:
        results = json.loads((folder / "results.json").read_text())
        columns["updates"][-1], columns["seconds"][-1] = results["updates"], results["seconds"]
    return {name: np.array(values, dtype=float) for name, values in columns.items()}


@torch.no_grad()
def roll_out(folder, episodes):
    """What the final agent of a run sees, remembers and gets, acting deterministically on the evaluation's seeds.

    obs (E, T, O), memory (E, T, D) and reward (E, T), zero after an episode's end; length (E,) and context (E, C). And
    untrained (E, T, D): what a memory of the same kind with random weights makes of the same episodes.
    """
    saved = load(folder / "model.pt")
    if not (ROOT / f"{saved['script']}.py").exists():
        sys.exit(f"{folder} is of {saved['script']}.py, which is not in {ROOT}")
    module = importlib.import_module(saved["script"])
    another_version = f"{folder} was trained by another version of {saved['script']}.py"
    try:
        args = module.Args(**saved["args"] | {"capture_video": False})
    except TypeError:  # flags that are not there any more
        sys.exit(another_version)
    vec, max_steps = running.make_envs(args, min(args.num_envs, episodes), None)
    device = running.begin(args)
    obs_dim = vec.single_observation_space.shape[0]
    agent, untrained = (module.Agent(obs_dim, vec.single_action_space, max_steps, args).to(device) for _ in range(2))
    try:
        agent.load_state_dict(saved["agent"])
    except RuntimeError:
        sys.exit(another_version)
    rollout, n, rounds = module.Rollout(vec, agent, device), vec.num_envs, []
    for first in range(module.EVAL_SEED, module.EVAL_SEED + episodes, n):
        infos = rollout.reset(seed=list(range(first, first + n)))
        arrays = {"obs": np.zeros((n, max_steps, obs_dim), dtype=np.float32)}
        for name in ("memory", "untrained"):
            arrays[name] = np.zeros((n, max_steps, agent.memory.dim), dtype=np.float32)
        arrays |= {"reward": np.zeros((n, max_steps)), "length": np.zeros(n, dtype=int)}
        arrays["context"] = np.reshape(infos.get("context", np.zeros((n, 0))), (n, -1))
        state = untrained.memory.initial_state(n)
        going, t = np.ones(n, dtype=bool), 0  # still in its first episode, the only one that counts
        while going.any():
            obs, memory = rollout.view()
            views = {"obs": obs, "memory": memory, "untrained": untrained.memory.read(state)}
            for name, view in views.items():
                arrays[name][going, t] = view.cpu()[going]
            step, _ = rollout.step(agent.act(obs, memory))
            state = untrained.memory.step(module.transition(*map(rollout.tensor, step[:4])), state)
            _, _, reward, _, terminated, truncated = step
            arrays["reward"][going, t] = reward[going]
            t += 1
            arrays["length"][going] = t
            going &= ~(terminated | truncated)
        rounds.append(arrays)
    vec.close()
    return {name: np.concatenate([arrays[name] for arrays in rounds])[:episodes] for name in rounds[0]}


# ----------------------------------------------------------------------------------------------------------- CSV files
def read_csv(path):
    """{run: {column: array}}"""
    tables = {}
    try:
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                script, env_id, length, seed = (row.pop(name) for name in Run._fields)
                columns = tables.setdefault(Run(script, env_id, int(length) if length else None, int(seed)), {})
                for name, value in row.items():
                    columns.setdefault(name, []).append(value if name == "measure" else float(value or "nan"))
    except (KeyError, TypeError, ValueError):
        sys.exit(f"{path} is not a CSV file that these programs have written")
    return {run: {name: np.array(values) for name, values in columns.items()} for run, columns in tables.items()}


def write_csv(path, tables):
    rows = []
    for run, columns in tables.items():
        rows += [run._asdict() | dict(zip(columns, values)) for values in zip(*columns.values())]
    write_rows(path, rows)


def write_rows(path, rows):
    def text(value):
        if value is None or isinstance(value, str):
            return value
        return "" if math.isnan(value) else f"{value:.0f}" if value % 1 == 0 else f"{value:.6g}"

    names = dict.fromkeys(name for row in rows for name in row)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows([{name: text(value) for name, value in row.items()} for row in rows])


def open_output(folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"cannot write to {folder}: {error.strerror}")
