"""The paper's experiments, on one machine or on a cluster: every run is a Ray task.

    pip install -r benchmark/requirements.txt
    python -m benchmark.sweep figure4 --size cpu            # as many runs at a time as there are cores
    python -m benchmark.sweep figure4 --size cpu --dry-run  # only print the commands, for SLURM or to run by hand
    python -m benchmark.sweep figure4 --only mate__tmaze-active --seeds 1 2 3 4 5
    python -m benchmark.sweep figure4 --size cpu --results benchmark/results/figure4_cpu  # only what is missing there
    python -m benchmark.sweep figure3 --address auto --cpus-per-run 2 --gpus-per-run 0.25  # on a Ray cluster

A run has its own folder, like sweeps/figure4-cpu/ddqn_mate__tmaze-active__L50__seed11, where its script writes runs/
and prints to log.txt. A script that dies is restarted from its checkpoint. Ctrl-C or SIGTERM stops the sweep, after
every script under way has saved a checkpoint. The same command continues: a run is finished when results.json exists.

On a cluster this repository, its Python environment and the output folder must be at the same paths on every machine.
"""

import contextlib
import csv
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

ROOT = Path(__file__).resolve().parent.parent

# --------------------------------------------------------------------------------------------------------- experiments
SAC = ("sac_mate", "sac_lstm", "sac_gpt2", "sac_markov")
DDQN = ("ddqn_mate", "ddqn_lstm", "ddqn_gpt2")

SMALL_SAC = {"memory_dim": 64, "hidden_dim": 128, "learning_rate": 1e-3, "tau": 0.005, "batch_size": 4, "bf16": True}
SMALL_SAC |= {"learning_starts": 5_000, "updates_per_step": 0.1}
RECIPE_DDQN = {"learning_rate": 1e-3, "adam_eps": 3e-7, "anneal_lr": True, "max_grad_norm": 1.0, "batch_size": 16}
RECIPE_DDQN |= {"learning_starts": 500}
PASSIVE = RECIPE_DDQN | {"env_id": "tmaze-passive", "tau": 0.005, "updates_per_episode": 0.25}
# Active: few episodes, many updates, so that the buffer keeps the early episodes, a quarter of which visit the oracle.
ACTIVE = RECIPE_DDQN | {"env_id": "tmaze-active", "tau": 0.01, "updates_per_episode": 4.0}
POINT = SMALL_SAC | {"env_id": "point-robot", "total_timesteps": 300_000, "batch_size": 16}
CHEETAH = SMALL_SAC | {"env_id": "cheetah-vel", "total_timesteps": 400_000}
MAZE_50 = PASSIVE | {"corridor_length": 50, "total_episodes": 24_000}


class Setting(NamedTuple):
    scripts: tuple
    seeds: tuple
    flags: dict  # on top of the scripts' defaults, which are the paper's values


# A run for each setting, script and seed. The "cpu" sizes use other seeds than those that their flags were chosen with.
EXPERIMENTS = {
    ("figure3", "paper"): [
        Setting(SAC, (1, 2, 3), {"env_id": env_id})
        for env_id in ("ant-dir", "cheetah-vel", "walker-param", "hopper-param", "ml10")
    ],
    ("figure4", "paper"): [
        Setting(DDQN, (1, 2), {"env_id": maze, "corridor_length": length})
        for maze in ("tmaze-passive", "tmaze-active")
        for length in (200, 300, 400, 500, 600)
    ],
    ("figure3", "cpu"): [
        Setting(SAC, (11, 12, 13), POINT),
        Setting(SAC, (11, 12, 13), CHEETAH),
        Setting(SAC, (11, 12), SMALL_SAC | {"env_id": "hopper-param", "total_timesteps": 600_000}),
        Setting(SAC, (11, 12), SMALL_SAC | {"env_id": "walker-param", "total_timesteps": 600_000}),
        Setting(SAC, (11, 12), SMALL_SAC | {"env_id": "ant-dir", "total_timesteps": 1_000_000}),
        Setting(SAC, (11, 12), SMALL_SAC | {"env_id": "ml10", "total_timesteps": 1_000_000}),
    ],
    # What agents of figure3 can do before they learn anything.
    ("untrained", "cpu"): [
        Setting(SAC, (11, 12), SMALL_SAC | {"env_id": "ml10", "total_timesteps": 5_001, "updates_per_step": 0.0})
    ],
    # Twice as long on ml10: a budget that was set after figure3's had been enough for two of the ten tasks.
    ("ml10", "cpu"): [
        Setting(("sac_mate", "sac_gpt2"), (12,), SMALL_SAC | {"env_id": "ml10", "total_timesteps": 2_000_000})
    ],
    # What the paper's sizes, the defaults, cost on a CPU.
    ("defaults", "cpu"): [Setting(("sac_mate",), (11,), {"env_id": "hopper-param", "bf16": True})],
    ("precision", "cpu"): [  # runs of the two figures with the other value of --bf16
        Setting(("sac_mate",), (11, 12), POINT | {"bf16": False}),
        Setting(("sac_mate",), (11,), CHEETAH | {"bf16": False}),
        Setting(("ddqn_mate",), (11, 12), MAZE_50 | {"bf16": True}),
    ],
    ("figure4", "cpu"): [
        Setting(
            DDQN, seeds, recipe | {"corridor_length": length, "total_episodes": episodes, "eval_interval": interval}
        )
        for recipe, length, episodes, interval, seeds in (
            (PASSIVE, 50, 24_000, 1_000, (11, 12, 13)),
            (ACTIVE, 50, 5_000, 125, (13, 14, 15)),
            (PASSIVE, 100, 32_000, 1_000, (11, 12, 13)),
            (ACTIVE, 100, 10_000, 250, (13, 14, 15)),
            (PASSIVE, 200, 40_000, 1_000, (11, 12, 13)),
            (ACTIVE, 200, 20_000, 500, (13,)),
            (PASSIVE, 400, 48_000, 1_000, (11,)),
            (PASSIVE, 600, 56_000, 1_000, (11,)),
        )
    ],
}


@dataclass
class Args:
    # the paper's figures; with --size cpu also defaults (a run at the paper's sizes), ml10 (longer runs), precision
    # (the other --bf16) and untrained (agents before training)
    experiment: tyro.conf.Positional[Literal[*sorted({name for name, _ in EXPERIMENTS})]]
    size: Literal["paper", "cpu"] = "paper"  # the paper's sizes and budgets, or small ones for a few cores
    output_dir: Path | None = None  # default: sweeps/{experiment}-{size}
    address: str | None = None  # of a Ray cluster, for example auto; default: start Ray on this machine
    num_cpus: int | None = None  # cores of this machine to use, without --address; default: all
    cpus_per_run: int = 1  # cores, and threads, of a run
    gpus_per_run: float = 0.0  # with 0.25, four runs share a GPU; with 0, they use none
    retries: int = 2  # how often a run that fails is started again, from its checkpoint
    seeds: tuple[int, ...] | None = None  # instead of the experiment's
    results: Path | None = None  # folder that plot.py wrote: runs that are finished there are not repeated
    only: tuple[str, ...] = ()  # only the runs whose names contain one of these
    dry_run: bool = False  # print the commands of the runs that are not finished; with --gpus-per-run they see GPUs


# ---------------------------------------------------------------------------------------------------------------- runs
class Run(NamedTuple):
    name: str  # also of its folder
    script: str
    flags: dict
    folder: Path


def name_of(script, env_id, corridor_length, seed):
    length = [f"L{corridor_length}"] if corridor_length else []
    return "__".join([script, env_id, *length, f"seed{seed}"])


def select_runs(args):
    if (args.experiment, args.size) not in EXPERIMENTS:
        sys.exit(f"error: {args.experiment} has no size {args.size}")
    folder = (args.output_dir or Path("sweeps", f"{args.experiment}-{args.size}")).absolute()
    numbered = []
    for setting in EXPERIMENTS[args.experiment, args.size]:
        for i, seed in enumerate(args.seeds or setting.seeds):
            for script in setting.scripts:
                name = name_of(script, setting.flags["env_id"], setting.flags.get("corridor_length"), seed)
                numbered.append((i, Run(name, script, setting.flags | {"seed": seed}, folder / name)))
    # All settings with their first seed, then with their second one: early on there is something of everything.
    runs = [run for _, run in sorted(numbered, key=lambda pair: pair[0])]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        sys.exit(f"error: two runs are called {max(names, key=names.count)}")
    runs = [run for run in runs if not args.only or any(part in run.name for part in args.only)]
    return runs or sys.exit(f"error: no name of a run contains --only {' '.join(args.only)}; the first is {names[0]}")


def finished_in(folder):
    """Names of the runs that are finished in the curves.csv of this folder."""
    if not (path := folder / "curves.csv").exists():
        sys.exit(f"error: {path} does not exist")
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["finished"] == "1"]
    return {name_of(*(row[name] for name in ("script", "env_id", "corridor_length", "seed"))) for row in rows}


def results_of(run):  # of a finished run, else None
    path = next(run.folder.glob("runs/*/results.json"), None)
    return path and json.loads(path.read_text())


def to_words(flags):  # {"memory_dim": 64, "autotune": False} -> --memory-dim 64 --no-autotune
    words = []
    for name, value in flags.items():
        name = name.replace("_", "-")
        words += [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return words


def command(run):
    """What to start in the run's folder: the script from its checkpoint, or from the beginning if there is none."""
    words = [sys.executable, str(ROOT / f"{run.script}.py")]
    checkpoints = run.folder.glob("runs/*/checkpoint.pt")
    if newest := max(checkpoints, key=lambda path: path.stat().st_mtime, default=None):
        return [*words, "--resume", str(newest.parent.relative_to(run.folder))]
    return words + to_words(run.flags)


def refuse_other_flags(run):
    """A run is continued only if it was started with the flags of its setting."""
    for path in run.folder.glob("runs/*/checkpoint.pt"):
        found = json.loads(path.with_name("args.json").read_text())
        for name in [name for name, value in run.flags.items() if name in found and found[name] != value]:
            problem = f"--{name.replace('_', '-')} {found[name]}, and {run.flags[name]} is asked for now"
            sys.exit(f"error: {run.folder} was run with {problem}: use another --output-dir, or move it away")


# ----------------------------------------------------------------------------------------------------- in a Ray worker
def train(run, args):
    """Bring a run to its end, from its checkpoint if there is one. If this raises an error, Ray tries again."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with open(run.folder / "log.txt", "a") as log:
        lock(log)
        if results := results_of(run):
            return results
        code = run_script(command(run), run.folder, log, args)
    if results := results_of(run):
        return results
    raise RuntimeError(f"exit code {code}: " + (run.folder / "log.txt").read_text().strip().splitlines()[-1])


def lock(log):
    """Wait for a script that still writes to this folder: scripts inherit the lock with the file that they print to."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(log, fcntl.LOCK_EX)


def run_script(words, folder, log, args):
    print(f"\n{time.strftime('%F %T')} on {os.uname().nodename}: {shlex.join(words)}", file=log, flush=True)
    # When this worker dies, whatever the cause, the script gets SIGTERM and saves a checkpoint. (setpriv: util-linux)
    words = ["setpriv", "--pdeathsig", "TERM", *words]
    env = os.environ | devices(args) | {"PYTHONUNBUFFERED": "1"}
    # In a session of its own: Ray kills a worker's process group soon after the worker, before a script has saved.
    options = {"cwd": folder, "env": env, "stdout": log, "stderr": log, "start_new_session": True}
    return subprocess.Popen(words, **options).wait()  # run() would kill the script


def devices(args):  # environment variables of a script; which GPU it sees is left to Ray
    return {"OMP_NUM_THREADS": str(args.cpus_per_run)} | ({} if args.gpus_per_run else {"CUDA_VISIBLE_DEVICES": ""})


# ------------------------------------------------------------------------------------------------------- in the driver
def start_ray(args):
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15, runs all but stop when a core has other work
    os.environ["RAY_kill_child_processes_on_worker_exit"] = "0"  # scripts end by themselves, see run_script
    import ray

    local = {"include_dashboard": False, "num_cpus": args.num_cpus} if args.address is None else {}
    for attempts_left in (2, 1, 0):  # Ray gives itself 30 s to start, too little on a very busy machine
        try:
            ray.init(args.address or "local", log_to_driver=False, logging_level="ERROR", **local)
            break
        except Exception as error:  # Ray raises errors of many kinds
            ray.shutdown()
            if not attempts_left:
                sys.exit(f"error: Ray does not start: {str(error).splitlines()[0]}")
    for name, wanted in {"CPU": args.cpus_per_run, "GPU": args.gpus_per_run}.items():
        if args.address is None and wanted > (there := ray.cluster_resources().get(name, 0)):  # Ray would wait for ever
            sys.exit(f"error: --{name.lower()}s-per-run {wanted:g} is more than the {there:g} of this machine")
    return ray


def sweep(runs, args):
    """Do these runs and print the outcome of each as it ends. Returns how many failed."""
    ray, failed = start_ray(args), 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C; only now, since Ray sets its own
    options = {"num_cpus": args.cpus_per_run, "num_gpus": args.gpus_per_run}
    task = ray.remote(**options, max_retries=args.retries, retry_exceptions=True)(train)
    pending = {task.remote(run, args): run for run in runs}
    try:
        while pending:
            for ref in ray.wait(list(pending), timeout=1)[0]:
                run = pending.pop(ref)
                try:
                    found = ray.get(ref)
                    text = f"best {found['best_return']:.3f}, last {found['last_return']:.3f}"
                    text += f", {found['seconds'] / 60:.1f} minutes"
                except ray.exceptions.RayError as error:
                    cause = getattr(error, "cause", None) or error  # what train raised, or what Ray says
                    failed, text = failed + 1, f"failed, {(str(cause).strip() or repr(cause)).splitlines()[-1]}"
                print(f"[{len(runs) - len(pending)}/{len(runs)}] {run.name}: {text}", flush=True)
    except KeyboardInterrupt:
        print("stopping: scripts under way save their checkpoints", flush=True)
        ray.shutdown()  # ends the workers, and so the scripts
        with contextlib.suppress(KeyboardInterrupt):  # a second one does not wait for them
            for path in [run.folder / "log.txt" for run in pending.values()]:
                if path.exists():
                    lock(path.open())
        print("stopped; the same command continues", flush=True)
        sys.exit(130)
    finally:
        ray.shutdown()
    return failed


def main():
    args = tyro.cli(Args, prog="python -m benchmark.sweep", description=__doc__)
    runs = select_runs(args)
    for run in runs:
        refuse_other_flags(run)
    known = finished_in(args.results) if args.results else ()
    missing = [run for run in runs if run.name not in known and results_of(run) is None]
    if args.dry_run:
        for run in missing:  # the same as a Ray worker does
            folder, env = shlex.quote(str(run.folder)), " ".join(f"{k}={v}" for k, v in devices(args).items())
            print(f"(mkdir -p {folder} && cd {folder} && {env} {shlex.join(command(run))})")
        print(f"{len(missing)} of {len(runs)} runs are not finished", file=sys.stderr)
        return
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are finished, in {runs[0].folder.parent}", flush=True)
    if missing and (failed := sweep(missing, args)):
        sys.exit(f"error: {failed} runs failed; what they printed is in log.txt in their folders")


if __name__ == "__main__":
    main()
