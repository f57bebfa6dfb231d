"""benchmark/plot.py: tables against numbers computed by hand, merging of runs and CSV files, and figures."""

import csv
import math
import shutil
import sys

import matplotlib.image
import numpy as np
import pytest
import torch
from conftest import ROOT, results_of, scalars_of, script, tiny, train_in
from matplotlib.colors import to_rgb

from benchmark import plot, runs
from benchmark.runs import LOOKS, Run

COLUMNS = "script,env_id,corridor_length,seed,step,updates,episodic_return,return_first_quarter,return_last_quarter"
SAC = tiny("sac_mate", max_episode_steps=8, total_timesteps=400)


def write_curves(path, curves):
    """A CSV file from {(script, env_id, length, seed): (returns, finished)}, an evaluation every 1,000 steps."""
    rows = [f"{COLUMNS},success_rate,seconds,finished"]
    for run, (returns, finished) in curves.items():
        for i, value in enumerate(returns):
            rows.append(",".join(map(str, [*run, 1_000 * i, 100 * i, value, i, 2 * i, "", 60 * i, int(finished)])))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")


def main(*words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["plot", *map(str, words)])
        plot.main()


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def assert_shows(path, *memories):
    """The figure is not blank, and something is drawn in the colour of each of these memories."""
    image = matplotlib.image.imread(path)[..., :3]
    assert min(image.shape[:2]) > 300
    for memory in memories:
        drawn = np.abs(image - to_rgb(LOOKS[memory].color)).max(axis=-1) < 0.02
        assert drawn.sum() > 100, f"nothing of {memory} in {path.name}"


# --------------------------------------------------------------------------------------------------------------- table


def test_table_of_tmaze(tmp_path):
    maze = ("tmaze-active", 50)
    curves = {
        ("ddqn_mate", *maze, 1): ([0, 0.5, 1.0, 0.4], True),  # reaches 0.95 at 200 updates and loses it
        ("ddqn_mate", *maze, 2): ([0, 0.96, 0.9, 0.95], True),  # at 100 updates
        ("ddqn_mate", *maze, 3): ([0, 0.5, 0.5, 0.5], True),  # never
        ("ddqn_mate", *maze, 4): ([0, 1.0], False),
        ("ddqn_lstm", *maze, 1): ([0, 0.5], True),
    }
    write_curves(tmp_path / "curves.csv", curves)
    main(tmp_path / "curves.csv", "--output-dir", tmp_path / "out")
    mate, under_way, lstm = rows_of(tmp_path / "out" / "table.csv")
    assert mate == {
        "environment": "tmaze-active, L=50", "memory": "MATE", "seeds": "3",
        "best return": "0.820 [0.500, 1.000]", "last return": "0.617 [0.400, 0.950]",
        "best ≥ 0.95": "2/3", "last ≥ 0.95": "1/3", "updates to 0.95": "150", "updates": "300", "minutes": "3.0",
    }  # fmt: skip
    assert (under_way["seeds"], under_way["best ≥ 0.95"], under_way["best return"]) == ("1 unfinished", "1/1", "1.000")
    assert (lstm["memory"], lstm["best ≥ 0.95"], lstm["updates to 0.95"]) == ("LSTM", "0/1", "")
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| tmaze-active, L=50 | MATE | 1 unfinished | 1.000 | 1.000 | 1/1 | 1/1 | 100 |" in text
    assert_shows(tmp_path / "out" / "curves.png", "mate", "lstm")
    assert_shows(tmp_path / "out" / "corridor.png", "mate", "lstm")
    assert {row["finished"] for row in rows_of(tmp_path / "out" / "curves.csv") if row["seed"] == "4"} == {"0"}


def test_table_of_continuous_tasks(tmp_path):
    write_curves(tmp_path / "curves.csv", {("sac_mate", "ant-dir", "", s): ([-10, s, 3 * s], True) for s in (10, 20)})
    main(tmp_path / "curves.csv", "--output-dir", tmp_path)
    [row] = rows_of(tmp_path / "table.csv")
    assert row["best return"] == row["last return"] == "45.0 [30.0, 60.0]"
    assert (row["first quarter"], row["last quarter"], row["success rate"]) == ("2.000", "4.000", "")
    assert "success rate" not in (tmp_path / "table.md").read_text(), "columns without a value are dropped"
    assert not (tmp_path / "corridor.png").exists()


def test_the_mean_of_seeds_is_taken_at_common_steps_and_of_the_finished_ones(tmp_path):
    x, theirs = np.array([0.0, 40, 110, 160]), np.array([10.0, 50, 90, 200])
    returns = [{"step": x, "episodic_return": 2 * x, "finished": np.ones(4)}]
    returns += [{"step": theirs, "episodic_return": 4 * theirs, "finished": np.ones(4)}]
    returns += [{"step": x[:1], "episodic_return": x[:1] + 99, "finished": np.zeros(1)}]  # just started
    results = {Run("sac_lstm", "ant-dir", None, i): {"curves": curves} for i, curves in enumerate(returns)}
    [ax] = plot.draw_curves(results).axes
    [mean] = [line for line in ax.get_lines() if line.get_label() == "LSTM"]
    assert mean.get_xdata().tolist() == [10, 40, 50, 90, 110, 160] and np.allclose(
        mean.get_ydata(), 3 * mean.get_xdata()
    )
    assert len(ax.get_lines()) == 4, "and every seed"


def test_corridor_shows_every_seed_and_the_best(tmp_path):
    values = {(20, 1): 1.0, (20, 2): 1.0, (50, 1): 0.4, (50, 2): 0.7}
    write_curves(
        tmp_path / "c.csv", {("ddqn_gpt2", "tmaze-passive", *run): ([0, v], True) for run, v in values.items()}
    )
    [ax] = plot.draw_corridor(plot.collect([tmp_path / "c.csv"])[0]).axes
    line, *markers = [
        line for line in ax.get_lines() if line.get_color() == LOOKS["gpt2"].color and len(line.get_xdata())
    ]
    assert line.get_ydata().tolist() == [1.0, 0.7]
    assert [m.get_ydata().tolist() for m in markers] == [[1.0, 1.0], [0.4, 0.7]]
    assert all(len(set(m.get_xdata())) == 2 for m in markers), "side by side"


# ------------------------------------------------------------------------------------------- runs, and merging with CSV


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Runs of two memories and two seeds on point-robot, and one on T-Maze."""
    folder = tmp_path_factory.mktemp("sweep")
    for name, seed in (("sac_mate", 1), ("sac_mate", 2), ("sac_markov", 1)):
        train_in(folder / f"{name}{seed}", name, **SAC, seed=seed)
    train_in(folder / "maze", "ddqn_mate", **tiny("ddqn_mate"))
    return folder


def run_dir(folder):
    [path] = (folder / "runs").iterdir()
    return path


def unfinished(source, target):
    shutil.copytree(source, target)
    for name in ("results.json", "model.pt"):
        (run_dir(target) / name).unlink()


def test_from_runs_to_tables_and_figures(sweep, tmp_path):
    out, models, robot = tmp_path / "out", tmp_path / "models", ("point-robot", None)
    main(sweep, "--output-dir", out, "--models", models)
    curves = runs.read_csv(out / "curves.csv")
    robots = [Run(*run) for run in (("sac_mate", *robot, 1), ("sac_mate", *robot, 2), ("sac_markov", *robot, 1))]
    assert list(curves) == [Run("ddqn_mate", "tmaze-passive", 4, 1), *robots]
    logged, results = scalars_of(run_dir(sweep / "sac_mate2")), results_of(run_dir(sweep / "sac_mate2"))
    columns = curves[Run("sac_mate", "point-robot", None, 2)]
    steps, returns = zip(*logged["eval/episodic_return"])
    assert columns["step"].tolist() == list(steps) and np.allclose(columns["episodic_return"], returns, rtol=1e-4)
    assert columns["updates"][-1] == results["updates"] and (columns["finished"] == 1).all()
    adaptation = runs.read_csv(out / "adaptation.csv")
    assert len(adaptation) == 3 and all(len(table["t"]) == 8 for table in adaptation.values()), "SAC's agents"
    assert_shows(out / "curves.png", "mate", "markov")
    assert_shows(out / "adaptation.png", "mate", "markov")
    text = (out / "table.md").read_text()
    assert "python sac_mate.py --env-id point-robot --num-envs 3 --max-episode-steps 8 --total-timesteps 400 " in text
    assert "--seed SEED`, seeds 1, 2; the same for sac_markov.py\n" in text
    # The best seed's best.pt, as its script loads it.
    best = max((1, 2), key=lambda seed: results_of(run_dir(sweep / f"sac_mate{seed}"))["best_return"])
    assert {path.name for path in models.iterdir()} == {
        "sac_mate__point-robot.pt", "sac_markov__point-robot.pt", "ddqn_mate__tmaze-passive__L4.pt",
    }  # fmt: skip
    assert (models / "sac_mate__point-robot.pt").read_bytes() == (
        run_dir(sweep / f"sac_mate{best}") / "best.pt"
    ).read_bytes()


def test_results_accumulate_and_nothing_is_lost(sweep, tmp_path, monkeypatch):
    out, days = tmp_path / "out", [tmp_path / f"day{i}" for i in range(3)]
    # Day 1: seed 1 is finished, seed 2 is under way, seed 3 has just been started.
    (days[0] / "sac_mate3" / "runs" / "run").mkdir(parents=True)
    shutil.copy(run_dir(sweep / "sac_mate1") / "args.json", run_dir(days[0] / "sac_mate3"))
    shutil.copytree(sweep / "sac_mate1", days[0] / "sac_mate1")
    unfinished(sweep / "sac_mate2", days[0] / "sac_mate2")
    main(days[0], "--output-dir", out)
    first = {name: runs.read_csv(out / f"{name}.csv") for name in ("curves", "adaptation", "commands")}
    seed1, seed2 = (Run("sac_mate", "point-robot", None, seed) for seed in (1, 2))
    assert first["curves"][seed2]["finished"][-1] == 0 and list(first["adaptation"]) == [seed1]
    # Day 2: another machine, which has only seed 2, finished by now. Seed 1 is not rolled out again: it is not there.
    shutil.copytree(sweep / "sac_mate2", days[1] / "sac_mate2")
    main(days[1], "--output-dir", out)
    second = {name: runs.read_csv(out / f"{name}.csv") for name in first}
    for name in first:
        assert list(second[name]) == [seed1, seed2]
        for column, values in first[name][seed1].items():
            assert np.array_equal(values, second[name][seed1][column], equal_nan=values.dtype.kind == "f")
    assert second["curves"][seed2]["finished"][-1] == 1
    # Day 3: an unfinished copy of what is finished here changes nothing, and no agent is rolled out again.
    unfinished(sweep / "sac_mate2", days[2] / "sac_mate2")
    monkeypatch.setattr(plot, "roll_out", lambda *args: pytest.fail("rolled out again"))
    before = {name: (out / f"{name}.csv").read_bytes() for name in (*first, "table")}
    main(days[2], days[1], "--output-dir", out)
    main(out, "--output-dir", tmp_path / "elsewhere")
    for folder in (out, tmp_path / "elsewhere"):
        assert {name: (folder / f"{name}.csv").read_bytes() for name in before} == before


def test_models_of_runs_that_are_gone_are_kept(sweep, tmp_path):
    out, models, model = tmp_path / "out", tmp_path / "models", "sac_mate__point-robot.pt"
    score = {seed: results_of(run_dir(sweep / f"sac_mate{seed}"))["best_return"] for seed in (1, 2)}
    best, other = sorted(score, key=score.get, reverse=True)
    main(sweep / f"sac_mate{best}", "--output-dir", out, "--models", models)
    before = (models / model).read_bytes()
    main(sweep / f"sac_mate{other}", "--output-dir", out, "--models", models)
    assert (models / model).read_bytes() == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot, "MAX_MODEL_BYTES", 10)
        main(sweep / "sac_mate1", "--output-dir", tmp_path / "b", "--models", tmp_path / "none")
    assert not list((tmp_path / "none").iterdir())


def test_runs_with_other_flags_are_not_mixed(sweep, tmp_path):
    train_in(tmp_path / "other", "sac_mate", **SAC | {"gamma": 0.9}, seed=3)
    with pytest.raises(
        SystemExit, match="sac_mate on point-robot was run with .* and with .* --gamma 0.9 .*separately"
    ):
        main(sweep, tmp_path / "other", "--output-dir", tmp_path / "out")
    write_curves(tmp_path / "old.csv", {("sac_mate", "point-robot", "", 9): ([0, 1], True)})
    with pytest.raises(SystemExit, match="with unknown flags and with --env-id"):
        main(tmp_path / "old.csv", sweep, "--output-dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source, answer", [("nothing", "does not exist"), (".", "there are no runs")])
def test_bad_sources_get_one_line(source, answer, tmp_path):
    with pytest.raises(SystemExit, match=f"^error: .*{answer}") as ended:
        main(tmp_path / source, "--output-dir", tmp_path / "out")
    assert "\n" not in ended.value.code


@pytest.mark.parametrize("source", ["learning.csv", "figure4_old_observation"])
def test_the_committed_curves_can_be_drawn(source, tmp_path):
    main(ROOT / "benchmark" / "results" / source, "--output-dir", tmp_path)
    assert_shows(tmp_path / "curves.png", "mate")


# ------------------------------------------------------------------------------------------------- episodes of an agent


@pytest.mark.parametrize("env_id", ["hopper-param", "point-robot"])  # hoppers fall: episodes of different lengths
def test_roll_out_gives_the_episodes_of_the_evaluation(env_id, tmp_path):
    module, T = script("sac_lstm"), 30
    args = module.Args(**SAC | {"env_id": env_id, "max_episode_steps": T, "num_envs": 3})
    vec, max_steps = args.make_envs(7)
    agent = module.Agent(vec.single_observation_space.shape[0], vec.single_action_space, max_steps, args)
    module.save(tmp_path / "model.pt", args, agent=agent.state_dict())
    expected = module.evaluate(agent, vec, max_steps, torch.device("cpu"))
    data = runs.roll_out(tmp_path / "model.pt", 7)  # in three rounds of three environments
    assert data["reward"].shape == (7, T) and data["memory"].shape == (7, T, 16)
    assert data["reward"].sum(axis=1).mean() == pytest.approx(expected["eval/episodic_return"], rel=1e-4)
    assert data["length"].mean() == pytest.approx(expected["eval/episodic_length"])
    after_the_end = np.arange(T) >= data["length"][:, None]
    assert not data["obs"][after_the_end].any() and not data["reward"][after_the_end].any()
    assert len(np.unique(data["context"], axis=0)) == 7
    # Memories of the saved agent and of another one: m_t from x_1 ... x_t, on the same episodes.
    assert data["memory"].any() and not np.allclose(data["memory"], data["untrained"])


def test_success_by_task_and_forward_reward_by_direction(monkeypatch):
    angle = np.radians([10, -40, 80, 100, 170, -170, -100, -80])
    forward = np.outer([4, 2, 1, 3, -1, -3, 0, 8], [0.0, 1.0])  # mean over two steps: a half of these
    data = {"reward": np.arange(16.0).reshape(8, 2), "length": np.full(8, 2), "forward": forward}
    data |= {"context": np.stack([np.cos(angle), np.sin(angle)], axis=1)}
    data |= {"task": np.array(["push", "reach"] * 4), "success": np.array([0, 1, 0, 1, 1, 1, 0, 0.0])}
    monkeypatch.setattr(plot, "roll_out", lambda path, episodes: data)
    run = Run("sac_mate", "ant-dir", None, 1)
    curves = {name: np.ones(1) for name in ("step", "finished", "episodic_return")}
    results = {run: {"curves": curves}}
    list(plot.add_episodes(results, {run: ROOT}))
    tables = results[run]
    assert tables["adaptation"]["reward"].tolist() == [7, 8]
    assert tables["success"]["task"].tolist() == ["all", "push", "reach"]
    assert np.allclose(tables["success"]["success_rate"], [0.5, 0.25, 0.75])
    assert tables["ant_directions"]["quarter"].tolist() == ["all", "+x", "+y", "-x", "-y"]
    assert np.allclose(tables["ant_directions"]["forward_reward"], [7 / 8, 1.5, 1, -1, 2])
    assert tables["ant_directions"]["episodes"].tolist() == [8, 2, 2, 2, 2]
    [line] = plot.group_lines(results, "success", "task", "success_rate")
    assert line == {
        "environment": "ant-dir",
        "memory": "MATE",
        "seeds": "1",
        "all": "0.50",
        "push": "0.25",
        "reach": "0.75",
    }


def test_csv_files_keep_numbers_texts_and_gaps(tmp_path):
    tables = {Run("sac_mate", "ml10", None, 1): {"t": np.array([0, 1]), "x": np.array([0.5, math.nan])}}
    tables[Run("ddqn_mate", "tmaze-active", 50, 2)] = {"t": np.array([7]), "x": np.array([1e6])}
    runs.write_csv(tmp_path / "a.csv", tables)
    assert runs.read_csv(tmp_path / "a.csv").keys() == tables.keys() and not list(tmp_path.glob("*.tmp"))
    assert (tmp_path / "a.csv").read_text().splitlines()[1:] == [
        "sac_mate,ml10,,1,0,0.5", "sac_mate,ml10,,1,1,", "ddqn_mate,tmaze-active,50,2,7,1000000",
    ]  # fmt: skip
