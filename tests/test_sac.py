"""SAC: the losses against a slow loop over episodes and steps, the policy against torch.distributions."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    LENGTHS,
    OBS,
    SAC,
    A,
    T,
    make_batch,
    make_update,
    results_of,
    script,
    tiny,
    train_in,
    twin_q,
    update,
)
from torch.distributions import Normal, TanhTransform, TransformedDistribution


def policy(agent, h, noise):
    """The squashed Gaussian of torch.distributions: an action and its log-probability."""
    mean, raw = agent.actor(h).chunk(2, dim=-1)
    base = Normal(mean, (-5 + (2 + 5) / 2 * (raw.tanh() + 1)).exp())
    squashed = TransformedDistribution(base, [TanhTransform(cache_size=1)])
    action = squashed.transforms[0](base.mean + base.stddev * noise)
    return action, squashed.log_prob(action).sum(-1)


@pytest.mark.parametrize("autotune", [True, False])
@pytest.mark.parametrize("name", SAC)
def test_losses_against_a_slow_loop(name, autotune):
    """Episode by episode and step by step, with the memory carried along by `step` as in a rollout."""
    parts = make_update(name, autotune=autotune, alpha=0.3)
    _, agent, target, _, args = parts
    batch, noise = make_batch(name), torch.randn(4, T + 1, A).double()
    squares1, squares2, actor, log_probs, values, smaller, bootstrapped = [], [], [], [], [], set(), 0
    with torch.no_grad():
        for b, length in enumerate(LENGTHS):
            state = agent.memory.initial_state(1)
            for t in range(length):
                s, s_next, a, r = *batch["obs"][b, t : t + 2], batch["action"][b, t], batch["reward"][b, t]
                h = agent.features(s[None], agent.memory.read(state))
                state = agent.memory.step(torch.cat([s, a, r[None], s_next])[None], state)
                h_next = agent.features(s_next[None], agent.memory.read(state))
                q1, q2 = twin_q(agent.critics, h, a[None])
                y = r
                if not batch["terminated"][b, t]:
                    next_action, next_log_prob = policy(agent, h_next, noise[b, t + 1])
                    y = r + args.gamma * (min(twin_q(target, h_next, next_action)) - 0.3 * next_log_prob)
                    bootstrapped += t == length - 1
                new_action, log_prob = policy(agent, h, noise[b, t])
                new_q = twin_q(agent.critics, h, new_action)
                smaller.add(bool(new_q[0] < new_q[1]))
                squares1.append((q1 - y) ** 2)
                squares2.append((q2 - y) ** 2)
                actor.append(0.3 * log_prob - min(new_q))
                log_probs.append(log_prob)
                values.append(q1)
    assert bootstrapped == 1, "the batch tells truncation from termination"
    assert smaller == {True, False}, "and either critic is the smaller one somewhere"
    assert len(actor) == sum(LENGTHS)

    metrics = update(parts, batch, noise)
    expected = {"qf1_loss": squares1, "qf2_loss": squares2, "actor_loss": actor, "qf1_values": values}
    expected = {key: torch.cat(steps).mean() for key, steps in expected.items()}
    expected["entropy"] = -torch.cat(log_probs).mean()
    expected["alpha_loss"] = math.log(0.3) * (expected["entropy"] + A)
    for key, value in expected.items():
        torch.testing.assert_close(metrics[f"losses/{key}"], value)
    assert metrics["losses/alpha"].item() == pytest.approx(0.3)
    assert not any(value.requires_grad for value in metrics.values())
    assert (agent.log_alpha.exp().item() == pytest.approx(0.3)) == (not autotune)


def test_alpha_rises_when_the_policy_is_too_certain_and_falls_when_it_is_too_random():
    for log_std_bias, rises in ((-5.0, True), (0.6, False)):
        parts = make_update("sac_mate")
        agent = parts[1]
        with torch.no_grad():  # a policy with almost no spread, and one that is about uniform
            agent.actor[-1].weight.zero_()
            agent.actor[-1].bias.copy_(torch.tensor([0.0] * A + [log_std_bias] * A))
        metrics = update(parts, make_batch("sac_mate"))
        assert (metrics["losses/entropy"] < -A) == rises
        assert (agent.log_alpha.exp().item() > 0.2) == rises


def test_log_probability_is_that_of_a_squashed_gaussian_and_finite_far_out():
    _, agent, *_ = make_update("sac_mate")
    h = torch.randn(50, 32).double()
    torch.manual_seed(3)
    sampled = agent.sample(h)
    torch.manual_seed(3)
    torch.testing.assert_close(sampled, policy(agent, h, torch.randn(50, A, dtype=torch.float64)))

    # Where 1 - tanh(u)^2 is zero in floating point, the naive form is infinite. Here value and gradient stay finite.
    agent = agent.float()
    with torch.no_grad():
        agent.actor[-1].bias[:A] = 40.0
    action, log_prob = agent.sample(torch.randn(50, 32))
    assert (1 - action**2 == 0).all() and log_prob.isfinite().all()
    log_prob.sum().backward()
    assert all(p.grad.isfinite().all() for p in agent.actor.parameters())


def test_policies():
    module = script("sac_mate")
    box = gym.spaces.Box(np.float32([-2, 0, 5]), np.float32([2, 1, 9]))
    agent = module.Agent(OBS, box, 5, module.Args(memory_dim=16, hidden_dim=16))
    obs, m = torch.randn(2000, OBS), torch.randn(2000, 16)
    acts = [agent.act(obs, m) for _ in range(2)]
    assert torch.equal(*acts) and acts[0].abs().max() < 1, "deterministic in evaluation"
    assert not torch.equal(agent.explore(obs, m), agent.explore(obs, m)), "stochastic in training"
    uniform = agent.random(obs, m)
    assert (
        uniform.abs().max() <= 1 and uniform.mean().abs() < 0.05 and uniform.std() == pytest.approx(3**-0.5, abs=0.03)
    )
    np.testing.assert_allclose(agent.to_env(np.array([-1.0, -1, -1])), box.low)
    np.testing.assert_allclose(agent.to_env(np.array([1.0, 1, 1])), box.high)
    np.testing.assert_allclose(agent.to_env(np.array([0.0, 0.5, -0.5])), [0, 0.75, 6])
    h = agent.features(torch.tensor([[1e-1, 2.0, 0.0], [100.0, -40.0, 7.0]]), torch.zeros(2, 16))
    torch.testing.assert_close(h[:, :16].norm(dim=-1), torch.full((2,), 4.0), rtol=1e-4, atol=0)  # on the sphere


def test_a_run_acts_at_random_first_and_stores_actions_between_minus_one_and_one(monkeypatch, tmp_path):
    """The reward of this environment is the action that reached it, in [5, 9]."""
    module, explored = script("sac_mate"), []
    explore = module.Agent.explore
    monkeypatch.setattr(module.Agent, "explore", lambda *a: explored.append(len(a[1])) or explore(*a))
    changes = {"env_id": "odd_envs:echo", "max_episode_steps": 10, "total_timesteps": 330, "learning_starts": 200}
    folder = train_in(tmp_path, "sac_mate", **tiny("sac_mate", **changes))
    assert sum(explored) == 330 - 201, "three environments take 201 random steps"
    buffer = torch.load(folder / "checkpoint.pt", weights_only=True)["buffer"]
    action, reward = buffer["action"][3:, :, 0], buffer["reward"][3:]  # of finished episodes
    torch.testing.assert_close(reward, 7 + 2 * action)
    assert action.abs().max() <= 1 and action[:15].min() < -0.8 and action[:15].max() > 0.8


def test_learning_waits_for_the_first_episode_of_many_environments(tmp_path):
    """With 40 environments of 20 steps no episode has ended after 100 steps, when learning could start."""
    changes = {"num_envs": 40, "learning_starts": 100, "total_timesteps": 1000}
    folder = train_in(tmp_path, "sac_markov", **tiny("sac_markov", **changes))
    assert results_of(folder)["updates"] == math.ceil((1000 - 100) * 0.05), "it catches up"
