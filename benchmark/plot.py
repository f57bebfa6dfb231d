"""The paper's figures and the table of final numbers, from run folders or from the CSV files that this writes.

    python benchmark/plot.py runs --output-dir figures                         # all runs below these folders
    python benchmark/plot.py sweeps/figure4-cpu --output-dir figures --format pdf
    python benchmark/plot.py benchmark/results/learning.csv --output-dir figures      # redrawn, no runs needed
    python benchmark/plot.py figures --output-dir figures                      # the same, from all that this wrote

    curves.csv      every evaluation of every run
    adaptation.csv  reward at step t of an episode by the final agents, averaged over contexts; zero after the end
    curves          Figure 3: average return against steps, the agent without memory as a line
    corridor        Figure 4: T-Maze, best average return against the corridor's length
    adaptation      reward at t, or in T-Maze the return so far: how fast a memory adapts within an episode
    table.csv, .md  best and last average returns

Runs that are not finished have a learning curve, and no part in the rest.

With five seeds or more, lines are interquartile means and bands 95 % bootstrap intervals; with fewer, the mean and one
(sample) standard deviation. Figures and table say which. "Best" is the best evaluation of a run, as in the paper.
"""

import argparse
import json
import math
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from matplotlib.transforms import ScaledTranslation
from scipy.stats import bootstrap, trim_mean
from tqdm import tqdm

import envs
from benchmark import runs
from envs import running

ENOUGH_SEEDS = 5  # for interquartile means: of four, trimming a quarter leaves two, of fewer it trims nothing
MARKOV_OPTIMUM, OPTIMUM = 0.5, 1.0  # of T-Maze, exactly
MAY_DIFFER = {"seed", "exp_name", "resume", "evaluate"} | running.RESUME_MAY_CHANGE  # between runs of one experiment


# ---------------------------------------------------------------------------------------------------------- statistics
def interquartile_mean(values, axis=0):
    return trim_mean(values, 0.25, axis=axis)


def summarise(values):
    """Centre, low and high over seeds, the first axis."""
    values = np.asarray(values, dtype=float)
    if len(values) >= ENOUGH_SEEDS:
        # By percentiles: the bias-corrected interval is not a number where all seeds are equal, as at a return of 1.
        resampled = bootstrap((values,), interquartile_mean, axis=0, n_resamples=2000, method="percentile", rng=0)
        return interquartile_mean(values), *resampled.confidence_interval
    spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.nan
    return values.mean(axis=0), values.mean(axis=0) - spread, values.mean(axis=0) + spread


def describe(seeds):
    """What summarise gives for these numbers of seeds, in words."""
    kinds = {}
    for n in sorted(set(seeds)):
        kind = "interquartile mean and 95 % bootstrap interval" if n >= ENOUGH_SEEDS else "mean and standard deviation"
        kinds.setdefault(kind, []).append(str(n))
    if kinds == {"mean and standard deviation": ["1"]}:
        return "one seed"
    return "; ".join(f"{kind} over {' or '.join(numbers)} seeds" for kind, numbers in kinds.items())


def on_common_steps(seeds, name):
    """Steps, and the values (seeds, steps) there. Evaluations wait for ends of episodes, so that their steps differ."""
    first, last = max(columns["step"][0] for columns in seeds), min(columns["step"][-1] for columns in seeds)
    steps = np.unique(np.concatenate([columns["step"] for columns in seeds]))
    steps = steps[(first <= steps) & (steps <= last)]
    return steps, np.array([np.interp(steps, columns["step"], columns[name]) for columns in seeds])


def best_returns(seeds):
    return np.array([columns["episodic_return"].max() for columns in seeds])


# ------------------------------------------------------------------------------------------------------------- reading
def collect(sources, episodes):
    """{run: columns} of curves.csv and of adaptation.csv. With `episodes` at 0 no agent is rolled out."""
    files, folders = [], {}
    for source in sources:
        if source.is_file():
            files.append(source)
        elif not source.is_dir():
            sys.exit(f"there is no {source}")
        elif found := runs.find(source):
            folders |= {folder.resolve(): folder for folder in found}
        elif (source / "curves.csv").exists():
            files += [path for path in (source / "curves.csv", source / "adaptation.csv") if path.exists()]
        else:
            sys.exit(f"there are no runs below {source}, and no curves.csv in it")

    curves, adaptation = {}, {}
    for path in files:
        for run, columns in runs.read_csv(path).items():
            if {"step", "updates", "episodic_return"} <= columns.keys():
                for name, value in (("success_rate", math.nan), ("seconds", math.nan), ("finished", 1.0)):
                    columns.setdefault(name, np.full(len(columns["step"]), value))  # older files have none of them
                table = curves
            elif columns.keys() == {"t", "reward"}:
                table = adaptation
            else:
                sys.exit(f"{path} holds neither learning curves nor adaptation")
            if run in table:
                print(f"{path}: left out {run.script} on {runs.title(run)}, seed {run.seed}, which was given before")
            table.setdefault(run, columns)
    # Of two runs alike the finished one counts, and else the later one.
    finished, settings = {folder: (folder / "results.json").exists() for folder in folders.values()}, {}
    latest_first = sorted(finished, key=lambda folder: (finished[folder], runs.first_log(folder)), reverse=True)
    for folder in tqdm(latest_first, desc="reading runs", unit="run", disable=None):
        run, columns = runs.identify(folder), runs.read_evaluations(folder)
        flags = json.loads((folder / "args.json").read_text())
        first, others = settings.setdefault(run._replace(seed=None), (folder, flags))
        different = [name for name in flags if name not in MAY_DIFFER and flags[name] != others.get(name)]
        if different:  # they are not seeds of one experiment
            sys.exit(f"{folder} and {first} differ in {', '.join(different)}: draw them apart")
        if run in curves:
            tqdm.write(f"{folder}: left out for a finished or later one of the same script, environment and seed")
            continue
        if len(columns["step"]) < 2:
            tqdm.write(f"{folder}: left out, it has not been evaluated since its start")
            continue
        curves[run] = columns
        if not finished[folder]:
            tqdm.write(f"{folder}: unfinished at step {columns['step'][-1]:.0f}, drawn if no other seed is finished")
        elif episodes and (folder / "model.pt").exists():
            try:
                reward = runs.roll_out(folder, episodes)["reward"].mean(axis=0)
                adaptation[run] = {"t": np.arange(len(reward)), "reward": reward}
            except SystemExit as error:  # one agent that cannot be rolled out must not cost the others their figure
                tqdm.write(f"{error}: no adaptation")
    if not curves:
        sys.exit("there is nothing to draw")
    return in_order(curves), in_order(adaptation)


def in_order(tables):
    def place(name, names):
        return names.index(name) if name in names else len(names), name

    def key(run):
        memory = place(run.script.split("_")[-1], list(runs.LOOKS))
        return place(run.env_id, envs.IDS), run.corridor_length or 0, memory, run.script, run.seed

    return {run: tables[run] for run in sorted(tables, key=key)}


def by_panel(tables):
    """{environment: {script: [columns of each seed]}}, an environment being a run of no script and no seed."""
    panels = {}
    for run, columns in tables.items():
        panel = panels.setdefault(run._replace(script=None, seed=None), {})
        panel.setdefault(run.script, []).append(columns)
    return panels


# ------------------------------------------------------------------------------------------------------------- drawing
def make_axes(titles, xlabel, ylabel=None):
    columns = 2 if len(titles) == 4 else min(len(titles), 3)
    rows = math.ceil(len(titles) / columns)
    width = runs.WIDTH / 2 if columns == 1 else runs.WIDTH * columns / 3
    figure = Figure(figsize=(width, 1.7 * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax in axes[len(titles) :]:
        ax.remove()
    for ax, title in zip(axes, titles):
        ax.set(title=title, xlabel=xlabel)
    for ax in axes[::columns]:
        ax.set_ylabel(ylabel)
    return figure, axes[: len(titles)]


def add_legend(figure, note):
    entries = {}
    for ax in figure.axes:
        entries |= dict(zip(*reversed(ax.get_legend_handles_labels())))
    labels = sorted(entries, key=lambda label: label not in [look.label for look in runs.LOOKS.values()])
    width = figure.get_figwidth()
    figure.legend(
        [entries[label] for label in labels],
        labels,
        title=textwrap.fill(note, int(17 * width)),
        loc="outside lower center",
        ncols=min(len(labels), round(width / 1.6)),
        handlelength=3.5,
        columnspacing=1.2,
    )


def draw_seeds(ax, script, x, values):
    look, (centre, low, high) = runs.look(script), summarise(values)
    every = math.ceil(len(x) / 8)
    shifted = len(ax.get_lines()) * every // 4 % every, every  # markers beside those of a line that this one covers
    style = {"color": look.color, "linestyle": look.linestyle, "marker": look.marker, "markersize": 3}
    ax.plot(x, centre, label=look.label, markevery=shifted, **style)
    if len(values) > 1:
        ax.fill_between(x, low, high, color=look.color, alpha=0.2, linewidth=0)


def draw_tmaze_optima(ax):
    markov = runs.LOOKS["markov"]
    ax.axhline(OPTIMUM, color=markov.color, linestyle=":", linewidth=1, label="optimum")
    ax.axhline(MARKOV_OPTIMUM, color=markov.color, linestyle=markov.linestyle, linewidth=1, label="no memory, optimum")


def draw_curves(curves):
    panels = by_panel(curves)
    figure, axes = make_axes([runs.title(environment) for environment in panels], "environment steps", "average return")
    for ax, (environment, scripts) in zip(axes, panels.items()):
        if runs.is_tmaze(environment.env_id):
            draw_tmaze_optima(ax)
        for script, seeds in scripts.items():
            seeds = [
                seed for seed in seeds if seed["finished"][-1]
            ] or seeds  # one under way would cut the others short
            if script.endswith("markov") and len(scripts) > 1:
                look = runs.look(script)
                level = summarise(best_returns(seeds))[0]
                ax.axhline(level, color=look.color, linestyle=look.linestyle, label="no memory, best return")
            else:
                draw_seeds(ax, script, *on_common_steps(seeds, "episodic_return"))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))  # 50k, 1M
    add_legend(figure, describe(len(seeds) for scripts in panels.values() for seeds in scripts.values()))
    return figure


def draw_corridor(curves):
    """None where there is no T-Maze."""
    panels = {}
    for environment, scripts in by_panel(curves).items():
        if runs.is_tmaze(environment.env_id):
            panel = panels.setdefault(environment.env_id, {})
            for script, seeds in scripts.items():
                panel.setdefault(script, {})[environment.corridor_length] = best_returns(seeds)
    if not panels:
        return None
    figure, axes = make_axes(list(panels), "corridor length L", "best average return")
    for ax, scripts in zip(axes, panels.values()):
        draw_tmaze_optima(ax)
        for i, (script, by_length) in enumerate(scripts.items()):
            look = runs.look(script)
            style = {"color": look.color, "marker": look.marker}
            # Markers of equal value would hide each other: side by side on paper, the data untouched.
            shift = ScaledTranslation((i - (len(scripts) - 1) / 2) * 4 / 72, 0, figure.dpi_scale_trans)
            style["transform"] = ax.transData + shift
            best = [returns.max() for returns in by_length.values()]
            ax.plot(list(by_length), best, label=look.label, linestyle=look.linestyle, **style)
            for length, returns in by_length.items():
                if len(returns) > 1:
                    ax.plot([length] * len(returns), returns, linestyle="", alpha=0.35, markersize=2.5, **style)
        lengths = sorted({length for by_length in scripts.values() for length in by_length})
        ax.set_xticks(lengths)
        margin = 0.15 * (lengths[-1] - lengths[0]) or 1
        ax.set_xlim(lengths[0] - margin, lengths[-1] + margin)
    numbers = sorted({len(r) for scripts in panels.values() for lengths in scripts.values() for r in lengths.values()})
    several = f"best of {' or '.join(map(str, numbers))} seeds; small and faint: each seed"
    add_legend(figure, "one seed" if numbers == [1] else several)
    return figure


def draw_adaptation(adaptation):
    panels = by_panel(adaptation)
    figure, axes = make_axes([runs.title(environment) for environment in panels], "step t of the episode")
    for ax, (environment, scripts) in zip(axes, panels.items()):
        tmaze = runs.is_tmaze(environment.env_id)
        if tmaze:
            draw_tmaze_optima(ax)
        for script, seeds in scripts.items():
            t = min((columns["t"] for columns in seeds), key=len)
            values = np.array([columns["reward"][: len(t)] for columns in seeds])
            # T-Maze pays at the end, so its single rewards would tell nothing.
            draw_seeds(ax, script, t, values.cumsum(axis=1) if tmaze else values)
        ax.set_ylabel("return so far" if tmaze else "reward at t")
    add_legend(figure, describe(len(seeds) for scripts in panels.values() for seeds in scripts.values()))
    return figure


# --------------------------------------------------------------------------------------------------------------- table
def make_table(curves):
    rows = []
    for environment, scripts in by_panel(curves).items():
        for script, seeds in scripts.items():
            row = {"script": script, "env_id": environment.env_id, "corridor_length": environment.corridor_length}
            row |= {"seeds": len(seeds), "low_and_high": describe([len(seeds)])}
            names = ("episodic_return", "success_rate", "updates", "seconds")
            last = {name: np.array([columns[name][-1] for columns in seeds]) for name in names}
            for name, values in (("best_return", best_returns(seeds)), ("last_return", last["episodic_return"])):
                row |= dict(zip((name, f"{name}_low", f"{name}_high"), summarise(values)))
            row["best_seed"] = best_returns(seeds).max()
            row |= {"success_rate": last["success_rate"].mean(), "updates": last["updates"].mean()}
            rows.append(row | {"minutes": last["seconds"].mean() / 60})
    return rows


def to_markdown(rows):
    def number(value, digits=None):
        digits = (3 if abs(value) < 10 else 1) if digits is None else digits
        return "" if math.isnan(value) else f"{value:,.{digits}f}"

    def spread(row, name):
        digits = 3 if abs(row[name]) < 10 else 1
        centre, low, high = (number(row[name + end], digits) for end in ("", "_low", "_high"))
        if row["seeds"] >= ENOUGH_SEEDS:
            return f"{centre} [{low}, {high}]"
        return centre if row["seeds"] == 1 else f"{centre} ± {number(row[f'{name}_high'] - row[name], digits)}"

    lines = []
    for row in rows:
        line = {"environment": runs.title(runs.Run(row["script"], row["env_id"], row["corridor_length"], None))}
        line |= {"memory": runs.look(row["script"]).label, "seeds": str(row["seeds"])}
        line |= {"best return": spread(row, "best_return"), "best seed": number(row["best_seed"])}
        line |= {"last return": spread(row, "last_return"), "success rate": number(row["success_rate"])}
        line |= {"updates": number(row["updates"], 0), "minutes": number(row["minutes"], 1)}
        lines.append(line)
    names = [name for name in lines[0] if any(line[name] for line in lines)]  # only Meta-World has success rates
    table = [names, ["---"] * len(names)] + [[line[name] for name in names] for line in lines]
    note = f"Best and last return: {describe(row['seeds'] for row in rows)}. Best seed: the best return among them."
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table) + f"\n\n{note}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+", help="folders with runs below them, or CSV files of this")
    parser.add_argument("--output-dir", type=Path, default=Path("figures"), help="(default: figures)")
    parser.add_argument("--episodes", type=int, default=100, help="of each final agent, for the adaptation (100)")
    parser.add_argument("--no-adaptation", action="store_true", help="do not roll the agents out")
    parser.add_argument("--format", choices=("png", "pdf"), default="png")
    args = parser.parse_args()
    if args.episodes < 1:
        sys.exit(f"--episodes must be 1 or more, got {args.episodes}")
    curves, adaptation = collect(args.sources, 0 if args.no_adaptation else args.episodes)

    # Drawn from the files, so that whoever has them gets the same figures.
    runs.open_output(args.output_dir)
    for name in ("curves", "corridor", "adaptation", "table"):
        for path in args.output_dir.glob(f"{name}.*"):
            path.unlink()  # what an earlier call left would be taken for this one's
    runs.write_csv(args.output_dir / "curves.csv", curves)
    curves = runs.read_csv(args.output_dir / "curves.csv")
    finished = {run: columns for run, columns in curves.items() if columns["finished"][-1]}
    figures = {"curves": draw_curves(curves), "corridor": draw_corridor(finished)}
    if adaptation:
        runs.write_csv(args.output_dir / "adaptation.csv", adaptation)
        figures["adaptation"] = draw_adaptation(runs.read_csv(args.output_dir / "adaptation.csv"))
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(args.output_dir / f"{name}.{args.format}")
    if finished:
        rows = make_table(finished)
        runs.write_rows(args.output_dir / "table.csv", rows)
        (args.output_dir / "table.md").write_text(to_markdown(rows))
        print(to_markdown(rows))
    print(f"written to {args.output_dir}")


if __name__ == "__main__":
    main()
