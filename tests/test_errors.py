"""What goes wrong is said in one line, and what was saved before stays good."""

import math

import pytest
import torch
from conftest import refused, script, spy, tiny, train_in, weights_of
from torch.utils._pytree import tree_leaves


def test_bad_input_gets_one_line_and_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, words, answer in (
        ("sac_mate", ["--env-id=ant-dri"], "unknown environment 'ant-dri': try ant-dir, any id of Gymnasium's, or"),
        (
            "sac_mate",
            ["--env-id=bandit"],
            "unknown environment 'bandit': try tmaze-passive, tmaze-active, point-robot,",
        ),
        ("sac_mate", ["--env-id=no such thing"], "unknown environment"),
        ("sac_mate", ["--env-id=CartPole-v1"], "has actions Discrete(2), a flat, bounded Box is needed"),
        ("sac_mate", ["--env-id=odd_envs:unbounded"], "a flat, bounded Box is needed"),
        ("sac_mate", ["--env-id=odd_envs:image"], "a flat Box is needed"),
        ("sac_mate", ["--env-id=odd_envs:successful"], "without a time limit: set max_episode_steps"),
        ("sac_mate", ["--env-id=odd_envs:echo", "--capture-video"], "echo cannot be rendered"),
        ("sac_mate", ["--gamma=1.5", "--total-timesteps=100"], "--gamma 1.5 is out of range"),
        ("sac_mate", ["--seed=99999999999999999999"], "is out of range"),
        ("sac_mate", ["--env-id=HalfCheetah-v5", "--total-timesteps=16000", "--learning-starts=9"], "exceed 16000"),
        ("sac_mate", ["--env-id=Ant-v3"], "mujoco"),
        ("ddqn_mate", ["--env-id=no_such_module:tmaze-passive"], "cannot import no_such_module"),
        ("ddqn_mate", ["--env-id=Pendulum-v1"], "has actions Box(-2.0, 2.0, (1,), float32), Discrete is needed"),
        ("ddqn_mate", ["--env-id=FrozenLake-v1"], "a flat Box is needed"),
        ("ddqn_mate", ["--corridor-length=1"], "corridor length must be a whole number, 2 or more"),
        ("ddqn_mate", ["--max-episode-steps=9"], "follows from corridor_length"),
    ):
        assert answer in refused(name, *words)


def assert_stops(folder, name, message, **changes):
    """A run that must stop with this message and leave a good checkpoint behind."""
    with pytest.raises(SystemExit, match=f"^error: .*{message}") as exit:
        train_in(folder, name, **tiny(name, checkpoint_interval=1e-9, **changes))
    assert "\n" not in exit.value.code
    [run] = (folder / "runs").iterdir()
    assert not (run / "model.pt").exists() and not (run / "results.json").exists()
    saved = torch.load(run / "checkpoint.pt", weights_only=True)
    parts = [saved[part] for part in ("agent", "target", "optimizer", "buffer")] + [weights_of(run, "best.pt")]
    assert all(leaf.isfinite().all() for leaf in tree_leaves(parts) if isinstance(leaf, torch.Tensor))


def test_a_number_that_is_not_finite_stops_the_run_and_is_not_saved(tmp_path):
    # After six good steps of three environments, and where their first episodes end.
    assert_stops(tmp_path / "a", "sac_mate", "reward is not finite at step 18", env_id="odd_envs:nan-reward")
    assert_stops(tmp_path / "e", "sac_mate", "reward is not finite at step 18", env_id="odd_envs:too-large-reward")
    assert_stops(tmp_path / "b", "sac_mate", "first observation is not finite at step 57", env_id="odd_envs:nan-start")
    assert_stops(tmp_path / "c", "sac_mate", "action is not finite at step", learning_rate=1e15)
    diverges = {"learning_rate": 1e15, "max_grad_norm": 1e15, "total_episodes": 300}
    assert_stops(tmp_path / "d", "ddqn_mate", "is not finite at step", **diverges)


@pytest.mark.parametrize("name, network", [("ddqn_mate", "q.0.weight"), ("sac_mate", "critics.0.0.weight")])
def test_weights_that_are_not_finite_are_never_saved(name, network, monkeypatch, tmp_path):
    """Also where no action shows it: the greedy action of NaN is an action, and critics do not act."""

    def break_weights(agent):
        weight = agent.get_parameter(network)
        if len(saves) >= 30 and weight.requires_grad:  # by now it learns, and it is not the target
            weight.data[0, 0] = math.nan

    saves = spy(monkeypatch, script(name).Agent, "state_dict", break_weights)
    assert_stops(tmp_path, name, f"{network} is not finite at step")
