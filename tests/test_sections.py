"""A script is an algorithm times a memory: every line has an owner, and what has one owner is equal to the byte."""

import re

import pytest
from conftest import ROOT, SCRIPTS

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
