"""What surrounds a run and is not its algorithm: the flags, the folder, the log, stopping, saving and loading.

Files are written beside and renamed, so that at any moment there is a whole file of that name or none. They are read
with weights_only=True: tensors and plain containers, never code, whoever made the file.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch.utils.tensorboard import SummaryWriter

import envs
from envs import state

RESUME_MAY_CHANGE = {"total_episodes", "total_timesteps", "eval_interval", "eval_episodes", "checkpoint_interval"}
RESUME_MAY_CHANGE |= {"capture_video", "save_model", "track", "wandb_project_name", "wandb_entity"}
EVALUATE_MAY_CHANGE = {"eval_episodes", "capture_video", "env_id", "corridor_length", "max_episode_steps"}
EVALUATE_MAY_CHANGE |= {"num_envs", "async_envs", "cuda", "seed"}


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


def command_line(Args, description):
    """The arguments, and the file that --resume or --evaluate names, whose arguments are then the defaults."""
    # Looked up by hand: the other flags can be made sense of only with that file's arguments for defaults.
    words = [part for word in sys.argv[1:] for part in word.split("=", 1)] + [None]
    resume, evaluate = (words[words.index(f) + 1] if f in words else None for f in ("--resume", "--evaluate"))
    if not resume and not evaluate:
        return tyro.cli(Args, description=description), None
    saved = load(Path(resume, "checkpoint.pt") if resume else evaluate)
    if saved["script"] != script_name():
        sys.exit(f"{resume or evaluate} is of {saved['script']}.py, not of {script_name()}.py")
    saved["args"] |= {"resume": resume, "evaluate": evaluate}
    args = tyro.cli(Args, description=description, default=Args(**saved["args"]))
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
    try:
        return envs.make_vec(args.env_id, num_envs, getattr(args, "async_envs", False), actions=actions, **options)
    except (ValueError, gym.error.Error) as error:
        sys.exit(str(error))


def open_run(args, step=None):
    """The run's folder and its TensorBoard writer. What a run that is resumed at `step` had logged later is void."""
    run_dir = Path(args.resume or f"runs/{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=1))
    except OSError as error:
        sys.exit(f"cannot write to {run_dir}: {error.strerror}")
    if args.track:
        import wandb

        wandb.init(
            project=args.wandb_project_name, entity=args.wandb_entity, name=run_dir.name, id=run_dir.name,
            config=asdict(args), sync_tensorboard=True, resume="allow",
        )  # fmt: skip
    writer = SummaryWriter(run_dir, purge_step=None if step is None else step + 1)
    rows = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}", step)
    return run_dir, writer


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
        self.signal, self.before = None, {}
        if threading.current_thread() is threading.main_thread():  # only there does Python take signals
            self.before = {s: signal.signal(s, self.receive) for s in (signal.SIGTERM, signal.SIGINT)}

    def receive(self, number, frame):
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __bool__(self):
        return self.signal is not None

    def close(self):
        for number, handler in self.before.items():
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
    print(f"return {mean:.3f} over {args.eval_episodes} episodes, 95 % confidence {low:.3f} to {high:.3f}")
    if "eval/success_rate" in metrics:
        print(f"success rate {metrics['eval/success_rate']:.3f}")
    if args.capture_video:
        record_video(Path(args.evaluate).parent / "videos" / "evaluate", args, agent, evaluate, device)


def record_video(folder, args, agent, evaluate, device):
    vec, max_steps = make_envs(args, 1, None, video_folder=str(folder))
    evaluate(agent, vec, max_steps, 1, device)
    vec.close()


def save(content, path):
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # a full disk is either, depending on where torch meets it
        temporary.unlink(missing_ok=True)
        reason = str(error).splitlines()[0]
        sys.exit(f"cannot write {path}: {reason}; what was saved before is whole")


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
    """All that the rest of the run depends on. Of the finished episodes, only those that are new since the last one."""
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


def set_random_state(state):
    random.setstate(state["python"])
    key = np.array(state["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(state["numpy"] | {"state": state["numpy"]["state"] | {"key": key}})
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def begin(args):
    """Seeds every generator of this process, and says where to compute."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    return torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
