"""A run that was killed or stopped goes on from its last checkpoint as if nothing had happened."""

import os
import pickle
import random
import shutil
import signal
import time

import pytest
import torch
from conftest import ROOT, equal, main, refused, results_of, scalars_of, script, spy, start, tiny, train_in, weights_of

from benchmark.sweep import to_words

KILLS = int(os.environ.get("KILLS", 3))  # by hand: KILLS=100 python -m pytest tests/test_resume.py -k killed
EPISODES = max(400, 60 * KILLS)
TMAZE = tiny("ddqn_mate", corridor_length=6, total_episodes=EPISODES, eval_interval=100)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of a run that nothing happened to."""
    return train_in(tmp_path_factory.mktemp("uninterrupted"), "ddqn_mate", **TMAZE)


# -------------------------------------------------------------------------------------------------- killed and stopped
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_weights(uninterrupted, tmp_path):
    """SIGKILL at random moments, often while a checkpoint is written: here one is, at every turn of the loop."""
    words = to_words(TMAZE | {"checkpoint_interval": 1e-9})
    rng = random.Random(os.environ.get("KILL_SEED", "0"))
    for _ in range(KILLS):
        process, before = start(ROOT / "ddqn_mate.py", *words, cwd=tmp_path), time.time_ns()
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
    process = start(ROOT / "ddqn_mate.py", *words, cwd=tmp_path)
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
    assert results_of(folder) | {"seconds": 0} == results_of(uninterrupted) | {"seconds": 0}


@pytest.mark.parametrize(
    "name, env_id, changes",
    [
        ("ddqn_gpt2", "tmaze-active", {"corridor_length": 5, "buffer_size": 40}),
        ("ddqn_mate", "CartPole-v1", {"max_episode_steps": 20}),
        ("sac_lstm", "hopper-param", {"buffer_size": 12}),
        ("sac_markov", "Pendulum-v1", {}),
        ("sac_markov", "ant-dir", {}),
        ("sac_mate", "point-robot", {}),
        ("sac_mate", "ml10", {"num_envs": 1, "eval_episodes": 1, "total_timesteps": 300}),
    ],
)
def test_stopped_and_resumed_in_mid_episode_is_the_same_to_the_bit(
    name, env_id, changes, monkeypatch, tmp_path, capsys
):
    """Everything in the last checkpoint: networks, optimizer, buffer, unfinished episodes, counters, generators."""
    values = tiny(name, env_id=env_id, **changes)
    reference = train_in(tmp_path / "a", name, **values)
    turns = results_of(reference)["step"] // values["num_envs"]
    # In the episodes that were begun by a seed, before learning starts, and in later ones.
    stops = {2: signal.SIGTERM, turns // 2 + 1: signal.SIGINT}

    def stop(*_):
        if len(steps) in stops:
            for _ in range(2):  # an impatient second Ctrl-C loses nothing
                signal.raise_signal(stops[len(steps)])

    steps = spy(monkeypatch, script(name).ReplayBuffer, "add", stop)
    handlers = [signal.getsignal(number) for number in stops.values()]
    monkeypatch.chdir(tmp_path)
    words = to_words(values)
    for number in stops.values():
        with pytest.raises(SystemExit) as exit:
            main(name, *words)
        [folder] = (tmp_path / "runs").iterdir()
        words = ["--resume", f"runs/{folder.name}"]
        assert exit.value.code == 128 + number
        assert capsys.readouterr().out.splitlines()[-1].endswith(f"continue with {' '.join(words)}")
        assert not (folder / "results.json").exists() and not (folder / "model.pt").exists()
        lengths = torch.load(folder / "checkpoint.pt", weights_only=True)["buffer"]["length"][: values["num_envs"]]
        assert lengths.any(), "episodes are under way"
    main(name, *words)
    assert len(steps) == turns, "no step was taken twice"
    assert [signal.getsignal(number) for number in stops.values()] == handlers
    ours, theirs = (torch.load(f / "checkpoint.pt", weights_only=True) for f in (folder, reference))
    for part in ("agent", "target", "optimizer", "buffer", "rollout", "rng"):
        assert equal(ours[part], theirs[part]), part
    assert all(ours["counters"][key] == theirs["counters"][key] for key in ours["counters"] if key != "seconds")
    assert ours["args"] == theirs["args"] | {"resume": words[1]}


# ------------------------------------------------------------------------------------------------- resume and evaluate
def test_a_finished_run_goes_on_with_a_larger_budget(uninterrupted, monkeypatch, tmp_path):
    folder = shutil.copytree(uninterrupted, tmp_path / "more")
    finished = spy(monkeypatch, script("ddqn_mate").ReplayBuffer, "add", lambda *_: (folder / "results.json").exists())
    main("ddqn_mate", "--resume", folder, "--total-episodes", EPISODES + 60, "--eval-interval", 20)
    assert finished and not any(finished), "results.json marks a finished run: it is removed when the run goes on"
    results, scalars = results_of(folder), scalars_of(folder)
    steps = [step for step, _ in scalars["charts/episodic_return"]]
    assert steps == sorted(steps) and len(steps) == results["episodes"] >= EPISODES + 60
    evaluations = [step for step, _ in scalars["eval/episodic_return"]]
    assert evaluations == sorted(set(evaluations))
    assert len(evaluations) == len(scalars_of(uninterrupted)["eval/episodic_return"]) + 3

    (folder / "results.json").unlink()  # as if killed between the last checkpoint and the results
    turns, weights = len(finished), weights_of(folder)
    main("ddqn_mate", "--resume", folder)
    assert results_of(folder)["episodes"] == results["episodes"] and equal(weights_of(folder), weights)
    assert scalars_of(folder) == scalars and len(finished) == turns, "nothing is trained, evaluated or logged twice"


class Malicious:
    """Makes a folder in the current one when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_what_cannot_be_resumed_or_evaluated_is_refused_and_left_alone(uninterrupted, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder, damaged, _ = (shutil.copytree(uninterrupted, tmp_path / name) for name in ("lr=3", "damaged", "code"))
    content = (damaged / "checkpoint.pt").read_bytes()
    (damaged / "checkpoint.pt").write_bytes(content[: len(content) // 2])
    torch.save([1, 2, 3], tmp_path / "list.pt")
    torch.save({"script": "ddqn_mate", "args": Malicious()}, tmp_path / "code.pt")
    torch.save(Malicious(), (tmp_path / "code" / "checkpoint.pt"))
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Malicious(), protocol=2))
    torch.save({"script": "ddqn_mate", "args": {"no_such_flag": 1}}, tmp_path / "other_version.pt")
    for words, answer in (
        (["--resume", folder, "--gamma", 0.5], f"--gamma is 0.99 in {folder}/checkpoint.pt and cannot be changed"),
        (["--batch-size", 9, f"--resume={folder}"], "--batch-size is 4 in"),
        (["--resume", folder, "--env-id", "tmaze-active"], "--env-id is tmaze-passive in"),
        (["--resume", folder, "--eval-episodes", 0], "--eval-episodes 0 is out of range"),
        (["--resume", tmp_path / "nowhere"], "FileNotFoundError"),
        (["--resume", damaged], "cannot load"),
        (["--evaluate", tmp_path / "nowhere.pt"], "FileNotFoundError"),
        (["--evaluate", folder / "args.json"], "cannot load"),
        (["--evaluate", tmp_path / "list.pt"], "cannot load"),
        (["--evaluate", tmp_path / "code.pt"], "cannot load"),
        (["--evaluate", tmp_path / "pickle.pt"], "cannot load"),
        (["--resume", tmp_path / "code"], "cannot load"),
        (["--evaluate", tmp_path / "other_version.pt"], "no_such_flag"),
        (["--evaluate", folder / "best.pt", "--memory-dim", 4], "--memory-dim is 16 in"),
        (["--evaluate", folder / "model.pt", "--eval-episodes", -1], "--eval-episodes -1 is out of range"),
    ):
        assert answer in refused("ddqn_mate", *words)
    for words in (["--resume", folder], ["--evaluate", folder / "best.pt"]):
        assert "saved by ddqn_mate.py, not by ddqn_lstm.py" in refused("ddqn_lstm", *words)
    assert not (tmp_path / "ran").exists()
    torch.load("code.pt", weights_only=False)
    assert (tmp_path / "ran").exists(), "the file would have run its code, had it been let"
    code = [path for folder in (".", "envs", "benchmark") for path in (ROOT / folder).glob("*.py")]
    calls = [line for path in code for line in path.read_text().splitlines() if "torch.load(" in line]
    assert calls and all("weights_only=True" in line for line in calls)


def test_a_checkpoint_is_complete_at_any_moment(uninterrupted, monkeypatch, tmp_path):
    """A full disk ends the run, and the last checkpoint is still whole."""
    folder = shutil.copytree(uninterrupted, tmp_path / "full")
    before, save = (folder / "checkpoint.pt").read_bytes(), torch.save

    def save_half(content, path):
        save(content, path)
        os.truncate(path, 1000)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", save_half)
    with pytest.raises(OSError, match="No space left"):
        main("ddqn_mate", "--resume", folder, "--total-episodes", EPISODES + 100)
    assert (folder / "checkpoint.pt").read_bytes() == before
