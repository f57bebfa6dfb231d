"""How much of the hidden context is in the memory? A linear probe from m_t to the context, at up to 50 values of t.

    python benchmark/probe.py runs/RUN                    # writes into runs/RUN/probe
    python benchmark/probe.py runs/RUN --episodes 1000 --output-dir figures
    python benchmark/probe.py runs/RUN/probe              # redrawn from the CSV files, no run needed

    probe.csv       score of the probe from the memory m_t and, for comparison, from a memory of the same kind that was
                    never trained and from the observation s_t alone; chance; the agent's reward at t (zero after the
                    end) and its return so far, averaged over all episodes
    projection.csv  the two first principal components of m_t at the last t probed, and the context, by episode
    probe           the figure of both

The final agent acts deterministically in many contexts. Half of the episodes fit the probe, a ridge regression whose
strength is chosen within that half, and the other half scores it: by accuracy where the context is one of a few classes
(T-Maze's side, ML10's task), else by R^2, averaged over the context's dimensions (0 is the mean of the contexts, 1 is
all). m_0 remembers nothing and scores at chance. At t only the episodes that are still going count.

Two controls keep the score honest. s_t may tell the context too, where the environment shows it for a moment or where
the agent has acted on what it knows. And random weights keep much of a history: a memory that was never trained, shown
the same episodes, may score as high. What training adds is the distance to that line, and what memory adds the distance
to s_t. T-Maze has two to four different episodes under a deterministic policy, so there a probe says only whether they
are told apart at all. In walker-param and hopper-param many of the multipliers move nothing (the damping of the root,
say), so that R^2 stays far below 1 whatever is remembered.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from matplotlib.figure import Figure

from benchmark import runs

STRENGTHS = np.logspace(-4, 4, 9)  # of the ridge, in units of the number of episodes
FEWEST = 50  # episodes that a probe is fitted on, and that it is scored on
MOST_CLASSES = 20  # a context whose first number takes more values than these counts as continuous
POINTS = 50  # values of t


# --------------------------------------------------------------------------------------------------------------- probe
def fit(x, y, strengths):
    """Ridge regressions from x (E, D), standardised, to y (E, K), one for each strength: new x -> (S, E, K)."""
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 1e-5 * np.abs(x).max(initial=1e-30), scale, np.inf)  # a constant is no feature
    u, s, vt = np.linalg.svd((x - mean) / scale, full_matrices=False)
    shrunk = s / (s**2 + len(x) * np.asarray(strengths)[:, None])  # (S, R), one decomposition for all strengths
    weights = (vt.T * shrunk[:, None]) @ (u.T @ (y - y.mean(axis=0)))  # (S, D, K)
    return lambda new: y.mean(axis=0) + (new - mean) / scale @ weights


def probe(x, y, train, classify):
    """Fitted on the episodes where `train` holds, scored on the others."""
    x_train, y_train, x_test, y_test = x[train], y[train], x[~train], y[~train]
    held_out = np.arange(len(x_train)) % 4 == 3  # chooses the strength
    trial = fit(x_train[~held_out], y_train[~held_out], STRENGTHS)(x_train[held_out])
    strength = STRENGTHS[((trial - y_train[held_out]) ** 2).sum(axis=(1, 2)).argmin()]
    predicted = fit(x_train, y_train, [strength])(x_test)[0]
    if classify:
        return (predicted.argmax(axis=1) == y_test.argmax(axis=1)).mean()
    error, variation = ((y_test - guess) ** 2 for guess in (predicted, y_train.mean(axis=0)))
    return (1 - error.sum(axis=0) / variation.sum(axis=0)).mean()


def classes_of(context):
    """The values of the context's first number if they are few, else None: it is one of a continuum."""
    values = np.unique(context[:, 0])
    return values if len(values) <= MOST_CLASSES else None


def measure(data):
    """The columns of probe.csv and of projection.csv, from what runs.roll_out gives."""
    context = data["context"].astype(float)
    context, length = context[:, np.ptp(context, axis=0) > 0], data["length"]
    classes = classes_of(context)
    classify = classes is not None
    target = (context[:, :1] == classes).astype(float) if classify else context
    # Every other episode; of each class, so that both halves have the same shares of them and the same chance level.
    train = np.zeros(len(context), dtype=bool)
    train[np.argsort(target.argmax(axis=1), kind="stable")[::2] if classify else slice(None, None, 2)] = True
    contexts, which = np.unique(context, axis=0, return_inverse=True)  # sorted, so by class first
    if classify and len(contexts) > MOST_CLASSES:  # ML10's tasks have goals: no goal is in both halves
        train = which.reshape(-1) % 2 == 0
    # Where too few are still going, stop: episodes differ in length.
    last = min(np.sort(length[half])[-FEWEST] for half in (train, ~train)) - 1
    scores = []
    for t in np.unique(np.linspace(0, last, POINTS).round().astype(int)):
        going = length > t
        y, half = target[going], train[going]
        row = {"t": t, "measure": "accuracy" if classify else "R2"}
        row["score_memory"] = probe(data["memory"][going, t].astype(float), y, half, classify)
        row["score_untrained"] = probe(data["untrained"][going, t].astype(float), y, half, classify)
        row["score_state"] = probe(data["obs"][going, t].astype(float), y, half, classify)
        row["chance"] = y[~half, y[half].sum(axis=0).argmax()].mean() if classify else 0.0  # always the commonest class
        row["reward"] = data["reward"][:, t].mean()
        row["return_so_far"] = data["reward"][:, : t + 1].sum(axis=1).mean()
        scores.append(row | {"episodes": going.sum()})
    x, y = project(data["memory"][going, t]).T
    projection = {"t": np.full(len(x), t), "x": x, "y": y}
    projection |= {f"context_{i}": values for i, values in enumerate(context[going].T)}
    return {name: np.array([row[name] for row in scores]) for name in scores[0]}, projection


def project(memory):
    """The two first principal components (E, 2), zero where there is nothing but rounding."""
    memory = memory.astype(float)
    u, s, _ = np.linalg.svd(memory - memory.mean(axis=0), full_matrices=False)
    components = (u * np.where(s > 1e-5 * np.abs(memory).max(), s, 0.0))[:, :2]
    return np.pad(components, ((0, 0), (0, 2 - components.shape[1])))  # a memory may have one number


# ------------------------------------------------------------------------------------------------------------- drawing
def draw(run, scores, projection):
    figure = Figure(figsize=(runs.WIDTH, 2.7), layout="constrained")
    score_axes, reward_axes, projection_axes = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    look, t, classify = runs.look(run.script), scores["t"], scores["measure"][0] == "accuracy"

    style = {"marker": look.marker, "markersize": 3, "markevery": max(len(t) // 8, 1)}
    score_axes.plot(t, scores["score_memory"], color=look.color, label="memory $m_t$", **style)
    score_axes.plot(t, scores["score_untrained"], color=look.color, linestyle=":", label="the same, untrained")
    score_axes.plot(t, scores["score_state"], color="black", linestyle="--", label="observation $s_t$")
    score_axes.plot(t, scores["chance"], color="0.6", linewidth=0.8, label="chance")
    lowest = min(scores[name].min() for name in ("score_memory", "score_untrained", "score_state"))
    score_axes.set_ylim(0 if classify else min(-0.1, lowest - 0.05), 1.05)
    dimensions = sum(name.startswith("context_") for name in projection)
    mean_of = f",\nmean of {dimensions} numbers" if dimensions > 1 else ""
    score_axes.set_ylabel("accuracy of a linear probe" if classify else f"$R^2$ of a linear probe{mean_of}")
    score_axes.set_title("what $m_t$ tells of the context")
    figure.legend(*score_axes.get_legend_handles_labels(), loc="outside lower left", ncols=4)

    so_far = runs.is_tmaze(run.env_id)  # which pays at the end, so that its single rewards would tell nothing
    reward_axes.plot(t, scores["return_so_far" if so_far else "reward"], color=look.color, **style)
    reward_axes.set_ylabel("return so far" if so_far else "reward at t")
    reward_axes.set_title("what the agent gets")
    for axes in (score_axes, reward_axes):
        axes.set_xlabel("step t of the episode")

    draw_projection(projection_axes, projection)
    episodes = f"{scores['episodes'][0]:.0f} episodes, half to fit and half to score"
    figure.suptitle(f"{look.label} on {runs.title(run)}, seed {run.seed}: {episodes}", fontsize=8)
    return figure


def draw_projection(axes, projection):
    x, y = projection["x"], projection["y"]
    context = np.stack([values for name, values in projection.items() if name.startswith("context_")], axis=1)
    classes = classes_of(context)
    if classes is not None:
        for i, value in enumerate(classes):
            which = context[:, 0] == value
            style = {"color": runs.COLORS[i % 8], "marker": "os^"[i // 8]}
            axes.scatter(x[which], y[which], s=8, alpha=0.6, linewidths=0, label=f"{value:g}", **style)
        style = {"markerscale": 2, "handletextpad": 0.1, "ncols": 1 + (len(classes) > 10)}
        axes.legend(title="context", loc="center left", bbox_to_anchor=(1, 0.5), **style)
    else:
        if context.shape[1] == 2:
            values, cmap, label = np.arctan2(context[:, 1], context[:, 0]), "twilight", "angle of the context"
        else:
            plane = np.column_stack([np.ones_like(x), x, y])
            residual = context - plane @ np.linalg.lstsq(plane, context)[0]
            i = (residual.var(axis=0) / context.var(axis=0)).argmin()  # the one that the plane shows best
            values, cmap = context[:, i], "viridis"
            label = "context" if context.shape[1] == 1 else f"context, the best shown: number {i} of {context.shape[1]}"
        points = axes.scatter(x, y, c=values, cmap=cmap, s=8, edgecolors="0.5", linewidths=0.2)
        bar = axes.figure.colorbar(points, ax=axes, label=label)
        if cmap == "twilight":
            points.set_clim(-np.pi, np.pi)
            bar.set_ticks([-np.pi, 0, np.pi], labels=["$-\\pi$", "0", "$\\pi$"])
    axes.set_title(f"$m_t$ at t = {projection['t'][0]:.0f}")
    axes.set_xlabel("first principal component")
    axes.set_ylabel("second")
    axes.set_aspect("equal", adjustable="datalim")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a finished run, or a folder with the CSV files of this")
    parser.add_argument("--episodes", type=int, default=400, help="to roll out (400)")
    parser.add_argument("--output-dir", type=Path, help="(default: probe in the run's folder)")
    parser.add_argument("--format", choices=("png", "pdf"), default="png")
    args = parser.parse_args()
    folder = args.folder
    if not folder.is_dir():
        sys.exit(f"there is no folder {folder}")
    if args.episodes < 2 * FEWEST:
        sys.exit(f"--episodes must be {2 * FEWEST} or more, got {args.episodes}")

    if (folder / "model.pt").exists():
        run = runs.identify(folder)
        if not any(name.startswith("memory.") for name in runs.load(folder / "model.pt")["agent"]):
            sys.exit(f"{folder} is of {run.script}.py, which has no memory: there is nothing to probe")
        data = runs.roll_out(folder, args.episodes)
        if not np.ptp(data["context"], axis=0).any():
            sys.exit(f"{run.env_id} has no context, or always the same: there is nothing to probe for")
        source = output = args.output_dir or folder / "probe"
        runs.open_output(output)
        for name, columns in zip(("probe.csv", "projection.csv"), measure(data)):
            runs.write_csv(output / name, {run: columns})
    elif (folder / "probe.csv").exists() and (folder / "projection.csv").exists():
        source, output = folder, args.output_dir or folder
        runs.open_output(output)
    elif (folder / "args.json").exists():
        sys.exit(f"{folder} has no model.pt: the run is not finished, or was told not to save it")
    else:
        sys.exit(f"{folder} is no run, and has no probe.csv and projection.csv")
    # From the files in any case, so that whoever has them gets the same figure.
    scores, projection = (runs.read_csv(source / name) for name in ("probe.csv", "projection.csv"))
    if len(scores) != 1 or scores.keys() != projection.keys():
        sys.exit(f"probe.csv and projection.csv in {source} are not of one and the same run")
    [run] = scores
    draw(run, scores[run], projection[run]).savefig(output / f"probe.{args.format}")
    print(f"written to {output}")


if __name__ == "__main__":
    main()
