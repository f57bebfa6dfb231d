"""The paper's experiments on one machine or a cluster: each run is a Ray task, none is lost and none is done twice.

    pip install -r benchmark/requirements.txt
    python benchmark/sweep.py figure4 --size cpu            # on this machine, as many runs at a time as it has cores
    python benchmark/sweep.py figure4 --size cpu --dry-run  # only prints the commands, for SLURM or to run by hand
    python benchmark/sweep.py figure4 --only mate__tmaze-active --seeds 1 2 3 4 5
    python benchmark/sweep.py figure3 --address auto --cpus-per-run 2 --gpus-per-run 0.25  # on a Ray cluster

A run has a folder of its own, like sweeps/figure4-cpu/ddqn_mate__tmaze-active__L50__seed1, in which its script is
started: what the script writes is in runs/ there, and what it prints is in log.txt. A run that dies is started again
from its checkpoint. Ctrl-C or SIGTERM stops the sweep, after every run under way has saved a checkpoint. The same
command again does what is missing: a run is finished when its script has written results.json.

On a cluster this repository, its Python environment and the output folder must be at the same paths on every machine
(NFS), and RAY_AUTH_MODE must be what it is there: token, as a rule. A run sees no GPU unless it is given one, or a part
of one, by --gpus-per-run.
"""

import contextlib
import fcntl
import importlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# -------------------------------------------------------------------------------------------------------- experiments
SAC = ("sac_mate", "sac_lstm", "sac_gpt2", "sac_markov")
DDQN = ("ddqn_mate", "ddqn_lstm", "ddqn_gpt2")

SMALL_SAC = {"memory_dim": 64, "hidden_dim": 128, "learning_rate": 1e-3, "tau": 0.005, "learning_starts": 5000}
SMALL_DDQN = {"memory_dim": 64, "hidden_dim": 128, "learning_rate": 3e-4, "tau": 0.005, "max_grad_norm": 1.0}
SMALL_DDQN |= {"batch_size": 32, "num_envs": 16, "eval_interval": 500}

# (figure, size): the scripts, the seeds, and the settings, which are flags on top of the scripts' defaults, that is of
# the paper's values. There is a run for each script, setting and seed.
EXPERIMENTS = {
    ("figure3", "paper"): (SAC, (1, 2, 3), [
        {"env_id": "ant-dir"},
        {"env_id": "cheetah-vel"},
        {"env_id": "walker-param"},
        {"env_id": "hopper-param"},
        {"env_id": "ml10"},
    ]),
    ("figure3", "cpu"): (SAC, (1, 2, 3), [
        SMALL_SAC | {"env_id": "point-robot", "total_timesteps": 150_000, "batch_size": 32, "eval_interval": 10_000},
        SMALL_SAC | {"env_id": "cheetah-vel", "total_timesteps": 400_000, "batch_size": 16, "eval_interval": 20_000,
                     "updates_per_step": 0.1},
    ]),
    ("figure4", "paper"): (DDQN, (1, 2), [
        {"env_id": maze, "corridor_length": length}
        for maze in ("tmaze-passive", "tmaze-active") for length in (200, 300, 400, 500, 600)
    ]),
    ("figure4", "cpu"): (DDQN, (1, 2), [
        SMALL_DDQN | {"env_id": "tmaze-passive", "corridor_length": 20, "total_episodes": 6_000},
        SMALL_DDQN | {"env_id": "tmaze-passive", "corridor_length": 50, "total_episodes": 8_000},
        SMALL_DDQN | {"env_id": "tmaze-active", "corridor_length": 20, "total_episodes": 12_000},
        SMALL_DDQN | {"env_id": "tmaze-active", "corridor_length": 50, "total_episodes": 40_000,
                      "updates_per_episode": 0.5},
    ]),
}  # fmt: skip


@dataclass
class Args:
    experiment: tyro.conf.Positional[str]  # figure3 or figure4
    size: Literal["paper", "cpu"] = "paper"  # the paper's budget, or one that fits a laptop overnight
    output_dir: Path | None = None  # the folder of the runs' folders; sweeps/{experiment}-{size} if not given
    address: str | None = None  # of a Ray cluster, for example auto; if not given, Ray is started on this machine
    num_cpus: int | None = None  # cores of this machine to use, all of them if not given
    cpus_per_run: int = 1  # cores, and threads, of a run
    gpus_per_run: float = 0.0  # GPUs of a run; with 0.25, four runs share one
    retries: int = 2  # how many times a run that dies is started again
    seeds: tuple[int, ...] | None = None  # in place of the experiment's
    only: tuple[str, ...] = ()  # do only the runs whose names contain one of these, to split a sweep over machines
    dry_run: bool = False  # print the command of each run that is not finished, and do nothing

    def __post_init__(self):
        if (self.experiment, self.size) not in EXPERIMENTS:
            known = ", ".join(sorted({experiment for experiment, _ in EXPERIMENTS}))
            sys.exit(f"there is no experiment {self.experiment} of size {self.size}, but {known}")
        if self.cpus_per_run < 1 or self.retries < 0 or self.num_cpus is not None and self.num_cpus < 1:
            sys.exit("--cpus-per-run and --num-cpus must be 1 or more, --retries 0 or more")
        if self.gpus_per_run < 0 or self.gpus_per_run > 1 and self.gpus_per_run % 1:
            sys.exit(f"--gpus-per-run must be a part of 1 or a whole number, got {self.gpus_per_run}")
        if self.address is not None and self.num_cpus is not None:
            sys.exit("--num-cpus is for this machine, and --address for a cluster: give one of them")
        self.output_dir = self.output_dir or Path("sweeps", f"{self.experiment}-{self.size}")


# ---------------------------------------------------------------------------------------------------------------- runs
@dataclass
class Run:
    script: str  # ddqn_mate
    flags: dict  # {"env_id": "tmaze-active", "corridor_length": 50, ...}
    seed: int

    @property
    def name(self):
        length = [f"L{self.flags['corridor_length']}"] if "corridor_length" in self.flags else []
        return "__".join([self.script, self.flags["env_id"], *length, f"seed{self.seed}"])


def select_runs(args):
    scripts, seeds, settings = EXPERIMENTS[args.experiment, args.size]
    # Seed by seed, so that a sweep that is looked at halfway shows every script in every setting.
    runs = [Run(s, flags, seed) for seed in args.seeds or seeds for flags in settings for s in scripts]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        sys.exit(f"two runs would be called {max(names, key=names.count)}, and share a folder")
    runs = [run for run in runs if not args.only or any(part in run.name for part in args.only)]
    if not runs:
        sys.exit(f"--only {' '.join(args.only)} is in none of the names, which are like {names[0]}")
    return runs


def folder_of(run, args):
    return args.output_dir.absolute() / run.name


def results_of(folder):
    """What a finished run reached; None if it is not finished."""
    paths = sorted(folder.glob("runs/*/results.json"))
    return json.loads(paths[-1].read_text()) if paths else None


def newest_checkpoint(folder):
    return max(folder.glob("runs/*/checkpoint.pt"), key=lambda path: path.stat().st_mtime, default=None)


def command(run, folder):
    """What is to be started in the folder: the script from its checkpoint, or from the beginning if there is none."""
    words = [sys.executable, str(ROOT / f"{run.script}.py")]
    if checkpoint := newest_checkpoint(folder):
        return [*words, "--resume", str(checkpoint.parent.relative_to(folder))]
    for name, value in (run.flags | {"seed": run.seed}).items():
        name = name.replace("_", "-")
        words += [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return words


def environment(args):
    """The variables that hold a run to its threads, and hide the GPUs from it if it is to have none: Ray does not."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(args.cpus_per_run))
    return threads if args.gpus_per_run else threads | {"CUDA_VISIBLE_DEVICES": ""}


def shell_line(run, args):
    """For --dry-run: does what a Ray worker would do, from any folder, and the sweep knows the run afterwards."""
    folder = folder_of(run, args)
    variables = {name: value for name, value in environment(args).items() if name.endswith("THREADS")}
    words = [*(f"{name}={value}" for name, value in variables.items()), *command(run, folder)]
    return f"(mkdir -p {shlex.quote(str(folder))} && cd {shlex.quote(str(folder))} && {shlex.join(words)})"


def refuse_other_flags(run, folder):
    """Runs of different settings must not be mixed: what is there already must be what is asked for now."""
    for path in folder.glob("runs/*/args.json"):
        if not (path.with_name("checkpoint.pt").exists() or path.with_name("results.json").exists()):
            continue
        Script = importlib.import_module(run.script).Args  # only now, since it takes seconds
        asked = asdict(Script(**run.flags, seed=run.seed))
        found = asdict(Script()) | json.loads(path.read_text())  # a flag that is newer than the run had its default
        for name in sorted(found.keys() - {"resume", "evaluate"}):
            if found[name] != asked.get(name):
                sys.exit(
                    f"{folder} was run with {name} {found[name]}, and {asked.get(name)} is asked for now: "
                    "give another --output-dir, or move it away"
                )


# ---------------------------------------------------------------------------------------------------- in a Ray worker
GRACE = 120  # seconds that a script has to save its checkpoint when it is stopped
# Started through this, a script gets SIGTERM when the process that started it dies, by whatever cause (Linux only).
# Without it, the scripts of a sweep that is killed would train on.
DIE_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"


def take_lock(folder):
    """The folder's lock, which the script inherits: it is held for as long as one of the two lives.

    None if another process has it, or trains in one of the folder's runs, and is not done with it in time.
    """
    lock = os.open(folder / "lock", os.O_CREAT | os.O_WRONLY)
    for _ in range(GRACE):
        of_runs = [os.open(path, os.O_WRONLY) for path in folder.glob("runs/*/lock")]  # all that a run by hand holds
        try:
            for file in [lock, *of_runs]:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            time.sleep(1)
        except OSError:  # a filesystem without locks
            return lock
        finally:
            for file in of_runs:
                os.close(file)
    os.close(lock)
    return None


def train(run, folder, args):
    """Brings a run to its end. Returns what it reached, as results.json has it, or in words what went wrong."""
    # A task is cancelled by an interrupt, which Python ignores if Ray was started in the background of a shell script.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder.mkdir(parents=True, exist_ok=True)
    lock = take_lock(folder)
    if lock is None:
        return "another process is training in its folder"
    try:
        for _ in range(1 + args.retries):
            if results := results_of(folder):  # another sweep may have been faster
                return results
            for path in folder.glob("runs/*"):
                if not (path / "checkpoint.pt").exists():  # died before its first checkpoint: there is nothing in it
                    shutil.rmtree(path)
            code = start(command(run, folder), folder, lock, args)
            if results := results_of(folder):
                return results
            killed = code < 0 or code > 128
            if not killed and newest_checkpoint(folder) is None:  # it refused its flags, say, and would do so again
                break
    finally:
        os.close(lock)
    last_line = (folder / "log.txt").read_text().strip().splitlines()[-1]
    return f"exit code {code}: {last_line}"


def start(words, folder, lock, args):
    """Runs the command to its end, or stops it if the task is cancelled. Returns its exit code."""
    env = os.environ | environment(args) | {"PYTHONUNBUFFERED": "1"}
    wrapper = [sys.executable, "-c", DIE_WITH_PARENT] if sys.platform == "linux" else []
    with open(folder / "log.txt", "a") as log:
        print(f"\n{time.strftime('%F %T')} on {platform.node()}: {shlex.join(words)}", file=log, flush=True)
        files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "pass_fds": [lock]}
        process = subprocess.Popen(wrapper + words, cwd=folder, env=env, **files)
    try:
        while process.poll() is None:  # wait() would not let Ray's KeyboardInterrupt through
            time.sleep(0.2)
    finally:
        process.terminate()  # this and the following do nothing if it has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        process.kill()
    return process.wait()


# ------------------------------------------------------------------------------------------------------ in the driver
def start_ray(args):
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 all but stops a run that shares its core with anything
    if sys.platform == "linux":  # if the sweep is killed, let DIE_WITH_PARENT end the scripts: they save, Ray kills
        os.environ["RAY_kill_child_processes_on_worker_exit"] = "0"
    try:
        import ray
    except ImportError:
        sys.exit("Ray is missing: pip install -r benchmark/requirements.txt")
    where = {"num_cpus": args.num_cpus, "include_dashboard": False} if args.address is None else {}
    try:
        ray.init(args.address or "local", log_to_driver=False, logging_level="ERROR", **where)
    except (ConnectionError, RuntimeError, ValueError) as error:
        sys.exit(f"Ray does not start, or is not at {args.address}: {str(error).splitlines()[0]}")
    for what, wanted in (("CPU", args.cpus_per_run), ("GPU", args.gpus_per_run)):
        most = max(node["Resources"].get(what, 0) for node in ray.nodes() if node["Alive"])
        if wanted > most:  # Ray would wait for such a machine forever
            sys.exit(f"--{what.lower()}s-per-run {wanted:g} is more than a machine here has, {most:g}")
        if what == "GPU" and most and not wanted:
            print("there are GPUs here, and these runs will use none of them: see --gpus-per-run")
    return ray


def sweep(missing, status, args):
    """Does the runs that are missing, and notes in status, {name: (status, outcome)}, how each went."""
    ray = start_ray(args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C; only now, since Ray sets its own
    resources = {"num_cpus": args.cpus_per_run, "num_gpus": args.gpus_per_run}
    task = ray.remote(**resources, max_retries=args.retries)(train)  # Ray's retries are for a worker that dies
    pending = {task.remote(run, folder_of(run, args), args): run for run in missing}
    count = {"initial": len(status), "total": len(status) + len(missing)}
    progress = tqdm(**count, unit="run", smoothing=0, dynamic_ncols=True, disable=None)  # time left by the mean so far
    try:
        while pending:
            for ref in ray.wait(list(pending), timeout=1)[0]:
                run = pending.pop(ref)
                try:
                    outcome = ray.get(ref)
                except ray.exceptions.RayError as error:
                    cause = getattr(error, "cause", error)
                    outcome = (str(cause) or repr(cause)).splitlines()[0]
                status[run.name] = "failed" if isinstance(outcome, str) else "finished", outcome
                progress.write(row(run, *status[run.name], args))
                progress.update()
            progress.refresh()
    except KeyboardInterrupt:
        progress.write("stopping: the runs under way save their checkpoints first")
        with contextlib.suppress(KeyboardInterrupt):  # a second one does not wait for them
            for ref in reversed(pending):
                ray.cancel(ref)
            ray.wait(list(pending), num_returns=len(pending), timeout=2 * GRACE)
        progress.write("stopped: the same command goes on")
        raise
    finally:
        progress.close()
        ray.shutdown()


def row(run, status, outcome, args):
    """Of the table: the run, its status, and what it reached or why not and where to read more."""
    columns = f"{run.name:<45}  {status:<15}"
    if isinstance(outcome, str):
        return f"{columns}  see {args.output_dir / run.name / 'log.txt'}\n    {outcome}"
    numbers = outcome["best_return"], outcome["last_return"], outcome["seconds"] / 60
    return columns + "  {:>11.3f}  {:>11.3f}  {:>7.1f}".format(*numbers)


def main():
    args = tyro.cli(Args, description=__doc__.splitlines()[0])
    runs = select_runs(args)
    for run in runs:
        refuse_other_flags(run, folder_of(run, args))
    done = {run.name: results_of(folder_of(run, args)) for run in runs}
    missing = [run for run in runs if done[run.name] is None]
    if args.dry_run:
        for run in missing:
            print(shell_line(run, args))
        return
    status = {name: ("finished before", results) for name, results in done.items() if results is not None}
    if missing:
        try:
            sweep(missing, status, args)
        except KeyboardInterrupt:
            sys.exit(130)
    print(f"\n{'run':<45}  status           best return  last return  minutes")
    print(*(row(run, *status[run.name], args) for run in runs), sep="\n")
    sys.exit(1 if any(word == "failed" for word, _ in status.values()) else 0)


if __name__ == "__main__":
    main()
