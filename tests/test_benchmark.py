"""benchmark/: tables and figures of numbers computed by hand, probes of memories whose content is known, timings."""

import json
import shutil
from functools import partial

import matplotlib.image
import numpy as np
import pytest
import torch
from conftest import ROOT, call, colours, main, make_agent, results_of, rows_of, scalars_of, tiny, train_in
from matplotlib.colors import to_rgb

from benchmark import plot, probe, runs, speed
from benchmark.runs import LOOKS, Run

COLUMNS = "script,env_id,corridor_length,seed,step,updates,episodic_return,return_first_quarter,return_last_quarter"
SAC = tiny("sac_mate", max_episode_steps=8, total_timesteps=400)
RNG = np.random.default_rng(0)
HALVES = np.arange(200) % 2 == 0


def write_curves(path, curves):
    """A CSV file from {(script, env_id, length, seed): (returns, finished)}, an evaluation every 1,000,001 steps."""
    rows = [f"{COLUMNS},success_rate,seconds,finished"]
    for run, (returns, finished) in curves.items():
        for i, value in enumerate(returns):
            rows.append(",".join(map(str, [*run, 1_000_001 * i, 100 * i, value, i, 2 * i, "", 60 * i, int(finished)])))
    path.write_text("\n".join(rows) + "\n")


def save_agent(path, name, env_id, **flags):
    module, agent, args, *_ = make_agent(name, env_id=env_id, num_envs=50, **flags)
    path.parent.mkdir(exist_ok=True)
    module.save(path, args, agent=agent.state_dict())
    return path


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
    call(plot.main, tmp_path / "curves.csv", "--output-dir", tmp_path / "out")
    mate, under_way, lstm = rows_of(tmp_path / "out" / "table.csv")
    assert mate == {
        "environment": "tmaze-active, L=50", "memory": "MATE", "seeds": "3",
        "best return": "0.820 [0.500, 1.000]", "last return": "0.617 [0.400, 0.950]",
        "best ≥ 0.95": "2/3", "last ≥ 0.95": "1/3", "evaluations ≥ 0.95": "0.25 [0.00, 0.50]", "updates to 0.95": "150",
        "updates": "300", "minutes": "3.0",
    }  # fmt: skip
    assert (under_way["seeds"], under_way["best ≥ 0.95"], under_way["best return"]) == ("1 unfinished", "1/1", "1.000")
    assert (lstm["memory"], lstm["best ≥ 0.95"], lstm["updates to 0.95"]) == ("LSTM", "0/1", "")
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| tmaze-active, L=50 | MATE | 1 unfinished | 1.000 | 1.000 | 1/1 | 1/1 | 0.50 | 100 |" in text
    for figure in ("curves.png", "corridor.png"):
        assert_shows(tmp_path / "out" / figure, "mate", "lstm")
    *_, first, last, _, _ = rows_of(tmp_path / "out" / "curves.csv")
    assert (first["seed"], first["success_rate"], first["finished"]) == ("4", "", "0")
    assert (last["step"], last["seconds"], last["episodic_return"]) == ("1000001", "60", "1")


def test_table_of_continuous_tasks(tmp_path):
    curves = {("sac_mate", "ant-dir", "", s): ([-99, *[s] * 9, 3 * s], True) for s in (10, 20)}
    write_curves(tmp_path / "curves.csv", curves)
    call(plot.main, tmp_path / "curves.csv", "--output-dir", tmp_path)
    [row] = rows_of(tmp_path / "table.csv")
    assert row["best return"] == row["last return"] == "45.0 [30.0, 60.0]"
    assert row["last ten"] == "18.0 [12.0, 24.0]"
    assert (row["first quarter"], row["last quarter"]) == ("10.0 [10.0, 10.0]", "20.0 [20.0, 20.0]")
    assert row["100 episodes"] == "" and "| 100 episodes |" not in (tmp_path / "table.md").read_text(), (
        "columns without a value are dropped"
    )
    assert not (tmp_path / "corridor.png").exists()


def test_the_mean_of_seeds_is_taken_at_common_steps_and_of_the_finished_ones():
    x, theirs = np.array([0.0, 40, 110, 160]), np.array([10.0, 50, 90, 200])
    returns = [{"step": x, "episodic_return": 2 * x, "finished": np.ones(4)}]
    returns += [{"step": theirs, "episodic_return": 4 * theirs, "finished": np.ones(4)}]
    returns += [{"step": x[:1], "episodic_return": x[:1] + 99, "finished": np.zeros(1)}]  # just started
    for curves in returns:
        curves["success_rate"] = curves["step"] / 200
    results = {Run("sac_lstm", "ml10", None, i): {"curves": curves} for i, curves in enumerate(returns)}
    figure = plot.draw_curves(results)
    note = "1 of 3 runs unfinished; thin: every seed; thick: mean of finished ones, if any, smoothed over 5 evaluations"
    assert figure.legends[0].get_title().get_text() == note
    ax, success = figure.axes
    assert success.get_title() == "ml10, success rate" and success.get_lines()[0].get_ydata()[-1] == x[-1] / 200
    [mean] = [line for line in ax.get_lines() if line.get_label() == "LSTM"]
    steps, values = mean.get_data()
    smoothed = [10, 100 / 3, 300 / 5, 450 / 5, 360 / 3, 160]  # over five, or three next to the ends
    assert steps.tolist() == [10, 40, 50, 90, 110, 160] and np.allclose(values, 3 * np.array(smoothed))
    assert len(ax.get_lines()) == 4, "and every seed"


def test_corridor_shows_every_seed_and_the_best(tmp_path):
    values = {(20, 1): [0, 1.0], (20, 2): [1.0, 0.5], (50, 1): [0, 0.4], (50, 2): [0, 0.7]}
    curves = {("ddqn_gpt2", "tmaze-passive", *run): (returns, True) for run, returns in values.items()}
    write_curves(tmp_path / "c.csv", curves)
    [ax] = plot.draw_corridor(plot.collect([tmp_path / "c.csv"])[0]).axes
    line, *markers, _ = [line for line in ax.get_lines() if line.get_color() == LOOKS["gpt2"].color]
    assert line.get_ydata().tolist() == [1.0, 0.7]
    assert [m.get_ydata()[0] for m in markers] == [1.0, 1.0, 0.4, 0.7]
    assert len({m.get_xdata()[0] for m in markers}) == 4, "side by side"
    assert [m.get_markerfacecolor() == "white" for m in markers] == [False, True, True, True], "filled: ended solved"


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


def test_results_accumulate_and_nothing_is_lost(sweep, tmp_path, monkeypatch):
    out, models, days = tmp_path / "out", tmp_path / "models", [tmp_path / f"day{i}" for i in range(3)]
    results = {seed: results_of(run_dir(sweep / f"sac_mate{seed}")) for seed in (1, 2)}
    best, other = sorted(results, key=lambda seed: results[seed]["best_return"], reverse=True)
    # Day 1: the other seed of sac_mate is under way, and a third one has just been started.
    shutil.copytree(sweep, days[0], ignore=lambda *_: [f"sac_mate{other}"])
    unfinished(sweep / f"sac_mate{other}", days[0] / f"sac_mate{other}")
    (days[0] / "sac_mate3" / "runs" / "run").mkdir(parents=True)
    shutil.copy(run_dir(sweep / "sac_mate1") / "args.json", run_dir(days[0] / "sac_mate3"))
    call(plot.main, days[0], "--output-dir", out, "--models", models)
    first = {name: runs.read_csv(out / f"{name}.csv") for name in ("curves", "adaptation", "commands")}
    robots = [Run(name, "point-robot", None, i) for name, i in (("sac_mate", 1), ("sac_mate", 2), ("sac_markov", 1))]
    under_way = robots[other - 1]
    assert first["curves"][under_way]["finished"][-1] == 0
    assert list(first["adaptation"]) == [run for run in robots if run != under_way], "final agents of SAC"
    # Day 2: another machine, which has only the other seed, finished by now.
    shutil.copytree(sweep / f"sac_mate{other}", days[1] / "other")
    call(plot.main, days[1], "--output-dir", out, "--models", models)
    second = {name: runs.read_csv(out / f"{name}.csv") for name in first}
    for name, tables in first.items():
        assert list(second[name]) == [Run("ddqn_mate", "tmaze-passive", 4, 1)] * (name != "adaptation") + robots
        for run in tables.keys() - {under_way}:
            for column, values in tables[run].items():
                assert np.array_equal(values, second[name][run][column], equal_nan=values.dtype.kind == "f")
    # What was logged is in the tables, and the best seed's best.pt is kept.
    columns = second["curves"][under_way]
    steps, returns = zip(*scalars_of(run_dir(sweep / f"sac_mate{other}"))["eval/episodic_return"])
    assert columns["step"].tolist() == list(steps) and np.allclose(columns["episodic_return"], returns, rtol=1e-4)
    assert columns["updates"][-1] == results[other]["updates"] and (columns["finished"] == 1).all()
    assert all(len(table["t"]) == 8 for table in second["adaptation"].values())
    for figure in ("curves.png", "adaptation.png"):
        assert_shows(out / figure, "mate", "markov")
    text = (out / "table.md").read_text()
    assert "python sac_mate.py --env-id point-robot --num-envs 3 --max-episode-steps 8 --total-timesteps 400 " in text
    assert "--seed SEED`; seeds: sac_mate.py 1, 2; sac_markov.py 1\n" in text
    assert "| best ≥ 0.95 |" in text and "| first quarter | last quarter |" in text, "of T-Maze, of the others"
    names = {"sac_mate__point-robot.pt", "sac_markov__point-robot.pt", "ddqn_mate__tmaze-passive__L4.pt"}
    assert {path.name for path in models.iterdir()} == names
    paths = models / "sac_mate__point-robot.pt", run_dir(sweep / f"sac_mate{best}") / "best.pt"
    copy, model = (torch.load(path, weights_only=True) for path in paths)
    assert copy | {"agent": None} == model | {"agent": None} and copy["agent"].keys() == model["agent"].keys()
    assert all(torch.equal(weights, model["agent"][name]) for name, weights in copy["agent"].items())
    assert runs.roll_out(paths[0], 2)["reward"].shape == (2, 8), "a copy can be used like the model"
    maze = models / "ddqn_mate__tmaze-passive__L4.pt"
    assert all(w.dtype == torch.half for w in torch.load(maze, weights_only=True)["agent"].values())
    main("ddqn_mate", "--evaluate", maze)
    # Day 3: an unfinished copy of what is finished here changes nothing, and no agent is rolled out again.
    unfinished(sweep / f"sac_mate{other}", days[2] / "other")
    monkeypatch.setattr(plot, "roll_out", lambda *args: pytest.fail("rolled out again"))
    before = {name: (out / f"{name}.csv").read_bytes() for name in (*first, "table")}
    call(plot.main, *reversed(days), "--output-dir", out)
    call(plot.main, out, "--output-dir", tmp_path / "elsewhere")
    for folder in (out, tmp_path / "elsewhere"):
        assert {name: (folder / f"{name}.csv").read_bytes() for name in before} == before
    assert not list(out.glob("*.tmp"))


def test_of_a_run_that_was_repeated_the_last_source_counts(sweep, tmp_path):
    run = Run("sac_mate", "point-robot", None, 1)
    [path] = (sweep / "sac_mate1").rglob("best.pt")
    on_disk = plot.read_run(path.parent)[1]
    adaptation = {"t": np.arange(2), "reward": np.zeros(2)}
    repeated = on_disk["curves"] | {"episodic_return": on_disk["curves"]["episodic_return"] + 1}
    for name, curves in (("same", on_disk["curves"]), ("other", repeated)):
        (tmp_path / name).mkdir()
        tables = on_disk | {"curves": curves, "adaptation": adaptation}
        for table, columns in tables.items():
            runs.write_csv(tmp_path / name / f"{table}.csv", {run: columns})
    same, other, disk = tmp_path / "same", tmp_path / "other", sweep / "sac_mate1"
    for sources, curves, episodes, folder in (
        ([same, disk], on_disk["curves"], True, True),
        ([disk, same], on_disk["curves"], True, True),
        ([other, disk], on_disk["curves"], False, True),  # episodes are of the agent that was trained again
        ([disk, other], repeated, True, False),  # and its model is not on disk
    ):
        results, folders = plot.collect(sources)
        assert np.allclose(results[run]["curves"]["episodic_return"], curves["episodic_return"], rtol=1e-4)
        assert ("adaptation" in results[run], run in folders) == (episodes, folder)


def test_runs_with_other_flags_and_bad_input_are_refused_in_one_line(sweep, tmp_path):
    other = train_in(tmp_path / "other", "sac_mate", **SAC | {"gamma": 0.9}, seed=3)
    write_curves(tmp_path / "old.csv", {("sac_mate", "point-robot", "", 9): ([0, 1], True)})
    (tmp_path / "empty").mkdir()
    markov = save_agent(tmp_path / "markov.pt", "sac_markov", "point-robot", max_episode_steps=4)
    for program, words, answer in (
        (
            plot,
            [sweep, other],
            "sac_mate on point-robot was run with defaults and with --gamma 0.9: plot them separately",
        ),
        (plot, [tmp_path / "old.csv", sweep], "with unknown flags and with --env-id"),
        (plot, [tmp_path / "nothing"], "does not exist"),
        (plot, [tmp_path / "empty"], "there are no runs"),
        (probe, [], "name a run folder"),
        (probe, [tmp_path / "nothing"], "does not exist"),
        (probe, [markov], "has no memory"),
        (probe, [markov, "--episodes", 10], "--episodes must be at least 100"),
    ):
        with pytest.raises(SystemExit, match=f"^error: [^\n]*{answer}[^\n]*$"):
            call(program.main, *words, "--output-dir", tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match="^error: .*ended before its run began"):
        speed.until_run_folder("no_such_script", "tmaze-passive")


def test_the_committed_curves_can_be_drawn(tmp_path):
    call(plot.main, ROOT / "benchmark" / "results" / "figure4_old_observation", "--output-dir", tmp_path)
    assert_shows(tmp_path / "curves.png", "mate")


# ------------------------------------------------------------------------------------------------- episodes of an agent
@pytest.mark.parametrize("env_id", ["hopper-param", "point-robot"])  # hoppers fall: episodes of different lengths
def test_roll_out_gives_the_episodes_of_the_evaluation(env_id, tmp_path):
    module, agent, args, vec, T = make_agent("sac_lstm", env_id=env_id, max_episode_steps=30, eval_episodes=18)
    module.save(tmp_path / "model.pt", args, agent=agent.state_dict())
    expected = module.evaluate(agent, vec, T, torch.device("cpu"))
    data = runs.roll_out(tmp_path / "model.pt", 18)  # in two rounds
    assert data["reward"].shape == (18, 30) and data["memory"].shape == (18, 30, 16)
    assert data["reward"].sum(axis=1).mean() == pytest.approx(expected["eval/episodic_return"], rel=1e-4)
    assert data["length"].mean() == pytest.approx(expected["eval/episodic_length"])
    after_the_end = np.arange(T) >= data["length"][:, None]
    assert not data["obs"][after_the_end].any() and not data["reward"][after_the_end].any()
    assert len(np.unique(data["context"], axis=0)) == 18
    # Memories of the saved agent and of another one: m_t from x_1 ... x_t, on the same episodes.
    assert data["memory"].any() and not np.allclose(data["memory"], data["untrained"])


def curves_of(value):
    names = ("step", "updates", "episodic_return", "return_first_quarter", "return_last_quarter", "seconds", "finished")
    return {name: np.full(1, value) for name in names}


def test_success_by_task_and_forward_reward_by_direction(monkeypatch):
    angle = np.radians([10, -40, 80, 100, 170, -170, -100, -80])
    forward = np.outer([4, 2, 1, 3, -1, -3, 0, 8], [0.0, 1.0])  # mean over two steps: a half of these
    data = {"reward": np.arange(16.0).reshape(8, 2), "length": np.full(8, 2), "forward": forward}
    data |= {"context": np.stack([np.cos(angle), np.sin(angle)], axis=1)}
    data |= {"task": np.array(["push", "reach"] * 4), "success": np.array([0, 1, 0, 1, 1, 1, 0, 0.0])}
    monkeypatch.setattr(plot, "roll_out", lambda path, episodes: data)
    run = Run("sac_mate", "ant-dir", None, 1)
    results = {run: {"curves": {name: np.ones(1) for name in ("step", "finished", "episodic_return")}}}
    list(plot.add_episodes(results, {run: ROOT}))
    adaptation, success, directions = (results[run][name] for name in ("adaptation", "success", "ant_directions"))
    assert adaptation["reward"].tolist() == [7, 8]
    assert success["task"].tolist() == ["all", "push", "reach"]
    assert np.allclose(success["success_rate"], [0.5, 0.25, 0.75])
    assert directions["quarter"].tolist() == ["all", "+x", "+y", "-x", "-y"]
    assert np.allclose(directions["forward_reward"], [7 / 8, 1.5, 1, -1, 2])
    assert directions["episodes"].tolist() == [8, 2, 2, 2, 2]
    [line] = plot.table_lines(results | {run: results[run] | {"curves": curves_of(5.0)}})
    assert (line["best return"], line["100 episodes"]) == ("5.000", "15.0"), "an evaluation, and the final agent"
    better = {"success": success | {"success_rate": np.array([1.0, 1, 1])}}
    [line] = plot.group_lines(results | {run._replace(seed=2): better}, "success", "task", "success_rate")
    assert list(line) == ["environment", "memory", "seeds", "all (8)", "push (4)", "reach (4)"]
    values = ["0.75 [0.50, 1.00]", "0.62 [0.25, 1.00]", "0.88 [0.75, 1.00]"]
    assert list(line.values()) == ["ant-dir", "MATE", "2", *values]


# ------------------------------------------------------------------------------------------- probe: what is in a memory
def test_fit_is_ridge_regression_on_standardised_features_and_outliers_are_clipped():
    """Against the normal equations, on other episodes than those it was fitted on."""
    x, y, new = RNG.normal(size=(30, 5)) * [1, 10, 0.1, 3, 1] + 7, RNG.normal(size=(30, 2)) + 3, RNG.normal(size=(9, 5))
    z, z_new = ((values - x.mean(axis=0)) / x.std(axis=0) for values in (x, new))
    z_new = np.clip(z_new, -10, 10)
    assert np.abs(z_new).max() == 10 and np.abs(z_new).min() < 10
    for strength, predicted in zip([0.01, 5.0], probe.fit(x, y, [0.01, 5.0])(new)):
        weights = np.linalg.solve(z.T @ z + 30 * strength * np.eye(5), z.T @ (y - y.mean(axis=0)))
        assert np.allclose(predicted, z_new @ weights + y.mean(axis=0))


def test_a_planted_context_is_found_and_random_labels_are_not_on_unseen_episodes():
    context = RNG.normal(size=(200, 3))
    memory = context @ RNG.normal(size=(3, 16)) + 5
    assert probe.probe(memory, context, HALVES, classify=False) > 0.99
    assert 0.5 < probe.probe(memory + 0.5 * RNG.normal(size=memory.shape), context, HALVES, classify=False) < 0.99
    assert abs(probe.probe(memory, RNG.normal(size=(200, 3)), HALVES, classify=False)) < 0.15
    constant = np.full((200, 16), 0.123456789) + 1e-9 * RNG.normal(size=(200, 16))  # but for rounding
    assert probe.probe(constant, context, HALVES, classify=False) == pytest.approx(0, abs=1e-12)

    classes = np.eye(4)[RNG.integers(4, size=200)]
    memory = classes @ RNG.normal(size=(4, 16)) + 0.01 * RNG.normal(size=(200, 16))
    assert probe.probe(memory, classes, HALVES, classify=True) == 1
    assert probe.probe(memory, np.eye(4)[RNG.integers(4, size=200)], HALVES, classify=True) < 0.45  # chance is 0.25

    # With more features than episodes everything seen can be fitted exactly, and nothing unseen predicted.
    memory, context = RNG.normal(size=(200, 500)), RNG.normal(size=(200, 1))
    seen = probe.fit(memory[HALVES], context[HALVES], [1e-9])(memory[HALVES])[0]
    assert np.allclose(seen, context[HALVES], atol=1e-3)
    assert probe.probe(memory, context, HALVES, classify=False) < 0.1
    # The sign is reversed in the other half: a probe that is fitted on one half only must be wrong there.
    assert probe.probe(context, np.where(HALVES[:, None], context, -context), HALVES, classify=False) < -2.5


def test_halves_have_the_same_classes_and_no_goal_of_ml10_is_in_both():
    side = np.where(RNG.random(240) < 0.6, 1.0, -1.0)[:, None]
    train = probe.split(side, probe.classes_of(side))
    assert abs(train.sum() - 120) <= 1 and abs(side[train].sum() - side[~train].sum()) <= 2
    tasks = np.stack([np.arange(240) % 4, np.arange(240) // 8], axis=1).astype(float)
    train = probe.split(tasks, probe.classes_of(tasks))
    seen, unseen = ({tuple(c) for c in tasks[half]} for half in (train, ~train))
    assert seen and unseen and not seen & unseen and {t for t, _ in seen} == {t for t, _ in unseen} == {0, 1, 2, 3}


def synthetic(context, length):
    """At t = 0 nothing is known, from t = 1 on all of it; observations are noise; episodes of up to 6 steps."""
    memory = np.repeat((context @ RNG.normal(size=(context.shape[1], 8)))[:, None], 6, axis=1)
    memory[:, 0] = 1
    noise = {"untrained": RNG.normal(size=memory.shape), "obs": RNG.normal(size=(len(context), 6, 3))}
    return noise | {"memory": memory, "context": context, "length": length}


def test_measure_along_the_episode_of_numbers_and_of_classes():
    angle, length = RNG.uniform(0, 2 * np.pi, 240), np.where(np.arange(240) % 4 < 2, 6, 4)
    data = synthetic(np.stack([np.cos(angle), np.sin(angle)], axis=1), length)
    scores, projection = probe.measure(data)
    assert scores["t"].tolist() == [0, 1, 2, 3, 4, 5] and set(scores["measure"]) == {"R2"}
    assert scores["episodes"].tolist() == [240, 240, 240, 240, 120, 120]
    assert scores["score_memory"][0] == pytest.approx(0) and (scores["score_memory"][1:] > 0.99).all()
    assert (abs(scores["score_obs"]) < 0.25).all() and (abs(scores["score_untrained"]) < 0.25).all()
    # The memory lies in a plane, so its first two principal components keep all distances.
    points, memory = np.stack([projection["x"], projection["y"]], axis=1), data["memory"][length > 5, 5]
    apart = np.linalg.norm(points[:, None] - points, axis=-1)
    assert np.allclose(apart, np.linalg.norm(memory[:, None] - memory, axis=-1))
    assert np.allclose(projection["context_1"], np.sin(angle)[length > 5])

    # Classes, and where episodes run out.
    side = np.where(RNG.random(240) < 0.6, 1.0, -1.0)
    scores, _ = probe.measure(synthetic(side[:, None], np.where(np.arange(240) < 60, 6, 3)))
    assert scores["t"].tolist() == [0, 1, 2], "from t = 3 on, fewer than 50 in each half"
    assert set(scores["measure"]) == {"accuracy"}
    assert (scores["score_memory"][1:] == 1).all() and scores["score_memory"][0] == scores["chance"][0]
    assert scores["chance"][0] == pytest.approx((side == 1).mean(), abs=0.02)


# --------------------------------------------------------------------------------------------------------- the program
@pytest.mark.parametrize(
    "env_id, names, flags, found",
    [
        # Even random weights keep something of a target speed that is in every reward, and of a cue in an observation.
        ("cheetah-vel", ["sac_mate"], {"max_episode_steps": 10}, 0.3),
        ("ant-dir", ["sac_lstm"], {"max_episode_steps": 10}, -9),
        ("tmaze-passive", ["ddqn_gpt2"], {"corridor_length": 4}, 0.9),
        ("point-robot", ["sac_mate", "sac_gpt2"], {"max_episode_steps": 4}, -9),  # two memories of one environment
    ],
)
def test_from_models_to_files_and_figure(env_id, names, flags, found, tmp_path):
    models = [save_agent(tmp_path / name / "model.pt", name, env_id, **flags) for name in names]
    call(probe.main, models[0].parent, *models[1:], "--episodes", 100, "--output-dir", tmp_path / "out")
    rows = rows_of(tmp_path / "out" / "probe.csv")
    assert (rows[0]["script"], rows[0]["env_id"], rows[0]["t"]) == (names[0], env_id, "0")
    assert {row["script"] for row in rows} == set(names)
    assert float(rows[0]["score_memory"]) == pytest.approx(float(rows[0]["score_untrained"]), abs=1e-6), "m_0 is empty"
    assert float(rows[-1]["score_memory"]) > found
    assert len((tmp_path / "out" / "projection.csv").read_text().splitlines()) == 101
    assert colours(matplotlib.image.imread(tmp_path / "out" / "probe.png")) > 50


# ---------------------------------------------------------------------------------------------------------------- speed
def test_candidates_are_timed_in_turns_and_the_first_call_does_not_count(monkeypatch):
    durations, now, calls = {"a": [100, 1, 3, 2, 9], "b": [5, 5, 5, 5, 5]}, [0.0], []
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])

    def spend(name):
        calls.append(name)
        now[0] += durations[name].pop(0)

    candidates = {name: partial(spend, name) for name in durations}
    assert speed.in_turns(candidates, budget=0, rounds=(3, 50)) == {"a": 2, "b": 5}
    assert calls == ["a", "b"] * 4


@pytest.mark.parametrize("name", ["sac_gpt2", "ddqn_mate"])
def test_the_update_that_is_timed_learns_and_the_sizes_of_the_paper_are_the_defaults(name):
    update = speed.make_update(name, "small", 5, bf16=True)
    agent, batch = update.args[0], update.args[3]
    assert batch["mask"].shape == (32, 5) and batch["mask"].all(), "full episodes"
    before = [parameter.detach().clone() for parameter in agent.parameters()]
    update()
    assert not any(torch.equal(old, new) for old, new in zip(before, agent.parameters()))
    paper = speed.make_update(name, "paper", 5, bf16=False).args
    assert paper[4] == type(paper[4])() and len(paper[3]["mask"]) == 64
    large, small = (sum(p.numel() for p in network.parameters()) for network in (paper[0], agent))
    assert large > (10 if name == "sac_gpt2" else 3) * small


def test_every_measurement_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(speed.SIZES, "paper", speed.SIZES["small"])  # faster
    call(speed.main, "--quick", "--output-dir", tmp_path)
    rows = {}
    for name in speed.MEASURES:
        saved = json.loads((tmp_path / f"speed_{name}.json").read_text())
        assert saved["machine"]["torch"] == torch.__version__ and saved["machine"]["cores"] and saved["rows"]
        assert all(value > 0 for row in saved["rows"] for value in row.values() if isinstance(value, float))
        assert len((tmp_path / f"speed_{name}.md").read_text().splitlines()) == 2 + len(saved["rows"])
        rows[name] = saved["rows"]
    scripts = {script for group in speed.SCRIPTS.values() for script in group}
    assert {row["script"] for row in rows["update"]} == {row["script"] for row in rows["rollout"]} == scripts
    assert {row["sizes"] for row in rows["update"]} == {"small", "paper"}
    for row in rows["update"]:
        assert row["gain of --bf16"] == pytest.approx(row["ms"] / row["ms with --bf16"])
    assert [row["t"] for row in rows["steps"] if row["script"] == "ddqn_gpt2"] == 2 * [0, 5, 10, 15]
    for name in ("rollout", "steps"):
        assert colours(matplotlib.image.imread(tmp_path / f"speed_{name}.png")) > 50
