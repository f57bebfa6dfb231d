"""benchmark/probe.py: probes of memories whose content is known, then the program on small agents."""

import csv
import sys

import matplotlib.image
import numpy as np
import pytest
from conftest import script, tiny

from benchmark import probe

RNG = np.random.default_rng(0)
HALVES = np.arange(200) % 2 == 0


def test_fit_is_ridge_regression_on_standardised_features():
    """Against the normal equations, on other episodes than those it was fitted on."""
    x, y, new = RNG.normal(size=(30, 5)) * [1, 10, 0.1, 3, 1] + 7, RNG.normal(size=(30, 2)) + 3, RNG.normal(size=(9, 5))
    z, z_new = ((values - x.mean(axis=0)) / x.std(axis=0) for values in (x, new))
    for strength, predicted in zip([0.01, 5.0], probe.fit(x, y, [0.01, 5.0])(new)):
        weights = np.linalg.solve(z.T @ z + 30 * strength * np.eye(5), z.T @ (y - y.mean(axis=0)))
        assert np.allclose(predicted, z_new @ weights + y.mean(axis=0))


def test_a_planted_context_is_found_and_random_labels_are_not():
    context = RNG.normal(size=(200, 3))
    memory = context @ RNG.normal(size=(3, 16)) + 5
    assert probe.probe(memory, context, HALVES, classify=False) > 0.99
    assert 0.5 < probe.probe(memory + 0.5 * RNG.normal(size=memory.shape), context, HALVES, classify=False) < 0.99
    assert abs(probe.probe(memory, RNG.normal(size=(200, 3)), HALVES, classify=False)) < 0.15


def test_planted_classes_are_found_and_random_labels_are_not():
    classes = np.eye(4)[RNG.integers(4, size=200)]
    memory = classes @ RNG.normal(size=(4, 16)) + 0.01 * RNG.normal(size=(200, 16))
    assert probe.probe(memory, classes, HALVES, classify=True) == 1
    assert probe.probe(memory, np.eye(4)[RNG.integers(4, size=200)], HALVES, classify=True) < 0.45  # chance is 0.25


def test_a_constant_memory_scores_at_chance():
    context = RNG.normal(size=(200, 2))
    constant = np.full((200, 16), 0.123456789) + 1e-9 * RNG.normal(size=(200, 16))  # but for rounding
    assert probe.probe(constant, context, HALVES, classify=False) == pytest.approx(0, abs=1e-12)


def test_it_is_scored_on_episodes_that_it_has_not_seen():
    """With more features than episodes everything seen can be fitted exactly, and nothing unseen predicted."""
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


def synthetic(context, steps=6):
    """At t = 0 nothing is known, from t = 1 on all of it; observations are noise; half of the episodes have 4 steps."""
    episodes = len(context)
    memory = np.repeat((context @ RNG.normal(size=(context.shape[1], 8)))[:, None], steps, axis=1)
    memory[:, 0] = 1
    data = {"memory": memory, "untrained": RNG.normal(size=memory.shape), "obs": RNG.normal(size=(episodes, steps, 3))}
    return data | {"context": context, "length": np.where(np.arange(episodes) % 4 < 2, steps, 4)}


def test_measure_along_the_episode():
    angle = RNG.uniform(0, 2 * np.pi, 240)
    data = synthetic(np.stack([np.cos(angle), np.sin(angle)], axis=1))
    scores, projection = probe.measure(data)
    assert scores["t"].tolist() == [0, 1, 2, 3, 4, 5] and set(scores["measure"]) == {"R2"}
    assert scores["episodes"].tolist() == [240, 240, 240, 240, 120, 120]
    assert scores["score_memory"][0] == pytest.approx(0) and (scores["score_memory"][1:] > 0.99).all()
    assert (abs(scores["score_obs"]) < 0.25).all() and (abs(scores["score_untrained"]) < 0.25).all()
    # The memory lies in a plane, so its first two principal components keep all distances.
    points, memory = np.stack([projection["x"], projection["y"]], axis=1), data["memory"][data["length"] > 5, 5]
    apart = np.linalg.norm(points[:, None] - points, axis=-1)
    assert np.allclose(apart, np.linalg.norm(memory[:, None] - memory, axis=-1))
    assert np.allclose(projection["context_1"], np.sin(angle)[data["length"] > 5])


def test_measure_of_classes_and_where_episodes_run_out():
    side = np.where(RNG.random(240) < 0.6, 1.0, -1.0)
    data = synthetic(side[:, None])
    data["length"][:] = np.where(np.arange(240) < 60, 6, 3)  # from t = 3 on, fewer than 50 in each half
    scores, _ = probe.measure(data)
    assert scores["t"].tolist() == [0, 1, 2] and set(scores["measure"]) == {"accuracy"}
    assert (scores["score_memory"][1:] == 1).all() and scores["score_memory"][0] == scores["chance"][0]
    assert scores["chance"][0] == pytest.approx((side == 1).mean(), abs=0.02)


# ------------------------------------------------------------------------------------------------------ the program


def save_agent(path, name, env_id, **flags):
    module = script(name)
    args = module.Args(**tiny(name, env_id=env_id, num_envs=50, **flags))
    vec, max_steps = args.make_envs(1)
    agent = module.Agent(vec.single_observation_space.shape[0], vec.single_action_space, max_steps, args)
    module.save(path, args, agent=agent.state_dict())
    return path


def main(*words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["probe", *map(str, words)])
        probe.main()


@pytest.mark.parametrize(
    "name, env_id, found",
    [
        # Even random weights keep something of a target speed that is in every reward, and of a cue in an observation.
        ("sac_mate", "cheetah-vel", 0.3),
        ("sac_lstm", "ant-dir", None),
        ("ddqn_gpt2", "tmaze-passive", 0.9),
    ],
)
def test_from_a_model_to_files_and_figure(name, env_id, found, tmp_path):
    flags = {"corridor_length": 4} if name.startswith("ddqn") else {"max_episode_steps": 10}
    (tmp_path / "run").mkdir()
    save_agent(tmp_path / "run" / "model.pt", name, env_id, **flags)
    main(tmp_path / "run", "--episodes", 100, "--output-dir", tmp_path / "out")
    with open(tmp_path / "out" / "probe.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[0]["script"], rows[0]["env_id"], rows[0]["t"]) == (name, env_id, "0")
    assert float(rows[0]["score_memory"]) == pytest.approx(float(rows[0]["score_untrained"]), abs=1e-6), "m_0 is empty"
    if found is not None:
        assert float(rows[-1]["score_memory"]) > found
    assert len((tmp_path / "out" / "projection.csv").read_text().splitlines()) == 101
    image = matplotlib.image.imread(tmp_path / "out" / "probe.png")
    assert len(np.unique(image.reshape(-1, image.shape[-1]), axis=0)) > 50


def test_several_memories_of_one_environment(tmp_path):
    flags = {"max_episode_steps": 4}
    models = [save_agent(tmp_path / f"{s}.pt", s, "point-robot", **flags) for s in ("sac_mate", "sac_gpt2")]
    main(*models, "--episodes", 100, "--output-dir", tmp_path / "out")
    with open(tmp_path / "out" / "probe.csv", newline="") as file:
        assert {row["script"] for row in csv.DictReader(file)} == {"sac_mate", "sac_gpt2"}


def test_bad_input_gets_one_line(tmp_path):
    markov = save_agent(tmp_path / "markov.pt", "sac_markov", "point-robot", max_episode_steps=4)
    for words, answer in (
        ([tmp_path / "nothing"], "does not exist"),
        ([markov], "has no memory"),
        ([markov, "--episodes", 10], "--episodes must be at least 100"),
    ):
        with pytest.raises(SystemExit, match=f"^error: .*{answer}"):
            main("--episodes", 100, *words, "--output-dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()
