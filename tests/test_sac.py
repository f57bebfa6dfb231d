"""SAC: the losses against a slow loop over episodes and steps, the policy against torch.distributions."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import SAC, A, T, make_batch, make_update, script, slow_sac, spy, tiny, train_in, update


@pytest.mark.parametrize("autotune", [True, False])
@pytest.mark.parametrize("name", SAC)
def test_losses_against_a_slow_loop(name, autotune):
    """Their gradients are in test_paper.py."""
    parts = make_update(name, autotune=autotune, alpha=0.3)
    batch, noise = make_batch(name), torch.randn(4, T + 1, A).double()
    expected = slow_sac(parts, batch, noise) | {"alpha": torch.tensor(0.3).double()}
    metrics = update(parts, batch, noise)
    torch.testing.assert_close(metrics, {f"losses/{key}": value.detach() for key, value in expected.items()})
    assert not any(value.requires_grad for value in metrics.values())
    assert (parts[1].log_alpha.exp().item() == pytest.approx(0.3)) == (not autotune)


def test_policies_and_the_log_probability_far_out():
    module, box = script("sac_mate"), gym.spaces.Box(np.float32([-2, 0, 5]), np.float32([2, 1, 9]))
    agent = module.Agent(3, box, 5, module.Args(memory_dim=16, hidden_dim=16))
    obs, m = torch.randn(2000, 3), torch.randn(2000, 16)
    acts = [agent.act(obs, m) for _ in range(2)]
    assert torch.equal(*acts) and acts[0].abs().max() < 1, "deterministic in evaluation"
    assert not torch.equal(agent.explore(obs, m), agent.explore(obs, m)), "stochastic in training"
    uniform = agent.random(obs, m)
    assert uniform.abs().max() <= 1 and uniform.mean().abs() < 0.05
    assert uniform.std() == pytest.approx(3**-0.5, abs=0.03)
    for action, expected in (([-1.0, -1, -1], box.low), ([1.0, 1, 1], box.high), ([0.0, 0.5, -0.5], [0, 0.75, 6])):
        np.testing.assert_allclose(agent.to_env(np.array(action)), expected)
    h = agent.features(torch.tensor([[1e-1, 2.0, 0.0], [100.0, -40.0, 7.0]]), torch.zeros(2, 16))
    torch.testing.assert_close(h[:, :16].norm(dim=-1), torch.full((2,), 4.0), rtol=1e-4, atol=0)  # on the sphere

    # Where 1 - tanh(u)^2 is zero in floating point, the naive form is infinite. Here value and gradient are finite.
    with torch.no_grad():
        agent.actor[-1].bias[:A] = 40.0
    action, log_prob = agent.sample(torch.randn(50, 32))
    assert (1 - action**2 == 0).all() and log_prob.isfinite().all()
    log_prob.sum().backward()
    assert all(p.grad.isfinite().all() for p in agent.actor.parameters())


def test_a_run_acts_at_random_first_and_stores_actions_between_minus_one_and_one(monkeypatch, tmp_path):
    """The reward of this environment is the action that reached it, in [5, 9]."""
    explored = spy(monkeypatch, script("sac_mate").Agent, "explore", lambda agent, obs, m: len(obs))
    changes = {"env_id": "odd_envs:echo", "max_episode_steps": 10, "total_timesteps": 330, "learning_starts": 200}
    folder = train_in(tmp_path, "sac_mate", **tiny("sac_mate", **changes))
    assert sum(explored) == 330 - 201, "three environments take 201 random steps"
    buffer = torch.load(folder / "checkpoint.pt", weights_only=True)["buffer"]
    action, reward = buffer["action"][3:, :, 0], buffer["reward"][3:]  # of finished episodes
    torch.testing.assert_close(reward, 7 + 2 * action)
    assert action.abs().max() <= 1 and action[:15].min() < -0.8 and action[:15].max() > 0.8
