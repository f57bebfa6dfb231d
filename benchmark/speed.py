"""How fast are we, and how close to the machine? What the paper's Table 1 claims, measured in one run on one machine.

    python benchmark/speed.py             everything below: about an hour, of an otherwise idle machine
    python benchmark/speed.py rollout     time of a step against t, and steps per second by number of environments
    python benchmark/speed.py update      time and memory of an update against T, and how close it is to the machine
    python benchmark/speed.py small       the same at the small sizes
    python benchmark/speed.py profile     which operations the time of an update and of acting goes to
    python benchmark/speed.py program     steps and updates per second of whole scripts, and where their time goes
    python benchmark/speed.py envs        the environments over the bare ones that they are built on
    python benchmark/speed.py checkpoint  writing and reading a checkpoint of a full buffer, at the paper's sizes
    python benchmark/speed.py startup     how long it takes from the command to the first step
    python benchmark/speed.py compile     what torch.compile would gain (it needs a C++ compiler)
    python benchmark/speed.py --redraw    the figures again, from the JSON files

Prints tables and writes benchmark/results/speed_{what}.json, with the machine and the versions, and .png. One thread
(OMP_NUM_THREADS=1) and no GPU, except where a row says otherwise.
"""

import argparse
import contextlib
import copy
import importlib
import json
import math
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"

import gymnasium as gym
import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from torch.utils._python_dispatch import TorchDispatchMode

import envs
from benchmark.runs import WIDTH, look
from envs import running

CPU = torch.device("cpu")
MEMORIES = ("mate", "lstm", "gpt2")
SIZES = {  # of networks and batches; the paper's are the scripts' defaults
    "paper": {},
    "small": {"memory_dim": 64, "hidden_dim": 128, "batch_size": 32},
}
SPACES = {  # observation and action of T-Maze, and of cheetah-vel
    "ddqn": (3, gym.spaces.Discrete(4)),
    "sac": (17, gym.spaces.Box(-1, 1, (6,))),
}


def machine() -> dict:
    info = Path("/proc/cpuinfo")  # Linux only
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    packages = ("torch", "numpy", "gymnasium", "mujoco", "metaworld")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def in_child(function, *args):
    """In a process of its own, set up like a run: what one measurement leaves in memory does not touch the next."""
    with multiprocessing.get_context("fork").Pool(1, running.keep_freed_memory) as pool:
        return pool.apply(function, args)


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def median_time(function, budget, least=3, most=50):
    """Median seconds of a call, over as many calls as the budget of seconds allows."""
    times = []
    while len(times) < least or sum(times) < budget and len(times) < most:
        times.append(timed(function))
    return float(np.median(times))


def make_agent(name, max_steps, size="paper"):
    module = importlib.import_module(name)
    obs_dim, action_space = SPACES[name.split("_")[0]]
    torch.manual_seed(0)
    args = module.Args(**SIZES[size])
    return module, args, module.Agent(obs_dim, action_space, max_steps, args)


def plural(number, thing="environment"):
    return f"{number} {thing}{'s' * (number != 1)}"


def bar(label, unit, value, note=""):  # the note is what is aimed at, mostly
    return {"what": f"{label}: {unit}", "label": label, "unit": unit, "value": value, "note": note}


def draw_bars(rows):
    """One bar a row, those that are rates or sizes in other panels than the ratios or the seconds."""
    units = list(dict.fromkeys(row["unit"] for row in rows))
    figure = Figure(figsize=(WIDTH, 0.9 + 0.22 * len(rows)), layout="constrained")
    heights = [1 + sum(row["unit"] == unit for row in rows) for unit in units]
    for ax, unit in zip(np.atleast_1d(figure.subplots(len(units), 1, height_ratios=heights)), units):
        chosen = [row for row in rows if row["unit"] == unit][::-1]
        bars = ax.barh([row["label"] for row in chosen], [row["value"] for row in chosen], color="#0072B2")
        ax.bar_label(
            bars, [f"{row['value']:,.0f}" if row["value"] > 100 else f"{row['value']:.2f}" for row in chosen], padding=3
        )
        ax.set_xlabel(unit)
        ax.margins(x=0.12)
        ax.grid(visible=False, axis="y")
    return figure


# -------------------------------------------------------------------------------------------------------------- rollout
class NoEnvironments:
    """N environments that never end and cost nothing, so that what is left is the agent."""

    def __init__(self, num_envs, obs_dim):
        self.num_envs, self.obs = num_envs, np.zeros((num_envs, obs_dim), dtype=np.float32)
        self.reward, self.ended = np.zeros(num_envs), np.zeros(num_envs, dtype=bool)

    def reset(self, seed=None):
        return self.obs, {}

    def step(self, action):
        return self.obs, self.reward, self.ended, self.ended, {}


def explore(module, agent, rollout):
    epsilon = (0.1,) if module.__name__.startswith("ddqn") else ()
    return rollout.step(agent.explore(*rollout.view(), *epsilon))[0]


def step_times(name, num_envs, max_steps, episodes, bins):
    """Microseconds of a step of all environments, in bins of t: medians over the bin and over the episodes."""
    module, _, agent = make_agent(name, max_steps)
    rollout = module.Rollout(NoEnvironments(num_envs, SPACES[name.split("_")[0]][0]), agent, CPU)
    times = np.zeros((1 + episodes, max_steps))
    for episode in times:
        rollout.reset(seed=0)
        for t in range(max_steps):
            start = time.perf_counter()
            explore(module, agent, rollout)
            episode[t] = time.perf_counter() - start
    by_bin = 1e6 * np.median(times[1:].reshape(episodes, bins, -1).swapaxes(0, 1).reshape(bins, -1), axis=1)
    middle = (np.arange(bins) + 0.5) * max_steps / bins
    return [{"t": float(t), "us": float(us)} for t, us in zip(middle, by_bin)]


def steps_per_second(name, size, num_envs, budget):
    """DDQN: the whole rollout on T-Maze of T = 200, policy, environment and buffer. SAC: acting alone."""
    module, _, agent = make_agent(name, 200, size)
    buffer = None
    if name.startswith("ddqn"):
        vec, max_steps = envs.make_vec("tmaze-passive", num_envs, corridor_length=199)
        buffer = module.ReplayBuffer(1_000, num_envs, max_steps, 3, 4)
    else:
        vec = NoEnvironments(num_envs, SPACES["sac"][0])
    rollout = module.Rollout(vec, agent, CPU)

    def episode():  # the whole of it, because GPT-2's later steps cost more
        rollout.reset(seed=0)
        for _ in range(200):
            step = explore(module, agent, rollout)
            if buffer is not None:
                buffer.add(*step)

    episode()
    return 200 * num_envs / median_time(episode, budget)


def measure_rollout(quick):
    max_steps, episodes, bins = (40, 1, 4) if quick else (2_000, 5, 40)
    for num_envs in (1, 64):
        for memory in MEMORIES:
            points = in_child(step_times, f"ddqn_{memory}", num_envs, max_steps, episodes, bins)
            for point in points:
                yield {"kind": "step", "script": f"ddqn_{memory}", "num_envs": num_envs} | point
            what = f"ddqn_{memory}, {plural(num_envs)}: time of a step, last {max_steps // bins} over the first"
            aim = "<= 1.05" if memory == "mate" else ""
            yield {"kind": "ratio", "what": what, "value": points[-1]["us"] / points[0]["us"], "note": aim}
    numbers = (4,) if quick else (1, 4, 16, 64, 256, 1024)
    configurations = [(f"{a}_{m}", "paper", n) for a in ("ddqn", "sac") for m in MEMORIES for n in numbers]
    configurations += [(f"ddqn_{m}", "small", 4 if quick else 256) for m in MEMORIES]
    for name, size, num_envs in configurations:
        rate = in_child(steps_per_second, name, size, num_envs, 0 if quick else 2)
        what = "T-Maze, T = 200, whole rollout" if name.startswith("ddqn") else "acting alone, T = 200"
        aim = ""
        if name.startswith("ddqn") and num_envs == 64:  # its default
            aim = ">= 50,000" if name == "ddqn_mate" else ">= 10,000"
        row = {"kind": "rate", "script": name, "size": size, "num_envs": num_envs, "value": rate, "note": aim}
        yield row | {"what": f"{name}, {size} sizes, {plural(num_envs)}: {what}, steps/s"}


def draw_rollout(rows):
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.subplots(2, 2)
    for ax, num_envs in zip(axes[0], (1, 64)):
        for memory in MEMORIES:
            points = [r for r in rows if r["kind"] == "step" and r["script"] == f"ddqn_{memory}"]
            points = [r for r in points if r["num_envs"] == num_envs]
            style, x, y = look(memory), [r["t"] for r in points], [r["us"] / 1e3 for r in points]
            ax.plot(x, y, color=style.color, linestyle=style.linestyle, label=style.label)
        ax.set(xlabel="t", ylabel="time of a step (ms)", ylim=(0, None))
        ax.set_title(f"Double DQN, {plural(num_envs)}")
    for ax, algorithm, title in zip(
        axes[1], ("ddqn", "sac"), ("Double DQN, T-Maze (T = 200), all in all", "SAC, acting alone (T = 200)")
    ):
        for memory in MEMORIES:
            points = [r for r in rows if r["kind"] == "rate" and r["script"] == f"{algorithm}_{memory}"]
            points = [r for r in points if r["size"] == "paper"]
            style = look(memory)
            x, y = [r["num_envs"] for r in points], [r["value"] for r in points]
            ax.loglog(x, y, color=style.color, linestyle=style.linestyle, marker=style.marker, label=style.label)
        ax.set(xlabel="environments in a batch", ylabel="steps per second", title=title)
        ax.set_xticks(x, [f"{n:,}" for n in x])
        ax.set_yticks(
            [rate for rate in (1_000, 3_000, 10_000, 30_000, 100_000) if ax.get_ylim()[0] < rate < ax.get_ylim()[1]]
        )
        ax.yaxis.set_major_formatter("{x:,.0f}")
        ax.minorticks_off()
    axes[0, 0].legend()
    return figure


# --------------------------------------------------------------------------------------------------------------- update
class MatrixProducts(TorchDispatchMode):
    """Notes the shapes of all matrix products that run within it, as (batch, rows, inner, columns)."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            a, b = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.shapes.append((*(a.shape[:-2] or (1,)), *a.shape[-2:], b.shape[-1]))
        elif name.startswith("_scaled_dot_product"):
            B, _, T, D = args["backward" in name].shape
            past = (T + 1) // 2  # steps that a step looks back at on average. A kernel does more, it works in blocks
            scores, values = (B, T, D, past), (B, T, past, D)
            if "backward" in name:  # the scores anew, and the gradients of values, weights, queries and keys
                self.shapes += [scores, values, scores, values, values]
            else:
                self.shapes += [scores, values]
        elif name == "mkldnn_rnn_layer":  # the LSTM: the inputs all at once, the recurrence step by step
            T, B, D = args[0].shape
            self.shapes += [(1, T * B, D, 4 * D)] + T * [(1, B, D, 4 * D)]
        elif name == "mkldnn_rnn_layer_backward":  # gradients of inputs and weights
            T, B, D = args[0].shape
            self.shapes += [(1, T * B, 4 * D, D)] + T * [(1, B, 4 * D, D)] + 2 * [(1, 4 * D, T * B, D)]
        return function(*args, **(kwargs or {}))

    def flops(self):
        return sum(2 * n * rows * inner * columns for n, rows, inner, columns in self.shapes)


def make_update(name, size, T):
    """An update with its arguments, the agent the first of them, on a full batch of episodes of T steps."""
    module, args, agent = make_agent(name, T, size)
    target = copy.deepcopy(agent if name.startswith("ddqn") else agent.critics).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    buffer = module.ReplayBuffer(args.batch_size, 1, T, SPACES[name.split("_")[0]][0], agent.action_dim)
    buffer.episodes["obs"][:] = np.random.default_rng(0).normal(size=buffer.episodes["obs"].shape)
    buffer.episodes["action"][..., 0] = 1
    buffer.count, buffer.length[:] = args.batch_size, T
    batch = buffer.sample(args.batch_size, CPU)
    return partial(module.update, agent, target, optimizer, batch, args)


def measure_one_update(name, size, T, threads, budget):
    """Seconds, peak memory and floating-point operations of an update, and seconds of its matrix products alone."""
    torch.set_num_threads(threads)
    make_update(name, size, 2)()  # what torch itself loads and sets up is not counted as memory of the update
    update = make_update(name, size, T)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    update()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    with MatrixProducts() as products:
        update()
    kinds = Counter(products.shapes)
    sizes = [(n * rows * inner, n * inner * columns, n * rows * columns) for n, rows, inner, columns in kinds]
    buffers = [torch.rand(max(size)) for size in zip(*sizes)]  # of the two factors and of their product

    def products_alone():
        for (n, rows, inner, columns), count in kinds.items():
            shapes = (n, rows, inner), (n, inner, columns), (n, rows, columns)
            a, b, out = (x[: math.prod(s)].view(s if n > 1 else s[1:]) for x, s in zip(buffers, shapes))
            for _ in range(count):
                torch.matmul(a, b, out=out)

    for _ in range(2):  # the buffers have taken what was free: until memory has grown again, an update waits for it
        update()
    update_times, product_times = [], []
    # In turns, so that a busy moment of the machine hits both.
    while len(update_times) < 3 or sum(update_times) < budget and len(update_times) < 10:
        update_times.append(timed(update))
        product_times.append(timed(products_alone))
    seconds, alone = float(np.median(update_times)), float(np.median(product_times))
    return {
        "seconds": seconds, "peak_mb": peak / 1e6, "gflop": products.flops() / 1e9,
        "gflop_per_second": products.flops() / seconds / 1e9, "products_seconds": alone, "fraction": alone / seconds,
        "parameters": sum(p.numel() for p in update.args[0].parameters()),
    }  # fmt: skip


def measure_update(size, quick):
    lengths, budget = ((5, 10), 0) if quick else ((50, 100, 200, 400, 600, 1_000), 12)
    configurations = [(f"{a}_{m}", T, 1) for a in ("ddqn", "sac") for m in MEMORIES for T in lengths]
    if size == "paper" and not quick:
        configurations += [(f"{a}_{m}", 200, os.cpu_count()) for a in ("ddqn", "sac") for m in MEMORIES]
    rows = []
    for name, T, threads in configurations:
        numbers = in_child(measure_one_update, name, size, T, threads, budget)
        what = f"{name}, {size} sizes, T = {T}, {plural(threads, 'thread')}: update, s"
        row = {"kind": "update", "what": what, "value": numbers["seconds"], "script": name, "T": T, "threads": threads}
        aim = " (aim: 75%)" if size == "paper" else ""
        rows.append(row | numbers | {"note": f"matrix products alone: {numbers['fraction']:.0%} of it{aim}"})
        yield rows[-1]
    for what, value, aim in update_ratios(rows, size):
        yield {"kind": "ratio", "what": what, "value": value, "note": aim}


def update_ratios(rows, size):
    """A long episode against a short one, two threads against one, and memory against memory."""
    seconds = {(row["script"], row["T"], row["threads"]): row["seconds"] for row in rows}
    lengths = sorted({row["T"] for row in rows})
    short, long = lengths[0], lengths[-1]
    for algorithm in ("ddqn", "sac"):
        for memory in MEMORIES:
            name = f"{algorithm}_{memory}"
            growth = seconds[name, long, 1] / long / (seconds[name, short, 1] / short)
            yield f"{name}, {size} sizes: time of an update per step, T = {long} over T = {short}", growth, "1: linear"
            for script, T, threads in seconds:
                if script == name and threads > 1:
                    gain = seconds[name, T, 1] / seconds[name, T, threads]
                    yield f"{name}, {size} sizes, T = {T}: time of an update, 1 thread over {threads}", gain, ""
        for other in ("lstm", "gpt2"):
            for T in lengths:
                aim = ">= 1.5" if (algorithm, size, other, T) == ("ddqn", "paper", "gpt2", 600) else ""
                over_mate = seconds[f"{algorithm}_{other}", T, 1] / seconds[f"{algorithm}_mate", T, 1]
                yield f"{algorithm}, {size} sizes, T = {T}: time of an update, {other} over mate", over_mate, aim


def draw_update(rows):
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for memory in MEMORIES:
        for algorithm, linestyle, filling in (("ddqn", "-", "full"), ("sac", "--", "none")):
            chosen = [r for r in rows if r["kind"] == "update" and r["script"] == f"{algorithm}_{memory}"]
            chosen = [r for r in chosen if r["threads"] == 1]
            style = look(memory)
            label = f"{'Double DQN' if algorithm == 'ddqn' else 'SAC'}, {style.label}"
            for ax, key, scale in zip(axes, ("seconds", "peak_mb", "fraction"), (1, 1e-3, 100)):
                x, y = [r["T"] for r in chosen], [scale * r[key] for r in chosen]
                ax.plot(x, y, color=style.color, ls=linestyle, marker=style.marker, fillstyle=filling, label=label)
    titles = ("time of an update (s)", "peak memory (GB)", "matrix products alone\n(% of the time)")
    for ax, title in zip(axes, titles):
        ax.set(xlabel="episode length T", title=title, xscale="log")
        lengths = [r["T"] for r in rows if r["kind"] == "update"]
        ax.set_xticks([T for T in (50, 200, 1_000) if T in lengths] or sorted(set(lengths)))
        ax.xaxis.set_major_formatter("{x:.0f}")
        ax.minorticks_off()
    for ax in axes[:2]:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")
    axes[2].set_ylim(0, 110)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


# -------------------------------------------------------------------------------------------------------------- profile
KINDS = {  # of operations; what is not named here is other: norms, sums, element-wise arithmetic, the optimizer
    "matrix products": ("mm", "addmm", "bmm"),
    "recurrence": ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
    "attention": (
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "GELU and ReLU": ("gelu", "gelu_backward", "clamp_min", "threshold_backward"),
    "cumulative sum": ("cumsum", "flip"),
    "copies": ("copy_", "cat", "constant_pad_nd", "fill_"),
}  # fmt: skip


def profile_of(function, repeats):
    """The share of its time that each kind of operation has, and that Python has between them."""
    for _ in range(3):
        function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        total = timed(lambda: [function() for _ in range(repeats)])
    seconds = Counter()
    for event in profile.key_averages():
        kind = next((k for k, names in KINDS.items() if event.key.removeprefix("aten::") in names), "other")
        seconds[kind] += 1e-6 * event.self_cpu_time_total
    share = {kind: seconds[kind] / total for kind in (*KINDS, "other")}
    return share | {"between operations": 1 - sum(share.values())}


def profile_update(name, size, T, repeats):
    return profile_of(make_update(name, size, T), repeats)


def profile_acting(name, num_envs, T):
    module, _, agent = make_agent(name, T)
    rollout = module.Rollout(NoEnvironments(num_envs, SPACES[name.split("_")[0]][0]), agent, CPU)

    def episode():
        rollout.reset(seed=0)
        for _ in range(T):
            explore(module, agent, rollout)

    return profile_of(episode, 1)


def measure_profile(quick):
    T, num_envs, repeats = (5, 4, 1) if quick else (200, 256, 4)
    for algorithm, title in (("ddqn", "Double DQN"), ("sac", "SAC")):
        for memory in MEMORIES:
            name, label = f"{algorithm}_{memory}", f"{title}, {look(memory).label}"
            for kind, function, *args in (
                ("update", profile_update, "paper", T, repeats),
                ("update, small", profile_update, "small", T, repeats),
                ("acting", profile_acting, num_envs, T),
            ):
                share = in_child(function, name, *args)
                work = share["matrix products"] + share["recurrence"] + share["attention"]
                what = f"{label}, {kind}, T = {T}: share of matrix products, recurrence and attention"
                yield {"what": what, "label": label, "kind": kind, "value": work, "share": share}


def draw_profile(rows):
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    titles = {"update": "update", "update, small": "update, small sizes", "acting": "acting, 256 environments"}
    for ax, (kind, title) in zip(figure.subplots(1, 3, sharey=True), titles.items()):
        chosen = [row for row in rows if row["kind"] == kind]
        left = np.zeros(len(chosen))
        for part, color in zip(chosen[0]["share"], matplotlib.colormaps["Set2"].colors):
            width = np.array([100 * row["share"][part] for row in chosen])
            ax.barh([row["label"] for row in chosen], width, left=left, color=color, label=part)
            left += width
        ax.set(xlabel="% of the time", xlim=(0, 100), title=title)
        ax.grid(visible=False, axis="y")
    ax.invert_yaxis()  # of all three
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


# -------------------------------------------------------------------------------------------------------------- compile
def compile_gain(name, size, T, backend, repeats):
    """Time of an update as it is, over its time under torch.compile; and how many graphs were compiled."""
    plain = make_update(name, size, T)
    compiled = partial(torch.compile(plain.func, backend=backend), *plain.args)
    times = [(timed(plain), timed(compiled)) for _ in range(3 + repeats)]  # in turns
    before, after = np.median(times[3:], axis=0)  # without the first calls, which compile
    return float(before / after), torch._dynamo.utils.counters["stats"]["unique_graphs"]


def measure_compile(quick):
    backend, repeats = ("eager", 1) if quick else ("inductor", 20)  # only the second needs a C++ compiler
    configurations = [("ddqn_mate", "small", 5)]
    if not quick:
        names = ("ddqn_mate", "ddqn_gpt2", "sac_mate", "sac_gpt2")  # it leaves an LSTM as it is
        configurations = [(name, "small", T) for name in names for T in (20, 200)] + [("ddqn_mate", "paper", 200)]
    for name, size, T in configurations:
        gain, graphs = in_child(compile_gain, name, size, T, backend, repeats)
        label = f"{name}, {size} sizes, T = {T}"
        note = f"{plural(graphs, 'graph')} compiled" + " (aim: 1.3)" * (size == "small")
        yield bar(label, "time of an update, plain over compiled", gain, note) | {"graphs": graphs}


# -------------------------------------------------------------------------------------------------------------- program
class Clock:
    """Seconds of each call of each part of a program, those of a part within it not counted twice."""

    def __init__(self):
        self.seconds, self.calls, self.part, self.since = Counter(), {}, "rest", time.perf_counter()

    def switch(self, part):
        now = time.perf_counter()
        self.seconds[self.part] += now - self.since
        before, self.part, self.since = self.part, part, now
        return before

    def timed(self, function, part):
        def wrapper(*args, **kwargs):
            if self.part == "left out":
                return function(*args, **kwargs)
            before, start = self.switch(part), self.seconds[part]
            try:
                return function(*args, **kwargs)
            finally:
                self.switch(before)
                self.calls.setdefault(part, []).append(self.seconds[part] - start)

        return wrapper


def run_program(name, flags):
    """Trains for a while. Returns what a step costs once updates are under way, in seconds, by part."""
    module, clock = importlib.import_module(name), Clock()
    args = module.Args(**flags)
    make_envs, open_run = running.make_envs, running.open_run

    def make_timed_envs(*args, **kwargs):
        vec, max_steps = make_envs(*args, **kwargs)
        vec.step = clock.timed(vec.step, "environment")
        return vec, max_steps

    def open_timed_run(*args, **kwargs):  # the last thing before the loop
        opened = open_run(*args, **kwargs)
        clock.switch("rest")
        clock.seconds.clear()
        return opened

    running.make_envs, running.open_run = make_timed_envs, open_timed_run
    for owner, function, part in (
        (module, "update", "update"), (module.ReplayBuffer, "sample", "sampling"),
        (module.Rollout, "step", "memory"), (module.Rollout, "view", "reading"), (module.Agent, "explore", "policy"),
        (module.ReplayBuffer, "add", "buffer"),
        # How often these come is the user's choice, or they come once.
        (module, "evaluate", "left out"), (running, "checkpoint", "left out"), (running, "save_model", "left out"),
        (running, "save_json", "left out"), (running, "close", "left out"),
    ):  # fmt: skip
        setattr(owner, function, clock.timed(getattr(owner, function), part))
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as devnull:
        os.chdir(folder)
        with contextlib.redirect_stdout(devnull), contextlib.redirect_stderr(devnull):
            module.train(args)
        clock.switch("end")
        os.chdir(ROOT)
    one = {part: np.mean(seconds) for part, seconds in clock.calls.items()}
    one["update"] = np.median(clock.calls["update"])  # of a few only, the first of which wait for memory
    if name.startswith("ddqn"):
        updates_per_step = args.updates_per_episode / (args.corridor_length + 1)
    else:
        updates_per_step = args.updates_per_step
    steps = args.num_envs * len(clock.calls["environment"])
    return updates_per_step, {
        "environment": one["environment"] / args.num_envs,
        "acting": (one["reading"] + one["policy"] + one["memory"]) / args.num_envs,
        "update": updates_per_step * (one["sampling"] + one["update"]),
        "rest": one["buffer"] / args.num_envs + clock.seconds["rest"] / steps,
    }


def measure_program(quick):
    ddqn = {"corridor_length": 200, "total_episodes": 192}
    sac = {"learning_starts": 20_000, "total_timesteps": 20_800}
    if quick:
        tiny = {"memory_dim": 8, "hidden_dim": 8, "batch_size": 2, "num_envs": 2}
        ddqn = tiny | {"corridor_length": 3, "total_episodes": 12, "learning_starts": 4}
        sac = tiny | {"learning_starts": 60, "total_timesteps": 200, "max_episode_steps": 10}
    programs = [(f"ddqn_{memory}", "tmaze-passive", ddqn) for memory in MEMORIES]
    programs += [(f"sac_{m}", env_id, sac) for env_id in ("cheetah-vel", "ml10") for m in (*MEMORIES, "markov")]
    if quick:
        programs = [(name, env_id, flags) for name, env_id, flags in programs if "mate" in name and env_id != "ml10"]
    for name, env_id, flags in programs:
        flags = flags | {"env_id": env_id, "eval_episodes": 1, "eval_interval": 1_000_000, "cuda": False}
        updates_per_step, parts = in_child(run_program, name, flags)
        total = sum(parts.values())
        row = {"script": name, "env_id": env_id, "what": f"{name} on {env_id}: steps/s", "value": 1 / total}
        row |= {"updates_per_second": updates_per_step / total}
        row |= {"share": {part: seconds / total for part, seconds in parts.items()}}
        shares = ", ".join(f"{part} {share:.1%}" for part, share in row["share"].items())
        yield row | {"note": f"{row['updates_per_second']:.2f} updates/s; {shares}"}


def draw_program(rows):
    groups = list(dict.fromkeys(row["env_id"] for row in rows))
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    axes = figure.subplots(
        1, len(groups), sharey=True, width_ratios=[sum(r["env_id"] == g for r in rows) for g in groups]
    )
    for ax, env_id in zip(axes, groups):
        chosen = [row for row in rows if row["env_id"] == env_id]
        for i, (part, color) in enumerate(zip(chosen[0]["share"], ("#56B4E9", "#E69F00", "#0072B2", "#999999"))):
            each = [1e6 * row["share"][part] / row["value"] for row in chosen]
            ax.bar(np.arange(len(chosen)) + 0.2 * (i - 1.5), each, width=0.2, color=color, label=part)
        labels = [f"{look(row['script']).label}\n{row['value']:,.0f} steps/s" for row in chosen]
        ax.set_xticks(range(len(chosen)), labels, fontsize=6)
        ax.set(title=f"{'Double DQN' if env_id.startswith('tmaze') else 'SAC'}, {env_id}", yscale="log")
        ax.grid(visible=False, axis="x")
    axes[0].set_ylabel("time for one step (µs)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


# ---------------------------------------------------------------------------------------------------------------- envs
def seconds_per_step(env, actions, reset):
    """Over one pass of the actions, with the time of resets left out."""
    reset()
    total = 0.0
    for action in actions:
        start = time.perf_counter()
        _, _, terminated, truncated, _ = env.step(action)
        total += time.perf_counter() - start
        if terminated or truncated:
            reset()
    return total / len(actions)


def ratio(ours, options, bare, blocks, steps):
    """Median over blocks that alternate between the two, so that a busy moment of the machine hits both."""
    ours.action_space.seed(0)
    times = []
    for _ in range(blocks):
        actions = [ours.action_space.sample() for _ in range(steps)]
        of_ours = seconds_per_step(ours, actions, lambda: ours.reset(options=options))
        times.append(of_ours / seconds_per_step(bare, actions, bare.reset))
    return float(np.median(times))


def measure_envs(quick):
    ratio_unit, rate_unit = "time of a step, over the bare environment", "steps per second, 256 environments"
    blocks, steps = (1, 20) if quick else (40, 500)
    parents = {"ant-dir": "Ant-v5", "cheetah-vel": "HalfCheetah-v5", "walker-param": "Walker2d-v5"}
    parents["hopper-param"] = "Hopper-v5"
    for name, parent in parents.items():
        ours, bare = gym.make(name), gym.make(parent, max_episode_steps=200)
        # The physics must be the parent's for the comparison: all multipliers 1. Rewards cost the same in any context.
        size = ours.reset(seed=0)[1]["context"].size
        options = {"context": np.ones(size)} if name.endswith("param") else None
        yield bar(f"{name} / {parent}", ratio_unit, ratio(ours, options, bare, blocks, steps), "<= 1.10")

    if not quick:  # ml10 takes ten seconds to make
        ours, options = gym.make("ml10"), {"context": [1.0, 0.0]}
        ours.reset(seed=0, options=options)
        task = ours.unwrapped.task
        bare = gym.wrappers.TimeLimit(ours.unwrapped.classes[task](), 300)
        bare.unwrapped.set_task(ours.unwrapped.goals[task][0])
        yield bar(f"ml10 / {task}", ratio_unit, ratio(ours, options, bare, blocks // 2, steps), "<= 1.10")

    for name, length in (("tmaze-passive", 200), ("tmaze-active", 20), ("point-robot", None)):
        vec, _ = envs.make_vec(name, 256, **({} if length is None else {"corridor_length": length}))
        vec.reset(seed=0)
        vec.action_space.seed(0)
        actions = [vec.action_space.sample() for _ in range(100)]
        seconds = median_time(lambda: [vec.step(action) for action in actions], 0, least=20)  # noqa: B023
        label = f"{name}, L={length}" if length else name
        yield bar(label, rate_unit, 256 * len(actions) / seconds, ">= 1,000,000" if length else "")


# ----------------------------------------------------------------------------------------------------------- checkpoint
def checkpoint_costs(name, flags):
    """Seconds to write one with 200 new episodes, with a buffer of new ones, and to read it; megabytes on disk."""
    module = importlib.import_module(name)
    args = module.Args(**flags)
    vec, max_steps = running.make_envs(args, args.num_envs, None)
    obs_dim = vec.single_observation_space.shape[0]
    agent = module.Agent(obs_dim, vec.single_action_space, max_steps, args)
    target = copy.deepcopy(agent if name.startswith("ddqn") else agent.critics)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    for parameter in agent.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes its state
    rollout = module.Rollout(vec, agent, CPU)
    rollout.reset(seed=0)
    sizes = (args.buffer_size, args.num_envs, max_steps, obs_dim, agent.action_dim)
    buffer = module.ReplayBuffer(*sizes)
    for array in buffer.episodes.values():
        array[:] = np.random.default_rng(0).random(array.shape, dtype=np.float32)
    buffer.length[:], buffer.count = max_steps, args.buffer_size
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)

        def write():
            running.checkpoint(folder, args, (0,) * 6, agent, target, optimizer, buffer, rollout)

        def read():
            saved = running.load(folder / "checkpoint.pt")
            running.restore(saved, folder, agent, target, optimizer, module.ReplayBuffer(*sizes), rollout)

        whole = timed(write)
        buffer.count += 200  # about what ten minutes of the paper's settings collect on a CPU
        new = timed(write)
        size = sum(path.stat().st_size for path in folder.rglob("*.pt"))
        return new, whole, timed(read), size / 1e6


def measure_checkpoint(quick):
    flags = {"buffer_size": 300} if quick else {}
    for name, env_id in (("ddqn_mate", "tmaze-passive"), ("sac_mate", "ant-dir")):
        new, whole, read, size = in_child(checkpoint_costs, name, flags | {"env_id": env_id})
        for label, unit, value, aim in (
            ("write, 200 new episodes", "seconds", new, "<= 2"),
            ("write, all episodes new", "seconds", whole, ""),
            ("read", "seconds", read, ""),
            ("size", "MB", size, ""),
        ):
            yield bar(f"{env_id}, {label}", unit, value, aim)


# -------------------------------------------------------------------------------------------------------------- startup
def until_folder(command, folder):
    """Seconds until the run's folder is there: by then all is imported, and environments and networks are made."""
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not list(Path(folder).glob("runs/*/args.json")):
            if process.poll() is not None:
                sys.exit(f"{' '.join(command)} ended before its run began")
            time.sleep(0.01)
        return time.perf_counter() - start
    finally:
        process.kill()
        process.wait()


def measure_startup(quick):
    def seconds(*words):
        return median_time(
            lambda: subprocess.run([sys.executable, *words], check=True, capture_output=True), 0, repeats
        )

    repeats = 1 if quick else 5
    yield bar("python -c 'import torch'", "seconds", seconds("-c", "import torch"))
    for name in ("ddqn_mate",) if quick else ("ddqn_mate", "sac_mate"):
        yield bar(f"{name}.py --help", "seconds", seconds(str(ROOT / f"{name}.py"), "--help"), "<= 2")
    runs = [("ddqn_mate", "tmaze-passive"), ("sac_mate", "ant-dir"), ("sac_mate", "ml10")]
    for name, env_id in runs[:1] if quick else runs:
        with tempfile.TemporaryDirectory() as folder:
            took = until_folder([sys.executable, str(ROOT / f"{name}.py"), "--env-id", env_id], folder)
        yield bar(f"{name}.py --env-id {env_id}, until the run begins", "seconds", took)


# ----------------------------------------------------------------------------------------------------------------- main
MEASURES = {
    "rollout": (measure_rollout, draw_rollout),
    "update": (partial(measure_update, "paper"), draw_update),
    "small": (partial(measure_update, "small"), draw_update),
    "profile": (measure_profile, draw_profile),
    "program": (measure_program, draw_program),
    "envs": (measure_envs, draw_bars),
    "checkpoint": (measure_checkpoint, draw_bars),
    "startup": (measure_startup, draw_bars),
    "compile": (measure_compile, draw_bars),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help=f"{', '.join(MEASURES)}; all of them if none is named")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "benchmark" / "results")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that it works; the numbers mean nothing"
    )
    parser.add_argument("--redraw", action="store_true", help="only draw the figures again, from the JSON files")
    args = parser.parse_args()
    if unknown := set(args.what) - set(MEASURES):
        sys.exit(f"there is no measurement {unknown.pop()}, but {', '.join(MEASURES)}")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for what in args.what or MEASURES:
        measure, draw = MEASURES[what]
        path = args.output_dir / f"speed_{what}.json"
        if args.redraw:
            if not path.exists():
                if not args.what:
                    continue  # of all of them, those that there are
                sys.exit(f"there is no {path} to draw from")
            rows = json.loads(path.read_text())["rows"]
        else:
            rows = []
            for row in measure(args.quick):
                rows.append(row)
                if "what" in row:
                    value = f"{row['value']:,.0f}" if row["value"] > 100 else f"{row['value']:.3f}"
                    print(f"{row['what']:<85} {value:>12}   {row.get('note', '')}", flush=True)
            path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
        draw(rows).savefig(path.with_suffix(".png"))
        print(f"written to {os.path.relpath(path)} and .png")


if __name__ == "__main__":
    main()
