"""plot.py: its statistics against other computations, its figures by what is in them, and all of it from tiny runs."""

import csv
import json
import os
import shutil
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT, results_of, scalars_of, train_in
from matplotlib.colors import to_rgb

from benchmark import plot, runs

COLUMNS = "script,env_id,corridor_length,seed,step,updates,episodic_return,return_first_quarter,return_last_quarter"
MATE, LSTM, NO_MEMORY = (runs.LOOKS[memory].color for memory in ("mate", "lstm", "markov"))


def write_curves(path, curves):
    """A CSV file with the columns that learning.csv has, from {(script, env_id, length, seed): (steps, returns)}."""
    rows = [COLUMNS]
    for run, (steps, returns) in curves.items():
        rows += [",".join(map(str, [*run, step, step // 10, value, 0, 0])) for step, value in zip(steps, returns)]
    path.write_text("\n".join(rows) + "\n")
    return path


def curves_of(path, curves):
    return plot.collect([write_curves(path, curves)], 0)[0]


def line(ax, label):
    [found] = [line for line in ax.get_lines() if line.get_label() == label]
    return found


def band(ax):
    """(x, low, high) of the one filled area."""
    [area] = ax.collections
    x, y = area.get_paths()[0].vertices.T
    steps = np.unique(x)
    return steps, np.array([y[x == step].min() for step in steps]), np.array([y[x == step].max() for step in steps])


def legend_of(figure):
    [legend] = figure.legends
    return [text.get_text() for text in legend.get_texts()], legend.get_title().get_text().replace("\n", " ")


def assert_shows(path, *colors):
    """The picture is not blank, and has points of each of these colours."""
    image = matplotlib.image.imread(path)[..., :3]
    assert min(image.shape[:2]) > 300 and len(np.unique(image.reshape(-1, 3), axis=0)) > 50
    for color in colors:
        assert (np.abs(image - to_rgb(color)).max(axis=-1) < 0.02).sum() > 20, f"nothing is drawn in {color}"


def main(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, words)])
    plot.main()


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# --------------------------------------------------------------------------------------------------------- statistics


def test_few_seeds_are_shown_as_mean_and_standard_deviation(tmp_path):
    returns = np.array([[0.0, 1.0, 5.0], [2.0, 1.0, 8.0], [4.0, 4.0, 2.0]])
    curves = {("sac_mate", "ant-dir", "", seed): ([0, 100, 200], returns[seed]) for seed in range(3)}
    figure = plot.draw_curves(curves_of(tmp_path / "c.csv", curves))
    [ax] = figure.axes
    mate = line(ax, "MATE")
    spread = np.sqrt(((returns - returns.mean(axis=0)) ** 2).sum(axis=0) / 2)
    assert mate.get_xdata().tolist() == [0, 100, 200] and np.allclose(mate.get_ydata(), [2, 2, 5])
    steps, low, high = band(ax)
    assert steps.tolist() == [0, 100, 200]
    assert np.allclose(low, [2, 2, 5] - spread) and np.allclose(high, [2, 2, 5] + spread)
    assert mate.get_color() == MATE and ax.get_title() == "ant-dir"
    assert legend_of(figure) == (["MATE"], "mean and standard deviation over 3 seeds")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("environment steps", "average return")


def test_seeds_evaluated_at_other_steps_are_compared_at_the_same_ones(tmp_path):
    """Both are straight lines, so that interpolation is exact: their mean is 3 x over the steps that both have."""
    ours, theirs = np.array([0, 40, 110, 160]), np.array([10, 50, 90, 200])
    curves = {("ddqn_lstm", "tmaze-passive", 20, 1): (ours, 2 * ours)}
    curves |= {("ddqn_lstm", "tmaze-passive", 20, 2): (theirs, 4 * theirs)}
    [ax] = plot.draw_curves(curves_of(tmp_path / "c.csv", curves)).axes
    lstm = line(ax, "LSTM")
    assert lstm.get_xdata().tolist() == [10, 40, 50, 90, 110, 160]
    assert np.allclose(lstm.get_ydata(), 3 * lstm.get_xdata())


def test_five_seeds_are_shown_as_interquartile_mean_and_bootstrap_interval(tmp_path):
    returns = np.random.default_rng(0).normal(size=(5, 4)).round(3) * [1, 1, 5, 0] + [0, 10, 0, 1]
    curves = {("sac_mate", "ant-dir", "", seed): ([0, 10, 20, 30], returns[seed]) for seed in range(5)}
    figure = plot.draw_curves(curves_of(tmp_path / "c.csv", curves))
    [ax] = figure.axes
    middle = np.sort(returns, axis=0)[1:4].mean(axis=0)  # a quarter of five, rounded down, is cut from each end
    assert np.allclose(line(ax, "MATE").get_ydata(), middle)
    # The interval by hand: whole seeds drawn with replacement, many times.
    draws = np.random.default_rng(1).integers(5, size=(20_000, 5))
    resampled = np.sort(returns[draws], axis=1)[:, 1:4].mean(axis=1)
    _, low, high = band(ax)
    expected_low, expected_high = np.percentile(resampled, [2.5, 97.5], axis=0)
    width = expected_high - expected_low
    assert (abs(low - expected_low) <= 0.1 * width).all() and (abs(high - expected_high) <= 0.1 * width).all()
    assert low[3] == high[3] == 1  # seeds that are all equal have an interval too, of no width
    assert legend_of(figure)[1] == "interquartile mean and 95 % bootstrap interval over 5 seeds"


def test_what_is_shown_is_said_for_any_mixture_of_seeds():
    assert plot.describe([1, 1]) == "one seed"
    assert plot.describe([3, 2, 2]) == "mean and standard deviation over 2 or 3 seeds"
    both = "mean and standard deviation over 2 seeds; interquartile mean and 95 % bootstrap interval over 5 seeds"
    assert plot.describe([5, 2]) == both


# ------------------------------------------------------------------------------------------------------------ figures


def test_the_agent_without_memory_is_a_line_and_so_are_the_optima_of_tmaze(tmp_path):
    curves = {
        ("sac_markov", "ant-dir", "", 1): ([0, 10, 20], [-9, 4, 1]),
        ("sac_markov", "ant-dir", "", 2): ([0, 10], [0, 6]),
    }
    curves |= {
        ("sac_gpt2", "ant-dir", "", 1): ([0, 10], [3, 7]),
        ("ddqn_mate", "tmaze-active", 5, 1): ([0, 10], [0, 1]),
    }
    curves |= {("sac_markov", "Pendulum-v1", "", 1): ([0, 10], [-500, -150])}
    figure = plot.draw_curves(curves_of(tmp_path / "c.csv", curves))
    tmaze, ant, pendulum = figure.axes
    assert [ax.get_title() for ax in figure.axes] == ["tmaze-active, L=5", "ant-dir", "Pendulum-v1"]
    assert set(line(ant, "no memory, best return").get_ydata()) == {5}  # the mean of the seeds' best, 4 and 6
    assert line(ant, "no memory, best return").get_color() == NO_MEMORY
    assert set(line(tmaze, "no memory, optimum").get_ydata()) == {0.5} and set(line(tmaze, "optimum").get_ydata()) == {
        1
    }
    assert line(pendulum, "no memory").get_ydata().tolist() == [-500, -150]  # alone it is a curve as any other
    labels, _ = legend_of(figure)
    assert sorted(labels) == sorted(
        ["MATE", "GPT-2", "no memory", "optimum", "no memory, optimum", "no memory, best return"]
    )


def test_best_return_against_corridor_length(tmp_path):
    best = {("ddqn_mate", 5, 1): 0.9, ("ddqn_mate", 5, 2): 1.0, ("ddqn_mate", 9, 1): 0.8, ("ddqn_mate", 9, 2): 0.7}
    best |= {("ddqn_lstm", 5, 1): 0.6, ("ddqn_lstm", 5, 2): 0.4}
    curves = {
        (name, maze, length, seed): ([0, 10, 20], [-1, value - shift, 0])
        for maze, shift in (("tmaze-active", 0.1), ("tmaze-passive", 0.0))
        for (name, length, seed), value in best.items()
    }
    curves[("sac_mate", "ant-dir", "", 1)] = ([0, 10], [0, 100])
    figure = plot.draw_corridor(curves_of(tmp_path / "c.csv", curves))
    assert [ax.get_title() for ax in figure.axes] == ["tmaze-passive", "tmaze-active"]
    for ax, shift in zip(figure.axes, (0.0, 0.1)):
        assert np.allclose(line(ax, "MATE").get_xydata(), [[5, 1.0 - shift], [9, 0.8 - shift]])
        assert np.allclose(line(ax, "LSTM").get_xydata(), [[5, 0.6 - shift]])
        assert set(line(ax, "no memory, optimum").get_ydata()) == {0.5}
        assert (line(ax, "MATE").get_color(), line(ax, "LSTM").get_color()) == (MATE, LSTM)
        assert ax.get_xticks().tolist() == [5, 9] and ax.get_xlabel() == "corridor length L"
        single = [l.get_xydata() for l in ax.get_lines() if l.get_alpha() is not None]
        expected = sorted((length, value - shift) for (_, length, _), value in best.items())
        assert np.allclose(sorted(map(tuple, np.concatenate(single))), expected)
    assert legend_of(figure)[1] == "best of 2 seeds; small and faint: each seed"
    assert (
        plot.draw_corridor(curves_of(tmp_path / "d.csv", {("sac_mate", "ant-dir", "", 1): ([0, 10], [0, 1])})) is None
    )


def test_adaptation_is_the_reward_at_t_and_in_tmaze_the_return_so_far(tmp_path):
    (tmp_path / "a.csv").write_text(
        "script,env_id,corridor_length,seed,t,reward\n"
        "sac_mate,point-robot,,1,0,-3\nsac_mate,point-robot,,1,1,-1\n"
        "sac_mate,point-robot,,2,0,-5\nsac_mate,point-robot,,2,1,-2\n"
        "ddqn_mate,tmaze-passive,2,1,0,-0.5\nddqn_mate,tmaze-passive,2,1,1,0\nddqn_mate,tmaze-passive,2,1,2,1\n"
    )
    curves = write_curves(tmp_path / "c.csv", {("sac_mate", "point-robot", "", 1): ([0, 10], [0, 1])})
    tmaze, point = plot.draw_adaptation(plot.collect([curves, tmp_path / "a.csv"], 0)[1]).axes
    assert np.allclose(line(tmaze, "MATE").get_xydata(), [[0, -0.5], [1, -0.5], [2, 0.5]])
    assert np.allclose(line(point, "MATE").get_xydata(), [[0, -4], [1, -1.5]])
    assert (tmaze.get_ylabel(), point.get_ylabel()) == ("return so far", "reward at t")


def test_memories_look_the_same_everywhere_and_can_be_told_apart():
    names = [path.stem for path in ROOT.glob("*_*.py")]
    assert len({runs.look(name) for name in names}) == 4
    for field in runs.Look._fields:
        assert len({getattr(look, field) for look in runs.LOOKS.values()}) == 4, field
    assert runs.look("sac_mate") == runs.look("ddqn_mate") and runs.look("my_gru").label == "my_gru"


# -------------------------------------------------------------------------------------------------------------- table


def test_table(tmp_path, monkeypatch, capsys):
    curves = {
        ("ddqn_mate", "tmaze-passive", 5, 1): ([0, 10, 20], [0, 0.9, 0.5]),
        ("sac_mate", "ant-dir", "", 1): ([0, 9], [1, 250]),
    }
    curves |= {("ddqn_mate", "tmaze-passive", 5, 2): ([0, 10, 30], [0, 0.7, 0.6])}
    curves |= {("ddqn_lstm", "tmaze-passive", 5, seed): ([0, 10], [0, seed / 10]) for seed in range(6)}
    main(monkeypatch, write_curves(tmp_path / "c.csv", curves), "--output-dir", tmp_path / "out")
    mate, lstm, ant = rows_of(tmp_path / "out" / "table.csv")
    assert list(mate.values())[:5] == ["ddqn_mate", "tmaze-passive", "5", "2", plot.describe([2])]
    assert ant["best_return_low"] == ant["best_return_high"] == "" and ant["low_and_high"] == "one seed"
    spread = np.std([0.9, 0.7], ddof=1)
    numbers = [float(mate[f"best_return{end}"]) for end in ("", "_low", "_high")]
    assert np.allclose(numbers, [0.8, 0.8 - spread, 0.8 + spread], atol=1e-5)
    assert (mate["last_return"], mate["best_seed"], mate["updates"]) == ("0.55", "0.9", "2.5")
    assert float(lstm["best_return"]) == 0.25 and float(lstm["best_seed"]) == 0.5  # 0.1 to 0.4, cut at both ends
    assert 0 <= float(lstm["best_return_low"]) < 0.25 < float(lstm["best_return_high"]) <= 0.5
    assert (ant["corridor_length"], ant["minutes"], ant["success_rate"]) == ("", "", "")

    text = (tmp_path / "out" / "table.md").read_text()
    assert text in capsys.readouterr().out
    header, _, first, second, third, _, note = text.splitlines()
    assert header == "| environment | memory | seeds | best return | best seed | last return | updates |"
    assert first == "| tmaze-passive, L=5 | MATE | 2 | 0.800 ± 0.141 | 0.900 | 0.550 ± 0.071 | 2 |"
    low, high = (f"{float(lstm[f'best_return_{end}']):.3f}" for end in ("low", "high"))
    assert second.startswith(f"| tmaze-passive, L=5 | LSTM | 6 | 0.250 [{low}, {high}] | 0.500 |")
    assert third == "| ant-dir | MATE | 1 | 250.0 | 250.0 | 250.0 | 0 |"
    assert "over 1 or 2 seeds; interquartile mean and 95 % bootstrap interval over 6 seeds" in note


def test_the_committed_curves_can_be_drawn(tmp_path, monkeypatch):
    source = ROOT / "benchmark" / "results" / "learning.csv"
    main(monkeypatch, source, "--output-dir", tmp_path / "out")
    expected = max(float(row["episodic_return"]) for row in rows_of(source) if row["script"] == "sac_lstm")
    table = {(r["script"], r["env_id"], r["corridor_length"]): r for r in rows_of(tmp_path / "out" / "table.csv")}
    assert float(table["sac_lstm", "point-robot", ""]["best_return"]) == pytest.approx(expected, rel=1e-5)
    assert float(table["ddqn_mate", "tmaze-passive", "50"]["best_return"]) == 1
    assert_shows(tmp_path / "out" / "curves.png", *(look.color for look in runs.LOOKS.values()))
    assert_shows(tmp_path / "out" / "corridor.png", MATE, LSTM)
    names = COLUMNS.split(",")[:6]
    before, after = (
        {tuple(row[name] for name in names) for row in rows_of(path)}
        for path in (source, tmp_path / "out" / "curves.csv")
    )
    assert before == after


# --------------------------------------------------------------------------------------------------------- tiny runs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with runs/: two memories with two seeds on T-Maze, and two memories on point-robot."""
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"memory_dim": 8, "hidden_dim": 8, "batch_size": 4, "num_envs": 2, "eval_episodes": 6}
    maze = {"corridor_length": 3, "total_episodes": 40, "learning_starts": 8, "eval_interval": 10}
    point = {"env_id": "point-robot", "max_episode_steps": 10, "total_timesteps": 300, "learning_starts": 60}
    point |= {"eval_interval": 100, "updates_per_step": 0.5}
    names = ["ddqn_mate", "ddqn_mate", "ddqn_lstm", "ddqn_lstm", "sac_mate", "sac_markov"]
    for name, seed in zip(names, [1, 2, 1, 2, 1, 1]):
        train_in(folder, name, seed=seed, **sizes, **(maze if name.startswith("ddqn") else point))
    return folder


def folders_of(tiny, pattern="*"):
    return sorted((tiny / "runs").glob(pattern))


def test_from_runs_to_figures_and_from_csv_to_the_same_figures(tiny, tmp_path, monkeypatch):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmark" / "plot.py"), str(tiny), "--episodes", "6", "--output-dir", "out"]
    done = subprocess.run(command, check=False, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    files = {"adaptation.csv", "adaptation.png", "corridor.png", "curves.csv", "curves.png", "table.csv", "table.md"}
    assert {path.name for path in out.iterdir()} == files

    curves, adaptation = rows_of(out / "curves.csv"), rows_of(out / "adaptation.csv")
    assert ",".join(curves[0]).startswith(COLUMNS)
    for folder in folders_of(tiny):
        args, results = json.loads((folder / "args.json").read_text()), results_of(folder)
        mine = [r for r in curves if (r["script"], r["seed"]) == (args["exp_name"], str(args["seed"]))]
        assert {r["corridor_length"] for r in mine} == {"3" if "tmaze" in args["env_id"] else ""}
        for tag in ("episodic_return", "return_first_quarter", "return_last_quarter"):
            logged = scalars_of(folder)[f"eval/{tag}"]
            assert [int(r["step"]) for r in mine] == [step for step, _ in logged]
            assert np.allclose([float(r[tag]) for r in mine], [value for _, value in logged], rtol=1e-5)
        assert int(mine[-1]["updates"]) == results["updates"]
        assert float(mine[-1]["seconds"]) == pytest.approx(results["seconds"], rel=1e-5)
        # Six episodes on the evaluation's seeds by the final agent are just what the script's last evaluation was.
        rewards = [
            float(r["reward"]) for r in adaptation if (r["script"], r["seed"]) == (args["exp_name"], str(args["seed"]))
        ]
        assert len(rewards) == (4 if "tmaze" in args["env_id"] else 10)
        assert sum(rewards) == pytest.approx(results["last_return"], rel=1e-4, abs=1e-4)

    assert_shows(out / "curves.png", MATE, LSTM, NO_MEMORY)
    assert_shows(out / "corridor.png", MATE, LSTM)
    assert_shows(out / "adaptation.png", MATE, LSTM, NO_MEMORY)
    main(monkeypatch, out, "--output-dir", tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == files
    for name in files:
        if name.endswith(".png"):
            before, after = (matplotlib.image.imread(folder / name) for folder in (out, tmp_path / "again"))
            assert np.array_equal(before, after), name
        else:
            assert (out / name).read_text() == (tmp_path / "again" / name).read_text(), name


def test_runs_without_model_unfinished_or_twice(tiny, tmp_path, monkeypatch, capsys):
    first, second = folders_of(tiny, "*ddqn_mate*")
    for source, name in ((first, "whole"), (first, "again"), (second, "unfinished")):
        shutil.copytree(source, tmp_path / "in" / name)
    for name in ("again", "unfinished"):
        (tmp_path / "in" / name / "results.json").unlink()
        (tmp_path / "in" / name / "model.pt").unlink()
    main(monkeypatch, tmp_path / "in", tmp_path / "in" / "whole", "--output-dir", tmp_path / "out", "--format", "pdf")
    said = capsys.readouterr().out
    assert "again: left out" in said and "unfinished: unfinished at step" in said and "whole:" not in said
    rows = rows_of(tmp_path / "out" / "curves.csv")
    assert {(r["script"], r["seed"]) for r in rows} == {("ddqn_mate", "1"), ("ddqn_mate", "2")}
    assert {r["seed"] for r in rows_of(tmp_path / "out" / "adaptation.csv")} == {"1"}
    assert [r["seeds"] for r in rows_of(tmp_path / "out" / "table.csv")] == [
        "1"
    ]  # final numbers of finished runs alone
    assert (tmp_path / "out" / "curves.pdf").read_bytes().startswith(b"%PDF")
    main(monkeypatch, tmp_path / "in" / "unfinished", "--output-dir", tmp_path / "alone")
    assert {path.name for path in (tmp_path / "alone").iterdir()} == {"curves.csv", "curves.png"}


def test_a_seed_under_way_does_not_cut_the_finished_ones_short(tmp_path):
    curves = curves_of(
        tmp_path / "c.csv",
        {("sac_mate", "ant-dir", "", s): (steps, [s] * len(steps)) for s, steps in ((1, [0, 50, 100]), (2, [0, 10]))},
    )
    [unfinished] = [columns for run, columns in curves.items() if run.seed == 2]
    unfinished["finished"][:] = 0
    assert line(plot.draw_curves(curves).axes[0], "MATE").get_xydata().tolist() == [[0, 1], [50, 1], [100, 1]]


def test_runs_with_other_flags_are_no_seeds_of_the_same(tiny, tmp_path, monkeypatch):
    first, second = folders_of(tiny, "*ddqn_mate*")
    shutil.copytree(first, tmp_path / "in" / "first")
    shutil.copytree(second, tmp_path / "in" / "second")
    path = tmp_path / "in" / "second" / "args.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"learning_rate": 0.5}))
    with pytest.raises(SystemExit, match="differ in learning_rate: draw them apart"):
        main(monkeypatch, tmp_path / "in", "--output-dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_of_an_earlier_call_are_not_left_beside_new_ones(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    for name in ("adaptation.csv", "corridor.png", "mine.txt"):
        (tmp_path / "out" / name).write_text("old")
    source = write_curves(tmp_path / "c.csv", {("sac_mate", "ant-dir", "", 1): ([0, 9], [1, 250])})
    main(monkeypatch, source, "--output-dir", tmp_path / "out")
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {"curves.csv", "curves.png", "table.csv", "table.md", "mine.txt"}


def test_no_adaptation_and_an_agent_that_cannot_be_rolled_out(tiny, tmp_path, monkeypatch, capsys):
    [folder] = folders_of(tiny, "*sac_mate*")
    main(monkeypatch, folder, "--no-adaptation", "--output-dir", tmp_path / "without")
    assert not (tmp_path / "without" / "adaptation.csv").exists()
    shutil.copytree(folder, tmp_path / "other")
    saved = runs.load(folder / "model.pt")
    saved["args"]["flag_of_the_past"] = 1
    plot.runs.running.save(saved, tmp_path / "other" / "model.pt")
    main(monkeypatch, tmp_path / "other", "--output-dir", tmp_path / "out")
    assert "was trained by another version of sac_mate.py: no adaptation" in capsys.readouterr().out
    assert (tmp_path / "out" / "curves.png").exists() and not (tmp_path / "out" / "adaptation.png").exists()


def test_the_script_is_known_whatever_the_experiment_is_called(tiny, tmp_path):
    [folder] = folders_of(tiny, "*ddqn_lstm__2*")
    for name, without in (("a", ()), ("b", ("model.pt",)), ("c", ("model.pt", "checkpoint.pt"))):
        shutil.copytree(folder, tmp_path / name)
        args = json.loads((folder / "args.json").read_text()) | {"exp_name": "mine", "env_id": "envs:tmaze-passive"}
        (tmp_path / name / "args.json").write_text(json.dumps(args))
        for file in without:
            (tmp_path / name / file).unlink()
        expected = "mine" if name == "c" else "ddqn_lstm"
        assert runs.identify(tmp_path / name) == (expected, "tmaze-passive", 3, 2)


def test_bad_input_gets_one_line(tiny, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "broken.csv").write_text(COLUMNS + "\nsac_mate,ant-dir,,1,many,0,0,0,0\n")
    (tmp_path / "probe.csv").write_text("script,env_id,corridor_length,seed,t,score_memory\nsac_mate,ant-dir,,1,0,0\n")
    (tmp_path / "header.csv").write_text(COLUMNS + "\n")
    shutil.copytree(folders_of(tiny)[0], tmp_path / "damaged")
    (tmp_path / "damaged" / "args.json").write_text("{}")
    for words, line in (
        (["nowhere"], "there is no nowhere"),
        ([tmp_path / "empty"], "there are no runs below"),
        ([tmp_path / "other.csv"], "is not a CSV file that these programs have written"),
        ([tmp_path / "broken.csv"], "is not a CSV file that these programs have written"),
        ([tmp_path / "probe.csv"], "holds neither learning curves nor adaptation"),
        ([tmp_path / "header.csv"], "there is nothing to draw"),
        ([tmp_path / "damaged"], "is not of a run of these scripts"),
        ([tiny, "--episodes", "0"], "--episodes must be 1 or more, got 0"),
        ([tiny, "--no-adaptation", "--output-dir", tmp_path / "other.csv"], "cannot write to"),
    ):
        with pytest.raises(SystemExit) as error:
            main(monkeypatch, *words)
        assert line in error.value.code and "\n" not in error.value.code
