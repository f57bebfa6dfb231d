"""Copies the sections that a script shares with its siblings to them: python tests/copy_sections.py sac_mate.py"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.stem for path in ROOT.glob("*_*.py"))  # ddqn_gpt2, ddqn_lstm, ...
BY_MEMORY, BY_ALGORITHM = ("memory",), ("args", "agent", "update", "train")  # all other sections are equal everywhere


def sections(name):
    """{section: its text} of a script, in order. The docstring is the section ""."""
    parts = re.split(r"^(# -{20,} [a-z ]+\n)", (ROOT / f"{name}.py").read_text(), flags=re.M)
    titles = [""] + [header.split("- ")[1].strip() for header in parts[1::2]]
    texts = [parts[0]] + [header + text for header, text in zip(parts[1::2], parts[2::2])]
    return dict(zip(titles, texts))


def sharing(section, name):
    """The scripts that have this section in common with `name`, which is one of them."""
    algorithm, memory = name.split("_")
    if section in BY_MEMORY:
        return [other for other in SCRIPTS if other.endswith(memory)]
    if section in BY_ALGORITHM:
        return [other for other in SCRIPTS if other.startswith(algorithm)]
    return [name] if section == "" else SCRIPTS


def main():
    if len(sys.argv) != 2 or Path(sys.argv[1]).stem not in SCRIPTS:
        sys.exit(f"{__doc__}\nThe scripts are {', '.join(SCRIPTS)}.")
    source = Path(sys.argv[1]).stem
    shared = sections(source)
    for name in SCRIPTS:
        old = sections(name)
        new = {title: shared[title] if name in sharing(title, source) else text for title, text in old.items()}
        if new != old:
            (ROOT / f"{name}.py").write_text("".join(new.values()))
            print(f"{name}.py: {', '.join(title for title in old if new[title] != old[title])}")


if __name__ == "__main__":
    main()
