"""benchmark/speed.py: what it times is an update, and every measurement is written (at tiny sizes)."""

import json
import sys

import matplotlib.image
import numpy as np
import pytest
import torch

from benchmark import speed


def test_candidates_are_timed_in_turns_and_the_first_call_does_not_count(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])

    def candidate(name, durations):
        def function():
            calls.append(name)
            now[0] += durations.pop(0)

        return function

    candidates = {"a": candidate("a", [100, 1, 3, 2, 9]), "b": candidate("b", [5, 5, 5, 5, 5])}
    assert speed.in_turns(candidates, budget=0, rounds=(3, 50)) == {"a": 2, "b": 5}
    assert calls == ["a", "b"] * 4


@pytest.mark.parametrize("name", ["sac_gpt2", "ddqn_mate"])
def test_the_update_that_is_timed_learns(name):
    update = speed.make_update(name, "small", 5, bf16=True)
    agent, batch = update.args[0], update.args[3]
    assert batch["mask"].shape == (32, 5) and batch["mask"].all(), "full episodes"
    before = [parameter.detach().clone() for parameter in agent.parameters()]
    update()
    assert not any(torch.equal(old, new) for old, new in zip(before, agent.parameters()))


def test_the_sizes_of_the_paper_are_the_defaults():
    small, paper = (speed.make_update("sac_mate", size, 5, bf16=False).args for size in ("small", "paper"))
    assert paper[4] == type(paper[4])() and len(paper[3]["mask"]) == 64
    assert sum(p.numel() for p in paper[0].parameters()) > 10 * sum(p.numel() for p in small[0].parameters())


def test_every_measurement_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(speed.SIZES, "paper", speed.SIZES["small"])  # faster
    monkeypatch.setattr(sys, "argv", ["speed", "--quick", "--output-dir", str(tmp_path)])
    speed.main()
    rows = {}
    for name in speed.MEASURES:
        saved = json.loads((tmp_path / f"speed_{name}.json").read_text())
        assert saved["machine"]["torch"] == torch.__version__ and saved["machine"]["cores"] and saved["rows"]
        assert all(value > 0 for row in saved["rows"] for value in row.values() if isinstance(value, float))
        assert len((tmp_path / f"speed_{name}.md").read_text().splitlines()) == 2 + len(saved["rows"])
        rows[name] = saved["rows"]
    scripts = {script for group in speed.SCRIPTS.values() for script in group}
    assert {row["script"] for row in rows["update"]} == {row["script"] for row in rows["rollout"]} == scripts
    assert {row["sizes"] for row in rows["update"]} == {"small", "paper"}
    for row in rows["update"]:
        assert row["gain of --bf16"] == pytest.approx(row["ms"] / row["ms with --bf16"])
    assert [row["t"] for row in rows["steps"] if row["script"] == "ddqn_gpt2"] == 2 * [0, 5, 10, 15]
    for name in ("rollout", "steps"):
        image = matplotlib.image.imread(tmp_path / f"speed_{name}.png")
        assert len(np.unique(image.reshape(-1, image.shape[-1]), axis=0)) > 50


def test_a_script_that_fails_has_no_start_up_time():
    with pytest.raises(SystemExit, match="ended before its run began"):
        speed.until_run_folder("ddqn_mate", "no-such-environment")
