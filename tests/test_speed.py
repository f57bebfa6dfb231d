"""benchmark/speed.py: what it counts is right, and every measurement runs, is written and drawn (tiny sizes)."""

import json
import os
import subprocess
import sys
import time

import matplotlib.image
import numpy as np
import pytest
import torch
from conftest import ROOT

from benchmark import speed


@pytest.mark.parametrize("name", ["ddqn_mate", "sac_mate", "sac_markov"])
def test_floating_point_operations_are_those_that_torch_counts(name):
    update = speed.make_update(name, "small", 6)
    with speed.MatrixProducts() as products:
        update()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_flops=True) as profile:
        update()
    counted = sum(e.flops for e in profile.events() if e.name in ("aten::mm", "aten::addmm", "aten::bmm"))
    assert products.flops() == counted > 0


def test_floating_point_operations_of_the_recurrence_and_of_attention():
    B, T, X, D = 3, 5, 4, 8
    x = torch.randn(B, T, X)
    embedding = 2 * 2 * B * T * X * D  # forward, and backward to the weights alone
    for name, of_memory in (
        ("ddqn_lstm", 3 * 2 * B * T * 8 * D * D),  # four gates of an input and a state, thrice: forward and backward
        # 3 + 1 + 4 + 4 matrices; and attention, in which the steps look back at 1 + 2 + ... + T steps
        ("ddqn_gpt2", 3 * 2 * B * T * 12 * D * D + (2 + 5) * 2 * B * (T * (T + 1) // 2) * D),
    ):
        memory = speed.importlib.import_module(name).Memory(X, D, T)
        with speed.MatrixProducts() as products:
            memory(x).sum().backward()
        assert products.flops() == embedding + of_memory


def test_an_update_of_the_benchmark_learns():
    update = speed.make_update("sac_lstm", "small", 5)
    agent = update.args[0]
    before = [parameter.detach().clone() for parameter in agent.parameters()]
    assert update()["losses/qf1_loss"] > 0
    assert not any(torch.equal(old, new) for old, new in zip(before, agent.parameters()))


def test_ratios_of_updates():
    of = {"mate": (1, 4), "lstm": (2, 2), "gpt2": (3, 36)}  # seconds at T = 50 and T = 100
    rows = [
        {"script": f"{algorithm}_{memory}", "T": T, "threads": 1, "seconds": seconds}
        for algorithm in ("ddqn", "sac")
        for memory, times in of.items()
        for T, seconds in zip((50, 100), times)
    ]
    rows.append(rows[0] | {"threads": 2, "seconds": 0.5})
    ratios = {what: value for what, value, _ in speed.update_ratios(rows, "paper")}
    assert ratios["ddqn_gpt2, paper sizes: time of an update per step, T = 100 over T = 50"] == 6
    assert ratios["sac_lstm, paper sizes: time of an update per step, T = 100 over T = 50"] == 0.5
    assert ratios["ddqn_mate, paper sizes, T = 50: time of an update, 1 thread over 2"] == 2
    assert ratios["sac, paper sizes, T = 50: time of an update, lstm over mate"] == 2
    assert ratios["ddqn, paper sizes, T = 100: time of an update, gpt2 over mate"] == 9


def test_what_compiling_gains_is_below_one_if_it_slows_down(monkeypatch):
    def slowed_down(update, backend):
        return lambda *args: (time.sleep(0.1), update(*args))

    monkeypatch.setattr(torch, "compile", slowed_down)
    gain, _ = speed.compile_gain("ddqn_mate", "small", 5, "eager", repeats=3)
    assert 0 < gain < 0.5


def test_the_profile_of_one_product():
    a = torch.rand(1_000, 1_000)  # so large that it takes its time on many cores too
    share = speed.profile_of(lambda: (a @ a, time.sleep(0.01)), 5)
    assert sum(share.values()) == pytest.approx(1)
    assert share["matrix products"] > 0.1 and share["between operations"] > 0.1
    assert share["recurrence"] == share["attention"] == share["cumulative sum"] == 0


def test_freed_memory_is_kept():
    """Counted in page faults: a run that has begun gets back the large block that it has just freed."""
    faults = """
import resource, torch, ddqn_mate
from envs import running
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(16_000_000)  # 64 MB, 16,000 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = faults()
running.begin(ddqn_mate.Args())
torch.ones(16_000_000)
print(before, faults())
"""
    done = subprocess.run([sys.executable, "-c", faults], cwd=ROOT, check=True, capture_output=True, text=True)
    before, after = map(int, done.stdout.split())
    assert after < before / 10


def test_the_clock_gives_each_moment_to_one_part(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    clock = speed.Clock()

    def wait(seconds):
        now[0] += seconds

    environment = clock.timed(wait, "environment")

    def step():
        wait(1)
        environment(10)

    def evaluate():
        wait(1000)
        environment(1000)

    wait(0.5)
    clock.timed(step, "memory")()
    clock.timed(step, "memory")()
    clock.timed(evaluate, "left out")()
    clock.switch("end")
    assert clock.seconds == {"rest": 0.5, "memory": 2, "environment": 20, "left out": 2000}
    assert clock.calls == {"memory": [1, 1], "environment": [10, 10], "left out": [2000]}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speed")
    speed_py(folder, "--quick")
    return folder


def speed_py(folder, *flags, code=0):
    command = [sys.executable, ROOT / "benchmark" / "speed.py", "--output-dir", folder, *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr + done.stdout
    return done


@pytest.mark.parametrize("what", list(speed.MEASURES))
def test_every_measurement_is_written_and_drawn(what, measured):
    saved = json.loads((measured / f"speed_{what}.json").read_text())
    assert saved["machine"]["packages"]["torch"].startswith("2.13")
    assert all(row["value"] > 0 for row in saved["rows"] if "value" in row)
    picture = matplotlib.image.imread(measured / f"speed_{what}.png")
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 50


def test_what_the_measurements_hold(measured):
    rows = {what: json.loads((measured / f"speed_{what}.json").read_text())["rows"] for what in speed.MEASURES}
    scripts = {f"{a}_{m}" for a in ("ddqn", "sac") for m in speed.MEMORIES}
    for what in ("update", "small"):
        updates = [row for row in rows[what] if row["kind"] == "update"]
        assert {row["script"] for row in updates} == scripts
        by_length = {row["T"]: row for row in updates if row["script"] == "sac_mate"}
        assert by_length[10]["gflop"] == pytest.approx(2 * by_length[5]["gflop"], rel=0.05)
        for row in updates:
            assert row["gflop_per_second"] == pytest.approx(row["gflop"] / row["seconds"])
            assert row["fraction"] == pytest.approx(row["products_seconds"] / row["seconds"]) and row["peak_mb"] > 0
    sizes = [{r["parameters"] for r in rows[what] if r.get("script") == "sac_mate"} for what in ("update", "small")]
    assert min(sizes[0]) > 10 * max(sizes[1])
    for row in rows["profile"]:
        share = row["share"]
        assert sum(share.values()) == pytest.approx(1) and min(share.values()) >= 0 and share["matrix products"] > 0.1
        assert (share["attention"] > 0) == ("GPT-2" in row["label"])
        if row["kind"] != "acting":  # in which the LSTM takes one step, and MATE adds one term
            assert (share["recurrence"] > 0) == ("LSTM" in row["label"])
            assert (share["cumulative sum"] > 0) == ("MATE" in row["label"])
    assert all(row["graphs"] > 0 for row in rows["compile"])
    for row in rows["program"]:
        assert sum(row["share"].values()) == pytest.approx(1) and min(row["share"].values()) > 0
    assert {(row["kind"], row.get("num_envs")) for row in rows["rollout"]} >= {("step", 1), ("step", 64), ("rate", 4)}


def test_redrawn_from_json(measured):
    path = measured / "speed_rollout.png"
    before = path.read_bytes()
    path.unlink()
    speed_py(measured, "rollout", "--redraw")
    assert path.read_bytes() == before


def test_a_script_that_fails_has_no_start_up_time(tmp_path):
    with pytest.raises(SystemExit, match="ended before its run began"):
        speed.until_folder([sys.executable, "-c", "1 / 0"], tmp_path)


def test_bad_input(tmp_path):
    done = speed_py(tmp_path, "nonsense", code=1)
    assert done.stderr.startswith("there is no measurement nonsense") and done.stderr.count("\n") == 1
    assert "to draw from" in speed_py(tmp_path, "envs", "--redraw", code=1).stderr
