"""Several seeds as one: a row of their rows, and what their returns come to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlstable.estimates import interquartile_mean
from rlstable.result import Row

# Of these the sum says something, of everything else the mean.
_SUMMED = ("guards/", "supervise/", "training/sps", "training/updates", "training/episodes")
_RETURN = "eval/episode_reward"


def row_of(rows: Sequence[Row], returns: Sequence[float | None], training: int) -> Row:
    """One row for those that several seeds have logged in the same iteration.

    Args:
        rows: A row per seed that logged one.
        returns: The latest evaluation of every seed, those that have ended included.
        training: How many seeds the iteration trained.

    Returns:
        Rates and counts summed, everything else as the mean over seeds of what is a number. Where one of them was
        evaluated also `seeds/return_iqm`, `_min` and `_max` of the latest evaluations of all.
    """
    row: Row = {}
    for key in dict.fromkeys(key for own in rows for key in own):
        values = _numbers(own.get(key) for own in rows)
        if not values:
            row[key] = None
        else:
            row[key] = sum(values) if key.startswith(_SUMMED) else float(np.mean(values))
    known = _numbers(returns)
    if _RETURN in row and known:
        row[_RETURN] = float(np.mean(known))
        row |= {
            "seeds/return_iqm": float(interquartile_mean(np.array(known))),
            "seeds/return_min": min(known),
            "seeds/return_max": max(known),
        }
    row["seeds/training"] = training
    return row


def fields_of(seeds: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """What `result.json` says of several seeds: how the worst ended, and the interquartile mean of their returns.

    Args:
        seeds: What it says of each.
    """
    own = list(seeds.values())
    worst = max(own, key=lambda fields: fields["exit_code"])
    return {
        "stop_reason": worst["stop_reason"],
        "exit_code": worst["exit_code"],
        "step": max(fields["step"] for fields in own),
        "return": _iqm(fields["return"] for fields in own),
        "best_return": _iqm(fields["best_return"] for fields in own),
        "seconds": max(fields["seconds"] for fields in own),
        "rollbacks": sum(fields["rollbacks"] for fields in own),
        "seeds": dict(seeds),
    }


def _iqm(values: Iterable[float | int | None]) -> float | None:
    known = _numbers(values)
    return float(interquartile_mean(np.array(known))) if known else None


def _numbers(values: Iterable[float | int | None]) -> list[float | int]:
    return [value for value in values if value is not None and math.isfinite(value)]
