"""Never lose a run: killed, stopped or out of disk, it goes on from its last checkpoint as if nothing had happened."""

import hashlib
import io
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, results_of, scalars_of, script

import envs
from envs import running, state

KILLS = int(os.environ.get("KILLS", 3))  # by hand: KILLS=100 python -m pytest tests/test_resume.py -k killed
EPISODES = max(700, 40 * KILLS)
TMAZE = f"--corridor-length 6 --total-episodes {EPISODES} --memory-dim 16 --hidden-dim 16 --batch-size 8".split()
TMAZE += "--learning-starts 20 --num-envs 3 --eval-interval 200 --eval-episodes 6".split()


def start(name, *flags, cwd, **kwargs):
    command = [sys.executable, str(ROOT / f"{name}.py"), *map(str, flags)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def weights(folder):
    return torch.load(folder / "model.pt", weights_only=True)["agent"]


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


def fingerprint(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of a run that nothing happened to."""
    cwd = tmp_path_factory.mktemp("uninterrupted")
    process = start("ddqn_mate", *TMAZE, cwd=cwd)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return next((cwd / "runs").iterdir())


# ------------------------------------------------------------------------------------------------ killed and stopped


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_weights(uninterrupted, tmp_path):
    """SIGKILL at random moments, often in the middle of a checkpoint: here one is written at every turn of the loop."""
    flags, kills, rng = [*TMAZE, "--checkpoint-interval", 1e-4], 0, random.Random(os.environ.get("KILL_SEED", "0"))
    folder = None
    while True:
        process = start("ddqn_mate", *(flags if folder is None else ["--resume", folder]), cwd=tmp_path)
        if kills < KILLS:
            time.sleep(rng.uniform(2.0, 5.0))
            process.kill()
            _, errors = process.communicate()
            kills += process.returncode == -signal.SIGKILL
        else:
            _, errors = process.communicate(timeout=300)
        assert not errors, errors
        if folder is None and list((tmp_path / "runs").glob("*/checkpoint.pt")):
            [folder] = (tmp_path / "runs").iterdir()
        if process.returncode == 0:
            break
        if folder is None:  # killed while it was still importing torch
            shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    assert kills == KILLS, "the run was over before it could be killed that often"
    assert_same_weights(weights(folder), weights(uninterrupted))
    # TensorBoard shows one curve without overlap or gap: what was logged after the last checkpoint was logged again.
    ours, theirs = scalars_of(folder), scalars_of(uninterrupted)
    for tag in theirs:
        if tag != "charts/SPS":
            assert ours[tag] == theirs[tag], tag
    same = ("best_return", "last_return", "episodes", "steps", "updates")
    assert all(results_of(folder)[key] == results_of(uninterrupted)[key] for key in same)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_writes_a_checkpoint_and_exits(number, uninterrupted, tmp_path):
    process = start("ddqn_mate", *TMAZE, "--checkpoint-interval", 60, cwd=tmp_path)
    for line in process.stdout:
        if line.startswith("episodes 2"):  # after the evaluation at 200 episodes
            break
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    [folder] = (tmp_path / "runs").iterdir()
    assert process.returncode == 128 + number and not errors
    assert f"go on with --resume {folder.relative_to(tmp_path)}" in output
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert 200 <= saved["count"] < 700, "not the one of the start"
    process = start("ddqn_mate", "--resume", folder, cwd=tmp_path)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and "episodes 0 " not in output, "no second start"
    assert_same_weights(weights(folder), weights(uninterrupted))


def test_a_second_interrupt_stops_at_once():
    before = signal.getsignal(signal.SIGINT)  # ignored, in what a shell has started in the background
    stop = running.Stop()
    try:
        assert not stop
        os.kill(os.getpid(), signal.SIGINT)
        assert stop and stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    finally:
        stop.close()
    assert signal.getsignal(signal.SIGINT) is before


class StopAfter(running.Stop):
    """A stop that comes by itself after the loop has asked for it so many times."""

    asked = 0

    def __bool__(self):
        StopAfter.asked += 1
        self.signal = signal.SIGTERM if StopAfter.asked >= StopAfter.limit else None
        return self.signal is not None


def train_with_stops(module, args, monkeypatch, tmp_path, every):
    """Trains in this process, stopping after every so many looks and resuming, to the end."""
    saved, stops = None, 0
    monkeypatch.setattr(running, "Stop", StopAfter)
    StopAfter.limit = every
    while True:
        StopAfter.asked = 0
        try:
            module.train(module.Args(**args), saved)
            break
        except SystemExit as stopped:
            assert stopped.code == 128 + signal.SIGTERM
        stops += 1
        time.sleep(1 - time.time() % 1)  # TensorBoard orders a run's files by the second in which they were begun
        [folder] = (tmp_path / "runs").iterdir()
        args = args | {"resume": str(folder)}
        saved = running.load(folder / "checkpoint.pt")
    [folder] = (tmp_path / "runs").iterdir()
    return folder, stops


SMALL = {"memory_dim": 16, "hidden_dim": 16, "batch_size": 4, "num_envs": 3, "eval_episodes": 3, "exp_name": "x"}
DDQN = {"total_episodes": 60, "learning_starts": 6, "eval_interval": 25, "buffer_size": 40, **SMALL}
SAC = {"total_timesteps": 420, "learning_starts": 100, "updates_per_step": 0.1, "eval_interval": 200, **SMALL}
SAC |= {"max_episode_steps": 20, "buffer_size": 12}


@pytest.mark.parametrize(
    "name, args",
    [
        ("ddqn_mate", DDQN | {"env_id": "tmaze-active", "corridor_length": 5}),
        ("ddqn_lstm", DDQN | {"env_id": "tmaze-passive", "corridor_length": 5}),
        ("ddqn_gpt2", DDQN | {"env_id": "tmaze-active", "corridor_length": 5}),
        ("ddqn_mate", DDQN | {"env_id": "CartPole-v1", "max_episode_steps": 20}),
        ("sac_mate", SAC | {"env_id": "hopper-param"}),
        ("sac_lstm", SAC | {"env_id": "point-robot"}),
        ("sac_gpt2", SAC | {"env_id": "walker-param"}),
        ("sac_markov", SAC | {"env_id": "cheetah-vel", "async_envs": True}),
        ("sac_mate", SAC | {"env_id": "ant-dir", "autotune": False}),
        ("sac_mate", SAC | {"env_id": "ml10", "num_envs": 1, "eval_episodes": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else value["env_id"],
)
def test_stopped_and_resumed_in_mid_episode_is_the_same_to_the_bit(name, args, monkeypatch, tmp_path):
    """T-Maze, MuJoCo and Meta-World: the episodes under way are replayed to where they were."""
    module = script(name)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    module.train(module.Args(**args))
    [reference] = (tmp_path / "a" / "runs").iterdir()
    monkeypatch.chdir(tmp_path / "b")
    folder, stops = train_with_stops(module, args, monkeypatch, tmp_path / "b", every=61)
    assert stops >= 2
    assert_same_weights(weights(folder), weights(reference))
    assert scalars_of(folder)["eval/episodic_return"] == scalars_of(reference)["eval/episodic_return"]


@pytest.mark.parametrize("env_id", ["tmaze-active", "point-robot", "hopper-param", "ant-dir", "ml10", "Pendulum-v1"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_environments_go_on_from_a_saved_state(env_id, asynchronous):
    """Their next observations, rewards, ends and contexts, over the end of the episodes under way."""
    options = {"corridor_length": 6} if "tmaze" in env_id else {"max_episode_steps": 12}
    first, _ = envs.make_vec(env_id, 2, asynchronous, **options)
    second, _ = envs.make_vec(env_id, 2, asynchronous, **options)
    first.action_space.seed(0)
    first.reset(seed=5)
    second.reset(seed=77)
    actions = [[], []]
    for _ in range(17):  # into the second episode
        action = first.action_space.sample()
        observations, _, terminated, truncated, _ = first.step(action)
        for i in range(2):
            actions[i] = [] if terminated[i] or truncated[i] else [*actions[i], action[i]]
    saved = torch.load(save_to_memory(state.get_state(first)), weights_only=True)
    np.testing.assert_array_equal(state.set_state(second, saved, actions), observations)
    for _ in range(20):
        action = first.action_space.sample()
        a, b = first.step(action), second.step(action)
        for x, y in zip(a[:4], b[:4]):
            np.testing.assert_array_equal(x, y)
        if "context" in a[4]:
            np.testing.assert_array_equal(a[4]["context"], b[4]["context"])
    first.close()
    second.close()


def save_to_memory(content):
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


# ----------------------------------------------------------------------------------------------------- what is saved


def test_only_new_episodes_are_written_and_old_ones_removed(tmp_path):
    module, rng = script("ddqn_mate"), np.random.default_rng(0)
    buffer = module.ReplayBuffer(capacity=10, num_envs=1, max_steps=4, obs_dim=2, action_dim=3)

    def collect(buffer, episodes):
        for _ in range(episodes):
            for t in range(n := rng.integers(1, 5)):
                obs = rng.normal(size=(2, 1, 2))
                ended = np.array([t == n - 1])
                buffer.add(obs[0], np.eye(3)[:1], rng.normal(size=1), obs[1], ended, np.array([False]))

    written = {}
    for episodes, expected in ((4, {"0-4.pt"}), (3, {"0-4.pt", "4-7.pt"}), (6, {"0-4.pt", "4-7.pt", "7-13.pt"}),
                               (4, {"7-13.pt", "13-17.pt"}), (25, {"32-42.pt"}), (0, {"32-42.pt"})):  # fmt: skip
        collect(buffer, episodes)
        running.save_episodes(buffer, tmp_path)
        running.remove_episodes(buffer, tmp_path)
        files = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        assert set(files) == expected
        assert all(files[name] == written[name] for name in files if name in written), "never written again"
        written |= files
        copy = module.ReplayBuffer(10, 1, 4, 2, 3)
        copy.count, copy.on_disk = buffer.count, list(buffer.on_disk)
        running.load_episodes(copy, tmp_path)
        rows = np.arange(max(0, buffer.count - 10), buffer.count) % 10
        np.testing.assert_array_equal(copy.length[rows], buffer.length[rows])
        for row in rows:
            for name in buffer.episodes:
                n = buffer.length[row] + (name == "obs")
                np.testing.assert_array_equal(copy.episodes[name][row, :n], buffer.episodes[name][row, :n])
    (tmp_path / "99-100.pt").touch()  # of a process that was killed before its checkpoint was written
    running.remove_episodes(buffer, tmp_path)
    assert not (tmp_path / "99-100.pt").exists()


def test_every_generator_is_saved():
    def draw():
        return random.random(), np.random.random(), np.random.standard_normal(), torch.rand(3).tolist()

    running.begin(script("ddqn_mate").Args(seed=3))
    np.random.standard_normal()  # leaves half of a pair behind
    saved = torch.load(save_to_memory(running.random_state()), weights_only=True)
    first = draw()
    draw()
    running.set_random_state(saved)
    assert draw() == first


def test_loading_runs_no_code_of_the_file(tmp_path):
    marker = tmp_path / "ran"

    class Malicious:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    path = tmp_path / "checkpoint.pt"
    torch.save({"script": "ddqn_mate", "args": Malicious()}, path)
    with pytest.raises(SystemExit, match="damaged, or not a file that this script has saved"):
        running.load(path)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists(), "the file would have run its code, had it been let"
    code = [path for folder in (".", "envs", "benchmark") for path in (ROOT / folder).glob("*.py")]
    calls = [line for path in code for line in path.read_text().splitlines() if "torch.load(" in line]
    assert calls and all("weights_only=True" in line for line in calls)


# ------------------------------------------------------------------------------------------------- resume and evaluate


def test_resuming_refuses_what_it_cannot_do_and_overwrites_nothing(uninterrupted, run, tmp_path):
    done_run = shutil.copytree(uninterrupted, tmp_path / "lr=3")
    before = fingerprint(done_run)
    damaged = shutil.copytree(uninterrupted, tmp_path / "damaged")
    content = (damaged / "checkpoint.pt").read_bytes()
    (damaged / "checkpoint.pt").write_bytes(content[: len(content) // 2])
    for flags, answer in (
        (["--resume", done_run], "is finished; a --total-episodes of more than 70"),
        (["--resume", done_run, "--gamma", 0.5], "--gamma 0.5 contradicts the run, which has 0.99: leave it out"),
        (["--batch-size", 9, f"--resume={done_run}"], "--batch-size 9 contradicts the run"),
        (["--resume", tmp_path / "nowhere"], "there is no"),
        (["--resume", damaged], "is damaged"),
        (["--evaluate", done_run / "args.json"], "is damaged, or not a file"),
        (["--evaluate", done_run / "model.pt", "--memory-dim", 8], "--memory-dim 8 contradicts the run"),
        (["--evaluate", done_run / "model.pt", "--env-id", "CartPole-v1"], "--env-id CartPole-v1 contradicts the run"),
        (["--evaluate", next((done_run / "episodes").iterdir())], "is not a file that this script has saved"),
        (["--evaluate", done_run / "model.pt", "--resume", done_run], "give one of them"),
        (["--resume", ""], "there is no checkpoint.pt"),
    ):
        result, _ = run("ddqn_mate", *flags, code=1)
        assert answer in result.stderr and result.stderr.count("\n") == 1 and not result.stdout, result.stderr
    result, _ = run("ddqn_lstm", "--resume", done_run, code=1)
    assert "is of ddqn_mate.py, not of ddqn_lstm.py" in result.stderr and result.stderr.count("\n") == 1
    assert fingerprint(done_run) == before
    assert not (tmp_path / "nowhere").exists() and not (tmp_path / "runs").exists()


def test_a_finished_run_goes_on_with_a_larger_budget(uninterrupted, run, tmp_path):
    folder = shutil.copytree(uninterrupted, tmp_path / "more")
    result, _ = run("ddqn_mate", "--resume", folder, "--total-episodes", 760, "--eval-interval", 20)
    assert results_of(folder)["episodes"] >= 760 and "episodes 0 " not in result.stdout
    steps = [step for step, _ in scalars_of(folder)["charts/episodic_return"]]
    assert steps == sorted(steps) and len(steps) == results_of(folder)["episodes"]


def test_a_run_that_is_extended_and_then_killed_is_not_taken_for_finished(uninterrupted, run, tmp_path):
    """The results of the shorter run are gone as soon as it goes on, so a kill before the new ones leaves it open."""
    folder = shutil.copytree(uninterrupted, tmp_path / "extended")
    process = start("ddqn_mate", "--resume", folder, "--total-episodes", EPISODES + 100000, cwd=tmp_path)
    while (folder / "results.json").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate()
    run("ddqn_mate", "--resume", folder, "--total-episodes", EPISODES + 40)
    assert results_of(folder)["episodes"] >= EPISODES + 40
    (
        folder / "results.json"
    ).unlink()  # as if killed just before they were written: nothing is evaluated or logged twice
    run("ddqn_mate", "--resume", folder)
    steps = [step for step, _ in scalars_of(folder)["eval/episodic_return"]]
    assert steps == sorted(set(steps)) and results_of(folder)["episodes"] >= EPISODES + 40


def test_one_process_per_run_and_one_run_per_folder(uninterrupted, run, tmp_path):
    folder = shutil.copytree(uninterrupted, tmp_path / "shared")
    process = start("ddqn_mate", "--resume", folder, "--total-episodes", 100000, cwd=tmp_path)
    while (folder / "results.json").exists():
        assert process.poll() is None
        time.sleep(0.05)
    result, _ = run("ddqn_mate", "--resume", folder, "--total-episodes", 200000, code=1)
    assert result.stderr == f"{folder} is being trained by another process\n"
    process.kill()
    process.communicate()
    first, second = (running.new_folder(str(tmp_path / "runs" / "x__")) for _ in range(2))
    assert first != second, "also when they are started in the same second"


def test_a_signal_to_the_whole_group_leaves_the_workers_to_the_main_process(tmp_path):
    """As Ctrl-C in a terminal and the time limit of a scheduler send it."""
    flags = "--env-id cheetah-vel --async-envs --total-timesteps 100000 --learning-starts 80 --max-episode-steps 20"
    flags += " --batch-size 4 --num-envs 2 --memory-dim 8 --hidden-dim 8 --eval-episodes 2"
    for number in (signal.SIGINT, signal.SIGTERM):
        cwd = tmp_path / str(int(number))
        cwd.mkdir()
        process = start("sac_mate", *flags.split(), cwd=cwd, start_new_session=True)
        process.stdout.readline()  # the evaluation before the first step
        time.sleep(1)
        os.killpg(process.pid, number)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + number and not errors, errors
        [folder] = (cwd / "runs").iterdir()
        assert running.load(folder / "checkpoint.pt")["counters"][0] > 0 and "go on with --resume" in output


def test_evaluate_needs_no_other_flag(uninterrupted, run):
    result, folders = run("ddqn_mate", "--evaluate", uninterrupted / "model.pt")
    assert not folders, "no run is started"
    last = results_of(uninterrupted)["last_return"]
    assert result.stdout.startswith(f"return {last:.3f} over 6 episodes, 95 % confidence ")
    low, high = (float(x) for x in result.stdout.split("confidence ")[1].split(" to "))
    assert low <= last <= high
    more, _ = run("ddqn_mate", "--evaluate", uninterrupted / "model.pt", "--eval-episodes", 40, "--capture-video")
    assert "over 40 episodes" in more.stdout
    assert len(list((uninterrupted / "videos" / "evaluate").glob("*.mp4"))) == 1
    size = (uninterrupted / "model.pt").stat().st_size
    assert size < (uninterrupted / "checkpoint.pt").stat().st_size / 2, "small, and separate from the checkpoint"


# -------------------------------------------------------------------------------------------------- a disk that is full


def test_a_full_disk_leaves_the_last_checkpoint_whole(uninterrupted, tmp_path):
    """The operating system refuses writes beyond a size that the checkpoint exceeds."""
    folder = shutil.copytree(uninterrupted, tmp_path / "full")
    before = fingerprint(folder)[folder / "checkpoint.pt"]
    limit = (folder / "checkpoint.pt").stat().st_size // 2

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = start("ddqn_mate", "--resume", folder, "--total-episodes", 5000, cwd=tmp_path, preexec_fn=small_files)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith(f"cannot write {folder / 'checkpoint.pt'}") and errors.count("\n") == 1, errors
    assert "the last checkpoint, if there is one, is whole" in errors
    assert fingerprint(folder)[folder / "checkpoint.pt"] == before
    assert not list(folder.rglob("*.tmp"))
    assert running.load(folder / "checkpoint.pt")["count"] >= 700


def test_a_full_disk_is_met_in_one_line_wherever_it_is_met(uninterrupted, tmp_path):
    """The arguments' file, the log, the episodes: whatever is the first to need more than there is."""
    for limit in (100, 2000, 20_000):
        folder = shutil.copytree(uninterrupted, tmp_path / str(limit))
        before = fingerprint(folder)

        def small_files():
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # noqa: B023

        process = start("ddqn_mate", "--resume", folder, "--total-episodes", 5000, cwd=tmp_path, preexec_fn=small_files)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1 and errors.startswith("cannot write") and errors.count("\n") == 1, errors
        after = fingerprint(folder)
        for name in ("checkpoint.pt", "model.pt", "args.json"):
            assert after[folder / name] == before[folder / name] or name == "args.json" and limit > 100
        assert not list(folder.rglob("*.tmp"))


def test_a_folder_that_cannot_be_written_is_answered_in_one_line(run, tmp_path):
    (tmp_path / "runs").write_text("in the way")
    command = [sys.executable, str(ROOT / "ddqn_mate.py"), *map(str, TMAZE)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("cannot write to runs/") and done.stderr.count("\n") == 1
    assert (tmp_path / "runs").read_text() == "in the way"


def test_a_seeded_reset_begins_where_the_seed_says():
    """An episode that was begun by a seed and not by the generator is restored too."""
    env = state.Restorable(gym.make("Pendulum-v1"))
    first, _ = env.reset(seed=4)
    env.step(np.array([0.5], dtype=np.float32))
    beginning = env.beginning
    env.reset()
    env.replay = (beginning, [])
    np.testing.assert_array_equal(env.reset()[0], first)
