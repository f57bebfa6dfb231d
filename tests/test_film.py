"""film.py: one GIF, a panel for each context."""

import sys

import numpy as np
import pytest
from conftest import tiny, train_in
from PIL import Image

from benchmark import film


@pytest.mark.parametrize("name, contexts", [("ddqn_mate", ["1", "-1"]), ("sac_gpt2", ["1,0", "0,1"])])
def test_a_gif_shows_the_agent_in_each_context(name, contexts, monkeypatch, tmp_path):
    """T-Maze of a length of its own, and episodes of point-robot that are shorter than registered."""
    folder = train_in(tmp_path, name, **tiny(name))
    words = [folder / "best.pt", tmp_path / "a.gif", "--contexts", *contexts]
    monkeypatch.setattr(sys, "argv", ["film.py", *map(str, words)])
    film.main()
    gif = Image.open(tmp_path / "a.gif")
    left, right = np.split(np.asarray(gif.convert("RGB")), 2, axis=1)
    assert gif.n_frames > 1 and left.shape[0] == 200 and (left != right).any(), "the goals are elsewhere"
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "1,2,3"])
    with pytest.raises(SystemExit, match="^error: the context must be .* got .1. 2. 3.. of shape"):
        film.main()
