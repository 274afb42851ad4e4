"""The study of walking reads what play says."""

from __future__ import annotations

import numpy as np
import pytest

from rlstable import play
from rlstable.config import ConfigError
from scripts import walk


def episode(stood: float, error: float) -> play.Played:
    moved = np.full((5, 3), error)
    return play.Played(10.0, stood, 0.3, [], None, moved, np.zeros((5, 3)), np.zeros((5, 4), bool), 1.0)


def test_lines_of_play_become_numbers_of_a_row() -> None:
    episodes = [episode(10.0, 0.0)] * 19 + [episode(3.0, 2.0)]
    lines = play.summary(episodes, [[0.5, 0.0, 0.0]] * 20)
    assert walk.read("\n".join(lines)) == [19, pytest.approx(2 * 2**0.5 / 20, abs=1e-3), pytest.approx(0.1)]


def test_play_without_twenty_commands_is_an_error() -> None:
    with pytest.raises(ConfigError, match="play says nothing of 20 episodes: fell after 3"):
        walk.read("fell after 3 s\n")
