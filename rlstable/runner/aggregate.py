"""Combines several seeds: one row from their rows, and one result from their results."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from rlstable.io.outcome import outcome_of
from rlstable.policy.statistics import interquartile_mean
from rlstable.runner.result import Row
from rlstable.supervise.stop_reasons import StopReason

Fields = dict[str, Any]

# Prefixes of metrics that count up over a run.
_COUNTERS = ("guards/", "supervise/", "training/updates", "training/episodes")
_RATE = "training/sps"
_RETURN = "eval/episode_reward"


class RowsOfSeeds:
    """Collects the rows of several seeds until one row of all seeds is complete."""

    def __init__(self) -> None:
        self._new: dict[int, Row] = {}
        self._last: dict[int, Row] = {}

    def add(self, seed: int, step: int, row: Row) -> None:
        """Adds the row of a seed."""
        del step
        self._new[seed] = self._last[seed] = row

    def set_last(self, seed: int, row: Row) -> None:
        """Sets the last row of a seed before a resume; its counters continue."""
        self._last[seed] = row

    def combine(self, training: Collection[int], returns: Iterable[float | None], is_last: bool = False) -> Row | None:
        """The row of all seeds; None while the row of a training seed is missing.

        With an evaluation, or at the end, the rows of some seeds are enough.

        Args:
            training: The seeds that the last iteration trained.
            returns: The latest evaluation of every seed, ended seeds included.
            is_last: Whether this is the last row.

        Returns:
            Counters summed over all seeds, rates summed over training seeds, and means of all other keys over the seeds
            with a number. With an evaluation also `seeds/return_iqm`, `_min` and `_max` of the latest evaluations.
        """
        new = self._new
        evaluated = any(_RETURN in row for row in new.values())
        if not new or not (is_last or evaluated or new.keys() >= set(training)):
            return None
        self._new = {}
        return _row(list(new.values()), list(self._last.values()), list(returns)) | {"seeds/training": len(training)}


def _row(new: list[Row], last: list[Row], returns: list[float | None]) -> Row:
    row: Row = {}
    counters = [key for seed_row in last for key in seed_row if key.startswith(_COUNTERS)]
    for key in dict.fromkeys([*(key for seed_row in new for key in seed_row), *counters]):
        is_counter = key.startswith(_COUNTERS)
        values = _numbers(seed_row.get(key) for seed_row in (last if is_counter else new))
        if not values:
            row[key] = None
        else:
            row[key] = sum(values) if is_counter or key == _RATE else float(np.mean(values))
    known = _numbers(returns)
    if _RETURN in row and known:
        row[_RETURN] = float(np.mean(known))
        row |= {"seeds/return_iqm": _iqm(known), "seeds/return_min": min(known), "seeds/return_max": max(known)}
    return row


def fields_of(seeds: Mapping[int, Fields], stop_reason: StopReason | None = None) -> Fields:
    """Fields of `result.json` for several seeds: the worst stop reason, the interquartile mean of returns.

    Args:
        seeds: Fields of each seed.
        stop_reason: Stop reason of the whole run; None if each seed has its own.
    """
    each = list(seeds.values())
    worst = max(each, key=lambda fields: int(fields["exit_code"])) if stop_reason is None else {}
    return {
        "stop_reason": worst["stop_reason"] if stop_reason is None else stop_reason.name,
        "exit_code": worst["exit_code"] if stop_reason is None else stop_reason.exit_code,
        "step": max((fields["step"] for fields in each), default=0),
        "return": _iqm(outcome_of(fields).value for fields in each),
        "best_return": _iqm(fields["best_return"] for fields in each),
        "last_return": _iqm(fields.get("last_return", fields["return"]) for fields in each),
        **_confirmed(each),
        "seconds": max((fields["seconds"] for fields in each), default=0.0),
        **_wall_seconds(each),
        "rollbacks": sum(fields["rollbacks"] for fields in each),
        "warnings": _warnings(seeds),
        "seeds": {seed: seeds[seed] for seed in sorted(seeds)},
    }


def _wall_seconds(seeds: list[Fields]) -> Fields:
    """The wall time of the seed that ended last, with the evaluations of all seeds.

    Seeds that another version trained have none.
    """
    known = [fields["wall_seconds"] for fields in seeds if "wall_seconds" in fields]
    if not known:
        return {}
    last = max(known, key=lambda wall: float(wall["total"]))
    return {"wall_seconds": last | {"evaluation": round(sum(wall["evaluation"] for wall in known), 1)}}


def _warnings(seeds: Mapping[int, Fields]) -> list[Fields]:
    """The warnings of all seeds, each with its `seed`; seeds that another version trained have none."""
    return [warning | {"seed": seed} for seed in sorted(seeds) for warning in seeds[seed].get("warnings", [])]


def _confirmed(seeds: list[Fields]) -> Fields:
    """The interquartile mean of the confirmed returns; empty unless it is confirmed for each seed with a return."""
    scored = [fields for fields in seeds if fields["best_return"] is not None]
    if not scored or any("confirmed_return" not in fields for fields in scored):
        return {}
    return {"confirmed_return": _iqm(fields["confirmed_return"] for fields in scored)}


def _iqm(values: Iterable[float | int | None]) -> float | None:
    known = _numbers(values)
    return float(interquartile_mean(np.array(known))) if known else None


def _numbers(values: Iterable[float | int | None]) -> list[float | int]:
    return [value for value in values if value is not None and math.isfinite(value)]
