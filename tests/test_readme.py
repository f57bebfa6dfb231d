"""The README: its links point to the lines they quote, its tests exist, its commands run (shortened)."""

import re
import shlex

import pytest
from conftest import ROOT, results_of

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"(?:^|&& )python ((?:sac|ddqn)_\w+\.py (?!--resume|--evaluate)[^\n#]*)", README, re.MULTILINE)
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


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_commands_run(command, run):
    script, *flags = shlex.split(command)
    short = SHORT[script.split("_")[0]] + ["--eval-episodes=2", "--memory-dim=8", "--hidden-dim=8"]
    _, [folder] = run(script.removesuffix(".py"), *flags, *short)
    assert results_of(folder)["updates"] > 0


def test_there_are_commands_to_run():
    assert len(set(COMMANDS)) >= 1
