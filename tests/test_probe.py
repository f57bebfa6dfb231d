"""probe.py: its probes on memories whose content is known, then the whole of it on tiny runs."""

import csv
import os
import shutil
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
import torch
from conftest import ROOT, script, train_in
from matplotlib.colors import to_rgb

from benchmark import probe, runs

RNG = np.random.default_rng(0)
HALVES = np.arange(200) % 2 == 0


# -------------------------------------------------------------------------------------------------------------- probe


def test_fit_is_ridge_regression_on_standardised_features():
    """Against the normal equations, and on other episodes than those it was fitted on."""
    x, y, new = RNG.normal(size=(30, 5)) * [1, 10, 0.1, 3, 1] + 7, RNG.normal(size=(30, 2)) + 3, RNG.normal(size=(9, 5))
    z, z_new = ((values - x.mean(axis=0)) / x.std(axis=0) for values in (x, new))
    for strength, predicted in zip([0.01, 5.0], probe.fit(x, y, [0.01, 5.0])(new)):
        weights = np.linalg.solve(z.T @ z + 30 * strength * np.eye(5), z.T @ (y - y.mean(axis=0)))
        assert np.allclose(predicted, z_new @ weights + y.mean(axis=0))


def test_a_context_that_is_linear_in_the_memory_is_found_and_noise_is_not():
    context = RNG.normal(size=(200, 3))
    memory = context @ RNG.normal(size=(3, 16)) + 5
    assert probe.probe(memory, context, HALVES, classify=False) > 0.99
    assert abs(probe.probe(RNG.normal(size=(200, 16)), context, HALVES, classify=False)) < 0.15
    noisy = memory + 0.5 * RNG.normal(size=memory.shape)
    assert 0.5 < probe.probe(noisy, context, HALVES, classify=False) < 0.99


def test_classes_that_are_apart_are_found_and_noise_is_not():
    classes = np.eye(4)[RNG.integers(4, size=200)]
    memory = classes @ RNG.normal(size=(4, 16)) + 0.01 * RNG.normal(size=(200, 16))
    assert probe.probe(memory, classes, HALVES, classify=True) == 1
    assert probe.probe(RNG.normal(size=(200, 16)), classes, HALVES, classify=True) < 0.45  # 0.25, give or take


def test_it_is_scored_on_episodes_that_it_has_not_seen():
    """With more features than episodes everything seen can be fitted exactly, and nothing unseen predicted."""
    memory, context = RNG.normal(size=(200, 500)), RNG.normal(size=(200, 1))
    assert np.allclose(
        probe.fit(memory[HALVES], context[HALVES], [1e-9])(memory[HALVES])[0], context[HALVES], atol=1e-3
    )
    assert probe.probe(memory, context, HALVES, classify=False) < 0.1
    # What holds in one half is turned round in the other: a probe of the first alone is as wrong as can be.
    turned = np.where(HALVES[:, None], context, -context)
    assert probe.probe(context, turned, HALVES, classify=False) < -2.5


def test_the_strength_of_the_ridge_is_chosen_on_episodes_that_it_was_not_fitted_on():
    """Of noise nothing can be learned, and the strongest ridge, which knows that, is the best; the weakest overfits."""
    noise, context = np.random.default_rng(0).normal(size=(200, 60)), np.random.default_rng(1).normal(size=(200, 1))
    weakest = probe.fit(noise[HALVES], context[HALVES], [probe.STRENGTHS[0]])(noise[~HALVES])[0]
    assert 1 - ((weakest - context[~HALVES]) ** 2).sum() / (context[~HALVES] ** 2).sum() < -0.5
    assert probe.probe(noise, context, HALVES, classify=False) > -0.2


def test_where_a_class_has_many_contexts_none_of_them_is_in_both_halves(monkeypatch):
    """ML10: the same task and goal is the same episode. Memories that know the goal alone must not tell the task."""
    tasks, goals = np.arange(240) % 4, np.arange(240) // 8
    data = synthetic(np.stack([tasks, goals], axis=1).astype(float))
    halves = []
    monkeypatch.setattr(probe, "probe", lambda x, y, train, classify: halves.append(train) or 0.5)
    probe.measure(data)
    seen, unseen = ({tuple(c) for c in data["context"][half]} for half in (halves[0], ~halves[0]))
    assert seen and unseen and not seen & unseen and {t for t, _ in seen} == {t for t, _ in unseen} == {0, 1, 2, 3}


def test_a_memory_of_nothing_scores_at_chance():
    context = RNG.normal(size=(200, 2))
    nothing = np.full((200, 16), 0.123456789) + 1e-9 * RNG.normal(size=(200, 16))  # constant but for rounding
    assert probe.probe(nothing, context, HALVES, classify=False) == pytest.approx(0, abs=1e-12)
    side = np.eye(2)[(RNG.random(200) < 0.7).astype(int)]
    assert probe.probe(nothing, side, HALVES, classify=True) == side[~HALVES, 1].mean()


def synthetic(context, episodes=240, steps=6):
    """At t = 0 nothing is known, from t = 1 on all; the observation is noise; half the episodes end after 4 steps."""
    memory = np.repeat((context @ RNG.normal(size=(context.shape[1], 8)))[:, None], steps, axis=1)
    memory[:, 0] = 1
    length = np.where(np.arange(episodes) % 4 < 2, steps, 4)
    going = np.arange(steps) < length[:, None]
    obs = RNG.normal(size=(episodes, steps, 3))
    data = {"memory": memory, "untrained": RNG.normal(size=memory.shape), "obs": obs, "context": context}
    return data | {"length": length, "reward": going * np.arange(steps)}


def test_measure_along_the_episode_for_a_continuous_context():
    angle = RNG.uniform(0, 2 * np.pi, 240)
    data = synthetic(np.stack([np.cos(angle), np.sin(angle)], axis=1))
    scores, projection = probe.measure(data)
    assert scores["t"].tolist() == [0, 1, 2, 3, 4, 5] and set(scores["measure"]) == {"R2"}
    assert scores["episodes"].tolist() == [240, 240, 240, 240, 120, 120]
    assert scores["score_memory"][0] == pytest.approx(0) and (scores["score_memory"][1:] > 0.99).all()
    assert (abs(scores["score_state"]) < 0.25).all() and (scores["chance"] == 0).all()
    assert (abs(scores["score_untrained"]) < 0.25).all()
    assert np.allclose(scores["reward"], [0, 1, 2, 3, 2, 2.5]) and np.allclose(scores["return_so_far"][-1], 10.5)
    # The memory lies in a plane, so that its two principal components keep all distances.
    assert set(projection["t"]) == {5} and len(projection["x"]) == 120
    points, memory = np.stack([projection["x"], projection["y"]], axis=1), data["memory"][data["length"] > 5, 5]
    apart = np.linalg.norm(points[:, None] - points, axis=-1)
    assert np.allclose(apart, np.linalg.norm(memory[:, None] - memory, axis=-1))
    assert np.allclose(projection["context_1"], np.sin(angle)[data["length"] > 5])


def test_measure_for_classes_and_where_episodes_run_out():
    side = np.where(RNG.random(240) < 0.6, 1.0, -1.0)
    data = synthetic(side[:, None])
    data["length"][60:] = 4  # 32 of 60 are left at t = 4, fewer than a probe needs
    scores, projection = probe.measure(data)
    assert scores["t"].tolist() == [0, 1, 2, 3] and set(scores["measure"]) == {"accuracy"}
    share = max((side == 1).mean(), (side == -1).mean())
    assert np.allclose(scores["chance"], share, atol=0.01)  # both halves have the classes in the same shares
    assert scores["score_memory"][0] == scores["chance"][0] and (scores["score_memory"][1:] == 1).all()
    assert set(projection["t"]) == {3} and np.abs(projection["y"]).max() == 0  # one dimension is all there is


def test_what_is_a_class():
    assert probe.classes_of(np.array([[1.0], [-1.0]] * 20)).tolist() == [-1, 1]  # T-Maze
    tasks = np.stack([np.arange(400) % 10, RNG.integers(50, size=400)], axis=1).astype(float)
    assert probe.classes_of(tasks).tolist() == list(range(10))  # ML10: the task, and not which of its goals
    assert probe.classes_of(RNG.random((400, 1))) is None and probe.classes_of(RNG.random((40, 2))) is None


# ------------------------------------------------------------------------------------------------------------- figure


def figure_of(context, name="sac_mate", env_id="point-robot", length=None):
    scores, projection = probe.measure(synthetic(context))
    return probe.draw(runs.Run(name, env_id, length, 3), scores, projection), scores, projection


def labels_of(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_figure_of_a_direction():
    angle = RNG.uniform(0, 2 * np.pi, 240)
    figure, scores, projection = figure_of(np.stack([np.cos(angle), np.sin(angle)], axis=1))
    left, middle, right, bar = figure.axes
    memory, untrained, state, chance = left.get_lines()
    assert np.allclose(untrained.get_ydata(), scores["score_untrained"]) and untrained.get_linestyle() == ":"
    assert np.allclose(memory.get_xydata(), np.stack([scores["t"], scores["score_memory"]], axis=1))
    assert np.allclose(state.get_ydata(), scores["score_state"]) and np.allclose(chance.get_ydata(), 0)
    assert memory.get_color() == runs.LOOKS["mate"].color
    assert labels_of(figure.legends[0]) == ["memory $m_t$", "the same, untrained", "observation $s_t$", "chance"]
    assert left.get_ylabel() == "$R^2$ of a linear probe,\nmean of 2 numbers"
    assert np.allclose(middle.get_lines()[0].get_ydata(), scores["reward"]) and middle.get_ylabel() == "reward at t"
    [points] = right.collections
    assert points.get_cmap().name == "twilight" and points.get_clim() == (-np.pi, np.pi)  # cyclic, as directions are
    assert np.allclose(np.mod(points.get_array(), 2 * np.pi), angle[np.arange(240) % 4 < 2])
    assert np.allclose(points.get_offsets(), np.stack([projection["x"], projection["y"]], axis=1))
    assert bar.get_ylabel() == "angle of the context"
    assert figure.get_suptitle() == "MATE on point-robot, seed 3: 240 episodes, half to fit and half to score"


def test_figure_of_classes():
    figure, scores, _ = figure_of(np.where(RNG.random(240) < 0.5, 1.0, -1.0)[:, None], "ddqn_lstm", "tmaze-active", 5)
    left, middle, right = figure.axes
    assert left.get_ylabel() == "accuracy of a linear probe" and middle.get_ylabel() == "return so far"
    assert np.allclose(middle.get_lines()[0].get_ydata(), scores["return_so_far"])
    assert left.get_lines()[0].get_color() == runs.LOOKS["lstm"].color
    assert labels_of(right.get_legend()) == ["-1", "1"] and len(right.collections) == 2
    assert "LSTM on tmaze-active, L=5" in figure.get_suptitle()


def test_figure_of_scalars():
    speed = RNG.uniform(0, 3, 240)
    *_, right, bar = figure_of(speed[:, None], env_id="cheetah-vel")[0].axes
    assert right.collections[0].get_cmap().name == "viridis" and bar.get_ylabel() == "context"
    assert np.allclose(right.collections[0].get_array(), speed[np.arange(240) % 4 < 2])
    # Of many numbers, that which the memory is about: here the fourth, which is far the largest.
    many = RNG.normal(size=(240, 6)) * [1, 1, 1, 50, 1, 1]
    assert figure_of(many, env_id="walker-param")[0].axes[-1].get_ylabel() == "context, the best shown: number 3 of 6"


# --------------------------------------------------------------------------------------------------------- tiny runs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """{script: folder of a short run}, of DDQN on T-Maze and of SAC on point-robot, and of sac_lstm on Pendulum."""
    cwd = tmp_path_factory.mktemp("tiny")
    sizes = {"memory_dim": 8, "hidden_dim": 8, "batch_size": 4, "num_envs": 7, "eval_episodes": 6}
    maze = {"corridor_length": 3, "total_episodes": 60, "learning_starts": 8, "eval_interval": 20}
    point = {"env_id": "point-robot", "max_episode_steps": 10, "total_timesteps": 300, "learning_starts": 60}
    pendulum = point | {"env_id": "Pendulum-v1"}  # which hides nothing
    for name, flags in {"ddqn_gpt2": maze, "sac_mate": point, "sac_markov": point, "sac_lstm": pendulum}.items():
        train_in(cwd, name, **sizes, **flags)
    return {folder.name.split("__")[1]: folder for folder in (cwd / "runs").iterdir()}


@pytest.mark.parametrize("name", ["ddqn_gpt2", "sac_mate"])
def test_a_rollout_is_what_the_agent_saw_remembered_and_got(tiny, name):
    """Its memories are those that the memory gives for the whole episodes at once."""
    data = runs.roll_out(tiny[name], 10)  # of 7 environments: a round and a part of one
    module, saved = script(name), runs.load(tiny[name] / "model.pt")
    args = module.Args(**saved["args"])
    vec, max_steps = runs.running.make_envs(args, 10, None)
    agent = module.Agent(vec.single_observation_space.shape[0], vec.single_action_space, max_steps, args)
    agent.load_state_dict(saved["agent"])
    obs, infos = vec.reset(seed=list(range(module.EVAL_SEED, module.EVAL_SEED + 10)))
    assert np.array_equal(data["context"], infos["context"]) and np.array_equal(data["obs"][:, 0], obs)

    obs, memory, reward = (torch.tensor(data[key], dtype=torch.float32) for key in ("obs", "memory", "reward"))
    assert memory.shape == (10, max_steps, 8)
    action = agent.act(obs, memory)
    x = module.transition(obs[:, :-1], action[:, :-1], reward[:, :-1], obs[:, 1:])
    with torch.no_grad():
        expected = agent.memory(x)
    going = torch.arange(max_steps) < torch.tensor(data["length"])[:, None]
    assert torch.allclose(memory[going], expected[going], atol=1e-5)
    assert not memory[~going].any() and not reward[~going].any() and data["length"].max() <= max_steps
    expected = module.evaluate(agent, vec, max_steps, 10, "cpu")
    assert data["reward"].sum(axis=1).mean() == pytest.approx(expected["eval/episodic_return"], rel=1e-4, abs=1e-4)


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def command(*words, cwd):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(ROOT / "benchmark" / "probe.py"), *map(str, words)]
    return subprocess.run(words, check=False, cwd=cwd, env=env, capture_output=True, text=True)


def test_from_a_run_to_the_figure_and_from_csv_to_the_same_figure(tiny, tmp_path):
    done = command(tiny["sac_mate"], "--episodes", 100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tiny["sac_mate"] / "probe"
    assert {path.name for path in out.iterdir()} == {"probe.csv", "projection.csv", "probe.png"}
    rows, projection = rows_of(out / "probe.csv"), rows_of(out / "projection.csv")
    names = "t measure score_memory score_untrained score_state chance reward return_so_far episodes"
    assert " ".join(rows[0]) == f"script env_id corridor_length seed {names}"
    assert [int(row["t"]) for row in rows] == list(range(10)) and {row["episodes"] for row in rows} == {"100"}
    assert rows[0]["score_memory"] == rows[0]["score_state"] == "0"  # neither m_0 nor the start tells the goal
    # A reward is minus the distance to the goal, which after one blind step tells something of where it is.
    assert float(rows[-1]["score_memory"]) > 0.2
    assert float(rows[-1]["return_so_far"]) == pytest.approx(sum(float(row["reward"]) for row in rows), rel=1e-4)
    goals = np.array([[float(row["context_0"]), float(row["context_1"])] for row in projection])
    assert len(goals) == 100 and np.allclose(np.linalg.norm(goals, axis=1), 1, atol=1e-4)

    image = matplotlib.image.imread(out / "probe.png")[..., :3]
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 200
    assert (np.abs(image - to_rgb(runs.LOOKS["mate"].color)).max(axis=-1) < 0.02).sum() > 100
    for name in ("probe.csv", "projection.csv"):
        shutil.copy(out / name, tmp_path)
    assert command(tmp_path, cwd=tmp_path).returncode == 0
    assert np.array_equal(matplotlib.image.imread(tmp_path / "probe.png")[..., :3], image)


def main(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["probe.py", *map(str, words)])
    probe.main()


def test_tmaze_end_to_end(tiny, tmp_path, monkeypatch):
    """The passive maze shows the side at the start only: s_0 tells it, m_0 does not, and m_1 has seen it."""
    main(monkeypatch, tiny["ddqn_gpt2"], "--episodes", 100, "--output-dir", tmp_path / "out", "--format", "pdf")
    first, second, *_ = rows_of(tmp_path / "out" / "probe.csv")
    assert first["measure"] == "accuracy" and first["corridor_length"] == "3"
    assert first["score_memory"] == first["chance"] and float(first["score_state"]) == 1
    assert float(second["score_memory"]) == 1 and 0.4 < float(second["chance"]) < 0.7
    assert (tmp_path / "out" / "probe.pdf").read_bytes().startswith(b"%PDF")


def test_bad_input_gets_one_line(tiny, tmp_path, monkeypatch):
    for name in ("unfinished", "foreign", "older"):
        shutil.copytree(tiny["sac_mate"], tmp_path / name, ignore=shutil.ignore_patterns("probe"))
    (tmp_path / "unfinished" / "model.pt").unlink()
    (tmp_path / "foreign" / "model.pt").write_text("something else")
    (tmp_path / "empty").mkdir()
    saved = runs.load(tmp_path / "older" / "model.pt")
    runs.running.save(saved | {"agent": {"memory.of_the_past": torch.zeros(1)}}, tmp_path / "older" / "model.pt")
    for words, line in (
        ([tmp_path / "nowhere"], "there is no folder"),
        ([tmp_path / "empty"], "is no run, and has no probe.csv and projection.csv"),
        ([tmp_path / "unfinished"], "has no model.pt: the run is not finished, or was told not to save it"),
        ([tmp_path / "foreign"], "is damaged, or not a file that this script has saved"),
        ([tmp_path / "older"], "was trained by another version of sac_mate.py"),  # the weights do not fit
        ([tiny["sac_lstm"]], "Pendulum-v1 has no context, or always the same: there is nothing to probe for"),
        ([tiny["sac_markov"]], "is of sac_markov.py, which has no memory: there is nothing to probe"),
        ([tiny["sac_mate"], "--episodes", "10"], "--episodes must be 100 or more, got 10"),
    ):
        with pytest.raises(SystemExit) as error:
            main(monkeypatch, *words)
        assert line in error.value.code and "\n" not in error.value.code
