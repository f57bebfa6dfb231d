"""benchmark/sweep.py on a real local Ray: interrupted, killed and failing runs, and doing only what is missing."""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import tyro
from conftest import call, equal, files_of, results_of, scalars_of, script, start, train_in, weights_of

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
QUICK, BROKEN, LONG = (f"{setting.scripts[0]}__tmaze-passive__L3__seed1" for setting in SETTINGS)


def processes_in(folder):
    """The processes that work in the folder or below it: the scripts, but not Ray's."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if Path(os.readlink(path / "cwd")).is_relative_to(folder):
                found.append(int(path.name))
    return found


def wait_for(condition, sweeping=None, seconds=300):
    """The first true value of the condition, for which this sweep must not have ended."""
    end = time.time() + seconds
    while not (value := condition()):
        assert time.time() < end, "waited in vain"
        assert sweeping is None or sweeping.poll() is None, sweeping.communicate()
        time.sleep(0.1)
    return value


def script_in(folder, episodes):
    """The processes of the run in this folder, once it has logged that many episodes."""
    log = (folder / "log.txt").read_text() if (folder / "log.txt").exists() else ""
    return any(int(n) >= episodes for n in re.findall(r"^episodes (\d+)", log, re.M)) and processes_in(folder)


@contextlib.contextmanager
def held(process):
    """Hold a script still until its Ray worker has been gone for a while, as if an iteration took that long."""

    def parent():
        return Path(f"/proc/{process}/stat").read_text().split()[3]

    os.kill(process, signal.SIGSTOP)
    worker = parent()
    yield
    wait_for(lambda: parent() != worker)
    time.sleep(1)
    os.kill(process, signal.SIGCONT)


def test_a_sweep_that_is_interrupted_and_whose_script_is_killed_ends_as_if_nothing_had_happened(tmp_path):
    """Three runs, one after the other: one that is soon finished, one that fails, and a long one."""
    driver = "from benchmark import sweep\nfrom benchmark.sweep import Setting\nif __name__ == '__main__':\n"
    driver += f"    sweep.EXPERIMENTS['figure4', 'cpu'] = {SETTINGS}\n    sweep.main()\n"
    (tmp_path / "driver.py").write_text(driver)
    command = "driver.py figure4 --size cpu --num-cpus 1 --retries 1 --output-dir".split()
    folder = tmp_path / "some runs"
    log = folder / LONG / "log.txt"

    # Interrupted in its third run: that run is saved, and no process is left.
    in_terminal = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}  # even if we are not
    sweeping = start(*command, "some runs", cwd=tmp_path, threads=7, **in_terminal)  # threads: not those of the runs
    [process] = wait_for(lambda: script_in(folder / LONG, 100), sweeping)
    environment = Path(f"/proc/{process}/environ").read_text().split("\0")
    niceness, quick_files = os.getpriority(os.PRIO_PROCESS, process), files_of(folder / QUICK)
    with held(process):
        sweeping.send_signal(signal.SIGINT)
    output, errors = sweeping.communicate(timeout=300)
    assert {"OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES="} <= set(environment)
    assert niceness == os.getpriority(os.PRIO_PROCESS, 0), "full priority"
    assert sweeping.returncode == 130 and not errors, errors
    assert "save their checkpoints" in output and "the same command continues" in output
    assert not processes_in(folder)
    [checkpoint] = folder.glob(f"{LONG}/runs/*/checkpoint.pt")
    interrupted_at = torch.load(checkpoint, weights_only=True)["buffer"]["count"]
    assert log.read_text().splitlines()[-1].startswith("stopped at step") and interrupted_at >= 100

    # Started again it does only what is missing, and restarts the script that is killed. A failed run stops no other.
    def attempts():
        return (folder / BROKEN / "log.txt").read_text().count("ddqn_gpt2.py")

    before = attempts()
    sweeping = start(*command, "some runs", cwd=tmp_path)
    [process] = wait_for(lambda: script_in(folder / LONG, interrupted_at + 200), sweeping)
    os.kill(process, signal.SIGKILL)
    output, errors = sweeping.communicate(timeout=600)
    assert files_of(folder / QUICK) == quick_files
    assert output.startswith("1 of 3 runs are finished") and QUICK not in output
    assert sweeping.returncode == 1 and "error: 1 runs failed" in errors and "Traceback" not in errors
    assert re.search(rf"^\[[12]/2\] {BROKEN}: failed, exit code 1: error: --batch-size 0 is", output, re.MULTILINE)
    assert attempts() == before + 2, "once more, as often as --retries says"
    run, text = checkpoint.parent, log.read_text()
    assert re.search(
        rf"^\[[12]/2\] {LONG}: best {results_of(run)['best_return']:.3f}, last .*, .* minutes$", output, re.M
    )
    assert text.count("ddqn_mate.py --env-id") == 1 and text.count(f"ddqn_mate.py --resume runs/{run.name}\n") == 2
    assert text.count("episodes 0 ") == 1, "it never started over"
    whole = train_in(tmp_path / "whole", "ddqn_mate", **SETTINGS[2].flags, seed=1)
    evaluations = [scalars_of(folder)["eval/episodic_return"] for folder in (run, whole)]
    assert equal(weights_of(run), weights_of(whole)) and equal(*evaluations)


def test_scripts_save_when_the_sweep_is_killed(tmp_path):
    """As a user starts it: `python -m benchmark.sweep`, in the background of a shell script that ignores Ctrl-C."""
    run = sweep.select_runs(sweep.Args("figure4", "cpu"))[0]
    command = ["-m", "benchmark.sweep", "figure4", "--size", "cpu", "--only", run.name]
    in_background = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    sweeping = start(*command, "--num-cpus", "1", cwd=tmp_path, **in_background)
    checkpoints = f"sweeps/figure4-cpu/{run.name}/runs/*/checkpoint.pt"
    [checkpoint] = wait_for(lambda: list(tmp_path.glob(checkpoints)), sweeping)
    [process] = processes_in(tmp_path / "sweeps")
    with held(process):
        sweeping.kill()
    sweeping.communicate(timeout=100)
    wait_for(lambda: not processes_in(tmp_path / "sweeps"))
    assert "stopped at step" in next(tmp_path.glob("sweeps/figure4-cpu/*/log.txt")).read_text()
    dry = start(*command, "--dry-run", cwd=tmp_path).communicate(timeout=200)[0]
    assert dry.endswith(f"{run.script}.py --resume runs/{checkpoint.parent.name})\n") and dry.count("\n") == 1


# --------------------------------------------------------------------------------------------------------- without Ray
REACHED = {"best_return": 1.0, "last_return": 0.5, "seconds": 60}  # as in results.json


def test_nothing_is_started_if_all_runs_are_finished_and_other_flags_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    folder = tmp_path / LONG / "runs" / "run"
    folder.mkdir(parents=True)
    (folder / "checkpoint.pt").touch()
    (folder / "results.json").write_text(json.dumps(REACHED))
    args = script("ddqn_mate").Args(**SETTINGS[2].flags, resume="runs/run")
    (folder / "args.json").write_text(json.dumps(asdict(args)))

    def main(*words, **changes):
        setting = SETTINGS[2]._replace(flags=SETTINGS[2].flags | changes)
        monkeypatch.setitem(sweep.EXPERIMENTS, ("figure4", "cpu"), [setting])
        call(sweep.main, "figure4", "--size", "cpu", "--output-dir", tmp_path, *words)
        return capsys.readouterr().out

    assert main().startswith("1 of 1 runs are finished") and main("--dry-run") == ""
    elsewhere = "script,env_id,corridor_length,seed,finished\nddqn_mate,tmaze-passive,3,1,{}\n"
    (folder / "results.json").unlink()
    for finished, count in ((0, 1), (1, 0)):
        (tmp_path / "curves.csv").write_text(elsewhere.format(finished))
        assert main("--dry-run", "--results", tmp_path).count("ddqn_mate.py") == count
    with pytest.raises(SystemExit, match="^error: no/curves.csv does not exist$"):
        main("--dry-run", "--results", "no")
    for name, old, new in (("hidden_dim", 8, 9), ("gamma", 0.99, 0.9), ("num_envs", 3, 64)):
        answer = f"--{name.replace('_', '-')} {old}, and {new} is asked for now"
        with pytest.raises(SystemExit, match=f"^error: [^\n]*{answer}[^\n]*$"):
            main("--dry-run", **{name: new})


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


@pytest.mark.parametrize("checkpoint", [True, False])
def test_another_try_continues_from_the_checkpoint_or_starts_over(checkpoint, monkeypatch, tmp_path):
    commands, run = fake_script(monkeypatch, (-9, 1, 0), checkpoint), Run("name", "ddqn_lstm", TINY, tmp_path)
    for code in (-9, 1):
        with pytest.raises(RuntimeError, match=f"^exit code {code}: last line$"):  # Ray tries again
            sweep.train(run, None)
    assert sweep.train(run, None) == REACHED
    assert all(words == (["--resume", "runs/1"] if checkpoint else commands[0]) for words in commands[1:])
    assert sweep.train(run, None) == REACHED and len(commands) == 3, "a finished run is not started again"


def test_a_run_waits_for_a_script_that_is_still_saving_in_its_folder(monkeypatch, tmp_path):
    with open(tmp_path / "log.txt", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        earlier = subprocess.Popen(["bash", "-c", "sleep 1; echo saved"], stdout=log)  # a script whose worker then dies
    monkeypatch.setattr(sweep, "run_script", lambda *_: 1)
    with pytest.raises(RuntimeError, match="^exit code 1: saved$"):
        sweep.train(Run("name", "ddqn_lstm", TINY, tmp_path), None)
    assert earlier.wait() == 0


@pytest.mark.parametrize("experiment", sweep.EXPERIMENTS)
def test_the_flags_of_the_experiments_are_those_of_the_scripts(experiment, tmp_path):
    runs = sweep.select_runs(sweep.Args(*experiment, output_dir=tmp_path))
    size = {("figure3", "paper"): 4 * 5 * 3, ("figure4", "paper"): 3 * 2 * 5 * 2}
    assert len(runs) == size.get(experiment, len(runs))
    for run in runs:
        args = script(run.script).Args(**run.flags)
        args.check()
        assert tyro.cli(script(run.script).Args, args=sweep.command(run)[2:]) == args
    flags = {"env_id": "ant-dir", "bf16": True, "freeze_critic": False}
    assert sweep.to_words(flags) == ["--env-id", "ant-dir", "--bf16", "--no-freeze-critic"]


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
    for args, answer in (
        ({"only": ("mat3",)}, "no name of a run contains --only mat3"),
        ({"seeds": (1, 1)}, "two runs"),
    ):
        with pytest.raises(SystemExit, match=answer):
            names(**args)
