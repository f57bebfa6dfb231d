"""What holds for every script: rollout, buffer and evaluation, and whole runs."""

import copy
import json
import math
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    DDQN,
    ROOT,
    colours,
    equal,
    make_agent,
    results_of,
    scalars_of,
    script,
    spy,
    tiny,
    train_in,
    weights_of,
)
from moviepy import VideoFileClip

from benchmark.sweep import to_words

CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------- rollout, replay buffer, evaluation
def test_rollout_and_buffer_keep_true_episodes_and_remember_each_on_its_own():
    """Against lists of the transitions of each episode, which are then replayed in an environment of their own.
    CartPole falls after some steps and is truncated after others."""
    torch.manual_seed(0)
    module, agent, _, vec, T = make_agent("ddqn_gpt2", env_id="CartPole-v1", max_episode_steps=20, eval_episodes=5)
    buffer, copied = (module.ReplayBuffer(17, num_envs=5, max_steps=T, obs_dim=4, action_dim=2) for _ in range(2))
    rollout, running, episodes = module.Rollout(vec, agent, CPU), [[] for _ in range(5)], []

    def policy(obs, m):  # m_t is the memory of the episode's transitions so far
        for i in range(5):
            x = torch.stack([*running[i], torch.zeros(4 + 2 + 1 + 4)])  # what follows does not matter for m_t
            torch.testing.assert_close(m[i], agent.memory(x[None])[0, len(running[i])], rtol=1e-4, atol=1e-5)
        return agent.explore(obs, m, 0.8)

    rollout.reset(seed=3)
    while len(episodes) < 60:
        step, ended = rollout.step(policy), []
        for i, x in enumerate(module.transition(*map(rollout.tensor, step[:4]))):
            running[i].append(x)
            if step.terminated[i] or step.truncated[i]:
                ended.append((torch.stack(running[i]), bool(step.terminated[i])))
                running[i] = []
        assert buffer.add(step) == [(len(x), len(x)) for x, _ in ended], "returns and lengths: every step pays 1"
        episodes += ended
    assert buffer.count == len(episodes) and {terminated for _, terminated in episodes} == {True, False}

    env = gym.make("CartPole-v1", max_episode_steps=20)
    for x, terminates in episodes:
        env.reset()
        env.unwrapped.state = x[0, :4].double().numpy()
        for t, (obs, action, reward, next_obs) in enumerate(zip(*x.split([4, 2, 1, 4], dim=1))):
            np.testing.assert_allclose(obs, np.float32(env.unwrapped.state), atol=1e-5)
            observed, paid, terminated, truncated, _ = env.step(int(action.argmax()))
            np.testing.assert_allclose(observed, next_obs, atol=1e-5)
            assert reward == paid and (terminated or truncated) == (t == len(x) - 1)
        assert terminated == terminates

    copied.load_state_dict(buffer.state_dict())
    batches, drawn = [], set()
    for source in (buffer, copied):
        torch.manual_seed(0)
        batches.append(source.sample(300, CPU))
    assert equal(*batches)
    for obs, action, reward, terminated, mask in zip(*batches[0].values()):
        n = int(mask.sum())
        x = module.transition(obs[:n], action[:n], reward[:n], obs[1 : n + 1])
        [k] = [k for k, (episode, _) in enumerate(episodes) if equal(episode, x)]
        assert mask[:n].all() and terminated[:n].tolist() == [0.0] * (n - 1) + [float(episodes[k][1])]
        drawn.add(k)
    assert drawn == set(range(len(episodes) - 17, len(episodes))), "the newest ones"
    assert all(buffer.sample(1, CPU)["mask"].all() for _ in range(20)), "padded to the longest one that is drawn"


def test_evaluation_is_on_fixed_seeds_and_counts_the_first_episode_of_each_environment():
    module, agent, _, vec, T = make_agent("ddqn_mate", corridor_length=7, eval_episodes=9)
    agent.act = lambda obs, m: torch.eye(4)[torch.ones(len(obs), dtype=torch.long)]  # up: never leaves the start
    metrics = module.evaluate(agent, vec, T, CPU)
    assert metrics["eval/episodic_return"] == pytest.approx(-1)
    assert metrics["eval/episodic_length"] == T == 8
    assert metrics["eval/return_first_quarter"] == pytest.approx(-2 / 7)
    assert metrics["eval/return_last_quarter"] == pytest.approx(-1 / 7), "the last of its two steps is free"

    # Right, then up where the goal is above, then idle: others are still under way when these have ended.
    agent.act = lambda obs, m: torch.eye(4)[torch.where(obs[:, 0] == 0, 1, 0)]
    returns = [gym.make("tmaze-passive").reset(seed=1_000_000 + i)[1]["context"][0] == 1 for i in range(9)]
    for _ in range(2):
        metrics = module.evaluate(agent, vec, T, CPU)
        assert metrics["eval/episodic_return"] == pytest.approx(np.mean(returns)) and len(set(returns)) == 2


@pytest.mark.parametrize("steps", [4, 8])
def test_evaluation_reports_success_at_any_step_overall_and_by_task(steps):
    changes = {"env_id": "odd_envs:successful", "max_episode_steps": steps, "eval_episodes": 7}
    module, agent, _, vec, T = make_agent("sac_mate", **changes)
    metrics = module.evaluate(agent, vec, T, CPU)
    assert metrics["eval/success_rate"] == pytest.approx(4 / 7)
    assert metrics["eval/success_rate/even"] == 1 and metrics["eval/success_rate/odd"] == 0
    assert metrics["eval/episodic_return"] == metrics["eval/episodic_length"] == pytest.approx((4 * steps + 3 * 3) / 7)


# ---------------------------------------------------------------------------------------------------------- whole runs
@pytest.mark.parametrize(
    "name, env_id, changes",
    [
        ("ddqn_mate", "envs:tmaze-passive", {"torch_deterministic": False, "cuda": False}),
        ("ddqn_lstm", "tmaze-active", {"capture_video": True, "learning_rate": 0.01, "buffer_size": 17}),
        ("ddqn_gpt2", "CartPole-v1", {"max_episode_steps": 15, "updates_per_episode": 2.0}),
        ("sac_mate", "ant-dir", {"buffer_size": 17}),
        ("sac_lstm", "cheetah-vel", {"autotune": False, "alpha": 0.1}),
        ("sac_gpt2", "walker-param", {"freeze_critic": False}),
        ("sac_markov", "hopper-param", {"track": True, "wandb_project_name": "p", "wandb_entity": "e"}),
        ("sac_mate", "ml10", {"num_envs": 1, "eval_episodes": 1, "max_episode_steps": 30}),
        ("sac_mate", "point-robot", {"bf16": True, "updates_per_step": 0.5}),
        ("sac_lstm", "Pendulum-v1", {"learning_rate": 0.01}),
        # No episode has ended at step 150, when learning could start: it catches up.
        ("sac_markov", "point-robot", {"num_envs": 40, "max_episode_steps": 10}),
    ],
)
def test_every_script_and_every_environment_is_trained(name, env_id, changes, monkeypatch, tmp_path):
    """One training each: sections that scripts share are equal to the byte."""
    values, module, tracked = tiny(name, env_id=env_id, exp_name="mine", **changes), script(name), []

    def targets_are_equal_and_size_of_batch(agent, target, optimizer, batch, args):
        online = agent if name in DDQN else agent.critics
        return equal(list(online.parameters()), list(target.parameters())), len(batch["obs"])

    updates = spy(monkeypatch, module, "update", targets_are_equal_and_size_of_batch)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: tracked.append(options)))
    folder = train_in(tmp_path, name, **values)
    assert folder.name.startswith(f"{env_id.replace(':', '-')}__mine__1__")
    files = {path.name for path in folder.iterdir() if not path.name.startswith("events.out.tfevents")}
    files ^= {"videos"} if values.get("capture_video") else set()
    assert files == {"args.json", "best.pt", "checkpoint.pt", "model.pt", "results.json"}
    results, scalars, saved = results_of(folder), scalars_of(folder), torch.load(folder / "model.pt", weights_only=True)
    assert saved["args"] == json.loads((folder / "args.json").read_text()) and saved["script"] == name
    torch.manual_seed(1)
    _, agent, args, _, T = make_agent(name, **saved["args"])
    assert all(getattr(args, key) == value for key, value in values.items())
    assert torch.backends.cudnn.deterministic is args.torch_deterministic
    for key, value in agent.state_dict().items():
        fixed = key == "log_alpha" and not args.autotune
        assert torch.equal(value, saved["agent"][key]) == fixed and saved["agent"][key].isfinite().all(), key

    assert updates == [(True, 4)] + [(False, 4)] * (results["updates"] - 1), "targets are equal at first"
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert checkpoint["optimizer"]["param_groups"][0]["lr"] == args.learning_rate
    rows = args.num_envs + min(results["episodes"], args.buffer_size)
    assert len(checkpoint["buffer"]["reward"]) == rows, "unfinished episodes of the environments, and the newest ones"
    wandb = {"project": "p", "entity": "e", "name": folder.name, "config": saved["args"], "sync_tensorboard": True}
    assert [call | wandb for call in tracked] == tracked and len(tracked) == args.track

    if name in DDQN:  # updates follow the episodes or the steps, whenever episodes end
        assert 60 <= results["episodes"] < 60 + args.num_envs
        assert results["updates"] == math.ceil((results["episodes"] - 6) * args.updates_per_episode)
        logged = {f"losses/{x}" for x in ("td_loss", "q_values", "grad_norm")} | {"charts/epsilon", "charts/SPS"}
    else:
        assert results["step"] == 600 and results["updates"] == math.ceil((600 - 150) * args.updates_per_step)
        losses = ("qf1_loss", "qf2_loss", "actor_loss", "alpha_loss", "alpha", "entropy", "qf1_values")
        logged = {f"losses/{x}" for x in losses} | {"charts/SPS"}
    logged = logged if results["updates"] >= 100 else set()
    assert all(len(scalars[tag]) == results["updates"] // 100 for tag in logged)
    assert scalars["charts/updates"][-1] == (results["step"], results["updates"]), "with every evaluation"
    episodes = {"charts/episodic_return", "charts/episodic_length"}
    assert all(len(scalars[tag]) == results["episodes"] for tag in episodes)
    assert max(length for _, length in scalars["charts/episodic_length"]) <= T
    evaluations = ("episodic_return", "episodic_length", "return_first_quarter", "return_last_quarter")
    evaluations = {f"eval/{x}" for x in evaluations}
    if env_id == "ml10":
        tasks = {tag for tag in scalars if tag.startswith("eval/success_rate/") and tag.endswith("-v3")}
        assert tasks and len(scalars["eval/success_rate"]) == 3
        evaluations |= {"eval/success_rate"} | tasks
    assert set(scalars) == logged | {"charts/updates"} | episodes | evaluations
    returns = scalars["eval/episodic_return"]
    assert len(returns) == (4 if name in DDQN else 3) and returns[0][0] == 0, "from the start to the end"
    assert returns[-1] == (results["step"], pytest.approx(results["last_return"]))
    assert results["best_return"] == pytest.approx(max(value for _, value in returns))
    videos = list(folder.glob("videos/*/*.mp4"))
    assert len(videos) == (len(returns) if args.capture_video else 0)
    assert all(colours(VideoFileClip(str(video)).get_frame(0)) > 4 for video in videos)


def test_a_script_needs_envs_and_nothing_else_of_ours_and_films_without_a_screen(monkeypatch, tmp_path):
    """Copied with envs/ into an empty folder, it runs. MuJoCo chooses how to render when it is imported."""
    shutil.copytree(ROOT / "envs", tmp_path / "envs")
    shutil.copy(ROOT / "sac_markov.py", tmp_path)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    changes = {"env_id": "hopper-param", "total_timesteps": 90, "learning_starts": 80, "capture_video": True}
    command = [sys.executable, "sac_markov.py", *to_words(tiny("sac_markov", **changes))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and not done.stderr, done.stderr
    video, _ = tmp_path.glob("runs/*/videos/*/*.mp4")
    assert colours(VideoFileClip(str(video)).get_frame(0)) > 4
    for path in (ROOT / "envs").glob("*.py"):
        unrelated = re.search(r"\b(torch|tyro|argparse|tensorboard)\b", path.read_text())
        assert not unrelated, f"{path} is not about environments"


def test_a_run_starts_from_its_seed_and_its_best_model_is_the_agent_of_the_best_evaluation(monkeypatch, tmp_path):
    """That the same seed gives the same weights in the end is in test_resume.py."""
    returns, agents, changes = [-3.0, -1.0, -2.0, -1.0, -5.0], [], {"learning_starts": 60, "eval_interval": 150}

    def evaluate(agent, *_):
        agents.append(copy.deepcopy(agent.state_dict()))
        return {"eval/episodic_return": returns[len(agents) - 1]}

    monkeypatch.setattr(script("sac_markov"), "evaluate", evaluate)
    folder = train_in(tmp_path, "sac_markov", **tiny("sac_markov", seed=7, **changes))
    torch.manual_seed(7)
    assert len(agents) == 5 and equal(agents[0], make_agent("sac_markov")[1].state_dict())
    best, final = weights_of(folder, "best.pt"), weights_of(folder)
    assert equal(best, agents[1]) and equal(final, agents[4])
    assert not any(torch.equal(best[key], final[key]) for key in best)
    assert results_of(folder)["best_return"] == -1 and results_of(folder)["last_return"] == -5
