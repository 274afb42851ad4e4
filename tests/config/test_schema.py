"""Suggestions for keys that do not exist."""

from __future__ import annotations

import pytest

from rlstable.config import Config
from rlstable.config.schema import unknown_key


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("gamma", "did you mean ppo.discounting?"),
        ("steps", "did you mean total_steps?"),
        ("seed_count", "did you mean seeds?"),
        ("eval.learning_rate", "did you mean ppo.learning_rate?"),
        ("guards.max_share", "did you mean guards.storm.max_share?"),
        ("seed.x", "seed is a value, not a section"),
        (
            "checkpoint.colour",
            "allowed here: enabled, every, every_minutes, keep, keep_best, confirm_best, keep_period, asynchronous",
        ),
    ],
)
def test_unknown_key_suggests_the_key_that_was_meant(key: str, hint: str) -> None:
    assert str(unknown_key(Config, key)) == f"{key}: unknown key; {hint}"
