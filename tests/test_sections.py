"""A script is an algorithm times a memory: sections that are shared are equal to the byte, and every flag is used."""

import inspect
import re
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest
from conftest import DDQN, ROOT, SAC, SCRIPTS, flags, script, tiny

ORDER = ["imports", "memory", "args", "replay buffer", "agent", "rollout", "update", "evaluate", "checkpoint", "train"]
OF_THE_ALGORITHM = ("args", "agent", "update", "train")


def sections(name):
    """The docstring and the sections of a script by name, which together are the whole file."""
    text = (ROOT / f"{name}.py").read_text()
    headers = list(re.finditer(r"^# -{20,} ([a-z ]+)$", text, re.M))
    assert all(len(h.group()) == 120 for h in headers), "headers end in the same column"
    starts = [h.start() for h in headers] + [len(text)]
    return text[: starts[0]], {h.group(1): text[a:b] for h, a, b in zip(headers, starts, starts[1:])}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_has_the_sections_in_order_and_is_short_enough(name):
    docstring, parts = sections(name)
    assert list(parts) == ORDER
    assert re.fullmatch(r'""".*"""\n\n', docstring, re.S), "nothing but a docstring before the first section"
    lines = (ROOT / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 550 and max(map(len, lines)) <= 120


@pytest.mark.parametrize("section", ORDER)
def test_what_is_shared_is_equal_to_the_byte(section):
    copies = {}
    for name in SCRIPTS:
        algorithm, memory = name.split("_")
        owner = memory if section == "memory" else algorithm if section in OF_THE_ALGORITHM else "all scripts"
        copies.setdefault(owner, {}).setdefault(sections(name)[1][section], []).append(name)
    for owner, versions in copies.items():
        assert len(versions) == 1, f"{section} of {owner} differs between {' and '.join(map(str, versions.values()))}"


@pytest.mark.parametrize("names", [DDQN, SAC])
def test_docstrings_explain_time_and_shapes_in_the_same_words(names):
    assert len({sections(name)[0].split("\nTime.")[1] for name in names}) == 1


def test_a_script_needs_envs_and_nothing_else_of_ours(tmp_path):
    """Copied with envs/ into an empty folder, it runs."""
    shutil.copytree(ROOT / "envs", tmp_path / "envs")
    shutil.copy(ROOT / "ddqn_mate.py", tmp_path)
    command = [sys.executable, "ddqn_mate.py", *flags(**tiny("ddqn_mate", total_episodes=20))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert len(list(tmp_path.glob("runs/*/model.pt"))) == 1
    for path in (ROOT / "envs").glob("*.py"):
        assert not re.search(r"\b(torch|tyro|argparse|tensorboard)\b", path.read_text()), (
            f"{path} is not about environments"
        )


# ---------------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize("name", ["ddqn_mate", "sac_mate"])
def test_every_flag_is_read_and_its_comment_is_its_help(name, monkeypatch, capsys):
    module, text = script(name), (ROOT / f"{name}.py").read_text()
    monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        module.parse_args()
    help_text = " ".join(re.sub(r"[│─╭╮╰╯]", " ", capsys.readouterr().out).split())
    source = inspect.getsource(module.Args)
    for field in fields(module.Args):
        comment = re.search(rf"^    {field.name}: .*?  # (.*)$", source, re.M).group(1)
        assert f"--{field.name.replace('_', '-')}" in help_text and comment in help_text, field.name
        assert re.search(rf"\b(args|self)\.{field.name}\b", text), f"{field.name} is never read"


@pytest.mark.parametrize("name", ["ddqn_mate", "sac_mate"])
def test_a_number_that_makes_no_sense_is_refused_by_check_alone(name):
    """An Args can be made in a notebook with anything: it is `check` that ends the program, in one line."""
    Args = script(name).Args
    may_be_zero = {"seed", "gamma", "updates_per_episode", "updates_per_step", "end_epsilon", "exploration_fraction"}
    at_most_one = {"gamma", "tau", "start_epsilon", "end_epsilon", "exploration_fraction"}
    numbers = {field.name for field in fields(Args) if re.search(r"\b(int|float)\b", str(field.type))}
    assert {"gamma", "num_envs", "max_episode_steps", "checkpoint_interval"} <= numbers
    for number in numbers:
        bad = [-1, float("nan"), float("inf")] + [0] * (number not in may_be_zero) + [1.1] * (number in at_most_one)
        for value in bad:
            with pytest.raises(SystemExit, match=rf"^error: --{number.replace('_', '-')} {value} is out of range$"):
                Args(**{number: value}).check()
    Args(**dict.fromkeys(may_be_zero & numbers, 0)).check()
    Args(**dict.fromkeys(at_most_one & numbers, 1.0)).check()
    total = "total_episodes" if name == "ddqn_mate" else "total_timesteps"
    Args(learning_starts=99, **{total: 100}).check()
    with pytest.raises(SystemExit, match="^error: --learning-starts must be less than --total-"):
        Args(learning_starts=100, **{total: 100}).check()
