"""What holds for every script: updates, devices, bfloat16, rollout, buffer and evaluation, and whole runs."""

import contextlib
import copy
import json
import math
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    DDQN,
    OBS,
    SCRIPTS,
    A,
    T,
    flags,
    main,
    make_batch,
    make_update,
    refused,
    results_of,
    scalars_of,
    script,
    tiny,
    train_in,
    update,
    weights_of,
)
from moviepy import VideoFileClip
from torch.utils._python_dispatch import TorchDispatchMode

import envs

CPU = torch.device("cpu")

# --------------------------------------------------------------------------------------------------------- update


@pytest.mark.parametrize("name", SCRIPTS)
def test_padding_changes_neither_loss_nor_gradient(name):
    short, long = make_batch(name), make_batch(name, [11] * 4, 11, seed=9)
    noise = torch.randn(4, 12, A).double()
    for key, value in short.items():
        long[key][:, : value.shape[1]] = value
        if key in ("mask", "terminated"):
            long[key][:, value.shape[1] :] = 0
    long["obs"][1, 3:] = 77.0  # padding inside the shorter batch, too
    outcomes = []
    for batch in (short, long):
        parts = make_update(name)
        metrics = update(parts, batch, noise[:, : batch["obs"].shape[1]])
        outcomes.append((metrics, {key: p.grad for key, p in parts[1].named_parameters()}))
    torch.testing.assert_close(*outcomes)


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_update_moves_every_parameter_and_the_target_by_tau(name):
    parts = make_update(name)
    _, agent, target, *_ = parts
    before, target_before = copy.deepcopy(agent), copy.deepcopy(target)
    update(parts, make_batch(name))
    for (key, new), old in zip(agent.named_parameters(), before.parameters()):
        assert not torch.equal(new, old), key
    online = agent if name in DDQN else agent.critics
    for new, old, fast in zip(target.parameters(), target_before.parameters(), online.parameters(), strict=True):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * fast)
        assert new.grad is None


class OneDevice(TorchDispatchMode):
    """Raises where an operation mixes devices, as CUDA would; numbers (no dimensions) and copies may."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor) and a.ndim]
        assert len({tensor.device for tensor in tensors}) <= 1 or "copy" in function.__name__, function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_left_on_the_cpu(name, monkeypatch):
    """The device "meta" computes shapes alone, which is enough to see where every tensor lives."""
    module, agent, target, _, args = make_update(name)
    agent, target = agent.to("meta"), target.to("meta")
    optimizer = torch.optim.Adam(agent.parameters())
    batch = {key: value.to("meta") for key, value in make_batch(name).items()}
    monkeypatch.setattr(torch, "autocast", lambda device, dtype, enabled: contextlib.nullcontext())  # knows no "meta"
    monkeypatch.setattr(torch.Tensor, "__int__", lambda self: T)  # GPT-2 reads the longest episode from the device
    memory, obs = agent.memory, batch["obs"][:, 0]
    x = module.transition(obs, batch["action"][:, 0], batch["reward"][:, 0], batch["obs"][:, 1])
    with OneDevice():
        metrics = module.update(agent, target, optimizer, batch, args)
        with torch.no_grad():
            state = memory.reset(memory.step(x, memory.initial_state(4)), torch.zeros(4, dtype=bool, device="meta"))
            m = memory.read(state)
            actions = [agent.act(obs, m), agent.explore(obs, m, *[0.5] * (name in DDQN))]
            actions += [] if name in DDQN else [agent.random(obs, m)]
    state = state if isinstance(state, tuple) else (state,)
    assert {tensor.device.type for tensor in (m, *state, *actions, *metrics.values())} == {"meta"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_bf16_changes_the_precision_of_the_forward_passes_alone(name):
    batch = {key: value.float() for key, value in make_batch(name).items()}
    noise, outcomes, dtypes = torch.randn(4, T + 1, A), [], []
    for bf16 in (False, True):
        parts = make_update(name, bf16=bf16)
        agent, _ = parts[1].float(), parts[2].float()
        for network in (agent.memory, agent.q if name in DDQN else agent.actor):
            network.register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
        metrics = update(parts, batch, noise)
        for value in (*metrics.values(), *agent.parameters(), *(p.grad for p in agent.parameters())):
            assert value.dtype == torch.float32
        outcomes.append((metrics, torch.cat([p.grad.flatten() for p in agent.parameters()])))
    assert dtypes[:2] == [torch.float32] * 2 and dtypes[3] == torch.bfloat16
    assert dtypes[2] == torch.float32 or "mate" not in name, "MATE's sum is not rounded"
    (metrics, gradient), (rounded, rounded_gradient) = outcomes
    torch.testing.assert_close(rounded, metrics, rtol=0.03, atol=0.01)
    assert 0.99 < torch.cosine_similarity(rounded_gradient, gradient, dim=0) and not torch.equal(
        rounded_gradient, gradient
    )
    assert script(name).Args().bf16 is False


# ---------------------------------------------------------------------------- rollout, replay buffer, evaluation


@pytest.mark.parametrize("env_id", ["tmaze-active", "CartPole-v1"])
def test_rollout_stores_true_episodes_and_remembers_each_on_its_own(env_id):
    """Every stored episode is replayed in an environment of its own, and the memory at every step is that of the
    episode's transitions so far. CartPole falls after some steps and is truncated after others."""
    module, options = script("ddqn_gpt2"), {"corridor_length": 6} if "tmaze" in env_id else {"max_episode_steps": 20}
    vec, T = envs.make_vec(env_id, 5, **options)
    obs_dim, action_dim = vec.single_observation_space.shape[0], int(vec.single_action_space.n)
    torch.manual_seed(0)
    agent = module.Agent(obs_dim, vec.single_action_space, T, module.Args(memory_dim=16, hidden_dim=16))
    buffer = module.ReplayBuffer(1000, 5, T, obs_dim, action_dim)
    rollout = module.Rollout(vec, agent, CPU)

    def policy(obs, m):
        for i in range(5):
            t, row = buffer.length[i], {key: torch.as_tensor(array[i]) for key, array in buffer.data.items()}
            x = module.transition(*(row[k][:t] for k in ("obs", "action", "reward")), row["obs"][1 : t + 1])
            x = torch.cat([x, torch.zeros(1, x.shape[-1])])  # what follows does not matter for m_t
            torch.testing.assert_close(m[i], agent.memory(x[None])[0, t], rtol=1e-4, atol=1e-5)
        return agent.explore(obs, m, 0.8)

    rollout.reset(seed=3)
    contexts = []  # of the episodes, as they are stored
    while buffer.count < 60:
        count, step = buffer.count, rollout.step(policy)
        finished = buffer.add(step)
        if finished and "tmaze" in env_id:
            contexts += list(step.infos["final_info"]["context"][step.infos["_final_info"]])
        assert len(finished) == buffer.count - count
        for row, (episodic_return, length) in enumerate(finished, start=5 + count):
            assert episodic_return == pytest.approx(buffer.data["reward"][row, :length].sum(), abs=1e-5)
            assert length == buffer.length[row]

    ends, env = set(), gym.make(env_id, **options)
    for k in range(buffer.count):
        n, episode = buffer.length[5 + k], {key: array[5 + k] for key, array in buffer.data.items()}
        if "tmaze" in env_id:
            env.reset(options={"context": contexts[k]})
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
    lengths = {0: [5, 2, 1, 3], 1: [1, 1, 4, 5]}  # of the episodes of each environment

    def stream(i):
        for episode, n in enumerate(lengths[i]):
            for t in range(n):
                yield 100 * i + 10 * episode + t, t == n - 1  # a name for each step

    expected = []
    for steps in zip(stream(0), stream(1)):
        names, ended = np.array([s[0] for s in steps]), np.array([s[1] for s in steps])
        obs, next_obs, no = names[:, None] + 0.25, names[:, None] + 0.5, np.zeros(2, dtype=bool)
        buffer.add(module.Step(obs, np.eye(2), names, next_obs, ended, no, {}))
        expected += [int(n) for n in names[ended]]
        if buffer.count == 1:
            assert buffer.sample(3, CPU)["obs"].shape == (3, 2, 1), "what is stored, no longer than the longest drawn"
    assert buffer.count == len(expected) == 8
    copied = module.ReplayBuffer(4, 2, 5, 1, 2)
    copied.load_state_dict(buffer.state_dict())
    torch.manual_seed(0)
    batch = buffer.sample(200, CPU)
    torch.manual_seed(0)
    torch.testing.assert_close(copied.sample(200, CPU), batch, rtol=0, atol=0)
    assert batch["obs"].shape == (200, 6, 1) and batch["action"].shape == (200, 5, 2)
    n, rows = batch["mask"].sum(1).long(), torch.arange(200)
    last = batch["reward"][rows, n - 1]
    assert set(last.int().tolist()) == set(expected[-4:]), "the newest four"
    assert (batch["mask"].diff(dim=1) <= 0).all() and (batch["terminated"] * batch["mask"]).sum(1).eq(1).all()
    assert batch["terminated"][rows, n - 1].eq(1).all()
    torch.testing.assert_close(batch["obs"][rows, n, 0], last + 0.5)  # the true last observation
    torch.testing.assert_close(batch["obs"][rows, n - 1, 0], last + 0.25)
    assert batch["action"][rows, n - 1].argmax(-1).eq((last >= 100).long()).all()


def test_evaluation_is_on_fixed_seeds_and_counts_the_first_episode_of_each_environment():
    module = script("ddqn_mate")
    vec, T = envs.make_vec("tmaze-passive", 9, corridor_length=7)
    agent = module.Agent(OBS, vec.single_action_space, T, module.Args(memory_dim=16, hidden_dim=16))
    agent.act = lambda obs, m: torch.eye(4)[torch.ones(len(obs), dtype=torch.long)]  # up: never leaves the start
    metrics = module.evaluate(agent, vec, T, CPU)
    assert metrics["eval/episodic_return"] == pytest.approx(-1) and metrics["eval/return_standard_error"] < 1e-6
    assert metrics["eval/episodic_length"] == T == 8
    assert metrics["eval/return_first_quarter"] == pytest.approx(-2 / 7)
    assert metrics["eval/return_last_quarter"] == pytest.approx(-1 / 7), "the last of its two steps is free"

    # Right, then up where the goal is above, then idle: others are still under way when these have ended.
    agent.act = lambda obs, m: torch.eye(4)[torch.where(obs[:, 0] == 0, 1, 0)]
    returns = [gym.make("tmaze-passive").reset(seed=1_000_000 + i)[1]["context"][0] == 1 for i in range(9)]
    for _ in range(2):
        metrics = module.evaluate(agent, vec, T, CPU)
        assert metrics["eval/episodic_return"] == pytest.approx(np.mean(returns)) and len(set(returns)) == 2
        assert metrics["eval/return_standard_error"] == pytest.approx(np.std(returns, ddof=1) / 3)


@pytest.mark.parametrize("steps", [4, 8])
def test_evaluation_reports_success_at_any_step_overall_and_by_task(steps):
    module = script("sac_mate")
    vec, T = envs.make_vec("odd_envs:successful", 7, max_episode_steps=steps)
    agent = module.Agent(OBS, vec.single_action_space, T, module.Args(memory_dim=16, hidden_dim=16))
    metrics = module.evaluate(agent, vec, T, CPU)
    assert metrics["eval/success_rate"] == pytest.approx(4 / 7)
    assert metrics["eval/success_rate/even"] == 1 and metrics["eval/success_rate/odd"] == 0
    assert metrics["eval/episodic_return"] == metrics["eval/episodic_length"] == pytest.approx((4 * steps + 3 * 3) / 7)


# ------------------------------------------------------------------------------------------------------ whole runs


@pytest.mark.parametrize(
    "name, env_id, changes",
    [
        ("ddqn_mate", "envs:tmaze-passive", {"torch_deterministic": False, "cuda": False}),
        ("ddqn_lstm", "tmaze-active", {}),
        ("ddqn_gpt2", "CartPole-v1", {"max_episode_steps": 15, "updates_per_episode": 2.0}),
        ("sac_mate", "ant-dir", {}),
        ("sac_lstm", "cheetah-vel", {"autotune": False, "alpha": 0.1}),
        ("sac_gpt2", "walker-param", {"freeze_critic": False}),
        ("sac_markov", "hopper-param", {}),
        ("sac_mate", "ml10", {"num_envs": 1, "eval_episodes": 1, "max_episode_steps": 30}),
        ("sac_mate", "point-robot", {"bf16": True, "updates_per_step": 0.5}),
        ("sac_lstm", "Pendulum-v1", {"learning_rate": 0.01}),
    ],
)
def test_every_script_and_every_environment_is_trained(name, env_id, changes, tmp_path):
    """One training each: sections that scripts share are equal to the byte."""
    values = tiny(name, env_id=env_id, exp_name="mine", **changes)
    folder = train_in(tmp_path, name, **values)
    assert folder.name.startswith(f"{env_id}__mine__1__")
    files = {path.name for path in folder.iterdir() if not path.name.startswith("events.out.tfevents")}
    assert files == {"args.json", "best.pt", "checkpoint.pt", "model.pt", "results.json"}
    module, results, scalars = script(name), results_of(folder), scalars_of(folder)
    saved = torch.load(folder / "model.pt", weights_only=True)
    assert saved["args"] == json.loads((folder / "args.json").read_text()) and saved["script"] == name
    args = module.Args(**saved["args"])
    assert all(getattr(args, key) == value for key, value in values.items())
    assert torch.backends.cudnn.deterministic is args.torch_deterministic

    vec, T = args.make_envs(1)
    torch.manual_seed(args.seed)
    agent = module.Agent(vec.single_observation_space.shape[0], vec.single_action_space, T, args)
    for key, value in agent.state_dict().items():
        fixed = key == "log_alpha" and not args.autotune
        assert torch.equal(value, saved["agent"][key]) == fixed and saved["agent"][key].isfinite().all(), key

    if name in DDQN:  # updates follow the episodes or the steps, whenever episodes end
        assert 60 <= results["episodes"] < 60 + args.num_envs
        assert results["updates"] == math.ceil((results["episodes"] - 6) * args.updates_per_episode)
        logged = {f"losses/{x}" for x in ("td_loss", "q_values", "grad_norm")} | {"charts/epsilon"}
    else:
        assert results["step"] == 600 and results["updates"] == math.ceil((600 - 150) * args.updates_per_step)
        losses = ("qf1_loss", "qf2_loss", "actor_loss", "alpha_loss", "alpha", "entropy", "qf1_values")
        logged = {f"losses/{x}" for x in losses}
    logged = logged | {"charts/SPS"} if results["updates"] >= 100 else set()
    assert all(len(scalars[tag]) == results["updates"] // 100 for tag in logged)
    assert scalars["charts/updates"][-1] == (results["step"], results["updates"]), "with every evaluation"
    logged.add("charts/updates")
    episodes = {"charts/episodic_return", "charts/episodic_length"}
    assert all(len(scalars[tag]) == results["episodes"] for tag in episodes)
    assert max(length for _, length in scalars["charts/episodic_length"]) <= T
    evaluations = {f"eval/{x}" for x in ("episodic_return", "episodic_length", "return_standard_error")}
    evaluations |= {"eval/return_first_quarter", "eval/return_last_quarter"}
    if env_id == "ml10":
        tasks = {tag for tag in scalars if tag.startswith("eval/success_rate/") and tag.endswith("-v3")}
        assert tasks and len(scalars["eval/success_rate"]) == 3
        evaluations |= {"eval/success_rate"} | tasks
    assert set(scalars) == logged | episodes | evaluations
    returns = scalars["eval/episodic_return"]
    assert len(returns) == (4 if name in DDQN else 3) and returns[0][0] == 0, "from the start to the end"
    assert returns[-1] == (results["step"], pytest.approx(results["last_return"]))
    assert results["best_return"] == pytest.approx(max(value for _, value in returns))


@pytest.mark.parametrize("name", ["ddqn_mate", "sac_mate"])
def test_a_run_starts_with_equal_targets_and_learns_as_its_flags_say(name, monkeypatch, tmp_path):
    module, batches, first = script(name), [], []
    run_update = module.update

    def recording_update(agent, target, optimizer, batch, args):
        online = agent if name in DDQN else agent.critics
        first.append(all(map(torch.equal, online.parameters(), target.parameters())))
        batches.append(len(batch["obs"]))
        return run_update(agent, target, optimizer, batch, args)

    monkeypatch.setattr(module, "update", recording_update)
    folder = train_in(tmp_path, name, **tiny(name, batch_size=5, buffer_size=17, learning_rate=0.0123))
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert first[0] and not any(first[1:]) and set(batches) == {5}
    assert saved["optimizer"]["param_groups"][0]["lr"] == 0.0123
    assert len(saved["buffer"]["reward"]) == 3 + 17, "unfinished episodes of three environments, and the newest 17"


@pytest.mark.parametrize("name, env_id", [("ddqn_mate", "tmaze-active"), ("sac_mate", "hopper-param")])
def test_same_seed_same_weights_and_another_seed_others(name, env_id, tmp_path):
    values = [tiny(name, env_id=env_id, seed=seed) for seed in (3, 3, 4)]
    first, second, third = (weights_of(train_in(tmp_path / str(k), name, **v)) for k, v in enumerate(values))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not any(torch.equal(first[key], third[key]) for key in first)


def test_best_model_is_the_agent_of_the_best_evaluation(monkeypatch, tmp_path):
    module, returns, agents = script("sac_markov"), [-3.0, -1.0, -2.0, -1.0, -5.0], []

    def evaluate(agent, *_):
        agents.append(copy.deepcopy(agent.state_dict()))
        return {"eval/episodic_return": returns[len(agents) - 1]}

    monkeypatch.setattr(module, "evaluate", evaluate)
    folder = train_in(tmp_path, "sac_markov", **tiny("sac_markov", learning_starts=60, eval_interval=150))
    assert len(agents) == 5
    best, final = weights_of(folder, "best.pt"), weights_of(folder, "model.pt")
    for key in best:
        assert torch.equal(best[key], agents[1][key]) and torch.equal(final[key], agents[4][key])
        assert not torch.equal(best[key], final[key])
    assert results_of(folder)["best_return"] == -1 and results_of(folder)["last_return"] == -5


def test_evaluate_takes_the_arguments_from_the_model(monkeypatch, tmp_path, capsys):
    """Evaluation has fixed seeds, so that the saved agent has the return that it had in training."""
    folder = train_in(tmp_path, "sac_mate", **tiny("sac_mate", learning_rate=0.01))
    results = results_of(folder)
    monkeypatch.chdir(tmp_path)
    for model, expected in (("best.pt", results["best_return"]), ("model.pt", results["last_return"])):
        capsys.readouterr()
        main("sac_mate", "--evaluate", folder / model)
        assert json.loads(capsys.readouterr().out)["eval/episodic_return"] == pytest.approx(expected)
    main("sac_mate", "--evaluate", folder / "model.pt", "--eval-episodes", 9, "--capture-video")
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["eval/episodic_return"] != pytest.approx(results["last_return"]), "of other episodes"
    assert len(list((folder / "videos").glob("*.mp4"))) == 1
    assert len(list((tmp_path / "runs").iterdir())) == 1, "no run is started"
    assert results_of(folder) == results


def colours(video):
    return np.unique(VideoFileClip(str(video)).get_frame(0).reshape(-1, 3), axis=0)


def test_videos_of_evaluations(tmp_path):
    changes = {"env_id": "tmaze-active", "total_episodes": 12, "eval_interval": 6, "capture_video": True}
    folder = train_in(tmp_path, "ddqn_mate", **tiny("ddqn_mate", **changes))
    videos = list((folder / "videos").glob("*/*.mp4"))
    assert len(videos) == 3 and len(colours(videos[0])) > 4


def test_mujoco_is_filmed_without_a_screen(run, monkeypatch):
    """In a process of its own: MuJoCo chooses how to render when it is imported."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    changes = {"env_id": "hopper-param", "total_timesteps": 90, "learning_starts": 80, "capture_video": True}
    _, [folder] = run("sac_markov", *flags(**tiny("sac_markov", **changes)))
    video, _ = (folder / "videos").glob("*/*.mp4")
    assert len(colours(video)) > 4


def test_track_logs_to_weights_and_biases(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: calls.append(options)))
    values = tiny("sac_markov", wandb_project_name="p", wandb_entity="e")
    folder = train_in(tmp_path, "sac_markov", **values, track=True)
    [call] = calls
    assert (call["project"], call["entity"], call["name"], call["sync_tensorboard"]) == ("p", "e", folder.name, True)
    assert call["config"]["env_id"] == "point-robot"
    train_in(tmp_path, "sac_markov", **values, seed=2)
    assert len(calls) == 1, "only if it is asked for"


# ------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    "name, words, answer",
    [
        ("sac_mate", ["--env-id=ant"], "unknown environment 'ant'"),
        ("sac_mate", ["--env-id=CartPole-v1"], "a flat, bounded Box is needed"),
        ("sac_mate", ["--env-id=odd_envs:unbounded"], "a flat, bounded Box is needed"),
        ("sac_mate", ["--env-id=odd_envs:image"], "a flat Box is needed"),
        ("sac_mate", ["--env-id=odd_envs:successful"], "without a time limit: set max_episode_steps"),
        ("sac_mate", ["--gamma=1.5"], "--gamma 1.5 is out of range"),
        ("sac_mate", ["--learning-rate=nan"], "--learning-rate nan is out of range"),
        ("sac_mate", ["--total-timesteps=500"], "--learning-starts must be less than --total-timesteps"),
        ("ddqn_mate", ["--env-id=tmaze"], "unknown environment 'tmaze'"),
        ("ddqn_mate", ["--env-id=no_such_module:tmaze-passive"], "cannot import no_such_module"),
        ("ddqn_mate", ["--env-id=Pendulum-v1"], "Discrete is needed"),
        ("ddqn_mate", ["--env-id=FrozenLake-v1"], "a flat Box is needed"),
        ("ddqn_mate", ["--corridor-length=1"], "corridor length must be a whole number, 2 or more"),
        ("ddqn_mate", ["--max-episode-steps=9"], "follows from corridor_length"),
        ("ddqn_mate", ["--num-envs=0"], "--num-envs 0 is out of range"),
    ],
)
def test_bad_input_gets_one_line_and_leaves_nothing_behind(name, words, answer, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert answer in refused(name, *words)


def test_an_error_is_one_line_and_a_failed_process(run):
    done, folders = run("ddqn_mate", "--env-id", "tmaze", code=1)
    assert done.stderr.startswith("error: unknown environment") and done.stderr.count("\n") == 1
    assert not done.stdout and not folders


def is_finite(part):
    if isinstance(part, dict):
        return all(map(is_finite, part.values()))
    return not isinstance(part, torch.Tensor) or bool(part.isfinite().all())


def assert_finite_checkpoint(folder):
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert all(is_finite(saved[part]) for part in ("agent", "target", "optimizer", "buffer"))
    return saved


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("sac_mate", {"env_id": "odd_envs:broken"}, "reward is not finite at step 18"),  # six steps of three were good
        ("sac_mate", {"env_id": "odd_envs:broken-start"}, "first observation is not finite at step 57"),
        ("sac_mate", {"learning_rate": 1e15}, "action is not finite at step"),
        ("ddqn_mate", {"learning_rate": 1e15, "max_grad_norm": 1e15, "total_episodes": 300}, "is not finite at step"),
    ],
)
def test_a_number_that_is_not_finite_stops_the_run_and_is_not_saved(name, changes, message, tmp_path):
    with pytest.raises(SystemExit) as exit:
        train_in(tmp_path, name, **tiny(name, checkpoint_interval=1e-9, **changes))
    assert exit.value.code.startswith("error: ") and message in exit.value.code and "\n" not in exit.value.code
    [folder] = (tmp_path / "runs").iterdir()
    assert_finite_checkpoint(folder)  # the last good one
    assert not (folder / "model.pt").exists() and not (folder / "results.json").exists()


@pytest.mark.parametrize("name, network", [("ddqn_mate", "q.0.weight"), ("sac_mate", "critics.0.0.weight")])
def test_weights_that_are_not_finite_are_never_saved(name, network, monkeypatch, tmp_path):
    """Also where no action shows it: the greedy action of NaN is an action, and critics do not act."""
    module, updates = script(name), []
    run_update = module.update

    def breaking_update(agent, *rest):
        updates.append(run_update(agent, *rest))
        if len(updates) == 10:
            agent.get_parameter(network).data[0, 0] = math.nan
        return updates[-1]

    monkeypatch.setattr(module, "update", breaking_update)
    with pytest.raises(SystemExit, match="^error: .*weight is not finite at step|Psi is not finite at step"):
        train_in(tmp_path, name, **tiny(name, checkpoint_interval=1e-9))
    [folder] = (tmp_path / "runs").iterdir()
    assert assert_finite_checkpoint(folder)["counters"]["updates"] < 10
    assert is_finite(weights_of(folder, "best.pt"))
