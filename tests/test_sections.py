"""A script is an algorithm times a memory: sections that are shared are equal to the byte, and every flag is used."""

import inspect
import re
import shutil
from dataclasses import fields

import pytest
from conftest import ROOT, SCRIPTS, call, script, start
from copy_sections import owner, sections

ORDER = ["imports", "memory", "args", "replay buffer", "agent", "rollout", "update", "evaluate", "checkpoint", "train"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_has_the_sections_in_order_and_is_short_enough(name):
    docstring, *parts = sections(name).values()
    assert list(sections(name)) == ["", *ORDER]
    assert re.fullmatch(r'""".*"""\n\n', docstring, re.S), "nothing but a docstring before the first section"
    sibling = sections(f"{name.split('_')[0]}_mate")[""]
    assert docstring.split("\nTime.")[1] == sibling.split("\nTime.")[1], "time and shapes in the same words"
    assert all(part.index("\n") == 120 for part in parts), "headers end in the same column"
    lines = (ROOT / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 550 and max(map(len, lines)) <= 120


@pytest.mark.parametrize("section", ORDER)
def test_what_is_shared_is_equal_to_the_byte(section):
    copies = {}
    for name in SCRIPTS:
        copies.setdefault(owner(section, name), {}).setdefault(sections(name)[section], []).append(name)
    for shared, versions in copies.items():
        assert len(versions) == 1, f"{section} of {shared} differs between {' and '.join(map(str, versions.values()))}"
    assert len(copies) == {"memory": 4, "args": 2, "agent": 2, "update": 2, "train": 2}.get(section, 1)


def test_a_shared_section_is_copied_to_its_siblings_and_to_no_script_of_the_reader(tmp_path):
    texts = {f"{name}.py": (ROOT / f"{name}.py").read_text() for name in SCRIPTS}
    mine = {"ddqn_mean.py": texts["ddqn_mate.py"].replace("tau: float = 0.001", "tau: float = 0.007")}
    changed = {"ddqn_mate.py": texts["ddqn_mate.py"].replace("gamma: float = 0.99", "gamma: float = 0.9")}
    for name, text in (texts | mine | changed).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "copy_sections.py", tmp_path / "tests")
    assert start("tests/copy_sections.py", "ddqn_mate.py", cwd=tmp_path).wait() == 0
    for name, text in (texts | mine).items():
        if name in texts and name.startswith("ddqn"):
            text = text.replace("gamma: float = 0.99", "gamma: float = 0.9")
        assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize("name", ["ddqn_mate", "sac_mate"])
def test_every_flag_is_read_and_its_comment_is_its_help(name, monkeypatch, capsys):
    module, text = script(name), (ROOT / f"{name}.py").read_text()
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        call(module.parse_args, "--help")
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
    may_be_zero = {"seed", "learning_starts", "gamma", "updates_per_episode", "updates_per_step"}
    may_be_zero |= {"start_epsilon", "end_epsilon", "exploration_fraction"}
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
    if name == "ddqn_mate":  # SAC's rule depends on the environment
        Args(learning_starts=99, total_episodes=100).check()
        with pytest.raises(SystemExit, match="^error: --learning-starts must be less than --total-episodes"):
            Args(learning_starts=100, total_episodes=100).check()
