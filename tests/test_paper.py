"""The paper's claims, in the paper's order, on the memories and updates that the scripts train with."""

import copy
import functools
import math
from itertools import product

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import SAC, A, T, make_batch, make_update, results_of, script, slow_sac, train_in, update
from torch.utils.flop_counter import FlopCounterMode

LENGTH, SEEDS = 2, (0, 1)  # of the T-Maze that is solved; in active these seeds start with either cue
MEMORIES = {"MATE": "ddqn_mate", "LSTM": "ddqn_lstm", "GPT-2": "ddqn_gpt2"}


def make_memory(name="MATE", x_dim=5, dim=16, max_steps=200, encode=None, Psi=None):
    """A memory of the scripts in double precision; for MATE, another encoder or offset where a claim is about one."""
    torch.manual_seed(0)
    memory = script(MEMORIES[name]).Memory(x_dim, dim, max_steps).double()
    if encode is not None:
        memory.encode = encode
    if Psi is not None:
        memory.Psi.data = torch.as_tensor(Psi).double()
    return memory


@torch.no_grad()
def accumulate(memory, xs):
    """The state of MATE's memory after these transitions: Psi + sum_i E(x_i)."""
    state = memory.initial_state(1)
    for x in xs:
        state = memory.step(x[None], state)
    return state[0]


# ------------------------------------------------------------------- Section 2.1: solving a contextual MDP needs memory
def bayes_adaptive_value(mazes):
    """The value of the best history-dependent policy, by looking ahead through all that can happen.

    `mazes` are copies of one environment, one for each context that the history so far leaves possible, each with its
    prior probability. Contexts that answer an action alike stay together, and those that differ have told themselves
    apart: this is the MDP over (s_t, p(c | x_{1:t})) of Eq. (2).
    """
    best = -math.inf
    for action in range(4):
        outcomes = {}
        for maze, probability in mazes:
            maze = copy.deepcopy(maze)
            observation, reward, terminated, _, _ = maze.step(action)
            key = (*observation.tolist(), reward, terminated)
            outcomes.setdefault(key, []).append((maze, probability))
        value = 0.0
        for (*_, reward, terminated), group in outcomes.items():
            value += reward * sum(p for _, p in group) + (0.0 if terminated else bayes_adaptive_value(group))
        best = max(best, value)
    return best


def memoryless_value(maze):
    """The best of all maps from an observation to an action, by trying every one of them. Random policies do no better
    than these: whatever they do at the junction cannot depend on the goal."""
    cells = [(0, 1), (0, -1), *((cell, 0) for cell in range(1, LENGTH + 1))]  # (cell, cue)
    if maze.active:
        cells += [(1, 1), (1, -1)]  # the start, with its false cue
    best = -math.inf
    for actions in product(range(4), repeat=len(cells)):
        table, total = dict(zip(cells, actions)), 0.0
        for goal, seed in product((1, -1), SEEDS):
            (x, _, cue), _ = maze.reset(seed=seed, options={"context": [goal]})
            terminated = False
            while not terminated:
                (x, _, cue), reward, terminated, _, _ = maze.step(table[x + LENGTH, cue / LENGTH])
                total += reward / (2 * len(SEEDS))
        best = max(best, total)
    return best


def test_section_2_1_the_optimal_value_needs_memory():
    """T-Maze with a corridor of 2, solved exactly: 1 with memory, 1/2 at best without, passive and active."""
    for name in ("tmaze-passive", "tmaze-active"):
        maze = gym.make(f"envs:{name}", corridor_length=LENGTH).unwrapped
        starts = {}  # by the first observation: in passive it is the oracle's cue, in active it means nothing
        for goal, seed in product((1, -1), SEEDS):
            start = copy.deepcopy(maze)
            observation, _ = start.reset(seed=seed, options={"context": [goal]})
            starts.setdefault(tuple(observation), []).append((start, 1 / (2 * len(SEEDS))))
        assert len(starts) == 2
        assert sum(bayes_adaptive_value(group) for group in starts.values()) == 1.0
        assert memoryless_value(maze) == 0.5


def test_section_2_1_a_small_mate_agent_reaches_it(tmp_path):
    """Trained by our own Double DQN, within 3 % of the optimum that the best memoryless policy is half of."""
    training = {"total_episodes": 600, "num_envs": 8, "learning_starts": 32, "batch_size": 32, "learning_rate": 3e-3}
    training |= {"tau": 0.02, "max_grad_norm": 1.0, "memory_dim": 32, "hidden_dim": 32, "eval_interval": 200}
    folder = train_in(tmp_path, "ddqn_mate", corridor_length=3, **training)
    assert results_of(folder)["best_return"] >= 0.97


# -------------------------------------------------------------- Section 3.1: the posterior does not depend on the order
@torch.no_grad()
@pytest.mark.parametrize("name", MEMORIES)
def test_eq_5_permutations_leave_mate_unchanged_and_not_the_others(name):
    x = torch.randn(1, 12, 5, generator=torch.Generator().manual_seed(1)).double()
    memory = make_memory(name)
    reference = memory(x)[0, -1]
    for seed in range(20):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        distance = (memory(x[:, order])[0, -1] - reference).abs().max()
        assert distance < 1e-12 if name == "MATE" else distance > 1e-3


# --------------------------------------------------------- Section 3.2, Appendix A.2: a sum can be the posterior itself
def test_appendix_a_2_the_sum_is_the_posterior_of_a_product_of_gaussians():
    """With x = (mu, sigma^2) and E(x) = (mu / sigma^2, 1 / sigma^2), against the product of the densities on a grid."""
    g = torch.Generator().manual_seed(2)
    mu, variance = torch.randn(15, 1, generator=g).double(), 0.5 + torch.rand(15, 1, generator=g).double()
    encode = lambda x: torch.cat([x[:, :1], torch.ones_like(x[:, :1])], dim=-1) / x[:, 1:]  # noqa: E731
    memory = make_memory(x_dim=2, dim=2, encode=encode, Psi=[0.0, 0.0])
    weighted_mean, precision = accumulate(memory, torch.cat([mu, variance], dim=1))
    grid = torch.linspace(-8, 8, 200_001, dtype=torch.float64)
    density = torch.softmax((-((grid - mu) ** 2) / (2 * variance)).sum(dim=0), dim=0)
    mean = (density * grid).sum()
    torch.testing.assert_close(weighted_mean / precision, mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(1 / precision, (density * (grid - mean) ** 2).sum(), rtol=1e-7, atol=1e-9)


# ----------------------------------------------------------- Section 3.3, Proposition 3.1: sums of multisets are unique
def distance(memory, a, b):
    return (accumulate(memory, a) - accumulate(memory, b)).norm().item()


def test_proposition_3_1_distinct_multisets_have_distinct_sums():
    """A random one-layer encoder with an analytic activation and the width 2nT + 1 that the proposition asks for."""
    n, horizon = 2, 4
    m, g = 2 * n * horizon + 1, torch.Generator().manual_seed(3)
    weight, bias = torch.randn(m, n, generator=g).double(), torch.randn(m, generator=g).double()
    memory = make_memory(x_dim=n, dim=m, encode=lambda x: torch.sin(x @ weight.T + bias))

    def draw(count):
        return torch.rand(count, n, generator=g).double() * 2 - 1

    sizes = torch.randint(0, horizon + 1, (300, 2), generator=g).tolist()
    random_pairs = [(draw(a), draw(b)) for a, b in sizes if a + b > 0]
    a, b, d = draw(1), draw(1), 0.1 * draw(1)
    adversarial = {
        "same mean": (torch.cat([a - d, a + d]), torch.cat([a, a])),
        "same mean and size, four of them": (torch.cat([a - d, a + d, b - d, b + d]), torch.cat([a, a, b, b])),
        "same elements, other multiplicities": (torch.cat([a, a, b]), torch.cat([a, b, b])),
        "sizes that differ by one": (torch.cat([a, a, a]), torch.cat([a, a, a, a])),
        "something and nothing": (a, draw(0)),
        "one element moved a little": (torch.cat([a, b]), torch.cat([a, b + 1e-3])),
    }
    for name, pair in adversarial.items():
        assert distance(memory, *pair) > 1e-5, name
    assert min(distance(memory, *pair) for pair in random_pairs) > 1e-5
    same = torch.cat([a, b, d])
    assert distance(memory, same, same.flip(0)) < 1e-12, "and equal multisets have equal ones"


# ------------------------------------------------------------- Section 3.4, Appendix A.4: the memory on the hypersphere
@torch.no_grad()
def test_section_3_4_without_psi_x_and_x_x_collide():
    x = torch.randn(5, generator=torch.Generator().manual_seed(4)).double()
    for Psi, collides in ((torch.zeros(16), True), (None, False)):
        memory = make_memory(Psi=Psi)
        once, twice = (memory.read(accumulate(memory, [x] * n)[None]) for n in (1, 2))
        assert ((once - twice).norm() < 1e-6) == collides


@torch.no_grad()
def test_appendix_a_4_the_sum_is_recovered_from_its_projection():
    """E = (E~, 0) and Psi = (0, 1): dividing by the last coordinate undoes the projection, whatever E~ and m0 are."""
    m0 = 15
    inner = make_memory(x_dim=5, dim=m0)  # E~ is MATE's own encoder, one dimension narrower
    Psi = torch.zeros(m0 + 1)
    Psi[-1] = 1.0
    memory = make_memory(dim=m0 + 1, encode=lambda x: torch.nn.functional.pad(inner.encode(x), (0, 1)), Psi=Psi)
    xs = torch.randn(30, 5, generator=torch.Generator().manual_seed(5)).double()
    for t in (0, 1, 7, 30):
        projected = memory.read(accumulate(memory, xs[:t])[None])[0]
        unnormalised = sum((inner.encode(x) for x in xs[:t]), torch.zeros(m0).double())
        torch.testing.assert_close(projected[:m0] / projected[m0], unnormalised, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_section_3_4_the_norm_is_the_same_at_every_t():
    memory = make_memory()
    m = memory(torch.randn(1, 10_000, 5).double())
    torch.testing.assert_close(m.norm(dim=-1), torch.full((1, 10_001), 16**0.5).double(), rtol=1e-6, atol=0)
    assert accumulate(memory, torch.randn(200, 5).double()).norm() > 20, "while the sum itself grows"
    single, state = memory.float(), memory.initial_state(1)  # step by step and in the precision of training, too
    for x in torch.randn(10_000, 1, 5):
        state = single.step(x, state)
    assert single.read(state).norm().item() == pytest.approx(4, rel=1e-5)


# ------------------------------------------------------------------------------------------- Table 1: what it all costs
def attention_flops(query, key, *_, **__):  # torch counts matrix products, and not yet this kernel
    *batch, queries, dim = query
    return 4 * math.prod(batch) * queries * key[-2] * dim


def flops(function, *args):
    """How many operations the function takes, and what it returns."""
    mapping = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        result = function(*args)
    return counter.get_total_flops(), result


@functools.cache
def depth(node):
    """The longest chain of operations, each a parallel kernel, from the inputs to this node of the graph."""
    return 1 + max((depth(before) for before, _ in node.next_functions if before is not None), default=0)


@torch.no_grad()
@pytest.mark.parametrize("name", MEMORIES)
def test_table_1_rollout_work_is_constant_for_mate_and_lstm_and_grows_for_gpt2(name):
    memory, x = make_memory(name), torch.randn(2, 5).double()
    state, work = memory.initial_state(2), []
    for _ in range(200):
        count, state = flops(memory.step, x, state)
        work.append(count)
    if name == "GPT-2":
        assert len(set(np.diff(work))) == 1 and work[1] > work[0], "by the same amount every step, so O(T^2) in all"
    else:
        assert len(set(work)) == 1 and work[0] > 0


@pytest.mark.parametrize("name", MEMORIES)
def test_table_1_update_is_parallel_for_mate_and_gpt2_and_linear_for_mate_and_lstm(name):
    memory = make_memory(name)
    inputs = [torch.randn(2, length, 5).double() for length in (25, 50, 100)]
    depths = [depth(memory(x).grad_fn) for x in inputs]
    if name == "LSTM":
        assert depths[2] - depths[1] == 2 * (depths[1] - depths[0]) > 50, "each step waits for the one before"
    else:
        assert depths[0] == depths[1] == depths[2]
    short, medium, long = (flops(memory, x)[0] for x in inputs)
    if name == "GPT-2":
        assert long - 2 * medium > medium - 2 * short > 0, "quadratic"
    else:
        assert long == 2 * medium == 4 * short, "linear"


# ---------------------------------------------------------------------- Appendix B.3: the gradients of the actor's loss
@pytest.mark.parametrize("freeze_critic", [True, False])
@pytest.mark.parametrize("name", SAC)
def test_eq_27_and_28_gradients_of_the_actors_loss_parameter_by_parameter(name, freeze_critic):
    """Eq. (28): the actor's loss has no gradient in theta and psi. Eq. (27): it has, and it adds to the critics'."""
    parts = make_update(name, freeze_critic=freeze_critic)
    batch, noise, agent = make_batch(name), torch.randn(4, T + 1, A).double(), parts[1]
    losses = slow_sac(parts, batch, noise)  # in a graph of their own, nothing detached but the TD target
    names, parameters = zip(*((n, p) for n, p in agent.named_parameters() if n != "log_alpha"))
    gradients = functools.partial(torch.autograd.grad, inputs=parameters, retain_graph=True, allow_unused=True)
    from_critic, from_actor = gradients(losses["qf1_loss"] + losses["qf2_loss"]), gradients(losses["actor_loss"])
    update(parts, batch, noise)
    torch.testing.assert_close(agent.log_alpha.grad, losses["entropy"].detach() + A)  # learns from the entropy alone
    for n, parameter, critic, actor in zip(names, parameters, from_critic, from_actor):
        assert actor is not None and actor.abs().max() > 0, f"without the freeze the actor's loss reaches {n}"
        if n.startswith("actor."):
            expected = actor
            assert critic is None, "the TD loss never trains the actor"
        else:
            expected = critic if freeze_critic else critic + actor
        torch.testing.assert_close(parameter.grad, expected, msg=f"gradient of {n}")
