"""What surrounds a run and is not its algorithm: the flags, the folder, the log, stopping, saving and loading.

Files are written beside and renamed, so that at any moment there is a whole file of that name or none. They are read
with weights_only=True: tensors and plain containers, never code, whoever made the file.
"""

import contextlib
import ctypes
import fcntl
import inspect
import json
import os
import platform
import random
import re
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch.utils.tensorboard import SummaryWriter

import envs
from envs import state

RESUME_MAY_CHANGE = {"total_episodes", "total_timesteps", "eval_interval", "eval_episodes", "checkpoint_interval"}
RESUME_MAY_CHANGE |= {"capture_video", "save_model", "track", "wandb_project_name", "wandb_entity"}
EVALUATE_MAY_CHANGE = {"eval_episodes", "capture_video", "corridor_length", "max_episode_steps", "num_envs"}
EVALUATE_MAY_CHANGE |= {"async_envs", "cuda", "seed"}
locks = []  # kept open while the process lives


@dataclass
class Args:
    """What every script has flags for, whatever its algorithm."""

    # run
    exp_name: str  # name of this experiment, part of the run's folder
    seed: int = 1  # seed of the networks, the exploration and the training environments; evaluation has its own
    torch_deterministic: bool = True  # if off, cuDNN may choose faster kernels that do not repeat to the bit
    cuda: bool = True  # use the GPU if there is one
    # tracking
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "mate"  # project in Weights and Biases
    wandb_entity: str | None = None  # team in Weights and Biases
    # saving and loading
    capture_video: bool = False  # record an episode at every evaluation, into the run's folder
    save_model: bool = True  # save the final networks into the run's folder
    checkpoint_interval: float = 10.0  # minutes between checkpoints
    resume: str | None = None  # folder of a run to go on with, as if it had never stopped
    evaluate: str | None = None  # model.pt of a run to evaluate, with --eval-episodes and --capture-video, and exit


def flag(name):
    return "--" + name.replace("_", "-")


def check_numbers(args, may_be_zero, at_most_one):
    """Refuses a number that makes no sense before anything is started."""
    for name, value in vars(args).items():
        if type(value) in (int, float):
            high = 1 if name in at_most_one else sys.float_info.max
            if not (0 <= value <= high and (value or name in may_be_zero)):
                low = "0 or more" if name in may_be_zero else "more than 0"
                sys.exit(f"{flag(name)} must be {low}{' and at most 1' if high == 1 else ''}, got {value}")


def script_name():
    return Path(sys.argv[0]).stem


def parse(Args, description, default=None):
    """The command line as an Args. --help has its flags in groups, as comments in the source of Args part them."""
    default, types = default or Args(), get_type_hints(Args)
    found, heading = {}, "other"
    for line in (line for part in Args.__mro__[:-1] for line in inspect.getsource(part).splitlines()):
        if comment := re.fullmatch(r"    # ([a-z ]+)(?: \(.*\))?", line):
            heading = comment[1].replace(" ", "_")
        elif flag := re.match(r"    (\w+): [^#]*(?:# (.*))?", line):
            found.setdefault(flag[1], (heading, flag[2] or ""))
    groups = {}
    for name in sorted(types, key=list(found).index):
        heading, text = found[name]
        option = Annotated[types[name], tyro.conf.arg(help=text)]
        groups.setdefault(heading, []).append((name, option, getattr(default, name)))
    groups = {title: make_dataclass(title, options, namespace={"__doc__": ""}) for title, options in groups.items()}
    Groups = make_dataclass("Groups", [(title, group, field(default_factory=group)) for title, group in groups.items()])
    description += " The paper's values are those of its Tables 2 and 3, Section 4 and Appendix B."
    parsed = tyro.cli(tyro.conf.OmitArgPrefixes[Groups], description=description)
    return Args(**{name: value for group in vars(parsed).values() for name, value in vars(group).items()})


def command_line(Args, description):
    """The arguments, and the file that --resume or --evaluate names, whose arguments are then the defaults."""
    # Looked up by hand: the other flags can be made sense of only with that file's arguments for defaults.
    words = [part for word in sys.argv[1:] for part in (word.split("=", 1) if word[:2] == "--" else [word])] + [None]
    resume, evaluate = (words[words.index(f) + 1] if f in words else None for f in ("--resume", "--evaluate"))
    if resume is None and evaluate is None:
        return parse(Args, description), None
    if resume is not None and evaluate is not None:
        sys.exit("--resume goes on with a run and --evaluate looks at a model: give one of them")
    if resume is not None:
        lock(Path(resume))
    saved = load(evaluate if resume is None else Path(resume, "checkpoint.pt"))
    if not isinstance(saved, dict) or "script" not in saved:
        sys.exit(f"{resume or evaluate} is not a file that this script has saved")
    if saved["script"] != script_name():
        sys.exit(f"{resume or evaluate} is of {saved['script']}.py, not of {script_name()}.py")
    saved["args"] |= {"resume": resume, "evaluate": evaluate}
    args = parse(Args, description, Args(**saved["args"]))
    may_change = RESUME_MAY_CHANGE if resume else EVALUATE_MAY_CHANGE
    for name, value in saved["args"].items():
        if name not in may_change and getattr(args, name) != value:
            sys.exit(f"{flag(name)} {getattr(args, name)} contradicts the run, which has {value}: leave it out")
    return args, saved


def make_envs(args, num_envs, actions, **options):
    """As the flags ask for them. `actions` is the kind of action space that the algorithm is for."""
    if args.max_episode_steps is not None:
        options["max_episode_steps"] = args.max_episode_steps
    if args.env_id.split(":")[-1].startswith("tmaze") and hasattr(args, "corridor_length"):
        options["corridor_length"] = args.corridor_length
    if args.capture_video and "video_folder" not in options:
        check_pictures(args.env_id)
    try:
        vec, max_steps = envs.make_vec(
            args.env_id, num_envs, getattr(args, "async_envs", False), actions=actions, **options
        )
    except (ValueError, gym.error.Error) as error:
        sys.exit(str(error))
    return vec, max_steps


def check_pictures(env_id):
    """Tries --capture-video on one picture, before anything is written."""
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a screen; MuJoCo reads it when it is imported
    try:
        env = gym.make(env_id)
        if "rgb_array" not in env.metadata.get("render_modes", []):
            sys.exit(f"{env_id} has no pictures: leave out --capture-video")
        env = gym.make(env_id, render_mode="rgb_array")
        env.reset()
        env.render()
        env.close()
    except gym.error.Error:
        pass  # an unknown id, say, which is answered where the environments are made
    except Exception as error:  # whatever the graphics libraries raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        sys.exit(
            f"--capture-video cannot draw {env_id} ({reason}). Without a screen MuJoCo needs EGL "
            "(Debian and Ubuntu: apt install libegl1 libegl-mesa0 libgl1-mesa-dri) and MUJOCO_GL=egl"
        )


def open_run(args, step=None):
    """The run's folder and its TensorBoard writer. What a run that is resumed at `step` had logged later is void."""
    if args.track:
        try:
            import wandb
        except ImportError:
            sys.exit("--track needs Weights and Biases: pip install wandb")
    if args.resume is not None:
        run_dir = Path(args.resume)
        (run_dir / "results.json").unlink(missing_ok=True)  # what says that a run is finished
    else:
        run_dir = new_folder(f"runs/{args.env_id}__{args.exp_name}__{args.seed}__")
        lock(run_dir)
    save_json(asdict(args), run_dir / "args.json")
    if args.track:
        name = run_dir.resolve().name
        wandb.init(
            project=args.wandb_project_name, entity=args.wandb_entity, name=name, id=name.replace(":", "-"),
            config=asdict(args), sync_tensorboard=True, resume="allow",
        )  # fmt: skip
    writer = SummaryWriter(run_dir, purge_step=None if step is None else step + 1)
    rows = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}", step)
    return run_dir, writer


def new_folder(prefix):
    while True:
        run_dir = Path(f"{prefix}{int(time.time())}")
        try:
            run_dir.mkdir(parents=True)
            return run_dir
        except FileExistsError:
            if run_dir.parent.is_dir():  # another run was started in the same second
                time.sleep(1)
            else:
                sys.exit(f"cannot write to {run_dir}: {run_dir.parent} is not a folder")
        except OSError as error:
            sys.exit(f"cannot write to {run_dir}: {error.strerror}")


def lock(run_dir):
    """Two processes in one run would delete each other's files. The lock goes with the process, however it ends."""
    try:
        file = open(run_dir / "lock", "w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"{run_dir} is being trained by another process")
    except OSError:
        return  # no such folder, which the caller answers, or a filesystem without locks
    locks.append(file)


def finite(values, step):
    """The values, read from the device, if they are numbers; else the end of the run."""
    values = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    for name, value in values.items():
        if not np.isfinite(value).all():
            sys.exit(f"{name} is not finite at step {step}: stopped, the last checkpoint is kept")
    return values


class Stop:
    """True once SIGTERM or SIGINT has come, so that the run can be saved first. A second SIGINT stops at once."""

    def __init__(self):
        self.signal, self.handlers_before = None, {}
        if threading.current_thread() is threading.main_thread():  # only there does Python take signals
            self.handlers_before = {s: signal.signal(s, self.receive) for s in (signal.SIGTERM, signal.SIGINT)}

    def receive(self, number, frame):
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __bool__(self):
        return self.signal is not None

    def close(self):
        for number, handler in self.handlers_before.items():
            signal.signal(number, handler)


def evaluate_model(args, saved, Agent, evaluate):
    """--evaluate: what a saved agent gets, and how sure that is."""
    device = begin(args)
    vec, max_steps = make_envs(args, min(args.num_envs, args.eval_episodes), None)
    agent = Agent(vec.single_observation_space.shape[0], vec.single_action_space, max_steps, args).to(device)
    agent.load_state_dict(saved["agent"])
    metrics = evaluate(agent, vec, max_steps, args.eval_episodes, device)
    mean, error = metrics["eval/episodic_return"], metrics["eval/return_standard_error"]
    low, high = mean - 1.96 * error, mean + 1.96 * error
    vec.close()
    print(f"return {mean:.3f} over {args.eval_episodes} episodes, 95 % confidence {low:.3f} to {high:.3f}")
    if "eval/success_rate" in metrics:
        print(f"success rate {metrics['eval/success_rate']:.3f}")
    if args.capture_video:
        record_video(Path(args.evaluate).parent / "videos" / "evaluate", args, agent, evaluate, device)


def record_video(folder, args, agent, evaluate, device):
    vec, max_steps = make_envs(args, 1, None, video_folder=str(folder))
    evaluate(agent, vec, max_steps, 1, device)
    vec.close()


@contextlib.contextmanager
def written_beside(path):
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # a full disk is either, depending on where torch meets it
        temporary.unlink(missing_ok=True)
        cannot_write(path, error)


def cannot_write(path, error):
    sys.exit(f"cannot write {path}: {str(error).splitlines()[0]}; the last checkpoint, if there is one, is whole")


def save(content, path):
    with written_beside(path) as file:
        torch.save(content, file)


def save_json(content, path):
    with written_beside(path) as file:
        file.write(json.dumps(content, indent=1).encode())


def close(*things):
    for thing in things:
        with contextlib.suppress(OSError):  # a full disk must not keep the others open
            thing.close()


def load(path):
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        sys.exit(f"there is no {path}")
    except Exception:  # whatever a damaged or a foreign file makes torch say, over many lines
        sys.exit(f"{path} is damaged, or not a file that this script has saved")


def save_model(path, args, agent):
    save({"script": script_name(), "args": asdict(args), "agent": agent.state_dict()}, path)


def checkpoint(run_dir, args, counters, agent, target, optimizer, buffer, rollout):
    """All that the rest of the run depends on. Of the finished episodes, only those that are new since the last one.

    A run gone wrong must not replace its last good checkpoint, so the weights have to be finite.
    """
    finite({name: value.abs().max() for name, value in agent.state_dict().items()}, counters[0])
    save_episodes(buffer, run_dir / "episodes")
    content = {"script": script_name(), "args": asdict(args), "counters": counters, "random": random_state()}
    content |= {"agent": agent.state_dict(), "target": target.state_dict(), "optimizer": optimizer.state_dict()}
    content |= {"count": buffer.count, "on_disk": buffer.on_disk, "t": torch.from_numpy(buffer.t)}
    content["current"] = {name: torch.from_numpy(array) for name, array in buffer.current.items()}
    content |= {"environments": state.get_state(rollout.vec), "memory": rollout.state}
    save(content, run_dir / "checkpoint.pt")
    remove_episodes(buffer, run_dir / "episodes")  # only now: the checkpoint before this one may have named them


def restore(saved, run_dir, agent, target, optimizer, buffer, rollout):
    """Puts everything back as it was. The random generators come last, because some of this draws."""
    agent.load_state_dict(saved["agent"])
    target.load_state_dict(saved["target"])
    optimizer.load_state_dict(saved["optimizer"])
    buffer.count, buffer.on_disk, buffer.t = saved["count"], saved["on_disk"], saved["t"].numpy()
    buffer.current = {name: tensor.numpy() for name, tensor in saved["current"].items()}
    load_episodes(buffer, run_dir / "episodes")
    actions = [agent.to_env(buffer.current["action"][i, :t]) for i, t in enumerate(buffer.t)]
    rollout.obs = state.set_state(rollout.vec, saved["environments"], actions)
    rollout.state = to_devices_of(agent.memory.initial_state(len(buffer.t)), saved["memory"])
    set_random_state(saved["random"])


def to_devices_of(fresh, saved):
    """A memory's state is a tensor or several, and GPT-2's are not all on the same device."""
    if isinstance(fresh, torch.Tensor):
        return saved.to(fresh.device)
    return tuple(to_devices_of(f, s) for f, s in zip(fresh, saved))


def save_episodes(buffer, folder):
    """Writes the episodes that are not on disk yet: once finished they never change."""
    oldest = max(buffer.count - buffer.capacity, 0)
    first = max([oldest] + [end for _, end in buffer.on_disk])
    if first < buffer.count:
        rows = np.arange(first, buffer.count) % buffer.capacity
        longest = buffer.length[rows].max()
        content = {name: torch.from_numpy(array[rows, : longest + 1]) for name, array in buffer.episodes.items()}
        folder.mkdir(exist_ok=True)
        save(content | {"length": torch.from_numpy(buffer.length[rows])}, folder / f"{first}-{buffer.count}.pt")
        buffer.on_disk.append((first, buffer.count))
    buffer.on_disk = [(first, end) for first, end in buffer.on_disk if end > oldest]


def load_episodes(buffer, folder):
    for first, end in buffer.on_disk:
        rows = np.arange(first, end) % buffer.capacity
        content = load(folder / f"{first}-{end}.pt")
        buffer.length[rows] = content.pop("length").numpy()
        for name, value in content.items():
            buffer.episodes[name][rows, : value.shape[1]] = value.numpy()


def remove_episodes(buffer, folder):
    """Those that the checkpoint just written does not name: overwritten in the buffer, or left by a killed run."""
    named = {f"{first}-{end}.pt" for first, end in buffer.on_disk}
    for path in folder.glob("*"):
        if path.name not in named:
            path.unlink()


def random_state():
    numpy_state = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(saved):
    random.setstate(saved["python"])
    key = np.array(saved["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(saved["numpy"] | {"state": saved["numpy"]["state"] | {"key": key}})
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(saved["cuda"])


def begin(args):
    """Seeds every generator of this process, and says where to compute."""
    keep_freed_memory()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    return torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")


def keep_freed_memory():
    """Has the C library keep the memory that torch frees, and serve large blocks from it too.

    By default it returns a large block to the system, which hands it out again page by page, zeroed: a third of the
    time of an update on long episodes. Where the C library is not glibc, nothing happens.
    """
    if platform.libc_ver()[0] == "glibc":
        M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1  # their numbers in malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)  # no blocks outside of the heap
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # and nothing of the heap is given back
