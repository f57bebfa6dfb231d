"""film.py: one GIF, a panel for each context."""

import sys

import numpy as np
import pytest
from conftest import tiny, train_in
from PIL import Image

from benchmark import film


@pytest.mark.parametrize("name, env_id, contexts", [("ddqn_mate", "tmaze-active", "1 -1"), ("sac_gpt2", "", "1,0 0,1")])
def test_a_gif_shows_the_agent_in_each_context(name, env_id, contexts, monkeypatch, tmp_path):
    folder = train_in(tmp_path, name, **tiny(name, **{"env_id": env_id} if env_id else {}))
    monkeypatch.setattr(
        sys, "argv", ["film.py", f"{folder}/best.pt", f"{tmp_path}/a.gif", "--contexts", *contexts.split()]
    )
    film.main()
    gif = Image.open(tmp_path / "a.gif")
    left, right = np.split(np.asarray(gif.convert("RGB")), 2, axis=1)
    assert gif.n_frames > 1 and left.shape[0] == 200 and (left != right).any(), "the goals are elsewhere"
