"""The documentation: what it names exists, and its commands and examples run (shortened)."""

import importlib.util
import re
import shlex
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, flags, main, results_of, script, train_in

README, PAPER = (ROOT / "README.md").read_text(), (ROOT / "docs" / "paper.md").read_text()
SHORT = {
    "ddqn": {"total_episodes": 9, "learning_starts": 4, "corridor_length": 3},
    "sac": {"total_timesteps": 130, "learning_starts": 80, "max_episode_steps": 20, "updates_per_step": 0.1},
}
SHORT = {key: value | {"batch_size": 4, "num_envs": 2, "eval_episodes": 2} for key, value in SHORT.items()}


def block(language, containing=""):
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)
    [text] = [text for text in blocks if containing in text]
    return text


def commands():  # (script, flags) of all commands that train
    lines = re.findall(r"^python ((?:sac|ddqn)_\w+)\.py ([^\n#]*)", README, re.M)
    return [(name, words) for name, words in lines if "runs/RUN" not in words]


@pytest.mark.parametrize(
    "text", [README, PAPER, (ROOT / "CONTRIBUTING.md").read_text()], ids=["README", "paper", "CON"]
)
def test_named_files_functions_and_tests_exist(text):
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for name in re.findall(r"`(test_\w+?)_?\*?`", text):
        assert f"def {name}" in tests, name
    folder = ROOT / "docs" if text is PAPER else ROOT
    for name in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (folder / name).exists(), name
    for name in re.findall(r"`((?:envs|tests|benchmark)/[\w/]+\.\w+)`", text):
        assert (ROOT / name).exists(), name
    sources = "".join((ROOT / f"{name}.py").read_text() for name in ("sac_mate", "ddqn_mate"))
    for name in re.findall(r"`(?:Agent|Memory)\.(\w+)`", text):
        assert f"def {name}(" in sources, name


@pytest.mark.parametrize("name, words", commands())
def test_commands_run(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(block("python"))
    main(name, *shlex.split(words), *flags(**SHORT[name.split("_")[0]], memory_dim=8, hidden_dim=8))
    [folder] = (tmp_path / "runs").iterdir()
    assert results_of(folder)["updates"] > 0


def test_resuming_and_evaluating(tmp_path, monkeypatch, capsys):
    train_in(tmp_path, "sac_mate", env_id="point-robot", **SHORT["sac"]).rename(tmp_path / "runs" / "RUN")
    monkeypatch.chdir(tmp_path)
    resume, evaluate, film = re.findall(r"^python sac_mate\.py ([^\n#]*runs/RUN[^\n#]*)", README, re.M)
    main("sac_mate", *shlex.split(resume), "--total-timesteps=150")
    assert results_of(tmp_path / "runs" / "RUN")["step"] >= 150
    capsys.readouterr()
    main("sac_mate", *shlex.split(evaluate))
    assert '"eval/episodic_return"' in capsys.readouterr().out
    main("sac_mate", *shlex.split(film), "--eval-episodes=2")
    assert list(tmp_path.glob("runs/RUN/videos/*.mp4"))


def test_benchmark_commands_name_programs_and_flags_that_exist(monkeypatch, capsys):
    programs = re.findall(r"^python -m benchmark\.(\w+) ([^\n#]*)", README, re.M)
    assert [name for name, _ in programs] == ["sweep", "plot", "probe"]
    monkeypatch.setattr(sys, "argv", ["sweep", *shlex.split(programs[0][1]), "--dry-run"])
    importlib.import_module("benchmark.sweep").main()
    assert capsys.readouterr().out.count("ddqn_mate.py") >= 9


@pytest.mark.parametrize("name", ["ddqn_mate", "sac_mate"])
def test_the_example_of_an_own_memory(name, tmp_path):
    """The diff applies, the mean is a mean, acting agrees with the update, and the copy trains."""
    source, lines = (ROOT / f"{name}.py").read_text(), block("diff").splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[:1] in kinds) for kinds in ((" ", "-"), (" ", "+")))
    assert source.count(before) == 1
    path = tmp_path / f"{name[:-4]}mean.py"
    path.write_text(source.replace(before, after))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    memory, x = module.Memory(5, 8, 7).double(), torch.randn(3, 7, 5, dtype=torch.float64)
    m, state = memory(x), memory.initial_state(3)
    for t in range(8):
        mean = memory.encode(x[:, :t]).mean(dim=1) if t else torch.zeros(3, 8)
        torch.testing.assert_close(m[:, t], F.normalize(memory.Psi + mean, dim=-1) * 8**0.5)
        torch.testing.assert_close(memory.read(state), m[:, t])
        state = memory.step(x[:, t], state) if t < 7 else state
    state = memory.reset(state, torch.tensor([True, False, True]))
    torch.testing.assert_close(memory.read(state), torch.stack([m[0, 0], m[1, 7], m[2, 0]]))

    assert script(path.stem) is module
    env = {"env_id": "point-robot"} if name == "sac_mate" else {}
    folder = train_in(tmp_path, path.stem, **SHORT[name.split("_")[0]], **env)
    assert "mean" in folder.name and results_of(folder)["updates"] > 0
