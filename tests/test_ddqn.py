"""Double DQN: the update against a slow computation of the same, the rollout against the environment, whole runs."""

import copy
import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import SCRIPTS, results_of, scalars_of, script

import envs

DDQN = [name for name in SCRIPTS if name.startswith("ddqn")]
SMALL = ["--memory-dim", 16, "--hidden-dim", 16, "--batch-size", 4, "--num-envs", 3, "--learning-starts", 6]
SMALL += ["--eval-episodes", 5, "--corridor-length", 4]


def make_args(module, **changes):
    return module.Args(memory_dim=16, hidden_dim=16, learning_rate=0.01, max_grad_norm=1e9, tau=0.25, **changes)


def make_batch(lengths, T, O=3, A=4, seed=0):
    """Random episodes of these lengths, padded to T with noise, the first of them truncated, the others terminated."""
    g, B = torch.Generator().manual_seed(seed), len(lengths)
    batch = {"obs": torch.randn(B, T + 1, O, generator=g), "reward": torch.randn(B, T, generator=g)}
    batch["action"] = torch.nn.functional.one_hot(torch.randint(A, (B, T), generator=g), A).float()
    batch["terminated"] = torch.zeros(B, T)
    for b, n in enumerate(lengths[1:], start=1):
        batch["terminated"][b, n - 1] = 1.0
    batch["mask"] = (torch.arange(T) < torch.tensor(lengths)[:, None]).float()
    return {key: value.double() for key, value in batch.items()}


def make_update(name, T, **changes):
    """An agent, a target that differs from it, and everything that an update takes."""
    module = script(name)
    args = make_args(module, **changes)
    torch.manual_seed(0)
    agent, target = (module.Agent(3, gym.spaces.Discrete(4), T, args).double() for _ in range(2))
    target.requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate)
    return module, agent, target, optimizer, args


# --------------------------------------------------------------------------------------------------------- update


@pytest.mark.parametrize("name", DDQN)
def test_double_q_loss_against_a_slow_loop(name):
    """Episode by episode and step by step, with the memory carried along by `step` as in a rollout."""
    lengths, T = [6, 2, 5, 1], 6
    module, agent, target, optimizer, args = make_update(name, T)
    batch = make_batch(lengths, T)
    squares, taken, bootstrapped, disagreements = [], [], 0, 0
    with torch.no_grad():
        for b, length in enumerate(lengths):
            states = [net.memory.initial_state(1) for net in (agent, target)]
            for t in range(length):
                s, a, r, s_next = (
                    batch[k][b, t + n] for k, n in (("obs", 0), ("action", 0), ("reward", 0), ("obs", 1))
                )
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
    metrics = module.update(agent, target, optimizer, batch, args)
    assert len(squares) == 14
    torch.testing.assert_close(metrics["losses/td_loss"], torch.stack(squares).mean())
    torch.testing.assert_close(metrics["losses/q_values"], torch.stack(taken).mean())
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("name", DDQN)
def test_padding_changes_neither_loss_nor_gradient(name):
    short = make_batch([6, 2, 5, 1], 6)
    noise = make_batch([11] * 4, 11, seed=9)
    long = {key: noise[key].clone() for key in noise}
    for key, value in short.items():
        long[key][:, : value.shape[1]] = value
        if key in ("mask", "terminated"):
            long[key][:, value.shape[1] :] = 0
    long["obs"][1, 3:] = 77.0  # padding inside the shorter batch, too
    outcomes = []
    for batch in (short, long):
        module, agent, target, optimizer, args = make_update(name, 11)
        metrics = module.update(agent, target, optimizer, batch, args)
        outcomes.append((metrics["losses/td_loss"], {key: p.grad for key, p in agent.named_parameters()}))
    torch.testing.assert_close(outcomes[0][0], outcomes[1][0])
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1])


@pytest.mark.parametrize("name", DDQN)
def test_update_moves_the_agent_and_the_target_by_tau(name):
    module, agent, target, optimizer, args = make_update(name, 6)
    before, target_before = copy.deepcopy(agent), copy.deepcopy(target)
    module.update(agent, target, optimizer, make_batch([6, 2, 5, 1], 6), args)
    for (key, new), old in zip(agent.named_parameters(), before.parameters()):
        assert not torch.equal(new, old), key
    for new, old, online in zip(target.parameters(), target_before.parameters(), agent.parameters()):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * online)
        assert new.grad is None


def test_gradients_are_clipped():
    module, agent, target, optimizer, args = make_update("ddqn_mate", 6)
    args.max_grad_norm = 1e-3
    metrics = module.update(agent, target, optimizer, make_batch([6, 2, 5, 1], 6), args)
    norm = torch.cat([p.grad.flatten() for p in agent.parameters()]).norm()
    assert metrics["losses/grad_norm"] > 0.1 and norm == pytest.approx(1e-3, rel=1e-3)


# ----------------------------------------------------------------------------------------- exploration and rollout


def test_epsilon_falls_linearly_to_one_over_T_over_a_tenth_of_the_run():
    module = script("ddqn_mate")
    args = module.Args(total_episodes=1000)
    assert module.epsilon_at(0, 50, args) == 1.0
    assert module.epsilon_at(50, 50, args) == pytest.approx((1 + 1 / 50) / 2)
    assert module.epsilon_at(100, 50, args) == module.epsilon_at(999, 50, args) == pytest.approx(1 / 50)
    args.end_epsilon, args.start_epsilon = 0.2, 0.6
    assert module.epsilon_at(0, 50, args) == 0.6 and module.epsilon_at(500, 50, args) == pytest.approx(0.2)


def test_exploration_is_random_with_probability_epsilon():
    module = script("ddqn_mate")
    torch.manual_seed(0)
    agent = module.Agent(3, gym.spaces.Discrete(4), 5, make_args(module))
    obs, m = torch.randn(1, 3).expand(4000, 3), torch.randn(1, 16).expand(4000, 16)
    greedy = agent.act(obs, m)
    assert greedy.sum(-1).eq(1).all() and torch.equal(agent.explore(obs, m, 0.0), greedy)
    counts = agent.explore(obs, m, 1.0).sum(0)
    assert counts.min() > 880 and counts.max() < 1120
    share = (agent.explore(obs, m, 0.4) == greedy).all(-1).float().mean()
    assert share == pytest.approx(0.6 + 0.4 / 4, abs=0.03)


@pytest.mark.parametrize("name", DDQN)
@pytest.mark.parametrize("env_id", ["tmaze-active", "CartPole-v1"])
def test_rollout_stores_true_episodes_and_remembers_each_on_its_own(name, env_id):
    """Every stored episode is replayed in an environment of its own, and at every step the memory carried along is
    that of the episode's transitions so far. CartPole falls after some steps and is cut off after others."""
    module, options = script(name), {"corridor_length": 6} if "tmaze" in env_id else {"max_episode_steps": 20}
    vec, T = envs.make_vec(env_id, 5, **options)
    O, A = vec.single_observation_space.shape[0], int(vec.single_action_space.n)
    torch.manual_seed(0)
    agent = module.Agent(O, vec.single_action_space, T, make_args(module))
    buffer = module.ReplayBuffer(1000, 5, T, O, A)
    rollout = module.Rollout(vec, agent, torch.device("cpu"))
    rollout.reset(seed=3)
    contexts = []  # of the episodes, as they are stored
    with torch.no_grad():
        while buffer.count < 60:
            obs, m = rollout.view()
            np.testing.assert_array_equal(obs, rollout.obs)
            for i in range(5):
                t, current = buffer.t[i], {k: torch.as_tensor(v[i]) for k, v in buffer.current.items()}
                x = module.transition(
                    current["obs"][:t], current["action"][:t], current["reward"][:t], current["obs"][1 : t + 1]
                )
                expected = agent.memory(x[None])[0, -1] if t else agent.memory(torch.zeros(1, 1, x.shape[-1]))[0, 0]
                torch.testing.assert_close(m[i], expected, rtol=1e-4, atol=1e-5)
            count = buffer.count
            step, infos = rollout.step(agent.explore(obs, m, 0.8))
            finished = buffer.add(*step)
            if finished and "tmaze" in env_id:
                contexts += list(infos["final_info"]["context"][infos["_final_info"]])
            assert len(finished) == buffer.count - count
            for k, (episodic_return, length) in enumerate(finished):
                assert episodic_return == pytest.approx(buffer.episodes["reward"][count + k, :length].sum(), abs=1e-5)
                assert length == buffer.length[count + k]

    ends, env = set(), gym.make(env_id, **options)
    for row in range(buffer.count):
        n = buffer.length[row]
        episode = {key: array[row] for key, array in buffer.episodes.items()}
        if "tmaze" in env_id:
            env.reset(options={"context": contexts[row]})
        else:
            env.reset()
            env.unwrapped.state = episode["obs"][0].astype(np.float64)
        for t in range(n):
            obs, reward, terminated, truncated, _ = env.step(int(episode["action"][t].argmax()))
            np.testing.assert_allclose(obs, episode["obs"][t + 1], atol=1e-5)
            assert reward == pytest.approx(episode["reward"][t], abs=1e-6)
            assert terminated == episode["terminated"][t]
            assert (terminated or truncated) == (t == n - 1)
        ends.add((terminated, truncated))
    assert ends == {(True, False)} if "tmaze" in env_id else ends >= {(True, False), (False, True)}


def test_buffer_keeps_the_newest_episodes_and_samples_them_padded():
    module = script("ddqn_mate")
    buffer = module.ReplayBuffer(capacity=4, num_envs=2, max_steps=5, obs_dim=1, action_dim=2)
    lengths = {0: [5, 2, 1, 3], 1: [1, 1, 4, 5]}  # what each environment's episodes are

    def stream(i):
        for episode, n in enumerate(lengths[i]):
            for t in range(n):
                yield 100 * i + 10 * episode + t, t == n - 1  # a name for each step

    expected = []
    for steps in zip(stream(0), stream(1)):
        names, ended = np.array([s[0] for s in steps]), np.array([s[1] for s in steps])
        obs, action = names[:, None] + 0.25, np.eye(2)[[0, 1]]
        buffer.add(obs, action, names, names[:, None] + 0.5, ended, np.zeros(2, dtype=bool))
        expected += [int(n) for n in names[ended]]
    assert buffer.count == len(expected) == 8
    torch.manual_seed(0)
    batch = buffer.sample(200, "cpu")
    assert batch["obs"].shape == (200, 6, 1) and batch["action"].shape == (200, 5, 2)
    n = batch["mask"].sum(1).long()
    rows = torch.arange(200)
    last = batch["reward"][rows, n - 1]
    assert set(last.int().tolist()) == set(expected[-4:]), "the newest four"
    assert (batch["mask"].diff(dim=1) <= 0).all() and (batch["terminated"] * batch["mask"]).sum(1).eq(1).all()
    assert batch["terminated"][rows, n - 1].eq(1).all()
    torch.testing.assert_close(batch["obs"][rows, n, 0], last + 0.5)  # the true last observation
    torch.testing.assert_close(batch["obs"][rows, n - 1, 0], last + 0.25)
    assert batch["action"][rows, n - 1].argmax(-1).eq((last >= 100).long()).all()
    few = module.ReplayBuffer(4, 2, 5, 1, 2)
    few.add(np.ones((2, 1)), np.eye(2), np.ones(2), np.ones((2, 1)), np.array([True, False]), np.zeros(2, dtype=bool))
    assert few.sample(3, "cpu")["obs"].shape == (3, 2, 1), "only what is stored, no longer than the longest drawn"


def test_evaluation_is_on_the_same_seeds_and_counts_each_first_episode_once():
    module = script("ddqn_mate")
    vec, T = envs.make_vec("tmaze-passive", 4, corridor_length=7)
    agent = module.Agent(3, vec.single_action_space, T, make_args(module))
    contexts, reset = [], vec.reset

    def recording_reset(**kwargs):
        obs, infos = reset(**kwargs)
        contexts.append(infos["context"].copy())
        return obs, infos

    vec.reset = recording_reset
    agent.act = lambda obs, m: torch.eye(4)[torch.ones(len(obs), dtype=torch.long)]  # up: never leaves the start
    first = module.evaluate(agent, vec, T, 9, torch.device("cpu"))
    assert first["eval/episodic_return"] == pytest.approx(-1)
    assert first["eval/episodic_length"] == T == 8
    assert first["eval/return_first_quarter"] == pytest.approx(-2 / 7)
    assert first["eval/return_last_quarter"] == pytest.approx(-1 / 7), "of two steps, the horizon's own is free"
    again = module.evaluate(agent, vec, T, 9, torch.device("cpu"))
    assert again == first and len(contexts) == 6  # three rounds of four environments
    for a, b in zip(contexts[:3], contexts[3:]):
        np.testing.assert_array_equal(a, b)
    seeds = [module.EVAL_SEED + k for k in range(12)]
    env = gym.make("tmaze-passive")
    expected = [env.reset(seed=s)[1]["context"][0] for s in seeds]
    assert np.concatenate(contexts[:3]).ravel().tolist() == expected

    # Always right, then up: a return of 1 where the goal is above. Nine episodes, and not the twelve that were run.
    def right_then_up(obs, m):
        return torch.eye(4)[torch.where(obs[:, 0] == 0, 1, 0)]

    agent.act = right_then_up
    metrics = module.evaluate(agent, vec, T, 9, torch.device("cpu"))
    assert np.mean(np.array(expected[:9]) == 1) != np.mean(np.array(expected) == 1)
    assert metrics["eval/episodic_return"] == pytest.approx(np.mean(np.array(expected[:9]) == 1))


def test_the_state_embedding_is_on_the_sphere():
    """The first layer of the Q-network sees a state of norm sqrt(D), whatever the scale of the observation."""
    module = script("ddqn_mate")
    agent = module.Agent(3, gym.spaces.Discrete(4), 5, make_args(module))
    seen = []
    agent.q[0].register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    agent.act(torch.tensor([[1e-1, 2.0, 0.0], [100.0, -40.0, 7.0]]), torch.zeros(2, 16))
    torch.testing.assert_close(seen[0][:, :16].norm(dim=-1), torch.full((2,), 16**0.5), rtol=1e-4, atol=0)


def test_actions_that_do_not_start_at_zero():
    module = script("ddqn_mate")
    agent = module.Agent(3, gym.spaces.Discrete(3, start=-1), 5, make_args(module))
    assert agent.to_env(np.eye(3)).tolist() == [-1, 0, 1]


# ------------------------------------------------------------------------------------------------------ whole runs


def test_what_a_run_hands_to_its_parts(monkeypatch, tmp_path):
    """Flags that no other test would miss: each is caught where it is used."""
    module, seen = script("ddqn_mate"), {"epsilon": [], "evaluated": []}
    update, explore, evaluate = module.update, module.Agent.explore, module.evaluate

    def recording_update(agent, target, optimizer, batch, args):
        if "batch" not in seen:
            seen.update(batch=len(batch["obs"]), lr=optimizer.param_groups[0]["lr"], agent=agent)
            seen["copied"] = all(map(torch.equal, agent.parameters(), target.parameters()))
        return update(agent, target, optimizer, batch, args)

    def recording_explore(agent, obs, m, epsilon):
        seen["epsilon"].append(epsilon)
        return explore(agent, obs, m, epsilon)

    def recording_evaluate(agent, *rest):
        seen["evaluated"].append(agent)
        return evaluate(agent, *rest)

    class Buffer(module.ReplayBuffer):
        def __init__(self, capacity, *rest):
            seen["capacity"] = capacity
            super().__init__(capacity, *rest)

    monkeypatch.chdir(tmp_path)
    for name, value in (("update", recording_update), ("evaluate", recording_evaluate), ("ReplayBuffer", Buffer)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module.Agent, "explore", recording_explore)
    args = module.Args(env_id="envs:tmaze-passive", corridor_length=4, total_episodes=60, num_envs=3, batch_size=5,
                       buffer_size=17, learning_rate=0.0123, memory_dim=8, hidden_dim=8, learning_starts=6,
                       end_epsilon=0.3, exploration_fraction=0.5, torch_deterministic=False)  # fmt: skip
    module.train(args)
    assert (seen["batch"], seen["lr"], seen["capacity"], seen["copied"]) == (5, 0.0123, 17, True)
    assert seen["evaluated"] == [seen["agent"]] * 2
    assert seen["epsilon"][0] == 1.0 and seen["epsilon"][-1] == pytest.approx(0.3)
    assert sorted(seen["epsilon"], reverse=True) == seen["epsilon"] and 0.6 < np.mean(seen["epsilon"][:30]) < 0.95
    assert torch.backends.cudnn.deterministic is False


@pytest.mark.parametrize("name", ["num_envs", "total_episodes", "batch_size", "buffer_size", "learning_rate", "tau",
                                  "max_grad_norm", "memory_dim", "hidden_dim", "eval_interval", "eval_episodes",
                                  "corridor_length", "max_episode_steps"])  # fmt: skip
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_number_that_makes_no_sense_is_refused(name, value):
    with pytest.raises(SystemExit, match=f"^--{name.replace('_', '-')} must be more than 0"):
        script("ddqn_mate").Args(**{name: value})


def test_numbers_at_their_limits():
    module = script("ddqn_mate")
    module.Args(seed=0, updates_per_episode=0.0, gamma=1.0, end_epsilon=0.0, exploration_fraction=0.0)
    assert module.epsilon_at(1, 5, module.Args(exploration_fraction=0.0)) == pytest.approx(1 / 5)
    for bad in (
        {"gamma": 1.1},
        {"tau": 2.0},
        {"start_epsilon": 1.5},
        {"end_epsilon": -0.1},
        {"seed": -1},
        {"learning_starts": 63},
        {"total_episodes": 100},
    ):
        with pytest.raises(SystemExit):
            module.Args(**bad)


def test_a_run_that_diverges_stops_and_says_so(run):
    flags = ["--total-episodes", 300, "--learning-rate", 1e30, "--max-grad-norm", 1e30, *SMALL]
    done, [folder] = run("ddqn_mate", *flags, code=1)
    assert "is not finite at step" in done.stderr and done.stderr.count("\n") == 1
    assert not (folder / "model.pt").exists() and not (folder / "results.json").exists()
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert all(value.isfinite().all() for value in saved["agent"].values()), "the last good one"


@pytest.mark.parametrize("name", DDQN)
def test_a_run_learns_and_writes_what_it_should(name, run):
    flags = ["--total-episodes", 230, "--updates-per-episode", 0.5, "--eval-interval", 100, *SMALL]
    done, [folder] = run(name, *flags)
    assert folder.name.startswith(f"tmaze-passive__{name}__1__")
    module, results = script(name), results_of(folder)
    saved = torch.load(folder / "model.pt", weights_only=True)
    assert saved["args"] == json.loads((folder / "args.json").read_text())
    assert saved["args"]["total_episodes"] == 230 and saved["args"]["gamma"] == 0.99
    args = module.Args(**saved["args"])
    torch.manual_seed(args.seed)
    agent = module.Agent(3, gym.spaces.Discrete(4), 5, args)
    for key, value in agent.state_dict().items():
        assert not torch.equal(value, saved["agent"][key]), f"{key} did not change"
    agent.load_state_dict(saved["agent"])

    scalars = scalars_of(folder)
    assert results["episodes"] >= 230 and results["updates"] == int((results["episodes"] - 6) * 0.5 + 0.999)
    assert len(scalars["charts/episodic_return"]) == len(scalars["charts/episodic_length"]) == results["episodes"]
    assert sum(n for _, n in scalars["charts/episodic_length"]) <= results["steps"]
    evaluations = scalars["eval/episodic_return"]
    assert len(evaluations) == 4, "before the first step, after 100 and 200 episodes, at the end"
    assert evaluations[0][0] == 0
    assert evaluations[-1][0] == results["steps"]
    assert results["best_return"] == pytest.approx(max(value for _, value in evaluations))
    assert results["last_return"] == pytest.approx(evaluations[-1][1])
    for tag in ("charts/SPS", "charts/epsilon", "losses/td_loss", "losses/q_values", "losses/grad_norm"):
        assert len(scalars[tag]) == results["updates"] // 100 == 1
    assert f"best average return {results['best_return']:.3f}" in done.stdout.splitlines()[-1]


def test_same_seed_same_weights_and_another_seed_others(run, tmp_path):
    weights = []
    for k, seed in enumerate((3, 3, 4)):
        (tmp_path / str(k)).mkdir()
        flags = ["--seed", seed, "--total-episodes", 40, *SMALL]
        _, [folder] = run("ddqn_mate", *flags, cwd=tmp_path / str(k))
        weights.append(torch.load(folder / "model.pt", weights_only=True)["agent"])
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not any(torch.equal(weights[0][key], weights[2][key]) for key in weights[0])


def test_flags_reach_the_run(run):
    """Another environment, of which the time limit is set by a flag; no GPU, no model, a name of one's own."""
    flags = ["--env-id", "CartPole-v1", "--max-episode-steps", 15, "--total-episodes", 40, "--no-save-model"]
    flags += ["--no-cuda", "--no-torch-deterministic", "--exp-name", "mine", *SMALL]
    _, [folder] = run("ddqn_mate", *flags)
    assert folder.name.startswith("CartPole-v1__mine__1__")
    assert not (folder / "model.pt").exists() and results_of(folder)["updates"] > 0
    assert max(n for _, n in scalars_of(folder)["charts/episodic_length"]) == 15


def test_videos_of_evaluations(run):
    flags = ["--env-id", "tmaze-active", "--total-episodes", 12, "--eval-interval", 6, "--capture-video", *SMALL]
    _, [folder] = run("ddqn_mate", *flags)
    videos = sorted((folder / "videos").glob("*/*.mp4"))
    assert len(videos) == 3 and all(video.stat().st_size > 1000 for video in videos)


@pytest.mark.parametrize(
    "flags, answer",
    [
        (["--env-id", "tmaze"], "unknown environment 'tmaze'"),
        (["--env-id", "Pendulum-v1"], "Double DQN needs Discrete"),
        (["--env-id", "FrozenLake-v1"], "flat Box"),
        (["--corridor-length", 1], "corridor length must be a whole number, 2 or more"),
    ],
)
def test_bad_input_gets_one_line_and_leaves_nothing_behind(flags, answer, run, tmp_path):
    done, folders = run("ddqn_mate", *flags, code=1)
    assert answer in done.stderr and done.stderr.count("\n") == 1 and not done.stdout
    assert not folders and not list(tmp_path.iterdir())
