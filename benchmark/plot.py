"""The paper's Figures 3 and 4 and the tables of results, from sweeps and from the CSV files of earlier calls.

    python -m benchmark.plot sweeps/figure4-cpu --output-dir benchmark/results/figure4_cpu
    python -m benchmark.plot benchmark/results/figure4_cpu --output-dir benchmark/results/figure4_cpu  # redraw

Sources are folders with runs below them, folders with CSV files of this program, or a CSV file of curves. What is in
the output folder already is a source too, so results accumulate and nothing is lost when sweeps/ is gone. Of a run
that is in several sources the finished one counts, or the longer one, or the one of the last source. Unfinished runs
have finished = 0 in curves.csv and rows of their own in the table, and are not in the mean of the finished ones.

    curves.csv, .png        Figure 3: average return of every evaluation against environment steps
    corridor.png            Figure 4: best average return against the length of T-Maze's corridor
    table.csv, .md          returns, and the commands of the runs (commands.csv)
    adaptation.csv, .png    reward at step t, mean over 100 episodes of the final agents of continuous tasks
    success.csv             Meta-World: success rate by task in these episodes
    ant_directions.csv      ant-dir: forward reward in these episodes by quarter of directions (+x: within 45°)
"""

import json
import logging
import math
import re
import shlex
import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import envs
from benchmark.runs import LOOKS, WIDTH, Run, is_tmaze, look, read_csv, roll_out, title, write_csv, write_rows
from benchmark.sweep import to_words

TABLES = ("curves", "commands", "adaptation", "success", "ant_directions")  # CSV files with rows for each run
SOLVED = 0.95  # average return from which on a T-Maze counts as solved; its optimum is 1, without memory 0.5
EPISODES = 100  # of each final agent
SMOOTHED = 5  # evaluations of a continuous task that are averaged in thick lines, an odd number
IRRELEVANT = ("seed", "exp_name", "resume", "evaluate", "checkpoint", "cuda", "capture", "track", "wandb")


@dataclass
class Args:
    sources: tyro.conf.Positional[tuple[Path, ...]]  # folders with runs, or with CSV files of this program
    output_dir: Path  # for CSV files, tables and figures
    models: Path | None = None  # folder for the best seed of each script and environment


# ------------------------------------------------------------------------------------------------------------- reading
def read_run(folder):
    """The run's name, and its rows of curves.csv and commands.csv."""
    args = json.loads((folder / "args.json").read_text())
    script = torch.load(folder / "best.pt", map_location="cpu", weights_only=True)["script"]
    length = args["corridor_length"] if args["env_id"].startswith("tmaze") else None
    defaults = asdict(import_module(script).Args())
    flags = {name: args[name] for name in args if name == "env_id" or args[name] != defaults.get(name)}
    flags = {name: value for name, value in flags.items() if not name.startswith(IRRELEVANT)}
    tables = {"curves": read_evaluations(folder), "commands": {"flags": np.array([shlex.join(to_words(flags))])}}
    return Run(script, args["env_id"], length, args["seed"]), tables


def read_evaluations(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    steps = sorted(scalars.get("eval/episodic_return", {}))
    columns = {"step": steps, "updates": [scalars["charts/updates"][step] for step in steps]}
    for name in ("episodic_return", "return_first_quarter", "return_last_quarter", "success_rate"):
        columns[name] = [scalars.get(f"eval/{name}", {}).get(step, math.nan) for step in steps]
    finished = (folder / "results.json").exists()
    columns |= {"seconds": [math.nan] * len(steps), "finished": [finished] * len(steps)}
    if finished:
        columns["seconds"][-1] = json.loads((folder / "results.json").read_text())["seconds"]
    return {name: np.array(values, dtype=float) for name, values in columns.items()}


def read_tables(source):
    """{run: {table: columns}} of the CSV files in a folder, or of one file of curves."""
    paths = {"curves": source} if source.is_file() else {name: source / f"{name}.csv" for name in TABLES}
    results = {}
    for name, path in paths.items():
        for run, columns in read_csv(path).items() if path.exists() else ():
            results.setdefault(run, {})[name] = columns
    return {run: tables for run, tables in results.items() if "curves" in tables}


def collect(sources):
    """{run: {table: columns}} of all sources, and {run: folder} of those that are on disk."""
    results, folders, settings = {}, {}, {}

    def add(run, tables, folder=None):
        flags = tables.get("commands", {}).get("flags", [None])[0]
        other = settings.setdefault(run._replace(seed=None), flags)
        if flags != other:
            words = [
                re.findall(r"--\S+(?: (?!--)\S+)?", text) if text else ["unknown flags"] for text in (other, flags)
            ]
            ours, theirs = (" ".join(f for f in a if f not in b) or "defaults" for a, b in (words, words[::-1]))
            names = f"{run.script} on {title(run)} was run with {ours} and with {theirs}"
            sys.exit(f"error: {names}: plot them separately")
        known = results.setdefault(run, tables)
        new_extent, known_extent = ((t["curves"]["finished"][-1], t["curves"]["step"][-1]) for t in (tables, known))
        if new_extent < known_extent:
            return
        same = same_returns(tables["curves"], known["curves"])  # known may have the episodes of its agent, too
        results[run] = known | tables if same else tables
        if folder is not None:
            folders[run] = folder
        elif not same:
            folders.pop(run, None)

    for source in sources:
        if not source.exists():
            sys.exit(f"error: {source} does not exist")
        for run, tables in read_tables(source).items():
            add(run, tables)
        for path in sorted(source.rglob("best.pt")):  # written after the first evaluation
            run, tables = read_run(path.parent)
            if len(tables["curves"]["step"]):
                add(run, tables, path.parent)
    return {run: results[run] for run in sorted(results, key=order)}, folders


def same_returns(curves, others):
    returns, theirs = curves["episodic_return"], others["episodic_return"]
    return len(returns) == len(theirs) and np.allclose(returns, theirs, rtol=1e-4)  # CSV files have six digits


def order(run):
    memory, ids, memories = run.script.split("_")[-1], envs.IDS, list(LOOKS)
    places = [names.index(name) if name in names else 99 for name, names in ((run.env_id, ids), (memory, memories))]
    return places[0], run.env_id, run.corridor_length or 0, places[1], run.script, run.seed


def add_episodes(results, folders):
    """Roll out the final agents of continuous tasks, unless it has been done before. Yields after each of them."""
    for run, tables in results.items():
        if run not in folders or "adaptation" in tables or is_tmaze(run) or not tables["curves"]["finished"][-1]:
            continue
        print(f"{EPISODES} episodes of {run.script} on {run.env_id}, seed {run.seed}", flush=True)
        data = roll_out(folders[run] / "model.pt", EPISODES)
        tables["adaptation"] = {"t": np.arange(data["reward"].shape[1]), "reward": data["reward"].mean(axis=0)}
        if "task" in data:
            groups = {task: data["task"] == task for task in sorted(set(data["task"]))}
            tables["success"] = by_group("task", groups, "success_rate", data["success"])
        if run.env_id == "ant-dir":
            quarter = np.round(np.arctan2(data["context"][:, 1], data["context"][:, 0]) / (np.pi / 2)).astype(int) % 4
            groups = {name: quarter == i for i, name in enumerate(("+x", "+y", "-x", "-y"))}
            forward = data["forward"].sum(axis=1) / data["length"]
            tables["ant_directions"] = by_group("quarter", groups, "forward_reward", forward)
        yield run


def by_group(name, groups, value_name, values):
    groups = {"all": np.ones(len(values), dtype=bool)} | {name: which for name, which in groups.items() if which.any()}
    means = np.array([values[which].mean() for which in groups.values()])
    counts = np.array([which.sum() for which in groups.values()])
    return {name: np.array(list(groups)), "episodes": counts, value_name: means}


def by_panel(results, name):
    """{environment: {script: [columns of each seed]}}, an environment being a Run without script and seed."""
    panels = {}
    for run, tables in results.items():
        if name in tables:
            panel = panels.setdefault(run._replace(script=None, seed=None), {})
            panel.setdefault(run.script, []).append(tables[name])
    return panels


# ------------------------------------------------------------------------------------------------------------- figures
def make_axes(panels, xlabel, ylabel):
    columns = {4: 2, 7: 4, 8: 4}.get(len(panels), min(len(panels), 3))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(WIDTH, 1.7 * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax in axes[len(panels) :]:
        ax.remove()
    for i, (ax, name) in enumerate(zip(axes, panels)):
        ax.set(title=name, xlabel=xlabel, ylabel=ylabel if i % columns == 0 else None)
    return figure, axes


def add_legend(figure, note):
    entries = {}
    for ax in figure.axes:
        entries |= dict(zip(*reversed(ax.get_legend_handles_labels())))
    memories = [memory.label for memory in LOOKS.values()]
    entries = dict(sorted(entries.items(), key=lambda e: memories.index(e[0]) if e[0] in memories else len(memories)))
    columns = min(len(entries), 5)
    place = {"loc": "outside lower center", "ncols": columns, "handlelength": 3, "columnspacing": 1.2}
    figure.legend(entries.values(), entries.keys(), title=note, **place)


def draw_optima(ax):
    ax.axhline(1.0, color="0.4", linestyle=":", linewidth=1, label="optimum", zorder=1)
    ax.axhline(0.5, color="0.4", linestyle=LOOKS["markov"].linestyle, linewidth=1, label="optimum without memory")


def draw_seeds(ax, script, curves, mean_of, window=1):
    """Every seed as a thin line, and the mean of some of them where all of those have values, smoothed."""
    style = {"color": look(script).color, "linestyle": look(script).linestyle}
    for x, y in curves:
        ax.plot(x, y, color=style["color"], linewidth=0.6, alpha=0.4)
    x = np.unique(np.concatenate([x for x, _ in mean_of]))
    x = x[(x >= max(x[0] for x, _ in mean_of)) & (x <= min(x[-1] for x, _ in mean_of))]
    mean = np.mean([np.interp(x, *curve) for curve in mean_of], axis=0)
    ax.plot(x, running_mean(mean, window), label=look(script).label, **style)


def running_mean(y, window):  # over an odd number of values, fewer towards the ends: the first and the last one stay
    halves = [min(window // 2, i, len(y) - 1 - i) for i in range(len(y))]
    return np.array([y[i - half : i + half + 1].mean() for i, half in enumerate(halves)])


def draw_curves(results):
    panels = []  # (title, column of curves.csv, environment, {script: seeds})
    for environment, scripts in by_panel(results, "curves").items():
        panels.append((title(environment), "episodic_return", environment, scripts))
        if any(np.isfinite(seed["success_rate"]).any() for seeds in scripts.values() for seed in seeds):
            panels.append((f"{title(environment)}, success rate", "success_rate", environment, scripts))
    figure, axes = make_axes([panel[0] for panel in panels], "environment steps", "average return")
    for ax, (_, column, environment, scripts) in zip(axes, panels):
        for script, seeds in scripts.items():
            finished = [seed for seed in seeds if seed["finished"][-1]]  # one under way would cut the mean short
            curves, mean_of = ([(s["step"], s[column]) for s in group] for group in (seeds, finished or seeds))
            draw_seeds(ax, script, curves, mean_of, 1 if is_tmaze(environment) else SMOOTHED)
        if column == "success_rate":
            ax.set_ylabel("success rate")
        if is_tmaze(environment):
            draw_optima(ax)
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))  # 50k, 1M
        ax.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    note = "thin: every seed; thick: their mean"
    if unfinished := sum(not tables["curves"]["finished"][-1] for tables in results.values()):
        note = f"{unfinished} of {len(results)} runs unfinished; thin: every seed; thick: mean of finished ones, if any"
    if not all(map(is_tmaze, results)):
        note += f", smoothed over {SMOOTHED} evaluations{' (not T-Maze)' if any(map(is_tmaze, results)) else ''}"
    add_legend(figure, note)
    return figure


def draw_corridor(results):
    mazes = {}  # {maze: {script: {length: [curve of each finished seed]}}}
    for environment, scripts in by_panel(results, "curves").items():
        for script, seeds in scripts.items() if is_tmaze(environment) else ():
            if finished := [seed for seed in seeds if seed["finished"][-1]]:
                by_length = mazes.setdefault(environment.env_id, {}).setdefault(script, {})
                by_length[environment.corridor_length] = finished
    if not mazes:
        return None
    figure, axes = make_axes(list(mazes), "corridor length L", "best average return")
    for ax, scripts in zip(axes, mazes.values()):
        lengths = sorted({length for by_length in scripts.values() for length in by_length})
        for i, (script, by_length) in enumerate(scripts.items()):
            # Lengths are categories, memories and seeds stand side by side: equal values do not hide each other.
            x = [lengths.index(length) + 0.25 * (i - (len(scripts) - 1) / 2) for length in by_length]
            style = {"color": look(script).color, "marker": look(script).marker, "linestyle": look(script).linestyle}
            ax.plot(x, [max(map(best_return, seeds)) for seeds in by_length.values()], **style | {"marker": ""})
            for center, seeds in zip(x, by_length.values()):
                side_by_side = center + 0.06 * (np.arange(len(seeds)) - (len(seeds) - 1) / 2)
                for place, seed in zip(side_by_side, seeds):
                    face = style["color"] if seed["episodic_return"][-1] >= SOLVED else "white"
                    ax.plot(place, best_return(seed), markerfacecolor=face, **style)
            ax.plot([], [], label=look(script).label, **style)  # for the legend
        draw_optima(ax)
        ax.grid(False, axis="x")
        for i in range(1, len(lengths), 2):  # a band for each length
            ax.axvspan(i - 0.5, i + 0.5, color="0.95", zorder=0)
        ax.set_xticks(range(len(lengths)), lengths)
        ax.set(xlim=(-0.5, len(lengths) - 0.5), ylim=(min(ax.get_ylim()[0], 0.4), 1.05))
    add_legend(figure, f"every finished seed, filled if its last evaluation is ≥ {SOLVED}; lines: the best seed")
    return figure


def best_return(curve):
    return curve["episodic_return"].max()


def draw_adaptation(results):
    panels = by_panel(results, "adaptation")
    if not panels:
        return None
    figure, axes = make_axes([title(environment) for environment in panels], "step t of the episode", "reward at t")
    for ax, scripts in zip(axes, panels.values()):
        for script, seeds in scripts.items():
            curves = [(seed["t"], seed["reward"]) for seed in seeds]
            draw_seeds(ax, script, curves, curves)
    add_legend(figure, f"final agents, mean of {EPISODES} episodes; thin: every seed; thick: their mean")
    return figure


# --------------------------------------------------------------------------------------------------------------- table
def number(value, digits=None):
    return "" if math.isnan(value) else f"{value:,.{(3 if abs(value) < 10 else 1) if digits is None else digits}f}"


def spread(values, digits=None):  # mean [lowest, highest]
    mean, low, high = (number(value, digits) for value in (np.mean(values), min(values), max(values)))
    return f"{mean} [{low}, {high}]" if len(values) > 1 and mean else mean


def table_lines(results):
    """A line for each environment and script; unfinished runs have a line of their own."""
    groups = {}  # {(environment and script, finished): [tables of each seed]}
    for run, tables in results.items():
        groups.setdefault((run._replace(seed=None), tables["curves"]["finished"][-1]), []).append(tables)
    for (run, finished), tables in groups.items():
        line = {"environment": title(run), "memory": look(run.script).label}
        line["seeds"] = f"{len(tables)}{'' if finished else ' unfinished'}"
        yield line | summarise(tables, is_tmaze(run))


def summarise(tables, tmaze):
    seeds = [table["curves"] for table in tables]
    best = np.array([best_return(seed) for seed in seeds])
    last = {name: np.array([seed[name][-1] for seed in seeds]) for name in seeds[0]}
    line = {"best return": spread(best), "last return": spread(last["episodic_return"])}
    if tmaze:
        for name, values in (("best", best), ("last", last["episodic_return"])):
            line[f"{name} ≥ {SOLVED}"] = f"{(values >= SOLVED).sum()}/{len(seeds)}"
        line[f"evaluations ≥ {SOLVED}"] = spread([(seed["episodic_return"] >= SOLVED).mean() for seed in seeds], 2)
        first = [s["updates"][(s["episodic_return"] >= SOLVED).argmax()] for s in seeds if best_return(s) >= SOLVED]
        line[f"updates to {SOLVED}"] = number(np.median(first), 0) if first else ""
    else:
        final = [table["adaptation"]["reward"].sum() for table in tables if "adaptation" in table]
        line["last ten"] = spread([seed["episodic_return"][-10:].mean() for seed in seeds])
        line[f"{EPISODES} episodes"] = spread(final) if final else ""
        line |= {f"{part} quarter": spread(last[f"return_{part}_quarter"]) for part in ("first", "last")}
    return line | {"updates": number(last["updates"].mean(), 0), "minutes": number(last["seconds"].min() / 60, 1)}


def markdown(lines):
    names = dict.fromkeys(name for line in lines for name in line)
    names = [name for name in names if any(line.get(name) for line in lines)]  # drop columns without a value
    cells = [names, ["---"] * len(names), *([line.get(name, "") for name in names] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells) + "\n"


def group_lines(results, table, name, value_name):
    """success.csv or ant_directions.csv, averaged over seeds: a line for each environment and memory."""
    for environment, scripts in by_panel(results, table).items():
        for script, seeds in scripts.items():
            values = {}
            for seed in seeds:
                for group, episodes, value in zip(seed[name], seed["episodes"], seed[value_name]):
                    values.setdefault(f"{group} ({episodes:.0f})", []).append(value)
            line = {"environment": title(environment), "memory": look(script).label, "seeds": str(len(seeds))}
            yield line | {group: spread(v, 2) for group, v in values.items()}


def command_lines(results):
    groups = {}  # {flags: {script: [seeds]}}
    for run, tables in results.items():
        if "commands" in tables:
            scripts = groups.setdefault(str(tables["commands"]["flags"][0]), {})
            scripts.setdefault(f"{run.script}.py", []).append(str(run.seed))
    for flags, scripts in groups.items():
        seeds = "; ".join(f"{script} {', '.join(seeds)}" for script, seeds in scripts.items())
        yield f"- `python {next(iter(scripts))} {flags} --seed SEED`; seeds: {seeds}"


def to_markdown(results):
    text = markdown(list(table_lines(results)))
    text += "\nMean over seeds [lowest, highest]. Best: highest of a run's evaluations; last: its last one."
    if any(is_tmaze(run) for run in results):
        text += f" Evaluations ≥ {SOLVED}: their fraction. Updates to {SOLVED}: median over the seeds that reached it."
    if not all(is_tmaze(run) for run in results):
        text += " Last ten: mean of its last ten."
        text += f" {EPISODES} episodes: return of the final agents in more episodes than an evaluation has."
        text += " First and last quarter: return of these steps of each episode, however long, last evaluation."
    text += " Minutes: of the fastest seed, one thread on a machine that did other work too."
    sections = {"success": ("Success rate by task (success at any step of the episode)", "task", "success_rate")}
    sections["ant_directions"] = ("Forward reward per step by quarter of directions", "quarter", "forward_reward")
    for table, (header, *names) in sections.items():
        if lines := list(group_lines(results, table, *names)):
            text += f"\n\n{header}, final agents (number of episodes per seed):\n\n{markdown(lines)}"
    commands = list(command_lines(results))
    return text + ("\n\nCommands:\n\n" + "\n".join(commands) if commands else "") + "\n"


# ---------------------------------------------------------------------------------------------------------------- main
def write_tables(results, output):
    for name in TABLES:
        if rows := {run: tables[name] for run, tables in results.items() if name in tables}:
            write_csv(output / f"{name}.csv", rows)


def copy_models(results, folders, output):
    """best.pt of the best finished seed, unless that is no longer on disk; T-Maze's in half precision, to be small."""
    output.mkdir(parents=True, exist_ok=True)
    best = {}
    for run, tables in results.items():
        key, score = run._replace(seed=None), (best_return(tables["curves"]), tables["curves"]["episodic_return"][-1])
        if tables["curves"]["finished"][-1] and (key not in best or score > best[key][0]):
            best[key] = score, run
    for _, run in best.values():
        if run in folders:
            length = f"__L{run.corridor_length}" if is_tmaze(run) else ""
            saved = torch.load(folders[run] / "best.pt", map_location="cpu", weights_only=True)
            if is_tmaze(run):  # loading makes it float32 again
                saved["agent"] = {name: weights.half() for name, weights in saved["agent"].items()}
            torch.save(saved, output / f"{run.script}__{run.env_id}{length}.pt")


def main():
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns about every run that was resumed
    args = tyro.cli(Args, prog="python -m benchmark.plot", description=__doc__)
    output = args.output_dir
    earlier = [output] if (output / "curves.csv").exists() else []
    results, folders = collect([*earlier, *args.sources])
    if not results:
        sys.exit("error: there are no runs in the sources")
    output.mkdir(parents=True, exist_ok=True)
    write_tables(results, output)
    for _ in add_episodes(results, folders):  # takes minutes: keep what is done
        write_tables(results, output)
    for name, draw in {"curves": draw_curves, "corridor": draw_corridor, "adaptation": draw_adaptation}.items():
        if figure := draw(results):
            figure.savefig(output / f"{name}.png")
    write_rows(output / "table.csv", list(table_lines(results)))
    (output / "table.md").write_text(to_markdown(results))
    if args.models:
        copy_models(results, folders, args.models)
    print(to_markdown(results))


if __name__ == "__main__":
    main()
