"""Double DQN: the loss against a slow loop over episodes and steps, clipping, exploration."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import DDQN, LENGTHS, OBS, make_batch, make_update, script, tiny, train_in, update

from envs.tmaze import observe


@pytest.mark.parametrize("name", DDQN)
def test_double_q_loss_against_a_slow_loop(name):
    """Episode by episode and step by step, with the memory carried along by `step` as in a rollout."""
    parts = make_update(name)
    _, agent, target, _, args = parts
    batch = make_batch(name)
    squares, taken, bootstrapped, disagreements = [], [], 0, 0
    with torch.no_grad():
        for b, length in enumerate(LENGTHS):
            states = [net.memory.initial_state(1) for net in (agent, target)]
            for t in range(length):
                s, s_next, a, r = *batch["obs"][b, t : t + 2], batch["action"][b, t], batch["reward"][b, t]
                q = agent(s[None], agent.memory.read(states[0]))[0]
                x = torch.cat([s, a, r[None], s_next])[None]
                states = [net.memory.step(x, state) for net, state in zip((agent, target), states)]
                online, offline = (net(s_next[None], net.memory.read(m))[0] for net, m in zip((agent, target), states))
                y = r
                if not batch["terminated"][b, t]:
                    y = r + args.gamma * offline[online.argmax()]
                    bootstrapped += t == length - 1
                disagreements += int(online.argmax() != offline.argmax())
                squares.append((q[a.argmax()] - y) ** 2)
                taken.append(q[a.argmax()])
    assert bootstrapped == 1 and disagreements > 0, "the batch tells truncation from termination, and double Q from Q"
    assert len(squares) == sum(LENGTHS)
    metrics = update(parts, batch)
    torch.testing.assert_close(metrics["losses/td_loss"], torch.stack(squares).mean())
    torch.testing.assert_close(metrics["losses/q_values"], torch.stack(taken).mean())
    assert not any(value.requires_grad for value in metrics.values())


def test_gradients_are_clipped():
    parts = make_update("ddqn_mate", max_grad_norm=1e-3)
    metrics = update(parts, make_batch("ddqn_mate"))
    norm = torch.cat([p.grad.flatten() for p in parts[1].parameters()]).norm()
    assert metrics["losses/grad_norm"] > 0.1 and norm == pytest.approx(1e-3, rel=1e-3)


def test_epsilon_falls_linearly_to_one_over_T_over_a_tenth_of_the_run(monkeypatch, tmp_path):
    module = script("ddqn_mate")
    args = module.Args(total_episodes=1000)
    assert module.epsilon_at(0, 50, args) == 1.0
    assert module.epsilon_at(50, 50, args) == pytest.approx((1 + 1 / 50) / 2)
    assert module.epsilon_at(100, 50, args) == module.epsilon_at(999, 50, args) == pytest.approx(1 / 50)
    args.end_epsilon, args.start_epsilon = 0.2, 0.6
    assert module.epsilon_at(0, 50, args) == 0.6 and module.epsilon_at(500, 50, args) == pytest.approx(0.2)
    assert module.epsilon_at(1, 5, module.Args(exploration_fraction=0.0)) == pytest.approx(1 / 5)

    seen, explore = [], module.Agent.explore  # and a run explores with it
    monkeypatch.setattr(module.Agent, "explore", lambda self, obs, m, e: seen.append(e) or explore(self, obs, m, e))
    train_in(tmp_path, "ddqn_mate", **tiny("ddqn_mate", exploration_fraction=0.5, end_epsilon=0.3))
    assert seen[0] == 1.0 and seen[-1] == pytest.approx(0.3) and sorted(seen, reverse=True) == seen
    assert len(set(seen)) > 10


def test_policies():
    module = script("ddqn_mate")
    torch.manual_seed(0)
    agent = module.Agent(OBS, gym.spaces.Discrete(4, start=-1), 5, module.Args(memory_dim=16, hidden_dim=16))
    obs, m = torch.randn(1, OBS).expand(4000, OBS), torch.randn(1, 16).expand(4000, 16)
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


def test_the_learning_rate_is_annealed_to_zero(monkeypatch, tmp_path):
    module, rates = script("ddqn_mate"), []
    update_of_module = module.update

    def recorded(agent, target, optimizer, batch, args):
        rates.append(optimizer.param_groups[0]["lr"])
        return update_of_module(agent, target, optimizer, batch, args)

    monkeypatch.setattr(module, "update", recorded)
    train_in(tmp_path, "ddqn_mate", **tiny("ddqn_mate", anneal_lr=True, learning_rate=1.0))
    assert rates == sorted(rates, reverse=True) and rates[0] == pytest.approx(1 - 7 / 60, abs=0.05) and rates[-1] < 0.1
    rates.clear()
    train_in(tmp_path, "ddqn_mate", **tiny("ddqn_mate", learning_rate=0.01, exp_name="constant"))
    assert set(rates) == {0.01}


def optimal_episodes(corridor_length, scale):
    """Both optimal episodes of the passive T-Maze, and their actions. `scale` changes the observations in cells."""
    cells, cue = np.r_[np.arange(corridor_length + 1), corridor_length], np.zeros(corridor_length + 2)
    obs, actions = [], []
    for goal, turn in ((1.0, 1), (-1.0, 3)):
        cue[0] = goal
        y = np.r_[np.zeros(corridor_length + 1), goal]
        obs.append(observe(cells, y, cue, corridor_length) * scale)
        actions.append(np.r_[np.zeros(corridor_length, int), turn])
    return torch.tensor(np.stack(obs), dtype=torch.float32), torch.tensor(np.stack(actions))


@pytest.mark.parametrize("name, cells", [("ddqn_mate", True), ("ddqn_lstm", True), ("ddqn_mate", False)])
def test_the_scale_of_the_maze_decides_how_fast_the_optimal_actions_are_learned(name, cells):
    """Supervised, L = 200: in cells within some hundred updates, with x / L and a cue of 1 not in 600."""
    module, L = script(name), 200
    torch.manual_seed(5)
    agent = module.Agent(3, gym.spaces.Discrete(4), L + 1, module.Args(memory_dim=64, hidden_dim=128))
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    obs, actions = optimal_episodes(L, 1.0 if cells else np.array([1 / L, 1, 1 / L]))
    one_hot, reward = torch.eye(4)[actions], torch.zeros(2, L + 1)
    reward[:, -1] = 1.0
    x = module.transition(obs[:, :-1], one_hot, reward, obs[:, 1:])
    values = one_hot * 0.99 ** torch.arange(L, -1, -1)[None, :, None]  # late after any other action
    for _ in range(600):
        q = agent(obs, agent.memory(x))[:, :-1]
        if solved := torch.equal(q.argmax(-1), actions):
            break
        optimizer.zero_grad()
        (q - values).square().mean().backward()
        optimizer.step()
    assert solved == cells
