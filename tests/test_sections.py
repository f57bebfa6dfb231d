"""A script is an algorithm times a memory: every line has an owner, and what has one owner is equal to the byte."""

import re
import sys
from dataclasses import dataclass, fields

import pytest
from conftest import ROOT, SCRIPTS, script

from envs import running

ORDER = ["imports", "memory", "args", "replay buffer", "agent", "rollout", "update", "evaluate", "train"]
OWNER = {section: "everyone" for section in ORDER}
OWNER |= {"memory": "memory"} | {section: "algorithm" for section in ("args", "agent", "update", "train")}


def sections(name):
    """The docstring and the sections of a script by name, which together are the whole file."""
    text = (ROOT / f"{name}.py").read_text()
    headers = list(re.finditer(r"^# -{20,} ([a-z ]+)$", text, re.M))
    assert all(len(h.group()) == 120 for h in headers), "headers end in the same column"
    starts = [h.start() for h in headers] + [len(text)]
    parts = {h.group(1): text[a:b] for h, a, b in zip(headers, starts, starts[1:])}
    return text[: starts[0]], parts


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_has_the_sections_in_order_and_is_short_enough(name):
    docstring, parts = sections(name)
    assert list(parts) == ORDER
    assert re.fullmatch(r'""".*"""\n\n', docstring, re.S), "nothing but a docstring before the first section"
    lines = (ROOT / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 500 and max(map(len, lines)) <= 120


@pytest.mark.parametrize("section", ORDER)
def test_what_is_shared_is_equal_to_the_byte(section):
    copies = {}
    for name in SCRIPTS:
        algorithm, memory = name.split("_")
        owner = {"everyone": "everyone", "algorithm": algorithm, "memory": memory}[OWNER[section]]
        copies.setdefault(owner, {}).setdefault(sections(name)[1][section], []).append(name)
    for owner, versions in copies.items():
        assert len(versions) == 1, f"{section} of {owner} differs between {' and '.join(map(str, versions.values()))}"


def test_docstrings_differ_only_in_what_they_are_about():
    """From "Time." on, the legend is the same text in every script of an algorithm."""
    for algorithm in {name.split("_")[0] for name in SCRIPTS}:
        legends = {sections(name)[0].split("\nTime.")[1] for name in SCRIPTS if name.startswith(algorithm)}
        assert len(legends) == 1


def help_of(Args, monkeypatch, capsys):
    """{group: its text} of --help."""
    monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        running.parse(Args, "what it does")
    title, *groups = re.split(r"^\W*?([\w-]+) options\W*?$", capsys.readouterr().out, flags=re.MULTILINE)
    assert "what it does" in title
    return dict(zip(groups[::2], groups[1::2]))


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_has_every_flag_in_a_group_with_its_comment(name, monkeypatch, capsys):
    groups = help_of(script(name).Args, monkeypatch, capsys)
    assert list(groups)[:3] == ["task", "learning", "networks"] and {"evaluation", "run", "tracking"} <= groups.keys()
    assert "--env-id" in groups["task"] and "--gamma" in groups["learning"] and "--seed" in groups["run"]
    everything = re.sub(r"\s+", " ", " ".join(groups.values()))
    for field in fields(script(name).Args):
        assert len(re.findall(rf"--{field.name.replace('_', '-')}[ ,]", everything)) >= 1, field.name
    assert "discount factor (paper: 0.99)" in everything and "use the GPU if there is one" in everything


@dataclass
class Mine(running.Args):
    exp_name: str = "mine"
    bare: int = 3


def test_a_flag_without_a_comment_is_a_flag_too(monkeypatch, capsys):
    assert "--bare" in help_of(Mine, monkeypatch, capsys)["other"]
    monkeypatch.setattr(sys, "argv", ["script.py", "--bare", "5", "--seed", "2"])
    args = running.parse(Mine, "")
    assert type(args) is Mine and (args.bare, args.seed, args.exp_name) == (5, 2, "mine")
