"""film.py: one GIF, a panel for each context."""

import re

import numpy as np
import pytest
from conftest import call, tiny, train_in
from PIL import Image

from benchmark import film


@pytest.mark.parametrize(
    "name, flags, contexts", [("ddqn_mate", {"corridor_length": 8}, ["1", "-1"]), ("sac_gpt2", {}, ["1,0", "0,1"])]
)
def test_a_gif_shows_the_agent_in_each_context(name, flags, contexts, tmp_path):
    """T-Maze of a length of its own, and episodes of point-robot that are shorter than registered."""
    folder = train_in(tmp_path, name, **tiny(name, **flags))
    words = [folder / "best.pt", tmp_path / "a.gif", "--contexts", *contexts]
    call(film.main, *words)
    gif = Image.open(tmp_path / "a.gif")
    one, other = np.split(np.asarray(gif.convert("RGB")), 2, axis=1 if name == "sac_gpt2" else 0)
    assert gif.n_frames > 1 and one.shape[0] == 200 and (one != other).any(), "the goals are elsewhere"
    for wrong, answer in (
        (["--contexts", "1,2,3"], "the context must be .* got .1. 2. 3.. of shape"),
        (["--contexts", *contexts, "--distance", 9], "--distance is for MuJoCo robots"),
    ):
        with pytest.raises(SystemExit, match=f"^error: {answer}[^\n]*$"):
            call(film.main, *words[:2], *wrong)
    for path in ("a.mp4", "no/a.gif"):
        with pytest.raises(SystemExit, match="must end in .gif, in a folder that exists$"):
            call(film.main, words[0], path, *words[2:])
    with pytest.raises(SystemExit, match="^error: cannot load [^\n]*$"):
        call(film.main, folder / "args.json", *words[1:])


def test_with_a_distance_all_contexts_are_in_one_picture(tmp_path):
    folder = train_in(tmp_path, "sac_mate", **tiny("sac_mate", env_id="ant-dir"))
    call(film.main, folder / "best.pt", tmp_path / "a.gif", "--contexts", "1,0", "-1,0", "--distance", 20)
    gif = Image.open(tmp_path / "a.gif")
    gif.seek(gif.n_frames - 1)
    picture = np.asarray(gif.convert("RGB"), dtype=float)
    right, left = picture[:, 160:].mean(axis=(0, 1)), picture[:, :40].mean(axis=(0, 1))
    assert picture.shape == (200, 200, 3) and right[0] > right[2] + 1 and left[2] > left[0] + 1, "orange and blue dots"
    assert picture[80:120, 80:120].min() < 200 < picture[:40].min(), "the ant, and an empty floor"


def test_a_robot_with_a_target_speed_is_filmed_with_its_speed(monkeypatch, tmp_path):
    folder, texts = train_in(tmp_path, "sac_mate", **tiny("sac_mate", env_id="cheetah-vel")), []
    monkeypatch.setattr(film, "label", lambda picture, text: texts.append(text) or picture)
    call(film.main, folder / "best.pt", tmp_path / "a.gif", "--contexts", "2.5")
    assert texts[0] == "context 2.5" and len(texts) == 11
    assert all(re.fullmatch(r"context 2.5, speed -?\d\.\d", text) for text in texts[1:])
