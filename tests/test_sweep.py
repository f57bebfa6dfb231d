"""benchmark/sweep.py on a real local Ray: interrupted, killed and failing runs, and doing only what is missing."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tyro
from conftest import ROOT, results_of, scalars_of, script, train_in

from benchmark import sweep
from benchmark.sweep import Run, Setting

TINY = {"env_id": "tmaze-passive", "corridor_length": 3, "memory_dim": 8, "hidden_dim": 8, "batch_size": 8}
TINY |= {"learning_starts": 20, "num_envs": 3, "eval_episodes": 6, "eval_interval": 100}
SETTINGS = [
    Setting(("ddqn_lstm",), (1,), TINY | {"total_episodes": 110}),
    Setting(("ddqn_gpt2",), (1,), TINY | {"total_episodes": 110, "batch_size": 0}),
    Setting(("ddqn_mate",), (1,), TINY | {"total_episodes": 4_000, "updates_per_episode": 0.3}),
]
SETTINGS[2].flags["checkpoint_interval"] = 0.01  # minutes
NAMES = [f"{setting.scripts[0]}__tmaze-passive__L3__seed1" for setting in SETTINGS]
QUICK, BROKEN, LONG = NAMES


def start(cwd, *flags, **options):
    """The program with the table above. Its environment has seven threads, which the runs must not take over."""
    (cwd / "driver.py").write_text(
        f"from benchmark import sweep\nfrom benchmark.sweep import Setting\n"
        f"sweep.EXPERIMENTS['figure4', 'cpu'] = {SETTINGS}\nif __name__ == '__main__':\n    sweep.main()\n"
    )
    command = [sys.executable, "driver.py", "figure4", "--size", "cpu", *map(str, flags)]
    return popen(command, cwd, **options)


def popen(command, cwd, **options):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "7"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=env, **pipes, **options)


def processes_in(folder):
    """The processes that work in the folder or below it: the scripts, but not Ray's."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(path / "cwd")).is_relative_to(folder):
                found.append(int(path.name))
        except OSError:  # it has ended
            continue
    return found


def wait_for(condition, what, seconds=300):
    end = time.time() + seconds
    while not (value := condition()):
        assert time.time() < end, f"waited for {what} in vain"
        time.sleep(0.1)
    return value


def wait_for_episodes(folder, number, sweeping):
    """Wait until the run has logged that many episodes, and return its process."""

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
    """A sweep that is interrupted in its third run and continued, and whose script is then killed."""
    cwd = tmp_path_factory.mktemp("sweep")
    folder = cwd / "some runs"
    flags, story = ("--output-dir", "some runs", "--num-cpus", 1, "--retries", 1), SimpleNamespace(folder=folder)
    first = start(cwd, *flags)
    process = wait_for_episodes(folder / LONG, 100, first)
    story.environment = Path(f"/proc/{process}/environ").read_text().split("\0")
    story.niceness = os.getpriority(os.PRIO_PROCESS, process)
    story.quick_files = files_of(folder / QUICK)
    first.send_signal(signal.SIGINT)
    story.interrupted = first.communicate(timeout=300), first.returncode
    story.left_over = processes_in(folder)
    [checkpoint] = folder.glob(f"{LONG}/runs/*/checkpoint.pt")
    story.interrupted_at = torch.load(checkpoint, weights_only=True)["buffer"]["count"]

    second = start(cwd, *flags)
    os.kill(wait_for_episodes(folder / LONG, story.interrupted_at + 200, second), signal.SIGKILL)
    story.output, story.errors = second.communicate(timeout=600)
    story.code = second.returncode
    return story


def test_an_interrupted_sweep_saves_its_runs_and_leaves_no_process(story):
    (output, errors), code = story.interrupted
    assert code == 130 and not errors, errors
    assert "save their checkpoints" in output and "the same command continues" in output
    assert not story.left_over
    log = (story.folder / LONG / "log.txt").read_text()
    assert "stopped at step" in log.split("--resume")[0] and story.interrupted_at >= 100


def test_started_again_it_does_only_what_is_missing(story):
    assert files_of(story.folder / QUICK) == story.quick_files
    assert story.output.startswith("1 of 3 runs are finished") and QUICK not in story.output


def test_a_run_that_is_interrupted_and_killed_ends_as_if_it_had_not_been(story, tmp_path):
    [folder] = (story.folder / LONG / "runs").iterdir()
    log = (story.folder / LONG / "log.txt").read_text()
    assert log.count("ddqn_mate.py --env-id") == 1 and log.count(f"ddqn_mate.py --resume runs/{folder.name}\n") == 2
    assert log.count("episodes 0 ") == 1, "it never started over"
    steps = [step for step, _ in scalars_of(folder)["eval/episodic_return"]]
    assert steps == sorted(set(steps)) and results_of(folder)["episodes"] >= 4_000
    whole = train_in(tmp_path, "ddqn_mate", **SETTINGS[2].flags, seed=1)
    swept, alone = (torch.load(path / "model.pt", weights_only=True)["agent"] for path in (folder, whole))
    assert all(torch.equal(swept[name], alone[name]) for name in alone)


def test_a_failed_run_stops_no_other_and_its_error_is_shown(story):
    assert story.code == 1 and "error: 1 runs failed" in story.errors and "Traceback" not in story.errors
    assert re.search(rf"^\[1/2\] {BROKEN}: failed, exit code 1: error: --batch-size 0 is", story.output, re.MULTILINE)
    best = results_of(next(story.folder.glob(f"{LONG}/runs/*")))["best_return"]
    assert re.search(rf"^\[2/2\] {LONG}: best {best:.3f}, last .*, .* minutes$", story.output, re.MULTILINE)
    assert (story.folder / BROKEN / "log.txt").read_text().count("ddqn_gpt2.py") == 2, "once in each sweep, no retry"


def test_runs_have_one_thread_no_gpu_and_full_priority(story):
    assert {"OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES="} <= set(story.environment)
    assert story.niceness == os.getpriority(os.PRIO_PROCESS, 0)


def test_scripts_save_when_the_sweep_is_killed(tmp_path):
    """As a user starts it: `python -m benchmark.sweep`, in the background of a shell script that ignores Ctrl-C."""
    run = sweep.select_runs(sweep.Args("figure4", "cpu"))[0]
    command = [sys.executable, "-m", "benchmark.sweep", "figure4", "--size", "cpu", "--only", run.name]
    in_background = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    sweeping = popen([*command, "--num-cpus", "1"], tmp_path, **in_background)
    checkpoints = f"sweeps/figure4-cpu/{run.name}/runs/*/checkpoint.pt"
    [checkpoint] = wait_for(lambda: list(tmp_path.glob(checkpoints)), "the first checkpoint")
    sweeping.kill()
    sweeping.communicate(timeout=100)
    wait_for(lambda: not processes_in(tmp_path / "sweeps"), "the end of the script")
    assert "stopped at step" in next(tmp_path.glob("sweeps/figure4-cpu/*/log.txt")).read_text()
    dry = popen([*command, "--dry-run"], tmp_path).communicate(timeout=200)[0]
    assert dry.endswith(f"{run.script}.py --resume runs/{checkpoint.parent.name})\n") and dry.count("\n") == 1


# --------------------------------------------------------------------------------------------------------- without Ray


@pytest.fixture
def main(monkeypatch, capsys):
    """The program in this process, which has no Ray: how it ends and what it prints."""
    monkeypatch.setitem(sys.modules, "ray", None)

    def run(output_dir, settings, *flags):
        monkeypatch.setitem(sweep.EXPERIMENTS, ("figure4", "cpu"), settings)
        words = ["sweep", "figure4", "--size", "cpu", "--output-dir", str(output_dir), *map(str, flags)]
        monkeypatch.setattr(sys, "argv", words)
        try:
            code = sweep.main()
        except SystemExit as ended:
            code = ended.code
        return code, capsys.readouterr().out

    return run


def test_nothing_is_started_if_all_runs_are_finished(story, main):
    finished = [SETTINGS[0], SETTINGS[2]]
    assert main(story.folder, finished)[1].startswith("2 of 2 runs are finished")
    assert main(story.folder, finished, "--dry-run") == (None, "")


def test_runs_with_other_flags_are_refused(story, main):
    long = SETTINGS[2]
    for changes, answer in (
        ({"hidden_dim": 9}, "--hidden-dim 8, and 9 is asked for now"),
        ({"gamma": 0.9}, "--gamma 0.99, and 0.9 is asked for now"),
        ({"num_envs": 64}, "--num-envs 3, and 64 is asked for now"),
    ):
        code, _ = main(story.folder, [long._replace(flags=long.flags | changes)], "--dry-run")
        assert answer in code and "\n" not in code


REACHED = {"best_return": 1.0, "last_return": 0.5, "seconds": 60}  # as in results.json


def fake_script(monkeypatch, codes, checkpoint):
    """Instead of a script: leaves a run folder, with or without a checkpoint, and ends with the next code."""
    commands, codes = [], list(codes)

    def run_script(words, folder, log, args):
        commands.append(words[2:])
        run_dir = folder / "runs" / str(len(commands))
        if "--resume" not in words:
            run_dir.mkdir(parents=True)
            if checkpoint:
                (run_dir / "checkpoint.pt").touch()
        if codes[0] == 0:
            (max(folder.glob("runs/*")) / "results.json").write_text(json.dumps(REACHED))
        print("first line\nlast line", file=log, flush=True)
        return codes.pop(0)

    monkeypatch.setattr(sweep, "run_script", run_script)
    return commands


@pytest.mark.parametrize(
    "codes, checkpoint, attempts, outcome",
    [
        ((-9, 143, 0), True, 3, REACHED),  # killed, then stopped by somebody
        ((-9, 0), False, 2, REACHED),  # killed before its first checkpoint
        ((1, 1, 1, 0), True, 3, "exit code 1: last line"),  # as often as --retries says
        ((2,), False, 1, "exit code 2: last line"),  # refused its flags, and would do so again
    ],
)
def test_what_is_tried_again(codes, checkpoint, attempts, outcome, monkeypatch, tmp_path):
    commands, run = fake_script(monkeypatch, codes, checkpoint), Run("ddqn_lstm", TINY, tmp_path)
    assert sweep.train(run, SimpleNamespace(retries=2)) == outcome
    assert len(commands) == attempts
    assert all(words == (["--resume", "runs/1"] if checkpoint else commands[0]) for words in commands[1:])
    assert len(list(tmp_path.glob("runs/*"))) == 1, "folders without a checkpoint are removed"
    if outcome == REACHED:
        assert sweep.train(run, SimpleNamespace(retries=2)) == REACHED
        assert len(commands) == attempts, "a finished run is not started again"


def test_a_run_waits_for_a_script_that_is_still_saving_in_its_folder(monkeypatch, tmp_path):
    commands = fake_script(monkeypatch, [0], True)
    with open(tmp_path / "log.txt", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        child = subprocess.Popen(["sleep", "100"], stdout=log)  # as a script whose worker then dies
    waited = []
    monkeypatch.setattr(
        sweep.time, "sleep", lambda seconds: (waited.append(list(commands)), child.kill(), child.wait())
    )
    assert sweep.train(Run("ddqn_lstm", TINY, tmp_path), SimpleNamespace(retries=0)) == REACHED
    assert waited == [[]], "nothing had been started while it waited"


@pytest.mark.parametrize("experiment", sweep.EXPERIMENTS)
def test_the_flags_of_the_experiments_are_those_of_the_scripts(experiment, tmp_path):
    runs = sweep.select_runs(sweep.Args(*experiment, output_dir=tmp_path))
    assert len(runs) == {("figure3", "paper"): 4 * 5 * 3, ("figure4", "paper"): 3 * 2 * 5 * 2}.get(
        experiment, len(runs)
    )
    for run in runs:
        args = script(run.script).Args(**run.flags)
        args.check()
        assert tyro.cli(script(run.script).Args, args=sweep.command(run)[2:]) == args


def test_runs_are_ordered_by_seed_then_by_setting(monkeypatch):
    settings = [Setting(("sac_mate", "sac_lstm"), (5, 6), {"env_id": "ant-dir"})]
    settings += [Setting(("ddqn_mate",), (7, 8, 9), {"env_id": "tmaze-active", "corridor_length": 50})]
    monkeypatch.setitem(sweep.EXPERIMENTS, ("figure4", "cpu"), settings)

    def names(**args):
        return [run.name for run in sweep.select_runs(sweep.Args("figure4", "cpu", **args))]

    maze = "ddqn_mate__tmaze-active__L50__seed"
    assert names() == [
        "sac_mate__ant-dir__seed5", "sac_lstm__ant-dir__seed5", f"{maze}7",
        "sac_mate__ant-dir__seed6", "sac_lstm__ant-dir__seed6", f"{maze}8", f"{maze}9",
    ]  # fmt: skip
    assert names(seeds=(3,), only=("lstm", "tmaze")) == ["sac_lstm__ant-dir__seed3", f"{maze}3"]
    for args, answer in (({"only": ("mat3",)}, "no run is called like --only mat3"), ({"seeds": (1, 1)}, "two runs")):
        with pytest.raises(SystemExit, match=answer):
            names(**args)


def test_switches_are_written_as_the_scripts_take_them():
    flags = {"env_id": "ant-dir", "bf16": True, "freeze_critic": False}
    assert sweep.to_words(flags) == ["--env-id", "ant-dir", "--bf16", "--no-freeze-critic"]
