"""SAC: the update against a slow computation of the same, each gradient, and runs on every environment."""

import copy
import json
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS, results_of, scalars_of, script, twin_q
from moviepy import VideoFileClip
from torch.distributions import Normal, TanhTransform, TransformedDistribution

import envs
from envs import running

SAC = [name for name in SCRIPTS if name.startswith("sac")]
CONTINUOUS = ["ant-dir", "cheetah-vel", "walker-param", "hopper-param", "ml10", "ml10-appendix", "point-robot"]
LENGTHS, T, O, A = [6, 2, 5, 1], 6, 3, 2
TINY = dict(memory_dim=16, hidden_dim=16, batch_size=4, num_envs=3, eval_episodes=4, max_episode_steps=20)
SMALL = [f"--{key.replace('_', '-')}={value}" for key, value in TINY.items()]


def make_update(name, **changes):
    """An agent, target critics that differ from its own, and everything that an update takes."""
    module = script(name)
    args = module.Args(memory_dim=16, hidden_dim=16, learning_rate=0.01, tau=0.25, **changes)
    torch.manual_seed(0)
    box = gym.spaces.Box(-1.0, 1.0, (A,))
    agent, other = (module.Agent(O, box, 11, args).double() for _ in range(2))
    batch = make_batch()
    with torch.no_grad():  # shift one critic until it is the smaller at half of the steps
        x = module.transition(batch["obs"][:, :-1], batch["action"], batch["reward"], batch["obs"][:, 1:])
        h = agent.features(batch["obs"], agent.memory(x))
        for critics in (agent.critics, other.critics):
            q1, q2 = twin_q(critics, h[:, :-1], batch["action"])
            critics.q1[-1].bias.sub_((q1 - q2)[batch["mask"].bool()].median())
    target = other.critics.requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate)
    return module, agent, target, optimizer, args


def make_batch(lengths=LENGTHS, T=T, seed=0):
    """Random episodes of these lengths, padded to T with noise, the first of them truncated, the others terminated."""
    g, B = torch.Generator().manual_seed(seed), len(lengths)
    batch = {"obs": torch.randn(B, T + 1, O, generator=g), "action": torch.rand(B, T, A, generator=g) * 2 - 1}
    batch |= {"reward": torch.randn(B, T, generator=g), "terminated": torch.zeros(B, T)}
    for b, n in enumerate(lengths[1:], start=1):
        batch["terminated"][b, n - 1] = 1.0
    batch["mask"] = (torch.arange(T) < torch.tensor(lengths)[:, None]).float()
    return {key: value.double() for key, value in batch.items()}


def update_with_noise(parts, batch, noise):
    """One update in which the policy draws exactly this noise, (B, T+1, A)."""
    module, agent, target, optimizer, args = parts
    randn_like, module.torch.randn_like = torch.randn_like, lambda mean: noise
    try:
        return module.update(agent, target, optimizer, batch, args)
    finally:
        module.torch.randn_like = randn_like


# --------------------------------------------------------------------------------------------------------- update


@pytest.mark.parametrize("autotune", [True, False])
@pytest.mark.parametrize("name", SAC)
def test_losses_against_a_slow_loop(name, autotune):
    """Episode by episode and step by step, with the memory carried along by `step` as in a rollout."""
    parts = make_update(name, autotune=autotune, alpha=0.3)
    _, agent, target, _, args = parts
    agent.log_alpha.data.fill_(math.log(0.3))
    batch, noise = make_batch(), torch.randn(4, T + 1, A).double()

    def policy(h, noise):
        mean, raw = agent.actor(h).chunk(2, dim=-1)
        base = Normal(mean, (-5 + (2 + 5) / 2 * (raw.tanh() + 1)).exp())
        u = base.mean + base.stddev * noise
        squashed = TransformedDistribution(base, [TanhTransform(cache_size=1)])
        action = squashed.transforms[0](u)
        return action, squashed.log_prob(action).sum(-1)

    squares1, squares2, actor, log_probs, values, smaller, bootstrapped = [], [], [], [], [], set(), 0
    with torch.no_grad():
        for b, length in enumerate(LENGTHS):
            state = agent.memory.initial_state(1)
            for t in range(length):
                s, a, r, s_next = (
                    batch["obs"][b, t],
                    batch["action"][b, t],
                    batch["reward"][b, t],
                    batch["obs"][b, t + 1],
                )
                h = agent.features(s[None], agent.memory.read(state))
                state = agent.memory.step(torch.cat([s, a, r[None], s_next])[None], state)
                h_next = agent.features(s_next[None], agent.memory.read(state))
                q1, q2 = twin_q(agent.critics, h, a[None])
                y = r
                if not batch["terminated"][b, t]:
                    next_action, next_log_prob = policy(h_next, noise[b, t + 1])
                    y = r + args.gamma * (
                        min(q.item() for q in twin_q(target, h_next, next_action)) - 0.3 * next_log_prob
                    )
                    bootstrapped += t == length - 1
                squares1.append((q1 - y) ** 2)
                squares2.append((q2 - y) ** 2)
                new_action, log_prob = policy(h, noise[b, t])
                new_q = [q.item() for q in twin_q(agent.critics, h, new_action)]
                smaller.add(new_q[0] < new_q[1])
                actor.append(0.3 * log_prob - min(new_q))
                log_probs.append(log_prob)
                values.append(q1)
    assert bootstrapped == 1 and smaller == {True, False}, (
        "the batch tells truncation from termination, and has both minima"
    )
    metrics = update_with_noise(parts, batch, noise)
    assert len(actor) == 14

    def mean(values):
        return torch.cat([v.reshape(1) for v in values]).mean()

    expected = {"qf1_loss": mean(squares1), "qf2_loss": mean(squares2), "actor_loss": mean(actor)}
    expected |= {"entropy": -mean(log_probs), "qf1_values": mean(values)}
    expected["alpha_loss"] = math.log(0.3) * (expected["entropy"] + A)
    for key, value in expected.items():
        torch.testing.assert_close(metrics[f"losses/{key}"], value)
    assert metrics["losses/alpha"].item() == pytest.approx(0.3)
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("name", SAC)
def test_padding_changes_neither_loss_nor_gradient(name):
    short, long = make_batch(), make_batch([11] * 4, 11, seed=9)
    noise = torch.randn(4, 12, A).double()
    for key, value in short.items():
        long[key][:, : value.shape[1]] = value
        if key in ("mask", "terminated"):
            long[key][:, value.shape[1] :] = 0
    long["obs"][1, 3:] = 77.0  # padding inside the shorter batch, too
    outcomes = []
    for batch in (short, long):
        parts = make_update(name)
        metrics = update_with_noise(parts, batch, noise[:, : batch["obs"].shape[1]])
        outcomes.append((metrics, {key: p.grad for key, p in parts[1].named_parameters()}))
    torch.testing.assert_close(outcomes[0], outcomes[1])


@pytest.mark.parametrize("name", SAC)
def test_update_moves_every_network_and_the_targets_by_tau(name):
    parts = make_update(name)
    module, agent, target, *_ = parts
    before, target_before = copy.deepcopy(agent), copy.deepcopy(target)
    module.update(*parts[1:4], make_batch(), parts[4])
    for (key, new), old in zip(agent.named_parameters(), before.parameters()):
        assert not torch.equal(new, old), key
    for new, old, online in zip(target.parameters(), target_before.parameters(), agent.critics.parameters()):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * online)
        assert new.grad is None


def test_alpha_rises_when_the_policy_is_too_certain_and_falls_when_it_is_too_random():
    for log_std_bias, rises in ((-5.0, True), (0.6, False)):
        parts = make_update("sac_mate")
        agent = parts[1]
        with torch.no_grad():  # the policy's spread: almost none, or about that of a uniform one
            agent.actor[-1].weight.zero_()
            agent.actor[-1].bias.copy_(torch.tensor([0.0] * A + [log_std_bias] * A))
        metrics = parts[0].update(*parts[1:4], make_batch(), parts[4])
        assert (metrics["losses/entropy"] < agent.target_entropy) == rises
        assert (agent.log_alpha.exp().item() > 0.2) == rises
    fixed = make_update("sac_mate", autotune=False, alpha=0.7)
    fixed[0].update(*fixed[1:4], make_batch(), fixed[4])
    assert fixed[1].log_alpha.exp().item() == pytest.approx(0.7)


# -------------------------------------------------------------------------------------------------------- the agent


def test_log_probability_against_torch_distributions_and_far_out():
    _, agent, *_ = make_update("sac_mate")
    h = torch.randn(50, 32).double()
    torch.manual_seed(3)
    action, log_prob = agent.sample(h)
    torch.manual_seed(3)
    mean, raw = agent.actor(h).chunk(2, dim=-1)
    base = Normal(mean, (-5 + 3.5 * (raw.tanh() + 1)).exp())
    u = mean + base.stddev * torch.randn_like(mean)
    reference = TransformedDistribution(base, [TanhTransform(cache_size=1)])
    torch.testing.assert_close(action, u.tanh())
    torch.testing.assert_close(log_prob, reference.log_prob(reference.transforms[0](u)).sum(-1))

    # Where 1 - tanh(u)^2 is zero in floating point, the naive form is infinite. Here value and gradient stay finite.
    agent = agent.float()
    with torch.no_grad():
        agent.actor[-1].bias[:A] = 40.0
    h = torch.randn(50, 32, requires_grad=True)
    action, log_prob = agent.sample(h)
    assert (1 - action**2 == 0).all() and log_prob.isfinite().all()
    log_prob.sum().backward()
    assert all(p.grad.isfinite().all() for p in agent.actor.parameters())


def test_actions_are_scaled_to_the_box():
    module = script("sac_mate")
    box = gym.spaces.Box(np.float32([-2, 0, 5]), np.float32([2, 1, 9]))
    agent = module.Agent(O, box, 5, module.Args(memory_dim=16, hidden_dim=16))
    np.testing.assert_allclose(agent.to_env(np.array([-1.0, -1, -1])), box.low)
    np.testing.assert_allclose(agent.to_env(np.array([1.0, 1, 1])), box.high)
    np.testing.assert_allclose(agent.to_env(np.array([0.0, 0.5, -0.5])), [0, 0.75, 6])
    obs, m = torch.randn(100, O), torch.randn(100, 16)
    acts = [agent.act(obs, m) for _ in range(2)]
    assert torch.equal(*acts) and acts[0].abs().max() < 1, "deterministic"
    assert not torch.equal(agent.explore(obs, m), agent.explore(obs, m))


@pytest.mark.parametrize("steps", [4, 8])
def test_evaluation_reports_success_at_any_step_overall_and_by_task(steps):
    module = script("sac_mate")
    vec, T = envs.make_vec("odd_envs:successful", 4, max_episode_steps=steps)
    agent = module.Agent(O, vec.single_action_space, T, module.Args(memory_dim=16, hidden_dim=16))
    metrics = module.evaluate(agent, vec, T, 7, torch.device("cpu"))
    assert metrics["eval/success_rate"] == pytest.approx(4 / 7)
    assert metrics["eval/success_rate/even"] == 1 and metrics["eval/success_rate/odd"] == 0
    assert metrics["eval/episodic_return"] == pytest.approx((4 * steps + 3 * 3) / 7)
    assert metrics["eval/episodic_length"] == pytest.approx((4 * steps + 3 * 3) / 7)


# ------------------------------------------------------------------------------------------------------ whole runs


def train_here(name, monkeypatch, tmp_path, **changes):
    """A run in this process, which is faster than many new ones. Returns its folder."""
    module = script(name)
    monkeypatch.chdir(tmp_path)
    args = dict(TINY, total_timesteps=600, learning_starts=150, updates_per_step=0.05, eval_interval=300) | changes
    module.train(module.Args(exp_name=name, **args))
    [folder] = (tmp_path / "runs").glob("*")
    return module, folder


@pytest.mark.parametrize("env_id", CONTINUOUS + ["Pendulum-v1"])
@pytest.mark.parametrize("name", SAC)
def test_every_script_learns_on_every_environment(name, env_id, monkeypatch, tmp_path):
    changes = {"env_id": env_id}
    if env_id.startswith("ml10"):  # fewer simulators to build, and episodes to draw a task for
        changes |= {"num_envs": 1, "eval_episodes": 1, "max_episode_steps": 30}
    module, folder = train_here(name, monkeypatch, tmp_path, **changes)
    results, saved = results_of(folder), torch.load(folder / "model.pt", weights_only=True)
    # The number of updates follows the steps, whether episodes are cut at 20 steps or a robot falls before that.
    assert results["updates"] == math.ceil((results["steps"] - 150) * 0.05) == 23
    args = module.Args(**saved["args"])
    vec, T = envs.make_vec(env_id, 1, max_episode_steps=args.max_episode_steps)
    torch.manual_seed(args.seed)
    agent = module.Agent(vec.single_observation_space.shape[0], vec.single_action_space, T, args)
    for key, value in agent.state_dict().items():
        assert not torch.equal(value, saved["agent"][key]) and saved["agent"][key].isfinite().all(), key
    tags = scalars_of(folder)
    assert len(tags["eval/episodic_return"]) == len(tags["eval/return_first_quarter"]) == 3
    assert len(tags["eval/return_last_quarter"]) == 3
    if env_id.startswith("ml10"):
        assert len(tags["eval/success_rate"]) == 3
        assert any(tag.startswith("eval/success_rate/") and tag.endswith("-v3") for tag in tags)


@pytest.mark.parametrize("changes", [{"freeze_critic": False}, {"autotune": False, "alpha": 0.1}, {"async_envs": True}])
def test_switches_run(changes, monkeypatch, tmp_path):
    _, folder = train_here("sac_mate", monkeypatch, tmp_path, env_id="hopper-param", **changes)
    assert results_of(folder)["updates"] == 23
    weights = torch.load(folder / "model.pt", weights_only=True)["agent"]
    assert (weights["log_alpha"].exp().item() == pytest.approx(0.1)) == ("alpha" in changes)


def test_learning_waits_for_the_first_episode_of_many_environments(monkeypatch, tmp_path):
    """With 40 environments of 20 steps nothing has ended after 100 steps in all, though learning could start."""
    changes = {"env_id": "point-robot", "num_envs": 40, "learning_starts": 100, "total_timesteps": 1000}
    _, folder = train_here("sac_markov", monkeypatch, tmp_path, **changes)
    assert results_of(folder)["updates"] == math.ceil((1000 - 100) * 0.05), "and then catches up"


def test_actions_are_random_before_learning_starts(monkeypatch, tmp_path):
    module, explored = script("sac_mate"), []
    explore = module.Agent.explore
    monkeypatch.setattr(module.Agent, "explore", lambda *a: explored.append(len(a[1])) or explore(*a))
    train_here("sac_mate", monkeypatch, tmp_path, env_id="point-robot")
    assert sum(explored) == 600 - 150


def test_what_a_run_hands_to_its_parts(monkeypatch, tmp_path):
    """Actions are stored in [-1, 1] and reach the environment scaled to its box; as many updates as the flag says."""
    module, seen = script("sac_mate"), {}
    update = module.update

    def recording_update(agent, target, optimizer, batch, args):
        if not seen:
            seen.update(lr=optimizer.param_groups[0]["lr"], batch=len(batch["obs"]))
            seen["copied"] = all(map(torch.equal, agent.critics.parameters(), target.parameters()))
        return update(agent, target, optimizer, batch, args)

    class Buffer(module.ReplayBuffer):
        def __init__(self, capacity, *rest):
            super().__init__(capacity, *rest)
            seen_buffers.append(self)

    seen_buffers = []
    monkeypatch.setattr(module, "update", recording_update)
    monkeypatch.setattr(module, "ReplayBuffer", Buffer)
    changes = {"env_id": "odd_envs:echo", "learning_starts": 200, "total_timesteps": 330, "updates_per_step": 0.5}
    changes |= {"max_episode_steps": 10, "buffer_size": 50, "learning_rate": 0.0123, "batch_size": 5}
    _, folder = train_here("sac_mate", monkeypatch, tmp_path, **changes)
    assert results_of(folder)["updates"] == math.ceil((330 - 200) * 0.5)
    assert seen == {"lr": 0.0123, "batch": 5, "copied": True}
    [buffer] = seen_buffers
    action = buffer.episodes["action"][: buffer.count, :, 0]
    np.testing.assert_allclose(buffer.episodes["reward"][: buffer.count], 7 + 2 * action, rtol=1e-5)
    assert buffer.capacity == 50 and np.abs(action).max() <= 1
    assert action[:15].min() < -0.8 and action[:15].max() > 0.8 and abs(action[:15].mean()) < 0.2, "uniform at first"


def test_the_state_embedding_is_on_the_sphere():
    _, agent, *_ = make_update("sac_mate")
    h = agent.features(torch.tensor([[1e-1, 2.0, 0.0], [100.0, -40.0, 7.0]]).double(), torch.zeros(2, 16).double())
    torch.testing.assert_close(h[:, :16].norm(dim=-1), torch.full((2,), 4.0).double(), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "flags, what",
    [
        (["--learning-rate", 1e30], "action is not finite at step"),
        (["--env-id", "odd_envs:broken"], "reward is not finite at step 21:"),  # the seventh step of three environments
        (["--env-id", "odd_envs:broken-start"], "first observation is not finite at step 60:"),  # of the second episode
    ],
)
def test_a_run_that_goes_wrong_stops_and_says_so(flags, what, run):
    defaults = [
        "--env-id",
        "point-robot",
        "--total-timesteps",
        2000,
        "--learning-starts",
        150,
        "--updates-per-step",
        0.1,
    ]
    done, [folder] = run("sac_mate", *defaults, *SMALL, *flags, code=1, pythonpath=ROOT / "tests")
    assert done.stderr.startswith(what) and done.stderr.count("\n") == 1
    saved = running.load(folder / "checkpoint.pt")  # the last good one
    assert all(value.isfinite().all() for value in saved["agent"].values()) and not (folder / "results.json").exists()


@pytest.mark.parametrize("name", ["alpha", "learning_starts", "total_timesteps", "num_envs", "checkpoint_interval"])
def test_a_number_that_makes_no_sense_is_refused(name):
    for value in (0, -1, float("nan")):
        with pytest.raises(SystemExit, match=f"^--{name.replace('_', '-')} must be more than 0"):
            script("sac_mate").Args(**{name: value})


def test_a_run_as_a_user_starts_it(run):
    flags = ["--env-id", "hopper-param", "--total-timesteps", 2700, "--learning-starts", 150, "--updates-per-step", 0.1]
    done, [folder] = run("sac_mate", *flags, "--eval-interval", 1000, *SMALL)
    results, tags = results_of(folder), scalars_of(folder)
    assert json.loads((folder / "args.json").read_text())["batch_size"] == 4
    assert len(tags["charts/episodic_return"]) == len(tags["charts/episodic_length"]) == results["episodes"]
    assert len({n for _, n in tags["charts/episodic_length"]}) > 3, "hoppers fall at different times"
    losses = ["qf1_loss", "qf2_loss", "actor_loss", "alpha_loss", "alpha", "entropy", "qf1_values"]
    for tag in ["charts/SPS"] + [f"losses/{loss}" for loss in losses]:
        assert len(tags[tag]) == results["updates"] // 100 == 2
    assert f"best average return {results['best_return']:.3f}" in done.stdout.splitlines()[-1]


def test_same_seed_same_weights_and_another_seed_others(run, tmp_path):
    weights = []
    for k, seed in enumerate((3, 3, 4)):
        (tmp_path / str(k)).mkdir()
        flags = ["--seed", seed, "--env-id", "hopper-param", "--total-timesteps", 450, "--learning-starts", 150, *SMALL]
        _, [folder] = run("sac_mate", *flags, "--updates-per-step", 0.1, cwd=tmp_path / str(k))
        weights.append(torch.load(folder / "model.pt", weights_only=True)["agent"])
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not any(torch.equal(weights[0][key], weights[2][key]) for key in weights[0])


@pytest.mark.parametrize("env_id", ["point-robot", "hopper-param"])
def test_videos_of_evaluations(run, env_id, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)  # no screen: MuJoCo must draw by EGL
    flags = ["--env-id", env_id, "--total-timesteps", 90, "--learning-starts", 80, "--capture-video", *SMALL]
    _, [folder] = run("sac_markov", *flags, "--no-save-model")
    videos = list((folder / "videos").glob("*/*.mp4"))
    assert len(videos) == 2 and not (folder / "model.pt").exists()
    frame = VideoFileClip(str(videos[0])).get_frame(0)
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) > 4  # something is to be seen


def test_what_videos_need_is_said_in_one_line(run, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")  # whose library is not among what we ask for
    done, folders = run("sac_markov", "--env-id", "hopper-param", "--capture-video", code=1)
    assert done.stderr.startswith("--capture-video cannot draw hopper-param") and "apt install libegl1" in done.stderr
    assert done.stderr.count("\n") == 1 and folders == []


def test_track_is_the_usual_switch(run, tmp_path):
    (tmp_path / "wandb.py").write_text("import json\ndef init(**k): json.dump(k, open('wandb.json', 'w'))\n")
    flags = [
        "--env-id",
        "point-robot",
        "--total-timesteps",
        90,
        "--learning-starts",
        80,
        "--track",
        "--wandb-project-name",
        "p",
        *SMALL,
    ]
    run("sac_markov", *flags, "--wandb-entity", "e", pythonpath=tmp_path)
    called = json.loads((tmp_path / "wandb.json").read_text())
    assert called["project"] == "p" and called["entity"] == "e" and called["sync_tensorboard"] is True
    assert called["config"]["env_id"] == "point-robot"


@pytest.mark.parametrize(
    "flags, answer",
    [
        (["--env-id", "odd_envs:echo", "--max-episode-steps", 10, "--capture-video"], "has no pictures"),
        (["--track"], "--track needs Weights and Biases: pip install wandb"),  # not among the requirements
        (["--env-id", "CartPole-v1"], "SAC needs a flat, bounded Box"),
        (["--env-id", "ant"], "unknown environment 'ant'"),
        (["--env-id", "odd_envs:unbounded"], "SAC needs a flat, bounded Box"),
        (["--env-id", "odd_envs:image"], "flat Box of numbers"),
        (["--env-id", "odd_envs:successful"], "--max-episode-steps"),
        (
            ["--env-id", "point-robot", "--batch-size", 500],
            "--learning-starts must be at least --batch-size episodes, 25000",
        ),
        (
            ["--env-id", "point-robot", "--total-timesteps", 500],
            "--learning-starts must be less than --total-timesteps",
        ),
    ],
)
def test_bad_input_gets_one_line_and_leaves_nothing_behind(flags, answer, run, tmp_path):
    done, folders = run("sac_mate", *flags, code=1, pythonpath=ROOT / "tests")
    assert answer in done.stderr and done.stderr.count("\n") == 1 and not done.stdout
    assert not folders and not list(tmp_path.iterdir())
