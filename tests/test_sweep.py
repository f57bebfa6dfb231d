"""Sweeps on a real Ray with two workers: killed, stopped and failing runs, and doing only what is missing."""

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tyro
from conftest import ROOT, results_of, scalars_of, script

from benchmark import sweep
from benchmark.sweep import Run

TINY = {"env_id": "tmaze-passive", "corridor_length": 3, "memory_dim": 8, "hidden_dim": 8, "batch_size": 8}
TINY |= {"learning_starts": 20, "num_envs": 3, "eval_episodes": 6, "eval_interval": 100, "total_episodes": 110}
QUICK = Run("ddqn_lstm", TINY, 1)
LONG = Run("ddqn_mate", TINY | {"total_episodes": 2_000, "checkpoint_interval": 0.01}, 1)
BROKEN = {"env_id": "odd_envs:broken", "total_timesteps": 130, "learning_starts": 80, "num_envs": 3}
BROKEN = Run("sac_mate", BROKEN | {"batch_size": 4, "memory_dim": 8, "hidden_dim": 8, "eval_episodes": 2}, 1)
RUNS = [QUICK, LONG, BROKEN]

# As a user starts it, but for the table of experiments, which has runs of hours.
DRIVER = f"""
from benchmark import sweep
from benchmark.sweep import Run
sweep.select_runs = lambda args: {RUNS}
if __name__ == "__main__":
    sweep.main()
"""


def start(program, *flags, cwd, **options):
    """A sweep that sees seven threads in its environment, of which its runs must not take note."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "7"}
    command = [sys.executable, str(program), "figure4", "--size", "cpu", *map(str, flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=env, **pipes, **options)


def processes_in(folder):
    """The processes that work in the folder or below it: of a sweep, the scripts but not Ray's."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(path / "cwd")).is_relative_to(folder):
                found.append(int(path.name))
        except OSError:  # it has ended
            continue
    return found


def wait_for(condition, what, seconds=200):
    end = time.time() + seconds
    while not (value := condition()):
        assert time.time() < end, f"waited for {what} in vain"
        time.sleep(0.1)
    return value


def wait_for_episodes(folder, number, sweeping):
    """Waits until the run has logged that it got as far, and returns its process."""

    def there():
        assert sweeping.poll() is None, sweeping.communicate()
        log = folder / "log.txt"
        logged = re.findall(r"^episodes (\d+)", log.read_text(), re.MULTILINE) if log.exists() else []
        return any(int(episodes) >= number for episodes in logged) and processes_in(folder)

    [process] = wait_for(there, f"{number} episodes")
    return process


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A sweep that is interrupted and started again, and then has a script and a Ray worker killed."""
    cwd = tmp_path_factory.mktemp("sweep")
    (cwd / "driver.py").write_text(DRIVER)
    flags = "--output-dir", "some runs", "--num-cpus", 2, "--retries", 1
    folders = SimpleNamespace(**{name: cwd / "some runs" / run.name for name, run in
                                 {"quick": QUICK, "long": LONG, "broken": BROKEN}.items()})  # fmt: skip
    story = SimpleNamespace(cwd=cwd, folders=folders)

    first = start("driver.py", *flags, cwd=cwd)
    process = wait_for_episodes(folders.long, 100, first)
    story.environment = Path(f"/proc/{process}/environ").read_text().split("\0")
    os.kill(process, signal.SIGSTOP)  # or it might be at its end before the other has begun
    wait_for(lambda: sweep.results_of(folders.quick), "the quick run")
    os.kill(process, signal.SIGCONT)
    story.quick_files = files_of(folders.quick)
    first.send_signal(signal.SIGINT)
    story.interrupted = first.communicate(timeout=200), first.returncode
    story.left_over = processes_in(cwd / "some runs")
    story.interrupted_at = torch.load(next(folders.long.glob("runs/*/checkpoint.pt")), weights_only=True)["count"]

    second = start("driver.py", *flags, cwd=cwd)
    os.kill(wait_for_episodes(folders.long, story.interrupted_at + 200, second), signal.SIGKILL)
    process = wait_for_episodes(folders.long, story.interrupted_at + 500, second)
    worker = int(Path(f"/proc/{process}/stat").read_text().split()[3])
    assert Path(f"/proc/{worker}/cmdline").read_text().startswith("ray::train")
    os.kill(worker, signal.SIGKILL)
    story.output, story.errors = second.communicate(timeout=400)
    story.code = second.returncode
    return story


# ------------------------------------------------------------------------------------------- interrupted and continued


def test_an_interrupted_sweep_saves_its_runs_and_leaves_no_process(story):
    (output, errors), code = story.interrupted
    assert code == 130 and not errors, errors
    assert "stopping: the runs under way save their checkpoints first" in output and "the same command" in output
    assert not story.left_over
    log = (story.folders.long / "log.txt").read_text()
    assert "stopped at step" in log.split("--resume")[0] and story.interrupted_at >= 100


def test_started_again_it_does_only_what_is_missing(story):
    assert files_of(story.folders.quick) == story.quick_files
    assert re.search(rf"^{QUICK.name} +finished before ", story.output, re.MULTILINE)


def test_a_run_whose_script_or_worker_is_killed_goes_on_from_its_checkpoint(story):
    [folder] = (story.folders.long / "runs").iterdir()
    log = (story.folders.long / "log.txt").read_text()
    assert log.count("ddqn_mate.py --env-id") == 1 and log.count(f"ddqn_mate.py --resume runs/{folder.name}\n") == 3
    assert log.count("episodes 0 ") == 1, "no second start"
    assert log.count("stopped at step") == 2, "it saved when it was interrupted, and when its worker was killed"
    assert results_of(folder)["episodes"] >= 2_000
    steps = [step for step, _ in scalars_of(folder)["eval/episodic_return"]]
    assert steps == sorted(set(steps))


def test_a_failed_run_stops_no_other_and_is_in_the_table_with_its_log(story):
    assert story.code == 1
    table = story.output.split("best return")[1].splitlines()[1:]
    assert len(table) == 4
    best, last = (
        f"{results_of(next(story.folders.long.glob('runs/*')))[key]:.3f}" for key in ("best_return", "last_return")
    )
    assert re.fullmatch(rf"{LONG.name} +finished +{best} +{last} +\d+\.\d", table[1])
    log = "some runs/" + BROKEN.name + "/log.txt"
    assert re.fullmatch(rf"{re.escape(BROKEN.name)} +failed +see {re.escape(log)}", table[2])
    assert table[3].startswith("    exit code 1: reward is not finite at step 21: stopped")
    assert "Traceback" not in story.errors
    assert not sweep.results_of(story.folders.broken)


def test_runs_are_held_to_their_threads_and_see_no_gpu(story):
    assert {"OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES="} <= set(story.environment)
    args = SimpleNamespace(cpus_per_run=3, gpus_per_run=0.5)
    assert sweep.environment(args) == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}, "Ray says which GPU"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_program_itself_can_be_stopped_and_killed(number, tmp_path):
    """Its functions reach the workers in another way than those of a module that is imported.

    Started as a shell script starts a program in the background, with Ctrl-C ignored by it and all that it starts.
    """
    program, flags = ROOT / "benchmark" / "sweep.py", ("--only", "ddqn_mate__tmaze-passive__L20__seed1")
    in_background = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    sweeping = start(program, *flags, "--num-cpus", 1, cwd=tmp_path, **in_background)
    checkpoints = "sweeps/figure4-cpu/*/runs/*/checkpoint.pt"
    [checkpoint] = wait_for(lambda: list(tmp_path.glob(checkpoints)), "the checkpoint that is written at the start")
    sweeping.send_signal(number)
    _, errors = sweeping.communicate(timeout=200)
    if number == signal.SIGKILL:  # then the script is told by the system
        wait_for(lambda: not processes_in(tmp_path / "sweeps"), "the end of the script")
    assert sweeping.returncode == (130 if number == signal.SIGTERM else -number) and not errors, errors
    assert not processes_in(tmp_path / "sweeps")
    assert "stopped at step" in next(tmp_path.glob("sweeps/figure4-cpu/*/log.txt")).read_text()
    dry = start(program, *flags, "--dry-run", cwd=tmp_path)
    assert dry.communicate(timeout=60)[0].endswith(f"ddqn_mate.py --resume runs/{checkpoint.parent.name})\n")


# --------------------------------------------------------------------------------------------------------- without Ray


@pytest.fixture
def main(monkeypatch, capsys):
    """main(folder, flags, runs) is the program in this process, which has no Ray: how it ends and what it prints."""
    monkeypatch.setitem(sys.modules, "ray", None)

    def run(output_dir, *flags, runs):
        monkeypatch.setattr(sweep, "select_runs", lambda args: runs)
        words = ["sweep.py", "figure4", "--size", "cpu", "--output-dir", str(output_dir), *map(str, flags)]
        monkeypatch.setattr(sys, "argv", words)
        code = 0
        try:
            sweep.main()
        except SystemExit as ended:
            code = ended.code
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def fake_ray(monkeypatch):
    """A cluster of one machine with 2 cores and 1 GPU, that notes what it is asked for and does it at once."""
    asked = SimpleNamespace(init=None, remote=None)

    def remote(**resources):
        asked.remote = resources
        return lambda function: SimpleNamespace(remote=lambda *args: object())

    def get(task):
        if isinstance(asked.result, Exception):
            raise asked.result
        return asked.result

    class RayError(Exception):
        pass

    ray = SimpleNamespace(
        init=lambda address, **kwargs: setattr(asked, "init", (address, kwargs)),
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": 2.0, "GPU": 1.0}}],
        remote=remote,
        get=get,
        wait=lambda refs, **kwargs: (refs[:1], refs[1:]),
        shutdown=lambda: None,
        exceptions=SimpleNamespace(RayError=RayError),
    )
    asked.result, asked.RayError = REACHED, RayError
    monkeypatch.setitem(sys.modules, "ray", ray)
    return asked


def test_the_cluster_and_the_resources_that_are_asked_for(main, fake_ray, monkeypatch, tmp_path):
    code, output = main(tmp_path, "--address", "auto", "--gpus-per-run", 0.5, "--retries", 1, runs=[QUICK, LONG])
    assert code == 0 and output.count("finished") == 4, output  # as they end, and in the table
    assert fake_ray.init[0] == "auto" and "num_cpus" not in fake_ray.init[1]
    assert fake_ray.remote == {"num_cpus": 1, "num_gpus": 0.5, "max_retries": 1}
    code, _ = main(tmp_path, "--num-cpus", 2, "--cpus-per-run", 2, runs=[QUICK])
    assert fake_ray.init[0] == "local" and fake_ray.init[1]["num_cpus"] == 2
    assert fake_ray.remote["num_cpus"] == 2 and fake_ray.remote["num_gpus"] == 0


@pytest.mark.parametrize("flag, what", [("--cpus-per-run", "cpus"), ("--gpus-per-run", "gpus")])
def test_more_than_a_machine_has_is_refused(flag, what, main, fake_ray, tmp_path):
    code, _ = main(tmp_path, flag, 3, runs=[QUICK])
    assert code.startswith(f"--{what}-per-run 3 is more than a machine here has") and "\n" not in code


def test_a_task_that_breaks_without_a_word_is_a_failed_run(main, fake_ray, tmp_path):
    fake_ray.result = fake_ray.RayError()
    code, output = main(tmp_path, runs=[QUICK, LONG])
    assert code == 1 and output.count("failed") == 4 and "RayError()" in output


def test_dry_run_prints_commands_that_do_the_same(story, main, tmp_path):
    """By hand, and uninterrupted: the same weights as the run that was interrupted once and killed twice."""
    code, line = main(tmp_path / "by hand", "--dry-run", runs=[LONG])
    assert code == 0 and line.count("\n") == 1 and not (tmp_path / "by hand").exists()
    subprocess.run(["bash", "-c", line], cwd="/", check=True, capture_output=True)
    code, table = main(tmp_path / "by hand", runs=[LONG])  # for which Ray would be needed if there were something to do
    assert code == 0 and re.search(rf"^{LONG.name} +finished before ", table, re.MULTILINE)
    assert main(tmp_path / "by hand", "--dry-run", runs=[LONG]) == (0, "")
    by_hand, swept = (
        torch.load(next(folder.glob("runs/*/model.pt")), weights_only=True)["agent"]
        for folder in (tmp_path / "by hand" / LONG.name, story.folders.long)
    )
    assert all(torch.equal(by_hand[name], swept[name]) for name in swept)


def test_without_ray_it_says_what_to_install(main, tmp_path):
    assert "pip install -r benchmark/requirements.txt" in main(tmp_path, runs=[LONG])[0]


def test_runs_with_other_flags_are_refused(story, main):
    for flags, answer in (
        (LONG.flags | {"hidden_dim": 9}, "was run with hidden_dim 8, and 9 is asked for now"),
        (LONG.flags | {"gamma": 0.9}, "was run with gamma 0.99, and 0.9 is asked for now"),
        ({k: v for k, v in LONG.flags.items() if k != "num_envs"}, "was run with num_envs 3, and 64 is asked for now"),
        (LONG.flags, 0),
    ):
        code, _ = main(story.cwd / "some runs", runs=[Run(LONG.script, flags, LONG.seed)])
        assert code == answer or answer and answer in code and "\n" not in code


REACHED = {"best_return": 1.0, "last_return": 0.5, "seconds": 60}  # what a run's results.json says


def fake_start(monkeypatch, codes, checkpoint):
    """In place of a script: leaves a run's folder, with or without a checkpoint, and ends with the next code."""
    commands, codes = [], list(codes)

    def start(words, folder, lock, args):
        commands.append(words[2:])
        run_dir = folder / "runs" / str(len(commands))
        if "--resume" not in words:
            run_dir.mkdir(parents=True)
            (run_dir / "args.json").write_text("{}")
            if checkpoint:
                (run_dir / "checkpoint.pt").touch()
        if codes[0] == 0:
            (max(folder.glob("runs/*")) / "results.json").write_text(json.dumps(REACHED))
        (folder / "log.txt").write_text("first line\nlast line\n")
        return codes.pop(0)

    monkeypatch.setattr(sweep, "start", start)
    return commands


@pytest.mark.parametrize(
    "codes, checkpoint, attempts, outcome",
    [
        ((-9, 143, 0), True, 3, REACHED),  # killed, then stopped by somebody
        ((-9, 0), False, 2, REACHED),  # killed before its first checkpoint
        ((1, 1, 1, 0), True, 3, "exit code 1: last line"),  # as often as --retries says
        ((2,), False, 1, "exit code 2: last line"),  # would refuse its flags again
        ((1,), False, 1, "exit code 1: last line"),
    ],
)
def test_what_is_tried_again(codes, checkpoint, attempts, outcome, monkeypatch, tmp_path):
    commands = fake_start(monkeypatch, codes, checkpoint)
    assert sweep.train(QUICK, tmp_path, SimpleNamespace(retries=2)) == outcome
    assert len(commands) == attempts
    for words in commands[1:]:
        assert words == (["--resume", "runs/1"] if checkpoint else commands[0])
    assert len(list(tmp_path.glob("runs/*"))) == 1, "what was left without a checkpoint is removed"
    if outcome == REACHED:
        assert sweep.train(QUICK, tmp_path, SimpleNamespace(retries=2)) == REACHED
        assert len(commands) == attempts, "finished: not started again"


def test_two_processes_never_train_in_one_folder(monkeypatch, tmp_path):
    commands = fake_start(monkeypatch, [0], True)
    monkeypatch.setattr(sweep, "GRACE", 1)
    lock = sweep.take_lock(tmp_path)
    child = subprocess.Popen(["sleep", "100"], pass_fds=[lock])  # as a script, whose worker then dies
    os.close(lock)
    assert sweep.train(QUICK, tmp_path, SimpleNamespace(retries=2)) == "another process is training in its folder"
    child.kill()
    child.wait()
    by_hand = tmp_path / "runs" / "by hand"  # which has no checkpoint yet, and must not be removed
    by_hand.mkdir(parents=True)
    with open(by_hand / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sweep.train(QUICK, tmp_path, SimpleNamespace(retries=2)) == "another process is training in its folder"
    assert by_hand.exists() and not commands
    assert sweep.train(QUICK, tmp_path, SimpleNamespace(retries=2)) == REACHED and not by_hand.exists()


def test_the_experiments_are_the_papers_and_their_flags_are_right():
    counts = {("figure3", "paper"): 4 * 5 * 3, ("figure4", "paper"): 3 * 2 * 5 * 2}
    for experiment, size in sweep.EXPERIMENTS:
        runs = sweep.select_runs(sweep.Args(experiment, size))
        assert len(runs) == len({run.name for run in runs}) == counts.get((experiment, size), len(runs))
        for run in runs:
            args = script(run.script).Args(**run.flags, seed=run.seed)  # refuses what it does not know
            words = sweep.command(run, Path("nowhere"))[2:]
            assert tyro.cli(script(run.script).Args, args=words) == args
    names = [run.name for run in sweep.select_runs(sweep.Args("figure4", "cpu", only=("mate", "gpt2"), seeds=(7,)))]
    assert "ddqn_mate__tmaze-active__L50__seed7" in names and not any(
        "lstm" in name or "seed1" in name for name in names
    )
    assert "ddqn_gpt2__tmaze-active__L600__seed2" in [r.name for r in sweep.select_runs(sweep.Args("figure4"))]


def test_switches_are_written_as_the_scripts_take_them():
    run = Run("sac_mate", {"env_id": "ant-dir", "async_envs": True, "freeze_critic": False}, 3)
    assert (
        shlex.join(sweep.command(run, Path("nowhere"))[2:])
        == "--env-id ant-dir --async-envs --no-freeze-critic --seed 3"
    )


@pytest.mark.parametrize(
    "flags, answer",
    [
        ({"experiment": "figure5"}, "there is no experiment figure5 of size paper, but figure3, figure4"),
        (
            {"only": ("mat3",)},
            "--only mat3 is in none of the names, which are like ddqn_mate__tmaze-passive__L200__seed1",
        ),
        ({"seeds": (1, 1)}, "two runs would be called ddqn_mate__tmaze-passive__L200__seed1"),
        ({"cpus_per_run": 0}, "--cpus-per-run and --num-cpus must be 1 or more"),
        ({"gpus_per_run": 1.5}, "--gpus-per-run must be a part of 1 or a whole number"),
        ({"address": "auto", "num_cpus": 2}, "give one of them"),
    ],
)
def test_bad_input_is_answered_in_one_line(flags, answer):
    with pytest.raises(SystemExit) as ended:
        sweep.select_runs(sweep.Args(**({"experiment": "figure4"} | flags)))
    assert answer in ended.value.code and "\n" not in ended.value.code
