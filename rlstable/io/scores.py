"""Scores of checkpoints: which returns can be compared, and which checkpoints are the best."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# Settings of the task; if one of them changed, the saved first states and randomised models are of another task.
TASK = ("env.source", "env.name", "env.kwargs", "env.xml", "env.task", "env.randomization_fn", "env.randomize")
_SCORED_BY = (
    *TASK, "env.episode_length", "env.action_repeat", "eval.deterministic", "eval.randomize", "eval.env_kwargs",
)  # fmt: skip


def value_at(settings: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key of nested settings; None if it does not exist."""
    value: Any = settings
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def scored_by(settings: Mapping[str, Any]) -> str:
    """The settings that a return depends on, as text; returns with different ones cannot be compared."""
    return json.dumps([value_at(settings, key) for key in _SCORED_BY], sort_keys=True)


class Score(NamedTuple):
    """The return of a checkpoint, None if it was not evaluated, and the settings by which it was scored."""

    value: float | None
    scored_by: str


def ranked(scores: Mapping[int, Score], steps: Iterable[int], own: str) -> list[tuple[int, float]]:
    """Steps scored by the settings `own`, with their scores, the best first; of equal scores the later one."""
    found = ((step, scores[step]) for step in steps if step in scores)
    known = [(step, score.value) for step, score in found if score.value is not None and score.scored_by == own]
    return sorted(known, key=lambda pair: (pair[1], pair[0]), reverse=True)


def best_of_each_kind(scores: Mapping[int, Score], steps: Sequence[int], n: int) -> list[int]:
    """The `n` best of the steps that are comparable with the newest one, then of those before them."""
    newest = dict.fromkeys(scores[step].scored_by for step in sorted(steps, reverse=True) if step in scores)
    return [step for own in list(newest)[:2] for step, _ in ranked(scores, steps, own)[:n]]
