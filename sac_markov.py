"""SAC without memory: the Markovian baseline, which sees the current state alone and cannot infer the context.

    python sac_markov.py --env-id ant-dir      # or cheetah-vel, walker-param, hopper-param, ml10, point-robot
    tensorboard --logdir runs

Time. At time t the agent observes s_t, has the memory m_t, takes the action a_t and receives r_t and s_{t+1}:

    s_0 a_0 r_0  s_1 a_1 r_1  ...  s_T       an episode of T steps has T + 1 observations, T actions and rewards
    x_1 ... x_T                              its transitions, x_t = (s_{t-1}, a_{t-1}, r_{t-1}, s_t)
    m_0 ... m_T                              its memories: m_t is computed from x_1 ... x_t, m_0 is the empty memory

Batches are whole episodes, padded to the longest one; padding is masked out of the losses. Every update recomputes the
memories of its episodes with the current weights: no stored states, no burn-in.

Shapes. B episodes in a batch, N environments, T steps, O observation, A action in [-1, 1], X = 2O + A + 1 transition,
D memory, H hidden layer, h (2D; D in sac_markov.py) input of actor and critics. Equation numbers are the paper's.
"""

# -------------------------------------------------------------------------------------------------------------- imports
import copy
import ctypes
import json
import math
import sys
import time
from collections import namedtuple
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGINT, SIGTERM, signal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import envs


# --------------------------------------------------------------------------------------------------------------- memory
def transition(obs, action, reward, next_obs):  # x_{t+1} = (s_t, a_t, r_t, s_{t+1}) (..., X)
    return torch.cat([obs, action, reward[..., None], next_obs], dim=-1)


class Memory(nn.Module):
    """No memory, the paper's Markovian baseline: m_t has no dimensions, so actor and critics see s_t alone."""

    def __init__(self, x_dim: int, dim: int, max_steps: int):
        super().__init__()
        self.dim = 0
        self.register_buffer("empty", torch.zeros(1, 0), persistent=False)  # on the device of the agent

    def forward(self, x):  # (B, T, X) -> (B, T+1, 0)
        return x.new_zeros(x.shape[0], x.shape[1] + 1, 0)

    def initial_state(self, n):
        return self.empty.expand(n, 0)

    def step(self, x, state):
        return state

    def read(self, state):  # -> (N, 0)
        return state

    def reset(self, state, ended):
        return state


# ----------------------------------------------------------------------------------------------------------------- args
@dataclass
class Args:
    """Soft Actor-Critic for contextual MDPs. "(paper: 64)" is the paper's value, [ours] a choice it leaves open."""

    env_id: str = "ant-dir"  # any Gymnasium id with a bounded Box action space and flat observations, or module:id
    seed: int = 1  # seed of networks, exploration and training environments; evaluation seeds are fixed
    num_envs: int = 16  # environments stepped in parallel [ours]
    max_episode_steps: int | None = None  # T, for environments registered without a time limit, or to shorten it
    total_timesteps: int = 1_000_000  # environment steps of the run, over all environments [ours]
    learning_starts: int = 20_000  # steps of random actions before the first update [ours]
    updates_per_step: float = 0.02  # gradient updates per environment step [ours]
    batch_size: int = 64  # episodes in a batch (paper: 64)
    buffer_size: int = 10_000  # episodes in the replay buffer (paper: 10,000)
    learning_rate: float = 1e-4  # of Adam, for all networks (paper: 1e-4)
    gamma: float = 0.99  # discount factor (paper: 0.99)
    tau: float = 0.001  # soft-update coefficient of the target critics (paper: 0.001)
    freeze_critic: bool = True  # the actor loss trains the actor alone, Eq. (28); off: Eq. (27) (paper: on)
    autotune: bool = True  # tune the entropy coefficient towards an entropy of -|A| [ours]
    alpha: float = 0.2  # entropy coefficient, or its initial value under --autotune [ours]
    memory_dim: int = 256  # D, size of memory and state embedding (paper: 256)
    hidden_dim: int = 512  # H, width of the two hidden layers of actor and critics (paper: 512)
    eval_interval: int = 20_000  # steps between evaluations [ours]
    eval_episodes: int = 20  # episodes per evaluation, with the same seeds every time [ours]
    checkpoint_interval: float = 10.0  # minutes between checkpoints
    resume: str | None = None  # run folder to continue, with its own flags, as if it had never stopped
    evaluate: str | None = None  # model.pt or best.pt to evaluate instead of training
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    torch_deterministic: bool = True  # if on, sets torch.backends.cudnn.deterministic
    cuda: bool = True  # use a GPU if there is one
    bf16: bool = False  # forward passes in bfloat16: 1.6 to 2.1 times faster on our CPU [ours]
    capture_video: bool = False  # record one episode at every evaluation
    track: bool = False  # log to Weights & Biases as well (pip install wandb)
    wandb_project_name: str = "mate"  # project in Weights & Biases
    wandb_entity: str | None = None  # team in Weights & Biases

    def check(self) -> None:  # exit with one line on values that make no sense, before anything is written
        for name, value in vars(self).items():
            low = 0 if name.endswith(("seed", "starts", "gamma", "per_step")) else sys.float_info.min  # positive
            if type(value) in (int, float) and not low <= value <= (1 if name in ("gamma", "tau") else 1e18):
                sys.exit(f"error: --{name.replace('_', '-')} {value} is out of range")

    def make_envs(self, n: int, folder: Path | None = None) -> tuple[gym.vector.VectorEnv, int]:  # and the limit T
        try:
            return envs.make_vec(self.env_id, n, gym.spaces.Box, self.max_episode_steps, folder, self.capture_video)
        except (ValueError, ImportError, gym.error.Error) as error:
            sys.exit(f"error: {error}".splitlines()[0])


# -------------------------------------------------------------------------------------------------------- replay buffer
# One step of N environments: s_t (N, O), a_t (N, A), r_t (N,), s_{t+1} (N, O), both flags (N,), and Gymnasium's infos.
Step = namedtuple("Step", "obs action reward next_obs terminated truncated infos")


class ReplayBuffer:
    """Whole episodes. The first N rows hold the unfinished episodes of the N environments, the others finished ones."""

    def __init__(self, capacity: int, num_envs: int, max_steps: int, obs_dim: int, action_dim: int):
        self.capacity, self.num_envs, self.count = capacity, num_envs, 0  # count: all episodes finished so far
        shapes = {"obs": (max_steps + 1, obs_dim), "action": (max_steps, action_dim)}
        shapes |= {"reward": (max_steps,), "terminated": (max_steps,)}
        # NumPy's zeros occupy memory only once they are written to, so a large empty buffer costs nothing.
        self.data = {name: np.zeros((num_envs + capacity, *shape), np.float32) for name, shape in shapes.items()}
        self.length = np.zeros(num_envs + capacity, np.int64)

    def add(self, step: Step) -> list[tuple[float, int]]:
        """Add one step of every environment. Returns (return, length) of each episode that ended with it."""
        env, t = np.arange(self.num_envs), self.length[: self.num_envs]
        for name, array in self.data.items():
            array[env, t] = getattr(step, name)  # only termination is stored: a truncated episode bootstraps
        self.data["obs"][env, t + 1] = step.next_obs
        t += 1  # in place, and t is a view: the unfinished episodes in self.length become one step longer
        finished = []
        for i in np.flatnonzero(step.terminated | step.truncated):
            row, T = self.num_envs + self.count % self.capacity, self.length[i]
            for array in self.data.values():
                array[row, : T + 1] = array[i, : T + 1]  # T + 1 observations; the others have T valid entries
            finished.append((float(self.data["reward"][row, :T].sum()), int(T)))
            self.length[row], self.length[i] = T, 0
            self.count += 1
        return finished

    def sample(self, batch_size: int, device: torch.device) -> dict[str, torch.Tensor]:
        """obs (B, T+1, O), action (B, T, A), reward, terminated and mask (B, T), with T the longest episode drawn."""
        rows = self.num_envs + torch.randint(min(self.count, self.capacity), (batch_size,)).numpy()  # (B,)
        T = self.length[rows].max()
        batch = {name: array[rows, : T + (name == "obs")] for name, array in self.data.items()}
        # Padding comes after the valid steps, so no valid m_t depends on it, and the mask removes it from the losses.
        batch["mask"] = (np.arange(T) < self.length[rows, None]).astype(np.float32)
        return {name: torch.from_numpy(array).to(device) for name, array in batch.items()}

    def state_dict(self):
        rows = self.num_envs + min(self.count, self.capacity)  # those in use
        arrays = self.data | {"length": self.length}
        return {"count": self.count} | {name: torch.from_numpy(array[:rows]) for name, array in arrays.items()}

    def load_state_dict(self, state):
        self.count = state["count"]
        for name, array in (self.data | {"length": self.length}).items():
            array[: len(state[name])] = state[name].numpy()


# ---------------------------------------------------------------------------------------------------------------- agent
def mlp(input_dim, hidden_dim, output_dim):
    hidden = nn.Linear(input_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, hidden_dim), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(hidden_dim, output_dim))


def twin_q(critics, h, action):  # (B, T, 2D), (B, T, A) -> Q1 and Q2 (B, T)
    inputs = torch.cat([h, action], dim=-1)
    return [q(inputs).squeeze(-1) for q in critics]


class Agent(nn.Module):
    """The policy pi(a_t | s_t, m_t) and the critics Q(s_t, m_t, a_t), Eq. (3), on a shared encoder."""

    def __init__(self, obs_dim: int, action_space: gym.spaces.Box, max_steps: int, args: Args):
        super().__init__()
        self.action_dim = action_dim = action_space.shape[0]
        self.memory = Memory(obs_dim + action_dim + 1 + obs_dim, args.memory_dim, max_steps)
        self.embed_state = nn.Linear(obs_dim, args.memory_dim)  # with the memory: encoder psi of Eq. (27)
        feature_dim = args.memory_dim + self.memory.dim
        self.actor = mlp(feature_dim, args.hidden_dim, 2 * action_dim)  # phi, as in Eq. (27)
        self.critics = nn.ModuleList(mlp(feature_dim + action_dim, args.hidden_dim, 1) for _ in range(2))  # theta
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha)), requires_grad=args.autotune)
        self.low, self.high = action_space.low, action_space.high

    def features(self, obs, m):  # (..., O), (..., D) -> h (..., 2D)
        z = self.embed_state(obs)
        z = F.rms_norm(z, z.shape[-1:])  # state embeddings are projected onto the sphere too (Appendix B.2)
        return torch.cat([z, m], dim=-1)

    def sample(self, h):  # (..., 2D) -> action tanh(u), u ~ N(mean, std^2), (..., A) and its log-probability (...)
        mean, log_std = self.actor(h).to(self.log_alpha.dtype).chunk(2, dim=-1)  # back to float32 under --bf16
        log_std = -5 + 3.5 * (log_std.tanh() + 1)  # in [-5, 2], as in CleanRL [ours]
        noise = torch.randn_like(mean)
        u = mean + log_std.exp() * noise
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_jacobian = 2 * (math.log(2) - u - F.softplus(-2 * u))  # log(1 - tanh(u)^2), finite for every u
        return u.tanh(), (log_normal - log_jacobian).sum(dim=-1)

    def act(self, obs, m):  # s_t (N, O), m_t (N, D) -> a_t (N, A): the deterministic policy, for evaluation
        return self.actor(self.features(obs, m)).chunk(2, dim=-1)[0].tanh()

    def explore(self, obs, m):  # the stochastic policy, for training
        return self.sample(self.features(obs, m))[0]

    def random(self, obs, m):  # uniform, before learning starts
        return torch.rand(len(obs), self.action_dim, device=obs.device) * 2 - 1

    def to_env(self, action):  # from [-1, 1] to the bounds of the action space
        return self.low + 0.5 * (action + 1) * (self.high - self.low)


# -------------------------------------------------------------------------------------------------------------- rollout
class Rollout:
    """N environments stepped in parallel, with the memory of the current episode in each."""

    def __init__(self, vec: gym.vector.VectorEnv, agent: Agent, device: torch.device):
        self.vec, self.agent, self.device = vec, agent, device

    def tensor(self, array):
        return torch.as_tensor(array, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def reset(self, seed: int) -> dict:
        self.obs, infos = self.vec.reset(seed=seed)  # s_0 (N, O)
        self.state = self.agent.memory.initial_state(self.vec.num_envs)
        return infos

    @torch.no_grad()
    def step(self, policy, *args) -> Step:  # act in every environment, and update its memory
        obs_tensor = self.tensor(self.obs)  # s_t (N, O)
        action = policy(obs_tensor, self.agent.memory.read(self.state), *args)  # a_t (N, A), from s_t and m_t
        action_array = action.cpu().numpy()
        obs, reward, terminated, truncated, infos = self.vec.step(self.agent.to_env(action_array))
        # Where an episode ended, obs is already s_0 of the next one, and the last observation is in the infos.
        ended, next_obs = terminated | truncated, obs
        if ended.any():
            next_obs = obs.copy()
            next_obs[ended] = np.stack(infos["final_obs"][ended])
        check_finite({"action": action_array, "reward": reward, "observation": next_obs, "first observation": obs})
        x = transition(obs_tensor, action, self.tensor(reward), self.tensor(next_obs))  # x_{t+1} (N, X)
        state = self.agent.memory.step(x, self.state)
        self.state = self.agent.memory.reset(state, torch.as_tensor(ended, device=self.device))
        previous_obs, self.obs = self.obs, obs
        return Step(previous_obs, action_array, reward, next_obs, terminated, truncated, infos)

    def state_dict(self):
        return {"envs": envs.get_state(self.vec), "memory": self.state}

    def load_state_dict(self, state):
        self.obs, memory = envs.set_state(self.vec, state["envs"]), state["memory"]
        self.state = memory.to(self.device) if torch.is_tensor(memory) else tuple(m.to(self.device) for m in memory)


def check_finite(values):
    for name, value in values.items():
        if not (np.abs(value) < 3e38).all():  # NaN, infinity, or infinity in float32
            raise FloatingPointError(f"{name} is not finite")


# --------------------------------------------------------------------------------------------------------------- update
def update(agent: Agent, target: nn.ModuleList, optimizer, batch: dict, args: Args) -> dict[str, torch.Tensor]:
    """One gradient step of SAC on a batch of episodes. The metrics stay on the device until they are logged."""
    obs, action, reward, mask = batch["obs"], batch["action"], batch["reward"], batch["mask"]

    def average(values):  # (B, T) -> mean over the valid steps: padding is masked out
        return (mask * values).sum() / mask.sum()

    with torch.autocast(obs.device.type, torch.bfloat16, enabled=args.bf16):
        # ENCODER, once for all losses
        x = transition(obs[:, :-1], action, reward, obs[:, 1:])  # x_1 ... x_T (B, T, X)
        m = agent.memory(x)  # m_0 ... m_T (B, T+1, D)
        h = agent.features(obs, m)  # (B, T+1, 2D)
        actor_h = h.detach() if args.freeze_critic else h  # stop-gradient on (z_t, m_t), Eq. (28)
        new_action, log_prob = agent.sample(actor_h)  # (B, T+1, A), (B, T+1)
        alpha = agent.log_alpha.exp().detach()

        # CRITIC LOSS (Appendix B.3). The encoder has no target copy: the target critics see the online memory.
        with torch.no_grad():
            next_q = torch.minimum(*twin_q(target, h[:, 1:], new_action[:, 1:]))  # (B, T)
            y = reward + args.gamma * (1 - batch["terminated"]) * (next_q - alpha * log_prob[:, 1:])  # (B, T)
        q1, q2 = twin_q(agent.critics, h[:, :-1], action)  # (B, T) each
        qf1_loss, qf2_loss = average((q1 - y).square()), average((q2 - y).square())

        # ACTOR LOSS, Eq. (27) or (28)
        new_q = torch.minimum(*twin_q(agent.critics, actor_h[:, :-1], new_action[:, :-1]))  # (B, T)
        actor_loss = average(alpha * log_prob[:, :-1] - new_q)

        # ENTROPY COEFFICIENT. Linear in log alpha, not in alpha, so that the gradient does not shrink with alpha.
        entropy = -average(log_prob[:, :-1].detach())
        alpha_loss = agent.log_alpha * (entropy + agent.action_dim)  # target entropy -|A|

    optimizer.zero_grad()
    if args.freeze_critic:  # Eq. (28): the actor loss gives gradients to the actor, none to critics and encoder
        actor_loss.backward(inputs=list(agent.actor.parameters()))
        (qf1_loss + qf2_loss + alpha_loss).backward()
    else:  # Eq. (27): gradients also flow to critics and encoder
        (qf1_loss + qf2_loss + alpha_loss + actor_loss).backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), agent.critics.parameters()):
            slow.lerp_(fast, args.tau)  # target <- (1 - tau) target + tau online
    metrics = {"qf1_loss": qf1_loss, "qf2_loss": qf2_loss, "actor_loss": actor_loss, "alpha_loss": alpha_loss}
    metrics |= {"alpha": alpha, "entropy": entropy, "qf1_values": average(q1)}
    return {f"losses/{name}": value.detach() for name, value in metrics.items()}


# ------------------------------------------------------------------------------------------------------------- evaluate
def evaluate(agent: Agent, vec: gym.vector.VectorEnv, max_steps: int, device: torch.device) -> dict[str, float]:
    """Average performance of the deterministic policy, one episode per environment, with fixed seeds and contexts."""
    rollout, n = Rollout(vec, agent, device), vec.num_envs
    tasks = rollout.reset(seed=1_000_000).get("task", np.full(n, None))  # the same in all runs, not a training seed
    rewards, lengths, success = np.zeros((n, max_steps)), np.zeros(n, dtype=int), np.zeros(n)  # (N, T), (N,), (N,)
    running = np.ones(n, dtype=bool)  # only the first episode of each environment counts
    while running.any():
        step = rollout.step(agent.act)
        rewards[running, lengths[running]] = step.reward[running]
        for info in (step.infos, step.infos.get("final_info", {})):  # the last step of an episode is in final_info
            success = np.maximum(success, running * info.get("success", 0.0))  # Meta-World: success at any step
        lengths += running
        running &= ~(step.terminated | step.truncated)

    # Reward in the first and the last quarter of an episode: a larger gain than without memory shows adaptation.
    t, length, quarter = np.arange(max_steps), lengths[:, None], np.ceil(lengths[:, None] / 4)
    metrics = {
        "eval/episodic_return": rewards.sum(axis=1).mean(),
        "eval/episodic_length": lengths.mean(),
        "eval/return_first_quarter": (rewards * (t < quarter)).sum(axis=1).mean(),
        "eval/return_last_quarter": (rewards * (t >= length - quarter)).sum(axis=1).mean(),
    }
    if "success" in step.infos["final_info"]:
        metrics["eval/success_rate"] = success.mean()
        metrics |= {f"eval/success_rate/{task}": success[tasks == task].mean() for task in set(tasks) - {None}}
    return {name: float(value) for name, value in metrics.items()}


def record_video(args: Args, agent: Agent, folder: Path, device: torch.device) -> None:
    vec, max_steps = args.make_envs(1, folder)
    evaluate(agent, vec, max_steps, device)
    vec.close()


# ----------------------------------------------------------------------------------------------------------- checkpoint
def save(path: Path, args: Args, **content) -> None:
    """Write a model or a checkpoint to a temporary file and rename it: the file at `path` is always complete."""
    check_finite({name: value.cpu().numpy() for name, value in content["agent"].items()})  # keep the last good file
    torch.save({"script": Path(__file__).stem, "args": asdict(args), **content}, f"{path}.tmp")
    Path(f"{path}.tmp").replace(path)


def parse_args() -> tuple[Args, dict | None]:
    """The arguments, and for --resume or --evaluate the saved file, whose arguments become the defaults."""
    args, saved = tyro.cli(Args), None
    if args.resume and args.evaluate:
        sys.exit("error: use either --resume or --evaluate")
    path = args.evaluate if args.resume is None else Path(args.resume, "checkpoint.pt")
    if path:
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)  # tensors and plain data, never code
            if saved["script"] != Path(__file__).stem:
                raise ValueError(f"saved by {saved['script']}.py, not by {Path(__file__).name}")
            defaults = Args(**saved["args"] | {"resume": args.resume, "evaluate": args.evaluate})
        except Exception as error:  # missing, damaged, foreign or malicious
            sys.exit(f"error: cannot load {path}: {type(error).__name__}: {error}".splitlines()[0])
        args = tyro.cli(Args, default=defaults)
        may_change = ("total", "eval", "checkpoint", "capture", "track", "wandb", "cuda")
        for name, value in asdict(defaults).items():
            if getattr(args, name) != value and not name.startswith(may_change):
                sys.exit(f"error: --{name.replace('_', '-')} is {value} in {path} and cannot be changed")
    args.check()
    return args, saved


def open_run(args: Args, step: int) -> tuple[Path, SummaryWriter]:
    """The run folder and its TensorBoard writer. On --resume, events after the checkpoint are purged."""
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace(":", "-")  # from module:id
    run_dir = Path(args.resume or f"runs/{name}")
    if args.track:
        import wandb

        options = {"project": args.wandb_project_name, "entity": args.wandb_entity, "resume": "allow"}
        wandb.init(**options, name=run_dir.name, id=run_dir.name, config=asdict(args), sync_tensorboard=True)
    run_dir.mkdir(parents=True, exist_ok=args.resume is not None)
    (run_dir / "results.json").unlink(missing_ok=True)  # it marks a finished run
    (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=1))
    writer = SummaryWriter(run_dir, purge_step=step + 1 if args.resume else None)
    table = "".join(f"|{name}|{value}|\n" for name, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}", step)
    return run_dir, writer


# ---------------------------------------------------------------------------------------------------------------- train
def train(args: Args, saved: dict | None = None) -> None:
    # ENVIRONMENTS AND NETWORKS
    torch.manual_seed(args.seed)  # torch draws all random numbers of the agent
    torch.backends.cudnn.deterministic = args.torch_deterministic
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    if sys.platform == "linux":  # with glibc: keep freed memory in the process, up to a third less time per update
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX
        ctypes.CDLL(None).mallopt(-1, -1)  # M_TRIM_THRESHOLD
    eval_vec, max_steps = args.make_envs(args.eval_episodes)
    if args.total_timesteps <= (least := max(args.learning_starts, args.num_envs * max_steps)):
        sys.exit(f"error: --total-timesteps must exceed {least}, the larger of --learning-starts and --num-envs * T")
    obs_dim = eval_vec.single_observation_space.shape[0]
    agent = Agent(obs_dim, eval_vec.single_action_space, max_steps, args).to(device)

    # EVALUATE A SAVED MODEL
    if args.evaluate:
        agent.load_state_dict(saved["agent"])
        print(json.dumps(evaluate(agent, eval_vec, max_steps, device), indent=1))
        if args.capture_video:
            record_video(args, agent, Path(args.evaluate).parent / "videos", device)
        return

    # START OR RESUME
    vec, _ = args.make_envs(args.num_envs)
    target = copy.deepcopy(agent.critics).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    buffer = ReplayBuffer(args.buffer_size, args.num_envs, max_steps, obs_dim, agent.action_dim)
    rollout = Rollout(vec, agent, device)
    counters = {"step": 0, "updates": 0, "best_return": -math.inf, "last_return": -math.inf, "seconds": 0.0}
    parts = {"agent": agent, "target": target, "optimizer": optimizer, "buffer": buffer, "rollout": rollout}
    generators = [torch.default_generator, *torch.cuda.default_generators]
    rollout.reset(seed=args.seed)
    if saved is not None:
        counters = saved["counters"]
        for name, part in parts.items():
            part.load_state_dict(saved.pop(name))
        for generator, state in zip(generators, saved["rng"]):
            generator.set_state(state)
    run_dir, writer = open_run(args, counters["step"])
    progress = tqdm(initial=counters["step"], total=args.total_timesteps, unit="step", disable=None)
    progress.write(f"{run_dir} on {device}, episodes of {max_steps} steps, from step {counters['step']} on")
    start_time, checkpoint_time = time.time() - counters["seconds"], 0.0  # 0: the first checkpoint comes at once
    stop = []  # signals received: the loop ends after the current iteration, and the run is saved
    handlers = {number: signal(number, lambda n, _: stop.append(n)) for number in (SIGTERM, SIGINT)}

    def log(scalars):
        check_finite(scalars)
        for name, value in scalars.items():
            writer.add_scalar(name, value, counters["step"])

    def evaluate_and_log():
        metrics = evaluate(agent, eval_vec, max_steps, device)
        log(metrics | {"charts/updates": counters["updates"]})
        counters["last_return"] = metrics["eval/episodic_return"]
        if counters["last_return"] > counters["best_return"]:
            counters["best_return"] = counters["last_return"]
            save(run_dir / "best.pt", args, agent=agent.state_dict())
        if args.capture_video:
            record_video(args, agent, run_dir / "videos" / f"step-{counters['step']}", device)
        line = f"steps {counters['step']}  episodes {buffer.count}  updates {counters['updates']}"
        progress.write(f"{line}  eval return {counters['last_return']:.3f}  {time.time() - start_time:.0f} s")

    try:
        if saved is None:
            evaluate_and_log()
        while counters["step"] < args.total_timesteps:
            # ACT, one step in every environment
            step = rollout.step(agent.random if counters["step"] < args.learning_starts else agent.explore)
            counters["step"] += args.num_envs
            progress.update(args.num_envs)

            # STORE
            for episodic_return, episodic_length in buffer.add(step):
                log({"charts/episodic_return": episodic_return, "charts/episodic_length": episodic_length})

            # LEARN, in proportion to the steps taken since learning_starts
            due = (counters["step"] - args.learning_starts) * args.updates_per_step
            while buffer.count and counters["updates"] < due:
                metrics = update(agent, target, optimizer, buffer.sample(args.batch_size, device), args)
                counters["updates"] += 1
                if counters["updates"] % 100 == 0:
                    metrics = {name: value.item() for name, value in metrics.items()}
                    sps = int(counters["step"] / (time.time() - start_time))
                    log(metrics | {"charts/updates": counters["updates"], "charts/SPS": sps})
                    progress.set_postfix(loss=metrics["losses/qf1_loss"], eval_return=counters["last_return"])

            # EVALUATE
            finished = counters["step"] >= args.total_timesteps
            if counters["step"] % args.eval_interval < args.num_envs or finished:
                evaluate_and_log()

            # CHECKPOINT
            if finished or stop or time.time() - checkpoint_time > 60 * args.checkpoint_interval:
                writer.flush()
                counters["seconds"] = time.time() - start_time
                state = {name: part.state_dict() for name, part in parts.items()} | {"counters": counters}
                save(run_dir / "checkpoint.pt", args, rng=[g.get_state() for g in generators], **state)
                checkpoint_time = time.time()
                if stop and not finished:
                    progress.write(f"stopped at step {counters['step']}; continue with --resume {run_dir}")
                    sys.exit(128 + stop[0])

        # REPORT
        save(run_dir / "model.pt", args, agent=agent.state_dict())
        (run_dir / "results.json").write_text(json.dumps(counters | {"episodes": buffer.count}, indent=1))
        progress.write(f"finished, best return {counters['best_return']:.3f}, in {run_dir}")
    except FloatingPointError as error:
        sys.exit(f"error: {error} at step {counters['step']}; stopped, the files in {run_dir} are from before it")
    finally:
        for number, handler in handlers.items():
            signal(number, handler)
        for resource in (progress, writer, vec, eval_vec):
            resource.close()


if __name__ == "__main__":
    train(*parse_args())
