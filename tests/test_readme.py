"""The documentation: what it names exists, and its commands and examples run (shortened)."""

import json
import re
import shlex

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, call, main, results_of, script, tiny, train_in

from benchmark import sweep

README = (ROOT / "README.md").read_text()


def block(language):
    [text] = re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)
    return text


def commands():  # (script, flags) of all commands that train
    lines = re.findall(r"^python ((?:sac|ddqn)_\w+)\.py ([^\n#]*)", README, re.M)
    return [(name, words) for name, words in lines if "runs/RUN" not in words]


@pytest.mark.parametrize("document", ["README.md", "docs/paper.md", "CONTRIBUTING.md"])
def test_named_files_functions_and_tests_exist(document):
    text = (ROOT / document).read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for name in re.findall(r"`(test_\w+?)_?\*?`", text):
        assert f"def {name}" in tests, name
    for name in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert ((ROOT / document).parent / name).exists(), name
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
    short = {key: value for key, value in tiny(name).items() if key != "env_id"}
    main(name, *shlex.split(words), *sweep.to_words(short))
    [folder] = (tmp_path / "runs").iterdir()
    assert results_of(folder)["updates"] > 0


def test_resuming_and_evaluating(tmp_path, monkeypatch, capsys):
    """Evaluation has fixed seeds, so that a saved agent has the return that it had in training."""
    folder = train_in(tmp_path, "sac_mate", **tiny("sac_mate", learning_rate=0.01)).rename(tmp_path / "runs" / "RUN")
    monkeypatch.chdir(tmp_path)
    resume, evaluate, film = re.findall(r"^python sac_mate\.py ([^\n#]*runs/RUN[^\n#]*)", README, re.M)
    main("sac_mate", *shlex.split(resume), "--total-timesteps=650")
    results = results_of(folder)
    assert results["step"] >= 650
    returns, last = [], "--evaluate runs/RUN/model.pt"
    for words in (f"{evaluate} --eval-episodes 4", last, evaluate, f"{last} --eval-episodes 9", film):
        capsys.readouterr()
        main("sac_mate", *shlex.split(words))
        returns.append(json.loads(capsys.readouterr().out)["eval/episodic_return"])
    assert returns[:2] == [pytest.approx(results["best_return"]), pytest.approx(results["last_return"])]
    assert returns[3] != pytest.approx(results["last_return"]), "of other episodes"
    assert len(list(folder.glob("videos/*.mp4"))) == 1
    assert [*(tmp_path / "runs").iterdir()] == [folder] and results_of(folder) == results, "no run is started"


def test_benchmark_commands_name_programs_and_flags_that_exist(capsys):
    programs = re.findall(r"^python -m benchmark\.(\w+) ([^\n#]*)", README, re.M)
    assert [name for name, _ in programs] == ["film", "sweep", "plot", "probe"]
    call(sweep.main, *shlex.split(programs[1][1]), "--dry-run")
    assert capsys.readouterr().out.count("ddqn_mate.py") >= 9


@pytest.mark.parametrize("name", ["ddqn_mate", "sac_mate"])
def test_the_example_of_an_own_memory(name, monkeypatch, tmp_path):
    """The diff applies, the mean is a mean, acting agrees with the update, and the copy trains."""
    source, lines = (ROOT / f"{name}.py").read_text(), block("diff").splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[:1] in kinds) for kinds in ((" ", "-"), (" ", "+")))
    assert source.count(before) == 1
    copy = f"{name[:-4]}mean"
    (tmp_path / f"{copy}.py").write_text(source.replace(before, after))
    monkeypatch.syspath_prepend(tmp_path)
    memory = script(copy).Memory(5, 8, 7).double()
    x = torch.randn(3, 7, 5, dtype=torch.float64)
    m, state = memory(x), memory.initial_state(3)
    for t in range(8):
        mean = memory.encode(x[:, :t]).mean(dim=1) if t else torch.zeros(3, 8)
        torch.testing.assert_close(m[:, t], F.normalize(memory.Psi + mean, dim=-1) * 8**0.5)
        torch.testing.assert_close(memory.read(state), m[:, t])
        state = memory.step(x[:, t], state) if t < 7 else state
    state = memory.reset(state, torch.tensor([True, False, True]))
    torch.testing.assert_close(memory.read(state), torch.stack([m[0, 0], m[1, 7], m[2, 0]]))
    folder = train_in(tmp_path, copy, **tiny(name))
    assert "mean" in folder.name and results_of(folder)["updates"] > 0
