"""Copies the sections that a script shares with its siblings to them: python tests/copy_sections.py sac_mate.py"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["ddqn_gpt2", "ddqn_lstm", "ddqn_mate", "sac_gpt2", "sac_lstm", "sac_markov", "sac_mate"]


def sections(name):
    """{section: its text} of a script, in order. The docstring is the section ""."""
    parts = re.split(r"^(# -{20,} [a-z ]+\n)", (ROOT / f"{name}.py").read_text(), flags=re.M)
    titles = [""] + [header.split("- ")[1].strip() for header in parts[1::2]]
    texts = [parts[0]] + [header + text for header, text in zip(parts[1::2], parts[2::2])]
    return dict(zip(titles, texts))


def owner(section, name):
    """What the scripts in which this section is equal have in common: the memory, the algorithm, or nothing."""
    algorithm, memory = name.split("_")
    owners = {"": name, "memory": memory} | dict.fromkeys(("args", "agent", "update", "train"), algorithm)
    return owners.get(section, "all scripts")


def main():
    if len(sys.argv) != 2 or Path(sys.argv[1]).stem not in SCRIPTS:
        sys.exit(f"{__doc__}\nThe scripts are {', '.join(SCRIPTS)}.")
    source = Path(sys.argv[1]).stem
    shared = sections(source)
    for name in SCRIPTS:
        old = sections(name)
        new = {title: shared[title] if owner(title, name) == owner(title, source) else old[title] for title in old}
        if new != old:
            (ROOT / f"{name}.py").write_text("".join(new.values()))
            print(f"{name}.py: {', '.join(title for title in old if new[title] != old[title])}")


if __name__ == "__main__":
    main()
