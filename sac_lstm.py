"""SAC with an LSTM: the memory is the hidden state after reading every transition of the episode so far.

    python sac_lstm.py --env-id ant-dir  # or cheetah-vel, walker-param, hopper-param, ml10: as in the paper, hours
    python sac_lstm.py --env-id point-robot --total-timesteps 150_000 --learning-starts 5000 --memory-dim 64 \
        --hidden-dim 128 --batch-size 32 --learning-rate 1e-3 --tau 0.005  # a first look: two minutes on one core
    tensorboard --logdir runs

Time. At t the agent sees s_t, recalls m_t, takes a_t and receives r_t and s_{t+1}. An episode of T steps is

    s_0 a_0 r_0  s_1 a_1 r_1  ...  s_T        T + 1 observations, T actions and rewards
    x_1 ... x_T                               its transitions, x_t = (s_{t-1}, a_{t-1}, r_{t-1}, s_t)
    m_0 ... m_T                               its memories: m_t of x_1 ... x_t, so m_0 of nothing at all

Batches are whole episodes, padded to the longest: in an update memory starts empty, without stale states or burn-in.
Padding has no weight in any loss. One encoder (psi: the memory, Psi in it, and the state embedding) feeds the actor
(phi) and the twin critics (theta); with --freeze-critic it learns from the TD losses alone, see ACTOR in update().

Shapes. B episodes in a batch, N environments, T steps, O observation, A action in [-1, 1] (scaled to the environment's
box on the way there only), X = O + A + 1 + O transition, D memory, H hidden, h (2D) what actor and critics see (D in
sac_markov.py). Equation numbers are the paper's; Greek letters those of Eq. (27), (28): Eq. (3) swaps phi and theta.
"""

# -------------------------------------------------------------------------------------------------------------- imports
import copy
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from envs import running


# --------------------------------------------------------------------------------------------------------------- memory
class Memory(nn.Module):
    """LSTM: m_t = h_t, the hidden state after one layer has read x_1 ... x_t; m_0 = h_0 = 0."""

    def __init__(self, x_dim: int, dim: int, max_steps: int):  # max_steps is for GPT-2, an LSTM has no use for it
        super().__init__()
        self.dim = dim
        self.embed = nn.Linear(x_dim, dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        # Paper: the baselines follow Ni et al. (2023), whose LSTM starts from orthogonal weights and zero biases.
        for name, parameter in self.lstm.named_parameters():
            nn.init.orthogonal_(parameter) if "weight" in name else nn.init.zeros_(parameter)

    def forward(self, x):  # (B, T, X) -> (B, T+1, D): m_0 ... m_T, in one call but one step after the other within it
        h, _ = self.lstm(self.embed(x))  # h_1 ... h_T (B, T, D)
        return F.pad(h, (0, 0, 1, 0))  # h_0 = 0 before them

    # One step at a time, for N environments. The state is (h, c), each (N, D).
    def initial_state(self, n):
        zeros = self.embed.weight.new_zeros(n, self.dim)
        return zeros, zeros

    def step(self, x, state):  # the cell: each call of the layer rearranges all weights, too much for one step
        return torch.lstm_cell(self.embed(x), state, *self.lstm.all_weights[0])

    def read(self, state):
        return state[0]  # m_t (N, D)

    def reset(self, state, ended):  # ended (N,), on the CPU
        return tuple(s.masked_fill(ended[:, None].to(s.device), 0.0) for s in state)


# ----------------------------------------------------------------------------------------------------------------- args
@dataclass
class Args(running.Args):  # which adds what any run has: --seed, --cuda, --resume, --evaluate, --capture-video ...
    # task (such comments are the groups of --help, and those behind the flags its texts)
    env_id: str = "ant-dir"  # any Gymnasium id with a bounded Box of actions and a flat observation
    max_episode_steps: int | None = None  # T, for an environment that is registered without one or to be cut shorter
    num_envs: int = 16  # environments that are stepped together and acted for in one batch (the paper does not say)
    async_envs: bool = False  # step each environment in a process of its own
    total_timesteps: int = 1_000_000  # length of the run, in steps over all environments (the paper does not say)
    # learning
    learning_starts: int = 20_000  # steps with random actions before the first update (the paper does not say)
    updates_per_step: float = 0.02  # gradient updates per step (the paper does not say; four per 200-step episode)
    batch_size: int = 64  # episodes in a batch (paper: 64)
    buffer_size: int = 10_000  # episodes in the replay buffer (paper: 10,000)
    learning_rate: float = 1e-4  # of Adam, for all networks (paper: 1e-4)
    gamma: float = 0.99  # discount factor (paper: 0.99)
    tau: float = 0.001  # how far the target critics move in an update (paper: 0.001)
    freeze_critic: bool = True  # the actor's loss trains the actor alone, Eq. (28); off: Eq. (27) (paper: on)
    autotune: bool = True  # tune the entropy coefficient to an entropy of minus the action's size (not in the paper)
    alpha: float = 0.2  # the entropy coefficient, or with --autotune its first value (the paper does not say)
    # networks
    memory_dim: int = 256  # D, the size of the memory and of the state embedding (paper: 256)
    hidden_dim: int = 512  # H, the width of the two hidden layers of actor and critics (paper: 512)
    # evaluation
    eval_interval: int = 20_000  # steps between evaluations
    eval_episodes: int = 20  # episodes of an evaluation, the same seeds each time
    # run
    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run's folder

    def __post_init__(self):
        may_be_zero = {"seed", "updates_per_step", "gamma"}
        running.check_numbers(self, may_be_zero, at_most_one={"gamma", "tau"})
        if self.learning_starts >= self.total_timesteps:
            sys.exit("--learning-starts must be less than --total-timesteps, or nothing is learned")


# -------------------------------------------------------------------------------------------------------- replay buffer
def transition(obs, action, reward, next_obs):
    """x_t = (s_{t-1}, a_{t-1}, r_{t-1}, s_t), of one step (N, X) or of a batch of episodes (B, T, X)."""
    return torch.cat([obs, action, reward[..., None], next_obs], dim=-1)


class ReplayBuffer:
    """Whole episodes. Those under way are gathered aside, and moved to the buffer when they end."""

    def __init__(self, capacity, num_envs, max_steps, obs_dim, action_dim):
        def storage(n):  # NumPy takes memory only as it is written to, so a large empty buffer costs nothing
            T = max_steps
            shapes = {"obs": (T + 1, obs_dim), "action": (T, action_dim), "reward": (T,), "terminated": (T,)}
            return {name: np.zeros((n, *shape), dtype=np.float32) for name, shape in shapes.items()}

        self.capacity, self.num_envs = capacity, num_envs
        self.episodes, self.length = storage(capacity), np.zeros(capacity, dtype=np.int64)
        self.current, self.t = storage(num_envs), np.zeros(num_envs, dtype=np.int64)
        self.count = 0  # episodes ever stored; the oldest are overwritten
        self.on_disk = []  # for running.checkpoint: which of them are in which files, (first, end) each

    def add(self, obs, action, reward, next_obs, terminated, truncated):
        """One step of every environment. Returns (return, length) of each episode that ended with it."""
        now = np.arange(self.num_envs), self.t
        self.current["obs"][now] = obs
        self.current["obs"][now[0], self.t + 1] = next_obs  # the last observation of an episode is needed too
        self.current["action"][now] = action
        self.current["reward"][now] = reward
        self.current["terminated"][now] = terminated  # not where truncated: such an end bootstraps
        self.t += 1
        finished = []
        for i in np.flatnonzero(terminated | truncated):
            slot, t = self.count % self.capacity, self.t[i]
            for name, array in self.episodes.items():
                array[slot, : t + 1] = self.current[name][i, : t + 1]  # all t + 1 observations; of the rest t count
            finished.append((float(self.episodes["reward"][slot, :t].sum()), int(t)))
            self.length[slot], self.t[i] = t, 0
            self.count += 1
        return finished

    def sample(self, batch_size, device):
        """obs (B, T+1, O), action (B, T, A), reward, terminated and mask (B, T), T being the longest length drawn."""
        rows = torch.randint(min(self.count, self.capacity), (batch_size,)).numpy()
        T = self.length[rows].max()
        batch = {name: array[rows, : T + (name == "obs")] for name, array in self.episodes.items()}
        # Past an episode's end lies what older episodes left there. The mask keeps it out of every loss, and it cannot
        # reach back: m_t is made of x_1 ... x_t only.
        batch["mask"] = (np.arange(T) < self.length[rows, None]).astype(np.float32)
        return {name: torch.from_numpy(array).to(device) for name, array in batch.items()}


# ---------------------------------------------------------------------------------------------------------------- agent
def mlp(input_dim, hidden_dim, output_dim):
    return nn.Sequential(
        nn.Linear(input_dim, hidden_dim), nn.ReLU(),
        nn.Linear(hidden_dim, hidden_dim), nn.ReLU(),
        nn.Linear(hidden_dim, output_dim),
    )  # fmt: skip


class Critics(nn.Module):
    """Twin Q(s_t, m_t, a_t), each an mlp of (h, a) whose first layer is computed in two parts, (W_h h + b) + W_a a. The
    first is most of the work and the same for any action: update() uses it both for a_t and for the actor's action."""

    def __init__(self, feature_dim, action_dim, hidden_dim):
        super().__init__()
        self.feature_dim = feature_dim
        self.q1, self.q2 = (mlp(feature_dim + action_dim, hidden_dim, 1) for _ in range(2))

    def part_of(self, h):  # W_h h + b of both critics: (B, T, 2D) -> (B, T, H) twice
        return [F.linear(h, q[0].weight[:, : self.feature_dim], q[0].bias) for q in (self.q1, self.q2)]

    def forward(self, parts, action):  # W_a a added, and the other layers: (B, T, H) twice, (B, T, A) -> (B, T) twice
        first = [p + F.linear(action, q[0].weight[:, self.feature_dim :]) for q, p in zip((self.q1, self.q2), parts)]
        return self.q1[1:](first[0]).squeeze(-1), self.q2[1:](first[1]).squeeze(-1)


class Agent(nn.Module):
    """The policy pi(a_t | s_t, m_t) and the critics, Eq. (3), on one shared encoder."""

    def __init__(self, obs_dim: int, action_space: gym.spaces.Box, max_steps: int, args: Args):
        super().__init__()
        self.action_dim = action_dim = action_space.shape[0]
        # psi, the encoder: the memory and the state embedding
        self.memory = Memory(obs_dim + action_dim + 1 + obs_dim, args.memory_dim, max_steps)
        self.embed_state = nn.Linear(obs_dim, args.memory_dim)
        feature_dim = args.memory_dim + self.memory.dim  # 2D, or D where the memory has none (sac_markov.py)
        self.actor = mlp(feature_dim, args.hidden_dim, 2 * action_dim)  # phi
        self.critics = Critics(feature_dim, action_dim, args.hidden_dim)  # theta
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha)), requires_grad=args.autotune)
        self.target_entropy = -action_dim
        self.low, self.high = action_space.low, action_space.high

    def features(self, obs, m):  # (..., O), (..., D) -> h (..., 2D), of one step or of all steps of a batch
        z = self.embed_state(obs)
        z = F.rms_norm(z, z.shape[-1:])  # on the sphere of radius sqrt(D) too, in all models (paper, Appendix B.2)
        return torch.cat([z, m], dim=-1)

    def sample(self, h):  # (..., 2D) -> action (..., A) and its log-probability (...)
        """a = tanh(u), u ~ N(mean, std), differentiable in both."""
        mean, log_std = self.actor(h).chunk(2, dim=-1)
        log_std = -5 + 3.5 * (log_std.tanh() + 1)  # between -5 and 2, CleanRL's bounds; the paper does not say
        noise = torch.randn_like(mean)
        u = mean + log_std.exp() * noise
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        # The density of tanh(u) is that of u over 1 - tanh(u)^2, whose logarithm in this form is never -inf.
        log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))
        return u.tanh(), (log_normal - log_slope).sum(dim=-1)

    @torch.no_grad()
    def act(self, obs, m):  # the deterministic policy (N, A)
        return self.actor(self.features(obs, m)).chunk(2, dim=-1)[0].tanh()

    @torch.no_grad()
    def explore(self, obs, m):
        return self.sample(self.features(obs, m))[0]

    def to_env(self, action):  # as the environments take it: from [-1, 1] to the box
        return self.low + 0.5 * (action + 1) * (self.high - self.low)


# -------------------------------------------------------------------------------------------------------------- rollout
class Rollout:
    """N environments stepped together, and the agent's memory of the episode under way in each.

    The memory is carried along, so updates in mid-episode leave it made by older parameters in part. Only acting sees
    that: an update makes the memories of its episodes anew.
    """

    def __init__(self, vec, agent, device):
        self.vec, self.agent, self.device = vec, agent, device

    def tensor(self, array):
        return torch.as_tensor(array, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def reset(self, seed):
        self.obs, infos = self.vec.reset(seed=seed)  # s_0 (N, O)
        self.state = self.agent.memory.initial_state(self.vec.num_envs)  # the memory of nothing
        return infos

    @torch.no_grad()
    def view(self):
        """s_t (N, O) and m_t (N, D): all that an action may depend on."""
        return self.tensor(self.obs), self.agent.memory.read(self.state)

    @torch.no_grad()
    def step(self, action):  # a_t (N, A)
        """One step of every environment: all about it in arrays, and the environments' infos."""
        action_array = action.cpu().numpy()
        obs, reward, terminated, truncated, infos = self.vec.step(self.agent.to_env(action_array))
        # Where an episode ended, obs is already the next one's s_0, and its own last observation is in the infos.
        ended, next_obs = terminated | truncated, obs
        if ended.any():
            next_obs = obs.copy()
            next_obs[ended] = np.stack(infos["final_obs"][ended])
        x = transition(self.tensor(self.obs), action, self.tensor(reward), self.tensor(next_obs))  # x_{t+1} (N, X)
        state = self.agent.memory.step(x, self.state)  # of x_1 ... x_{t+1}
        self.state = self.agent.memory.reset(state, torch.from_numpy(ended))  # of nothing where the episode ended
        step = (self.obs, action_array, reward, next_obs, terminated, truncated)
        self.obs = obs
        return step, infos


# --------------------------------------------------------------------------------------------------------------- update
def update(agent, target, optimizer, batch, args):
    """One gradient step of SAC on a batch of episodes. Metrics stay on the device until they are logged."""
    obs, action, mask = batch["obs"], batch["action"], batch["mask"]
    weight = mask / mask.sum()  # padding weighs nothing, and a valid step the same in any episode

    def average(values):
        return (weight * values).sum()

    x = transition(obs[:, :-1], action, batch["reward"], obs[:, 1:])  # x_1 ... x_T (B, T, X)
    m = agent.memory(x)  # m_0 ... m_T (B, T+1, D)
    h = agent.features(obs, m)  # of (s_t, m_t) (B, T+1, 2D), for actor and critics: the one pass of the encoder
    actor_h = h.detach() if args.freeze_critic else h  # Eq. (28): the encoder takes no gradient from the actor's loss
    # The one pass of the actor: at t for its own loss, at t + 1 for the TD target.
    new_action, log_prob = agent.sample(actor_h)  # (B, T+1, A), (B, T+1)
    alpha = agent.log_alpha.exp().detach()

    # CRITICS AND ENCODER
    with torch.no_grad():
        next_q = torch.minimum(*target(target.part_of(h[:, 1:]), new_action[:, 1:]))  # the encoder has no target copy
        y = batch["reward"] + args.gamma * (1 - batch["terminated"]) * (next_q - alpha * log_prob[:, 1:])  # (B, T)
    parts = agent.critics.part_of(h[:, :-1])  # for a_t here, for the actor's action below
    q1, q2 = agent.critics(parts, action)
    qf1_loss, qf2_loss = average((q1 - y).square()), average((q2 - y).square())

    # ACTOR. Under Eq. (28) psi and theta are constants here, or the loss would reach memory and critics through q, a
    # coupling that the paper avoids (Appendix B.3). What is left is phi's gradient, by new_action and log_prob.
    theta = dict(agent.critics.named_parameters())
    if args.freeze_critic:
        theta = {name: parameter.detach() for name, parameter in theta.items()}
        parts = [part.detach() for part in parts]  # they are made of psi, in h, and of theta
    q = torch.minimum(*torch.func.functional_call(agent.critics, theta, (parts, new_action[:, :-1])))
    actor_loss = average(alpha * log_prob[:, :-1] - q)  # Eq. (27) or (28)

    # ENTROPY: alpha rises while the policy is less random than it should be. The loss is linear in log alpha, not in
    # alpha, or a small alpha would hardly move any more.
    entropy = -average(log_prob[:, :-1].detach())
    alpha_loss = agent.log_alpha * (entropy - agent.target_entropy)

    optimizer.zero_grad()
    # One backward for all. Under Eq. (28) each parameter gets its gradient from one kind of loss only: psi and theta
    # from the TD losses, phi from actor_loss, alpha from alpha_loss. Under Eq. (27) psi and theta get the sum.
    (qf1_loss + qf2_loss + actor_loss + alpha_loss).backward()
    optimizer.step()
    with torch.no_grad():  # target += tau (online - target), all parameters in one call
        torch._foreach_lerp_(list(target.parameters()), list(agent.critics.parameters()), args.tau)
    metrics = {"qf1_loss": qf1_loss, "qf2_loss": qf2_loss, "actor_loss": actor_loss, "alpha_loss": alpha_loss}
    metrics |= {"alpha": alpha, "entropy": entropy, "qf1_values": average(q1)}
    return {f"losses/{name}": value.detach() for name, value in metrics.items()}


# ------------------------------------------------------------------------------------------------------------- evaluate
EVAL_SEED = 1_000_000  # the same contexts for every run, whatever its seed, and not those it trains on


def evaluate(agent, vec, max_steps, episodes, device):
    """What the deterministic policy gets, averaged over episodes on fixed seeds, that is on fixed contexts."""
    rollout, n, rounds = Rollout(vec, agent, device), vec.num_envs, []
    for first in range(EVAL_SEED, EVAL_SEED + episodes, n):
        infos = rollout.reset(seed=list(range(first, first + n)))
        tasks = infos.get("task", np.full(n, None))
        rewards, lengths, success = np.zeros((n, max_steps)), np.zeros(n, dtype=int), np.zeros(n)
        counting = np.ones(n, dtype=bool)  # still in its first episode, the only one that counts
        while counting.any():
            (_, _, reward, _, terminated, truncated), infos = rollout.step(agent.act(*rollout.view()))
            rewards[counting, lengths[counting]] = reward[counting]
            for info in (infos, infos.get("final_info", {})):  # an episode's last step is told of in final_info
                success = np.maximum(success, counting * info.get("success", 0.0))  # Meta-World: at any step
            lengths += counting
            counting &= ~(terminated | truncated)
        rounds.append((rewards, lengths, success, tasks))
    rewards, lengths, success, tasks = (np.concatenate(arrays)[:episodes] for arrays in zip(*rounds))

    # Adaptation within the episode is what memory is for: what is the last quarter of its steps worth, and the first?
    t, length = np.arange(max_steps), lengths[:, None]
    quarter = np.ceil(length / 4)
    metrics = {
        "eval/episodic_return": rewards.sum(axis=1).mean(),
        "eval/return_standard_error": rewards.sum(axis=1).std() / math.sqrt(max(episodes - 1, 1)),
        "eval/episodic_length": lengths.mean(),
        "eval/return_first_quarter": (rewards * (t < quarter)).sum(axis=1).mean(),
        "eval/return_last_quarter": (rewards * (t >= length - quarter)).sum(axis=1).mean(),  # zero after the end
    }
    if "success" in infos:
        metrics["eval/success_rate"] = success.mean()
        metrics |= {f"eval/success_rate/{task}": success[tasks == task].mean() for task in set(tasks) - {None}}
    return {name: float(value) for name, value in metrics.items()}


# ---------------------------------------------------------------------------------------------------------------- train
def train(args, saved=None):
    # ENVIRONMENTS AND NETWORKS
    vec, max_steps = running.make_envs(args, args.num_envs, gym.spaces.Box)
    if args.batch_size * max_steps > args.learning_starts:
        sys.exit(f"--learning-starts must be at least --batch-size episodes, {args.batch_size * max_steps} steps")
    eval_rounds = math.ceil(args.eval_episodes / args.num_envs)
    eval_vec, _ = running.make_envs(args, math.ceil(args.eval_episodes / eval_rounds), gym.spaces.Box)
    device = running.begin(args)
    obs_dim = vec.single_observation_space.shape[0]
    agent = Agent(obs_dim, vec.single_action_space, max_steps, args).to(device)
    target = copy.deepcopy(agent.critics).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    buffer = ReplayBuffer(args.buffer_size, args.num_envs, max_steps, obs_dim, agent.action_dim)
    rollout = Rollout(vec, agent, device)

    # START OR RESUME
    global_step, updates, evaluated_at, next_checkpoint = 0, 0, -1, 0.0  # evaluate and save before anything else
    best_return, last_return, start_time = -math.inf, -math.inf, time.time()
    if saved is None:
        run_dir, writer = running.open_run(args)
        rollout.reset(seed=args.seed)
        running.finite({"first observation": rollout.obs}, step=0)
    else:
        global_step, updates, evaluated_at, best_return, last_return, seconds = saved["counters"]
        running.restore(saved, Path(args.resume), agent, target, optimizer, buffer, rollout)
        if global_step >= args.total_timesteps and Path(args.resume, "results.json").exists():
            sys.exit(f"{args.resume} is finished; a --total-timesteps of more than {global_step} would go on with it")
        run_dir, writer = running.open_run(args, step=global_step)
        start_time -= seconds
    progress = tqdm(initial=global_step, total=args.total_timesteps, unit="step", dynamic_ncols=True, disable=None)

    stop = running.Stop()
    try:
        while True:
            # LEARN, as many updates as the steps so far allow: episodes that end early do not slow it down
            while buffer.count and updates < (global_step - args.learning_starts) * args.updates_per_step and not stop:
                metrics = update(agent, target, optimizer, buffer.sample(args.batch_size, device), args)
                updates += 1
                if updates % 100 == 0:
                    scalars = running.finite(metrics, global_step)
                    sps = int(global_step / (time.time() - start_time))
                    scalars |= {"charts/updates": updates, "charts/SPS": sps}
                    for name, value in scalars.items():
                        writer.add_scalar(name, value, global_step)
                    loss = scalars["losses/qf1_loss"]
                    progress.set_postfix_str(f"return {last_return:.3f}, loss {loss:.2g}, {sps} steps/s")

            # EVALUATE, at the start, at intervals and at the end
            finished = global_step >= args.total_timesteps
            due = global_step // args.eval_interval > evaluated_at // args.eval_interval
            if (due or finished and evaluated_at < global_step) and not stop:
                evaluated_at = global_step
                eval_metrics = evaluate(agent, eval_vec, max_steps, args.eval_episodes, device)
                running.finite(eval_metrics, global_step)
                for name, value in eval_metrics.items():
                    writer.add_scalar(name, value, global_step)
                last_return = eval_metrics["eval/episodic_return"]
                best_return = max(best_return, last_return)
                if args.capture_video:
                    running.record_video(run_dir / "videos" / f"step-{global_step}", args, agent, evaluate, device)
                line = f"steps {global_step}  episodes {buffer.count}  updates {updates}  return {last_return:.3f}"
                progress.write(f"{line}  {time.time() - start_time:.0f} s")

            # CHECKPOINT, at intervals, at the end, and when told to stop
            stopping = bool(stop)
            if stopping or finished or time.time() >= next_checkpoint:
                writer.flush()
                seconds = time.time() - start_time
                counters = (global_step, updates, evaluated_at, best_return, last_return, seconds)
                running.checkpoint(run_dir, args, counters, agent, target, optimizer, buffer, rollout)
                next_checkpoint = time.time() + 60 * args.checkpoint_interval
            if stopping:
                progress.write(f"stopped at step {global_step}: go on with --resume {run_dir}")
                sys.exit(128 + stop.signal)
            if finished:
                break

            # ACT, one step in every environment
            if global_step < args.learning_starts:
                action = torch.rand(args.num_envs, agent.action_dim, device=device) * 2 - 1
            else:
                action = agent.explore(*rollout.view())
            step, _ = rollout.step(action)
            global_step += args.num_envs
            progress.update(args.num_envs)
            numbers = {"action": step[1], "reward": step[2], "observation": step[3], "first observation": rollout.obs}
            running.finite(numbers, global_step)
            for episodic_return, episodic_length in buffer.add(*step):
                writer.add_scalar("charts/episodic_return", episodic_return, global_step)
                writer.add_scalar("charts/episodic_length", episodic_length, global_step)

        # REPORT
        if args.save_model:
            running.save_model(run_dir / "model.pt", args, agent)
        results = {"best_return": best_return, "last_return": last_return, "episodes": buffer.count}
        results |= {"steps": global_step, "updates": updates, "seconds": seconds}
        running.save_json(results, run_dir / "results.json")
        progress.write(f"best average return {best_return:.3f}, last {last_return:.3f}, in {run_dir}")
    except OSError as error:  # the log meets a full disk before a checkpoint does
        running.cannot_write(run_dir, error)
    finally:
        running.close(stop, progress, writer, vec, eval_vec)


if __name__ == "__main__":
    args, saved = running.command_line(Args, __doc__.splitlines()[0])
    if args.evaluate is None:
        train(args, saved)
    else:
        running.evaluate_model(args, saved, Agent, evaluate)
