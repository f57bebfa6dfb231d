"""A run that was killed or stopped goes on from its last checkpoint as if nothing had happened."""

import hashlib
import os
import pickle
import random
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    equal,
    flags,
    main,
    refused,
    results_of,
    scalars_of,
    script,
    start,
    tiny,
    train_in,
    weights_of,
)

import envs

KILLS = int(os.environ.get("KILLS", 3))  # by hand: KILLS=100 python -m pytest tests/test_resume.py -k killed
EPISODES = max(400, 60 * KILLS)
TMAZE = tiny("ddqn_mate", corridor_length=6, total_episodes=EPISODES, eval_interval=100)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of a run that nothing happened to."""
    return train_in(tmp_path_factory.mktemp("uninterrupted"), "ddqn_mate", **TMAZE)


def fingerprint(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------ killed and stopped


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_weights(uninterrupted, tmp_path):
    """SIGKILL at random moments, often while a checkpoint is written: here one is, at every turn of the loop."""
    words, rng = flags(**TMAZE, checkpoint_interval=1e-9), random.Random(os.environ.get("KILL_SEED", "0"))
    for _ in range(KILLS):
        process, before = start("ddqn_mate", *words, cwd=tmp_path), time.time_ns()
        while not any(p.stat().st_mtime_ns > before for p in tmp_path.glob("runs/*/checkpoint.pt")):  # it has begun
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.6))
        process.kill()
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, "the run was over before it could be killed that often"
        assert not errors, errors
        [folder] = (tmp_path / "runs").iterdir()
        words = ["--resume", folder]
    process = start("ddqn_mate", *words, cwd=tmp_path)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0 and not errors, errors
    assert "episodes 0 " not in output, "it did not start again"
    assert equal(weights_of(folder), weights_of(uninterrupted))
    assert equal(weights_of(folder, "best.pt"), weights_of(uninterrupted, "best.pt"))
    # TensorBoard shows one curve without overlap or gap: what was logged after the last checkpoint was logged again.
    ours, theirs = scalars_of(folder), scalars_of(uninterrupted)
    assert ours.keys() == theirs.keys()
    for tag in theirs:
        assert ours[tag] == theirs[tag] or tag == "charts/SPS", tag
    same = ("best_return", "last_return", "episodes", "step", "updates")
    assert all(results_of(folder)[key] == results_of(uninterrupted)[key] for key in same)


def test_sigterm_saves_a_checkpoint_and_ends_the_process(tmp_path):
    process = start("ddqn_mate", *flags(**TMAZE | {"total_episodes": 10**6, "checkpoint_interval": 60}), cwd=tmp_path)
    while not process.stdout.readline().startswith("episodes 1"):  # after the evaluation at 100 episodes
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=600)
    [folder] = (tmp_path / "runs").iterdir()
    assert process.returncode == 128 + signal.SIGTERM and not errors
    assert output.splitlines()[-1].endswith(f"continue with --resume {folder.relative_to(tmp_path)}")
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["buffer"]["count"] >= 100, "not that of the start"
    assert not (folder / "results.json").exists() and not (folder / "model.pt").exists()


@pytest.mark.parametrize(
    "name, env_id, changes",
    [
        ("ddqn_gpt2", "tmaze-active", {"corridor_length": 5, "buffer_size": 40}),
        ("ddqn_mate", "CartPole-v1", {"max_episode_steps": 20}),
        ("sac_lstm", "hopper-param", {"buffer_size": 12}),
        ("sac_markov", "Pendulum-v1", {}),
        ("sac_mate", "ml10", {"num_envs": 1, "eval_episodes": 1, "total_timesteps": 300}),
    ],
)
def test_stopped_and_resumed_in_mid_episode_is_the_same_to_the_bit(name, env_id, changes, monkeypatch, tmp_path):
    """Everything in the last checkpoint: networks, optimizer, buffer, unfinished episodes, counters, generators."""
    module, values = script(name), tiny(name, env_id=env_id, **changes)
    reference = train_in(tmp_path / "a", name, **values)
    steps, add = [], module.ReplayBuffer.add
    turns = results_of(reference)["step"] // values["num_envs"]
    stops = {turns // 5 + 1: signal.SIGTERM, turns // 2 + 2: signal.SIGINT}  # before learning starts, and after

    def add_and_stop(buffer, step):
        steps.append(step)
        if len(steps) in stops:
            signal.raise_signal(stops[len(steps)])
        return add(buffer, step)

    monkeypatch.setattr(module.ReplayBuffer, "add", add_and_stop)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(SystemExit) as exit:
        train_in(tmp_path / "b", name, **values)
    assert exit.value.code == 128 + signal.SIGTERM
    [folder] = (tmp_path / "b" / "runs").iterdir()
    lengths = torch.load(folder / "checkpoint.pt", weights_only=True)["buffer"]["length"][: values["num_envs"]]
    assert lengths.any(), "episodes are under way"
    with pytest.raises(SystemExit) as exit:
        main(name, "--resume", folder)
    assert exit.value.code == 128 + signal.SIGINT
    main(name, "--resume", folder)
    assert len(steps) == turns, "no step was taken twice"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    ours, theirs = (torch.load(f / "checkpoint.pt", weights_only=True) for f in (folder, reference))
    for part in ("agent", "target", "optimizer", "buffer", "rollout", "rng"):
        assert equal(ours[part], theirs[part]), part
    assert all(ours["counters"][key] == theirs["counters"][key] for key in ours["counters"] if key != "seconds")
    assert ours["args"] == theirs["args"] | {"resume": str(folder)}


@pytest.mark.parametrize("env_id", ["tmaze-active", "point-robot", "hopper-param", "ant-dir", "ml10", "Pendulum-v1"])
def test_environments_go_on_from_a_saved_state(env_id, tmp_path):
    """Their next observations, rewards, ends and contexts, over the end of the unfinished episodes."""
    options = {"corridor_length": 6} if "tmaze" in env_id else {"max_episode_steps": 12}
    first, second = (envs.make_vec(env_id, 2, **options)[0] for _ in range(2))
    first.action_space.seed(0)
    first.reset(seed=5)
    second.reset(seed=77)
    for steps in (5, 17):  # in the episode that was begun by a seed, and in a later one
        for _ in range(steps):
            observations, *_ = first.step(first.action_space.sample())
        torch.save(envs.get_state(first), tmp_path / "state.pt")  # plain data, which is safe to load
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        np.testing.assert_array_equal(envs.set_state(second, state), observations)
        for _ in range(20):
            action = first.action_space.sample()
            a, b = first.step(action), second.step(action)
            for x, y in zip(a[:4], b[:4]):
                np.testing.assert_array_equal(x, y)
            if "context" in a[4]:
                np.testing.assert_array_equal(a[4]["context"], b[4]["context"])


# ------------------------------------------------------------------------------------------------- resume and evaluate


def test_a_finished_run_goes_on_with_a_larger_budget(uninterrupted, monkeypatch, tmp_path):
    folder, module = shutil.copytree(uninterrupted, tmp_path / "more"), script("ddqn_mate")
    finished, add = [], module.ReplayBuffer.add

    def recording_add(*step):
        finished.append((folder / "results.json").exists())
        return add(*step)

    monkeypatch.setattr(module.ReplayBuffer, "add", recording_add)
    main("ddqn_mate", "--resume", folder, "--total-episodes", EPISODES + 60, "--eval-interval", 20)
    assert finished and not any(finished), "results.json marks a finished run: it is removed when the run goes on"
    results, scalars = results_of(folder), scalars_of(folder)
    steps = [step for step, _ in scalars["charts/episodic_return"]]
    assert steps == sorted(steps) and len(steps) == results["episodes"] >= EPISODES + 60
    evaluations = [step for step, _ in scalars["eval/episodic_return"]]
    assert evaluations == sorted(set(evaluations))
    assert len(evaluations) == len(scalars_of(uninterrupted)["eval/episodic_return"]) + 3

    shutil.copy(uninterrupted / "checkpoint.pt", folder)  # as if killed before the next checkpoint was written
    weights = weights_of(folder)
    time.sleep(1)  # TensorBoard orders the files of a run by the second in which they were begun
    main("ddqn_mate", "--resume", folder, "--total-episodes", EPISODES + 60, "--eval-interval", 20)
    again = scalars_of(folder)
    assert all(again[tag] == scalars[tag] for tag in scalars if tag != "charts/SPS"), "nothing is shown twice"
    assert equal(weights_of(folder), weights)

    (folder / "results.json").unlink()  # as if killed between the last checkpoint and the results
    turns = len(finished)
    main("ddqn_mate", "--resume", folder)
    assert results_of(folder)["episodes"] == results["episodes"] and equal(weights_of(folder), weights)
    assert scalars_of(folder) == again and len(finished) == turns, "nothing is trained, evaluated or logged twice"


def test_what_cannot_be_resumed_or_evaluated_is_refused_and_left_alone(uninterrupted, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(uninterrupted, tmp_path / "lr=3")
    damaged = shutil.copytree(uninterrupted, tmp_path / "damaged")
    content = (damaged / "checkpoint.pt").read_bytes()
    (damaged / "checkpoint.pt").write_bytes(content[: len(content) // 2])
    torch.save([1, 2, 3], tmp_path / "list.pt")
    torch.save({"script": "ddqn_mate", "args": {"no_such_flag": 1}}, tmp_path / "other_version.pt")
    before = fingerprint(tmp_path)
    for words, answer in (
        (["--resume", folder, "--gamma", 0.5], f"--gamma is 0.99 in {folder} and cannot be changed"),
        (["--batch-size", 9, f"--resume={folder}"], "--batch-size is 4 in"),
        (["--resume", folder, "--env-id", "tmaze-active"], "--env-id is tmaze-passive in"),
        (["--resume", folder, "--eval-episodes", 0], "--eval-episodes 0 is out of range"),
        (["--resume", tmp_path / "nowhere"], "FileNotFoundError"),
        (["--resume", damaged], "cannot load"),
        (["--evaluate", tmp_path / "nowhere.pt"], "FileNotFoundError"),
        (["--evaluate", folder / "args.json"], "cannot load"),
        (["--evaluate", tmp_path / "list.pt"], "cannot load"),
        (["--evaluate", tmp_path / "other_version.pt"], "no_such_flag"),
        (["--evaluate", folder / "model.pt", "--eval-episodes", -1], "--eval-episodes -1 is out of range"),
    ):
        assert answer in refused("ddqn_mate", *words)
    for words in (["--resume", folder], ["--evaluate", folder / "best.pt"]):
        assert "saved by ddqn_mate.py, not by ddqn_lstm.py" in refused("ddqn_lstm", *words)
    assert fingerprint(tmp_path) == before


def test_loading_runs_no_code_of_the_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "ran"

    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    (tmp_path / "run").mkdir()
    for path, content in (
        ("model.pt", {"script": "ddqn_mate", "args": Malicious()}),
        ("run/checkpoint.pt", Malicious()),
    ):
        torch.save(content, path)
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Malicious(), protocol=2))
    for words in (["--evaluate", "model.pt"], ["--resume", "run"], ["--evaluate", "pickle.pt"]):
        assert "cannot load" in refused("ddqn_mate", *words)
    assert not marker.exists()
    torch.load("model.pt", weights_only=False)
    assert marker.exists(), "the file would have run its code, had it been let"
    code = [path for folder in (".", "envs", "benchmark") for path in (ROOT / folder).glob("*.py")]
    calls = [line for path in code for line in path.read_text().splitlines() if "torch.load(" in line]
    assert calls and all("weights_only=True" in line for line in calls)


def test_a_checkpoint_is_complete_at_any_moment(uninterrupted, monkeypatch, tmp_path):
    """A full disk ends the run, and the last checkpoint is still whole."""
    folder = shutil.copytree(uninterrupted, tmp_path / "full")
    before, save = fingerprint(folder)[folder / "checkpoint.pt"], torch.save

    def save_half(content, path):
        save(content, path)
        with open(path, "r+b") as file:
            file.truncate(1000)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", save_half)
    with pytest.raises(OSError, match="No space left"):
        main("ddqn_mate", "--resume", folder, "--total-episodes", EPISODES + 100)
    assert fingerprint(folder)[folder / "checkpoint.pt"] == before
    monkeypatch.undo()
    main("ddqn_mate", "--resume", folder, "--total-episodes", EPISODES + 100)
    assert results_of(folder)["episodes"] >= EPISODES + 100
