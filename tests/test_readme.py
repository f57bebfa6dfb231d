"""The README: its links point to the lines they quote, its tests exist, its commands and examples run (shortened)."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, results_of

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"(?:^|&& |`)python ((?:sac|ddqn)_\w+\.py (?!--resume|--evaluate)[^\n#`]*)", README, re.MULTILINE)
SHORT = {
    "ddqn": ["--total-episodes=9", "--learning-starts=4", "--batch-size=4", "--corridor-length=3", "--num-envs=2"],
    "sac": [
        "--total-timesteps=130",
        "--learning-starts=80",
        "--batch-size=4",
        "--max-episode-steps=20",
        "--num-envs=2",
    ],
}


def test_links_point_to_the_lines_that_they_quote():
    links = re.findall(r"\[`([^`]+)`\]\(([\w/]+\.py)#L(\d+)\)", README)
    assert len(links) > 10
    for text, path, line in links:
        assert text in (ROOT / path).read_text().splitlines()[int(line) - 1], f"{path}:{line} is not {text}"


def test_named_tests_and_files_exist():
    tests = {path.name: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    for name in re.findall(r"\b(test_\w+)\b(?!\.py)", README):
        assert any(f"def {name}" in text for text in tests.values()), name
    for name in re.findall(r"`((?:envs|tests|benchmark)/[\w/]+\.\w+)`", README):
        assert (ROOT / name).exists(), name


def block(language):
    [text] = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return text


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_commands_run(command, run, tmp_path):
    (tmp_path / "mine.py").write_text(block("python"))  # the example of an own environment
    script, *flags = shlex.split(command)
    short = SHORT[script.split("_")[0]] + ["--eval-episodes=2", "--memory-dim=8", "--hidden-dim=8"]
    _, [folder] = run(script.removesuffix(".py"), *flags, *short, pythonpath=tmp_path)
    assert results_of(folder)["updates"] > 0


def test_there_are_commands_to_run():
    assert len(set(COMMANDS)) >= 6 and any("mine:bandit" in command for command in COMMANDS)


def test_going_on_and_evaluating(run, tmp_path):
    """The README's commands for a finished run, with its RUN for the folder and fewer episodes."""
    flags = SHORT["ddqn"] + ["--eval-episodes=2", "--memory-dim=8", "--hidden-dim=8"]
    _, [folder] = run("ddqn_mate", *flags)
    folder.rename(tmp_path / "runs" / "RUN")
    commands = re.findall(r"^python ddqn_mate\.py (--(?:resume|evaluate) [^\n#]*)", README, re.MULTILINE)
    assert len(commands) == 3
    run("ddqn_mate", *shlex.split(commands[0]), "--total-episodes=13")
    run("ddqn_mate", *shlex.split(commands[1]), "--total-episodes=17")
    assert results_of(tmp_path / "runs" / "RUN")["episodes"] >= 17
    done, _ = run("ddqn_mate", *shlex.split(commands[2]), "--eval-episodes=2")
    assert done.stdout.startswith("return ") and list(tmp_path.glob("runs/RUN/videos/*/*.mp4"))


@pytest.mark.parametrize("program, made", [("sweep.py figure4 --dry-run", None), ("plot.py benchmark/", "figures")])
def test_benchmark_commands_run(program, made, tmp_path):
    [words] = re.findall(rf"^python (benchmark/{re.escape(program)}[^\n#]*)", README, re.MULTILINE)
    (tmp_path / "benchmark").symlink_to(ROOT / "benchmark")
    done = subprocess.run(
        [sys.executable, *shlex.split(words)], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout.count("ddqn_") >= 60 if made is None else list((tmp_path / made).glob("*.png"))


@pytest.mark.parametrize("name", ["ddqn_mate", "sac_mate"])
def test_the_example_of_an_own_memory(name, tmp_path):
    """The diff applies, the mean is a mean, and the rollout remembers what the update does."""
    source, lines = (ROOT / f"{name}.py").read_text(), block("diff").splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
    assert source.count(before) == 1
    path = tmp_path / f"{name[:-4]}mean.py"
    path.write_text(source.replace(before, after))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)

    memory, x = module.Memory(5, 8, 7).double(), torch.randn(3, 7, 5, dtype=torch.float64)
    m = memory(x)
    for t in range(8):
        mean = memory.encode(x[:, :t]).mean(dim=1) if t else torch.zeros(3, 8)
        torch.testing.assert_close(m[:, t], F.normalize(memory.Psi + mean, dim=-1) * 8**0.5)
    state = memory.initial_state(3)
    for t in range(7):
        torch.testing.assert_close(memory.read(state), m[:, t])
        state = memory.step(x[:, t], state)
    state = memory.reset(state, torch.tensor([True, False, True]))
    torch.testing.assert_close(memory.read(state), torch.stack([m[0, 0], m[1, 7], m[2, 0]]))

    flags = SHORT[name.split("_")[0]] + ["--eval-episodes=2", "--memory-dim=8", "--hidden-dim=8"]
    env_id = ["--env-id=point-robot"] if name == "sac_mate" else []
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, path, *flags, *env_id], cwd=tmp_path, env=env, check=True, capture_output=True)
    [folder] = (tmp_path / "runs").iterdir()
    assert "mean" in folder.name and results_of(folder)["updates"] > 0
