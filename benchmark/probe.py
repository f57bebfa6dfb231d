"""How much of the hidden context is in the memory? A linear probe from m_t to the context, at up to 50 values of t.

    python -m benchmark.probe runs/RUN                   # a run folder (its model.pt), or a .pt file
    python -m benchmark.probe MATE.pt LSTM.pt GPT2.pt    # several memories on one environment

    probe.csv       score of the probe from the memory m_t and of two controls: the memory of an untrained agent, shown
                    the same episodes, and the observation s_t alone
    projection.csv  the first two principal components of m_t at the last t, and the context, by episode (first model)
    probe.png       the figure of both

The agent acts deterministically in many contexts. Half of the episodes fit the probe, a ridge regression whose strength
is chosen within that half; the other half scores it: by accuracy if the context is one of a few classes (T-Maze's goal,
ML10's task), else by R^2, averaged over the dimensions of the context (0: no better than the mean, 1: all of it). At t
only the episodes that are still running count.

Random weights keep much of a history too: what training adds is the distance to the untrained memory, and what memory
adds is the distance to s_t. In walker-param and hopper-param many of the multipliers have no effect (the damping of the
root, for example), so R^2 stays far below 1.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure

from benchmark.runs import COLORS, WIDTH, Run, look, roll_out, title, write_csv

STRENGTHS = np.logspace(-4, 4, 9)  # of the ridge, in units of the number of episodes
FEWEST = 50  # episodes that a probe is fitted on, and that it is scored on
MOST_CLASSES = 20  # a context whose first number takes more values is continuous
POINTS = 50  # values of t


@dataclass
class Args:
    models: tyro.conf.Positional[tuple[Path, ...]]  # run folders, or model.pt or best.pt files
    output_dir: Path = Path("probe")
    episodes: int = 400


# --------------------------------------------------------------------------------------------------------------- probe
def fit(x, y, strengths):
    """Ridge regressions from x (E, D), standardised, to y (E, K), one for each strength: new x -> (S, E, K)."""
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 1e-5 * np.abs(x).max(initial=1e-30), scale, np.inf)  # a constant is no feature

    def standardise(x):  # clipped: an entry that is almost never nonzero, such as a contact force, has a tiny scale
        return np.clip((x - mean) / scale, -10, 10)

    u, s, vt = np.linalg.svd(standardise(x), full_matrices=False)
    shrunk = s / (s**2 + len(x) * np.asarray(strengths)[:, None])  # (S, R), one decomposition for all strengths
    weights = (vt.T * shrunk[:, None]) @ (u.T @ (y - y.mean(axis=0)))  # (S, D, K)
    return lambda new: y.mean(axis=0) + standardise(new) @ weights


def probe(x, y, train, classify):
    """Score of a probe that is fitted on the episodes where `train` holds, on the others."""
    x_train, y_train, x_test, y_test = x[train], y[train], x[~train], y[~train]
    held_out = np.arange(len(x_train)) % 4 == 3  # chooses the strength
    trial = fit(x_train[~held_out], y_train[~held_out], STRENGTHS)(x_train[held_out])
    strength = STRENGTHS[((trial - y_train[held_out]) ** 2).sum(axis=(1, 2)).argmin()]
    predicted = fit(x_train, y_train, [strength])(x_test)[0]
    if classify:
        return (predicted.argmax(axis=1) == y_test.argmax(axis=1)).mean()
    error, variation = ((y_test - guess) ** 2 for guess in (predicted, y_train.mean(axis=0)))
    return (1 - error.sum(axis=0) / variation.sum(axis=0)).mean()


def classes_of(context):  # values of its first number if they are few, else None
    values = np.unique(context[:, 0])
    return values if len(values) <= MOST_CLASSES else None


def split(context, classes):
    """Half of the episodes. No goal of ML10 is in both halves, or the probe could recognise the goal, not the task."""
    contexts, which = np.unique(context, axis=0, return_inverse=True)  # sorted, so by class first
    if classes is None:
        return np.arange(len(context)) % 2 == 0
    if len(contexts) > MOST_CLASSES:
        return which.reshape(-1) % 2 == 0
    train = np.zeros(len(context), dtype=bool)
    train[np.argsort(which.reshape(-1), kind="stable")[::2]] = True  # every other episode of each class
    return train


def measure(data):
    """The columns of probe.csv and of projection.csv, from what roll_out returns."""
    context, length = data["context"].astype(float), data["length"]
    context = context[:, np.ptp(context, axis=0) > 0]
    classes = classes_of(context)
    classify = classes is not None
    target, train = (context[:, :1] == classes).astype(float) if classify else context, split(context, classes)
    last = min(np.sort(length[half])[-FEWEST] for half in (train, ~train)) - 1  # later, too few are still running
    rows = []
    for t in np.unique(np.linspace(0, last, POINTS).round().astype(int)):
        running = length > t
        y, half = target[running], train[running]
        row = {"t": t, "measure": "accuracy" if classify else "R2"}
        for name in ("memory", "untrained", "obs"):
            row[f"score_{name}"] = probe(data[name][running, t].astype(float), y, half, classify)
        row["chance"] = y[~half, y[half].sum(axis=0).argmax()].mean() if classify else 0.0  # the most frequent class
        rows.append(row | {"episodes": running.sum()})
    x, y = project(data["memory"][running, t]).T
    projection = {"t": np.full(len(x), t), "x": x, "y": y}
    projection |= {f"context_{i}": values for i, values in enumerate(context[running].T)}
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}, projection


def project(memory):
    """First two principal components (E, 2)."""
    u, s, _ = np.linalg.svd(memory.astype(float) - memory.mean(axis=0), full_matrices=False)
    return (u * s)[:, :2]


# -------------------------------------------------------------------------------------------------------------- figure
def draw(scores, projection):
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    ax, plane = figure.subplots(1, 2, width_ratios=(1.2, 1))
    for run, columns in scores.items():
        style = look(run.script)
        ax.plot(columns["t"], columns["score_memory"], color=style.color, label=f"{style.label}, $m_t$")
        ax.plot(columns["t"], columns["score_untrained"], ":", color=style.color, label=f"{style.label}, untrained")
    run, first = next(iter(scores.items()))
    ax.plot(first["t"], first["score_obs"], "--", color="black", label="observation $s_t$")
    ax.plot(first["t"], first["chance"], color="0.6", linewidth=0.8, label="chance")
    classify, episodes = first["measure"][0] == "accuracy", first["episodes"][0]
    ax.set_ylim(0 if classify else -0.15, 1.05)
    ax.set(xlabel="step t of the episode", ylabel="accuracy of the probe" if classify else "$R^2$ of the probe")
    ax.set_title(f"context in the memory, {title(run)}, {episodes} episodes")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    draw_projection(plane, projection)
    plane.set_title(f"{look(run.script).label}: $m_t$ at t = {projection['t'][0]}")
    return figure


def draw_projection(ax, projection):
    x, y = projection["x"], projection["y"]
    context = np.stack([values for name, values in projection.items() if name.startswith("context_")], axis=1)
    classes, style = classes_of(context), {"s": 8, "linewidths": 0}
    if classes is not None:
        for i, value in enumerate(classes):
            which = context[:, 0] == value
            ax.scatter(x[which], y[which], color=COLORS[i % 8], marker="os^"[i // 8], label=f"{value:g}", **style)
        ax.legend(title="context", loc="center left", bbox_to_anchor=(1, 0.5), handletextpad=0.1)
    elif context.shape[1] == 2:  # a direction, or a goal in the plane
        angle = np.degrees(np.arctan2(context[:, 1], context[:, 0]))
        points = ax.scatter(x, y, c=angle, cmap="hsv", vmin=-180, vmax=180, **style)
        ax.figure.colorbar(points, ax=ax, label="angle of the context", ticks=[-180, 0, 180])
    else:
        label = "context" if context.shape[1] == 1 else f"first of {context.shape[1]} numbers of the context"
        ax.figure.colorbar(ax.scatter(x, y, c=context[:, 0], cmap="viridis", **style), ax=ax, label=label)
    ax.set(xlabel="first principal component", ylabel="second")


def main():
    args = tyro.cli(Args, prog="python -m benchmark.probe", description=__doc__)
    if not args.models:
        sys.exit("error: name a run folder or a saved model")
    if args.episodes < 2 * FEWEST:
        sys.exit(f"error: --episodes must be at least {2 * FEWEST}")
    scores, projections = {}, {}
    for path in args.models:
        path = path / "model.pt" if path.is_dir() else path
        if not path.exists():
            sys.exit(f"error: {path} does not exist; an unfinished run has best.pt only")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        flags = saved["args"]
        length = flags["corridor_length"] if flags["env_id"].startswith("tmaze") else None
        data = roll_out(path, args.episodes)
        if not data["memory"].shape[2] or not np.ptp(data["context"], axis=0).any():
            sys.exit(f"error: {path} has no memory, or {flags['env_id']} has no context that changes")
        run = Run(saved["script"], flags["env_id"], length, flags["seed"])
        scores[run], projections[run] = measure(data)
    if len({(run.env_id, run.corridor_length) for run in scores}) > 1:
        sys.exit("error: the models are of different environments")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    first = next(iter(scores))
    write_csv(args.output_dir / "probe.csv", scores)
    write_csv(args.output_dir / "projection.csv", {first: projections[first]})
    draw(scores, projections[first]).savefig(args.output_dir / "probe.png")
    for run, columns in scores.items():
        print(f"{run.script} on {title(run)}: {columns['score_memory'][-1]:.3f} at t = {columns['t'][-1]}, ", end="")
        print(f"untrained {columns['score_untrained'][-1]:.3f}, observation {columns['score_obs'][-1]:.3f}")


if __name__ == "__main__":
    main()
