"""What the test modules share: the scripts by name, and a way to run one as a user does."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.stem for path in ROOT.glob("*_*.py"))  # ddqn_gpt2, ddqn_lstm, ...


def script(name):
    return importlib.import_module(name)


@pytest.fixture
def run(tmp_path):
    """run("ddqn_mate", "--seed", 2) starts the script in an empty folder and returns what it left there."""

    def start(name, *flags, code=0, cwd=tmp_path, pythonpath=ROOT):
        command = [sys.executable, str(ROOT / f"{name}.py"), *map(str, flags)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(pythonpath)}  # many small runs: threads only cost
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == code, done.stderr + done.stdout
        folders = sorted((cwd / "runs").glob("*")) if (cwd / "runs").exists() else []
        return done, folders

    return start


def train_in(folder, name, **flags):
    """As `python name.py` does in that folder, but in this process: short runs spend their time on imports."""
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py"])  # the script's name, as the saved files have it
        script(name).train(script(name).Args(**flags))


def twin_q(critics, h, action):
    """Q1 and Q2 written out plainly: two networks of (h, a). The scripts make them in two steps."""
    inputs = torch.cat([h, action], dim=-1)
    return critics.q1(inputs).squeeze(-1), critics.q2(inputs).squeeze(-1)


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def scalars_of(folder):
    """{tag: [(step, value), ...]} of a run's TensorBoard events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
