"""Double DQN with an LSTM: the memory is the hidden state after reading every transition of the episode so far.

    python ddqn_lstm.py                                             # passive T-Maze, L = 200, as in the paper: hours
    python ddqn_lstm.py --env-id tmaze-active --corridor-length 20  # must go back to look at the oracle first
    tensorboard --logdir runs

Time. At t the agent sees s_t, recalls m_t, takes a_t and receives r_t and s_{t+1}. An episode of T steps is

    s_0 a_0 r_0  s_1 a_1 r_1  ...  s_T        T + 1 observations, T actions and rewards
    x_1 ... x_T                               its transitions, x_t = (s_{t-1}, a_{t-1}, r_{t-1}, s_t)
    m_0 ... m_T                               its memories: m_t of x_1 ... x_t, so m_0 of nothing at all

Batches are whole episodes, padded to the longest: in an update memory starts empty, without stale states or burn-in.
Padding has no weight in the loss.

Shapes. B episodes in a batch, N environments, T steps, O observation, A actions (one-hot), D memory, H hidden,
X = O + A + 1 + O transition. Equation numbers are the paper's.
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
    env_id: str = "tmaze-passive"  # any Gymnasium id with discrete actions and a flat observation, like tmaze-active
    corridor_length: int = 200  # L of T-Maze (paper: 200 to 600)
    max_episode_steps: int | None = None  # T, for an environment that is registered without one or to be cut shorter
    num_envs: int = 64  # environments that are stepped together and acted for in one batch (the paper does not say)
    total_episodes: int = 80_000  # length of the run, which also sets how long epsilon falls (paper: 80,000)
    # learning
    learning_starts: int = 100  # episodes collected before the first update (the paper does not say)
    updates_per_episode: float = 1.0  # gradient updates per episode collected (the paper does not say)
    batch_size: int = 64  # episodes in a batch (paper: 64)
    buffer_size: int = 10_000  # episodes in the replay buffer (paper: 10,000)
    learning_rate: float = 3e-5  # of Adam (paper: 3e-5)
    gamma: float = 0.99  # discount factor (paper: 0.99)
    tau: float = 0.001  # how far the target network moves in an update (paper: 0.001)
    max_grad_norm: float = 0.03  # gradients are clipped to this norm (paper: 0.03)
    # networks
    memory_dim: int = 128  # D, the size of the memory and of the state embedding (paper: 128)
    hidden_dim: int = 256  # H, the width of the two hidden layers of the Q-network (paper: 256)
    # exploration
    start_epsilon: float = 1.0  # probability of a random action at first (paper: 1)
    end_epsilon: float | None = None  # probability of a random action at last (paper: 1/T, which is the default)
    exploration_fraction: float = 0.1  # part of the run over which epsilon falls from the one to the other (paper: 0.1)
    # evaluation
    eval_interval: int = 1_000  # episodes between evaluations
    eval_episodes: int = 50  # episodes of an evaluation, the same seeds each time
    # run
    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run's folder

    def __post_init__(self):
        at_most_one = {"gamma", "tau", "start_epsilon", "end_epsilon", "exploration_fraction"}
        may_be_zero = {"seed", "updates_per_episode", "gamma", "end_epsilon", "exploration_fraction"}
        running.check_numbers(self, may_be_zero, at_most_one)
        if not self.batch_size <= self.learning_starts < self.total_episodes:
            sys.exit("--learning-starts must be at least --batch-size and less than --total-episodes")


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
class Agent(nn.Module):
    """Q(s_t, m_t) for every action, Eq. (3): memory, state embedding and Q-network, trained together."""

    def __init__(self, obs_dim: int, action_space: gym.spaces.Discrete, max_steps: int, args: Args):
        super().__init__()
        self.first_action, self.action_dim = int(action_space.start), int(action_space.n)
        self.memory = Memory(obs_dim + self.action_dim + 1 + obs_dim, args.memory_dim, max_steps)
        self.embed_state = nn.Linear(obs_dim, args.memory_dim)
        self.q = nn.Sequential(
            nn.Linear(args.memory_dim + self.memory.dim, args.hidden_dim), nn.ReLU(),
            nn.Linear(args.hidden_dim, args.hidden_dim), nn.ReLU(),
            nn.Linear(args.hidden_dim, self.action_dim),
        )  # fmt: skip

    def forward(self, obs, m):  # (..., O), (..., D) -> (..., A), of one step or of all steps of a batch
        z = self.embed_state(obs)
        z = F.rms_norm(z, z.shape[-1:])  # on the sphere of radius sqrt(D) too, in all models (paper, Appendix B.2)
        return self.q(torch.cat([z, m], dim=-1))

    @torch.no_grad()
    def act(self, obs, m):  # the best action, one-hot (N, A)
        return F.one_hot(self(obs, m).argmax(dim=-1), self.action_dim).float()

    @torch.no_grad()
    def explore(self, obs, m, epsilon):  # a random action with probability epsilon
        random_action = F.one_hot(torch.randint(self.action_dim, (len(obs),)), self.action_dim).float().to(obs.device)
        explores = (torch.rand(len(obs), 1) < epsilon).to(obs.device)
        return torch.where(explores, random_action, self.act(obs, m))

    def to_env(self, action):  # as the environments take it: one-hot (N, A) -> (N,)
        return self.first_action + action.argmax(axis=-1)


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
    """One gradient step of Double DQN on a batch of episodes. Metrics stay on the device until they are logged."""
    obs, action, mask = batch["obs"], batch["action"], batch["mask"]
    x = transition(obs[:, :-1], action, batch["reward"], obs[:, 1:])  # x_1 ... x_T (B, T, X)

    m = agent.memory(x)  # m_0 ... m_T (B, T+1, D)
    q = agent(obs, m)  # (B, T+1, A): one pass for both Q(s_t, m_t) and the choice at t + 1
    with torch.no_grad():
        best_action = q[:, 1:].argmax(dim=-1, keepdim=True)  # the online network chooses,
        next_q = target(obs[:, 1:], target.memory(x)[:, 1:])  # the target network, its own memory in it, values
        next_q = next_q.gather(-1, best_action).squeeze(-1)  # (B, T)
        y = batch["reward"] + args.gamma * (1 - batch["terminated"]) * next_q  # (B, T)
    q_taken = (q[:, :-1] * action).sum(dim=-1)
    # The mean over valid steps, not over padding: a step weighs the same in a short episode and in a long one.
    td_loss = (mask * (q_taken - y).square()).sum() / mask.sum()

    optimizer.zero_grad()
    td_loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    with torch.no_grad():  # target += tau (online - target), all parameters in one call
        torch._foreach_lerp_(list(target.parameters()), list(agent.parameters()), args.tau)
    q_values = (mask * q_taken.detach()).sum() / mask.sum()
    return {"losses/td_loss": td_loss.detach(), "losses/q_values": q_values, "losses/grad_norm": grad_norm}


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
def epsilon_at(episode, max_steps, args):
    """Linear from start_epsilon to end_epsilon over the first part of the run, then constant."""
    end = 1 / max_steps if args.end_epsilon is None else args.end_epsilon
    progress = min(episode / max(args.exploration_fraction * args.total_episodes, 1), 1.0)
    return args.start_epsilon + progress * (end - args.start_epsilon)


def train(args, saved=None):
    # ENVIRONMENTS AND NETWORKS
    vec, max_steps = running.make_envs(args, args.num_envs, gym.spaces.Discrete)
    eval_rounds = math.ceil(args.eval_episodes / args.num_envs)
    eval_vec, _ = running.make_envs(args, math.ceil(args.eval_episodes / eval_rounds), gym.spaces.Discrete)
    device = running.begin(args)
    obs_dim = vec.single_observation_space.shape[0]
    agent = Agent(obs_dim, vec.single_action_space, max_steps, args).to(device)
    target = copy.deepcopy(agent).requires_grad_(False)
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
        if buffer.count >= args.total_episodes and Path(args.resume, "results.json").exists():
            sys.exit(f"{args.resume} is finished; a --total-episodes of more than {buffer.count} would go on with it")
        run_dir, writer = running.open_run(args, step=global_step)
        start_time -= seconds
    progress = tqdm(initial=buffer.count, total=args.total_episodes, unit="episode", dynamic_ncols=True, disable=None)

    stop = running.Stop()
    try:
        while True:
            epsilon = epsilon_at(buffer.count, max_steps, args)

            # LEARN, as many updates as the episodes so far allow
            while updates < (buffer.count - args.learning_starts) * args.updates_per_episode and not stop:
                metrics = update(agent, target, optimizer, buffer.sample(args.batch_size, device), args)
                updates += 1
                if updates % 100 == 0:
                    scalars = running.finite(metrics, global_step)
                    sps = int(global_step / (time.time() - start_time))
                    scalars |= {"charts/epsilon": epsilon, "charts/updates": updates, "charts/SPS": sps}
                    for name, value in scalars.items():
                        writer.add_scalar(name, value, global_step)
                    loss = scalars["losses/td_loss"]
                    progress.set_postfix_str(f"return {last_return:.3f}, loss {loss:.2g}, {sps} steps/s")

            # EVALUATE, at the start, at intervals and at the end
            finished = buffer.count >= args.total_episodes
            due = buffer.count // args.eval_interval > evaluated_at // args.eval_interval
            if (due or finished and evaluated_at < buffer.count) and not stop:
                evaluated_at = buffer.count
                eval_metrics = evaluate(agent, eval_vec, max_steps, args.eval_episodes, device)
                running.finite(eval_metrics, global_step)
                for name, value in eval_metrics.items():
                    writer.add_scalar(name, value, global_step)
                last_return = eval_metrics["eval/episodic_return"]
                best_return = max(best_return, last_return)
                if args.capture_video:
                    running.record_video(run_dir / "videos" / f"step-{global_step}", args, agent, evaluate, device)
                line = f"episodes {buffer.count}  steps {global_step}  updates {updates}  return {last_return:.3f}"
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
            step, _ = rollout.step(agent.explore(*rollout.view(), epsilon))
            global_step += args.num_envs
            numbers = {"action": step[1], "reward": step[2], "observation": step[3], "first observation": rollout.obs}
            running.finite(numbers, global_step)
            for episodic_return, episodic_length in buffer.add(*step):
                writer.add_scalar("charts/episodic_return", episodic_return, global_step)
                writer.add_scalar("charts/episodic_length", episodic_length, global_step)
                progress.update()

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
