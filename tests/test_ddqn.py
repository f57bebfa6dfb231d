"""Double DQN: the loss against a slow loop over episodes and steps, clipping, exploration."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import DDQN, LENGTHS, make_batch, make_update, script, spy, tiny, train_in, update, walk

from envs.tmaze import observe


@pytest.mark.parametrize("max_grad_norm", [1e9, 1e-3])
@pytest.mark.parametrize("name", DDQN)
def test_double_q_loss_against_a_slow_loop(name, max_grad_norm):
    """And its gradient, parameter by parameter, which is clipped."""
    parts, batch = make_update(name, max_grad_norm=max_grad_norm), make_batch(name)
    _, agent, target, _, args = parts
    squares, taken, truncated, disagreements = [], [], 0, 0
    for (b, t), s, a, r, s_next, [m, _], [m_next, target_m_next], bootstrap in walk(batch, agent, target):
        q, online, offline = agent(s, m)[0], agent(s_next, m_next)[0], target(s_next, target_m_next)[0]
        y = r + args.gamma * offline[online.argmax()].detach() if bootstrap else r
        truncated += int(bootstrap and t == LENGTHS[b] - 1)
        disagreements += int(online.argmax() != offline.argmax())
        squares.append((q[a.argmax()] - y) ** 2)
        taken.append(q[a.argmax()])
    assert truncated == 1 and disagreements > 0, "the batch tells truncation from termination, and double Q from Q"
    td_loss = torch.stack(squares).mean()
    gradients = torch.autograd.grad(td_loss, list(agent.parameters()))
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    expected = {"td_loss": td_loss, "q_values": torch.stack(taken).mean(), "grad_norm": norm}
    metrics = update(parts, batch)
    torch.testing.assert_close(metrics, {f"losses/{key}": value.detach() for key, value in expected.items()})
    assert not any(value.requires_grad for value in metrics.values())
    assert norm > 0.1
    scale = min(1.0, max_grad_norm / (norm + 1e-6))
    for (key, parameter), gradient in zip(agent.named_parameters(), gradients):
        torch.testing.assert_close(parameter.grad, scale * gradient, msg=f"gradient of {key}")


def test_epsilon_falls_linearly_to_one_over_T_over_a_tenth_of_the_run(monkeypatch, tmp_path):
    module = script("ddqn_mate")
    args = module.Args(total_episodes=1000)
    assert module.epsilon_at(0, 50, args) == 1.0
    assert module.epsilon_at(50, 50, args) == pytest.approx((1 + 1 / 50) / 2)
    assert module.epsilon_at(100, 50, args) == module.epsilon_at(999, 50, args) == pytest.approx(1 / 50)
    args.end_epsilon, args.start_epsilon = 0.2, 0.6
    assert module.epsilon_at(0, 50, args) == 0.6 and module.epsilon_at(500, 50, args) == pytest.approx(0.2)
    assert module.epsilon_at(1, 5, module.Args(exploration_fraction=0.0)) == pytest.approx(1 / 5)

    # In a run, and so does the learning rate with --anneal-lr.
    epsilons = spy(monkeypatch, module.Agent, "explore", lambda agent, obs, m, epsilon: epsilon)
    settings = spy(monkeypatch, module, "update", lambda agent, target, optimizer, *_: dict(optimizer.param_groups[0]))
    changes = {"exploration_fraction": 0.5, "end_epsilon": 0.3, "anneal_lr": True, "learning_rate": 1.0}
    changes |= {"adam_eps": 0.01}
    train_in(tmp_path, "ddqn_mate", **tiny("ddqn_mate", **changes))
    assert epsilons[0] == 1.0 and epsilons[-1] == pytest.approx(0.3) and sorted(epsilons, reverse=True) == epsilons
    assert len(set(epsilons)) > 10
    rates = [setting["lr"] for setting in settings]
    assert {setting["eps"] for setting in settings} == {0.01}
    assert rates == sorted(rates, reverse=True) and rates[0] == pytest.approx(1 - 7 / 60, abs=0.05) and rates[-1] < 0.1


def test_policies():
    module = script("ddqn_mate")
    torch.manual_seed(0)
    agent = module.Agent(3, gym.spaces.Discrete(4, start=-1), 5, module.Args(memory_dim=16, hidden_dim=16))
    obs, m = torch.randn(1, 3).expand(4000, 3), torch.randn(1, 16).expand(4000, 16)
    assert 0 < agent(obs, m).abs().max() < 0.05, "a wrong initial value would take long to fade"
    greedy = agent.act(obs, m)
    assert greedy.sum(-1).eq(1).all() and torch.equal(greedy.argmax(-1), agent(obs, m).argmax(-1))
    assert torch.equal(agent.explore(obs, m, 0.0), greedy)
    counts = agent.explore(obs, m, 1.0).sum(0)
    assert counts.min() > 880 and counts.max() < 1120, "uniform"
    share = (agent.explore(obs, m, 0.4) == greedy).all(-1).float().mean()
    assert share == pytest.approx(0.6 + 0.4 / 4, abs=0.03)
    assert agent.to_env(np.eye(4)).tolist() == [-1, 0, 1, 2], "actions need not start at zero"

    seen = []  # the Q-network sees a state of norm sqrt(D), whatever the scale of the observation
    agent.q[0].register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    agent.act(torch.tensor([[1e-1, 2.0, 0.0], [100.0, -40.0, 7.0]]), torch.zeros(2, 16))
    torch.testing.assert_close(seen[0][:, :16].norm(dim=-1), torch.full((2,), 4.0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["ddqn_mate", "ddqn_lstm"])
def test_the_optimal_actions_of_a_long_maze_are_learned_within_some_hundred_updates(name):
    """Supervised, L = 200, one seed: others, and what other scales need, are in benchmark/README.md."""
    module, L = script(name), 200
    torch.manual_seed(5)
    agent = module.Agent(3, gym.spaces.Discrete(4), L + 1, module.Args(memory_dim=64, hidden_dim=128))
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    # Both optimal episodes of the passive maze: along the corridor, then up or down.
    goal, t = np.array([[1.0], [-1.0]]), np.arange(L + 2)
    obs = torch.tensor(observe(np.minimum(t, L) + 0 * goal, goal * (t > L), goal * (t == 0), L))
    actions = torch.tensor([[0] * L + [1], [0] * L + [3]])
    one_hot = torch.eye(4)[actions]
    x = module.transition(obs[:, :-1], one_hot, torch.zeros(2, L + 1), obs[:, 1:])  # the last reward comes too late
    values = one_hot * 0.99 ** torch.arange(L, -1, -1)[None, :, None]  # late after any other action
    for _ in range(600):
        q = agent(obs, agent.memory(x))[:, :-1]
        if torch.equal(q.argmax(-1), actions):
            return
        optimizer.zero_grad()
        (q - values).square().mean().backward()
        optimizer.step()
    pytest.fail("not learned")
