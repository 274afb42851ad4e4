"""Finds the bad numbers of an environment step, in the order in which a bad number spreads from array to array.

Names are as in `io.arrays`: `pipeline_state/qpos`, `obs/state`, `reward`, `info/steps`, and `action`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from rlstable.config.guards import QuarantineConfig
from rlstable.guards.base import GREATEST_NORM
from rlstable.guards.env import ACCELERATIONS, COORDINATES

Arrays = Mapping[str, np.ndarray]
_PHYSICS = ("pipeline_state", "data")
_GROUPS = ("action", "physics", "obs", "reward", "done", "metrics", "info")
# Physics in the order of causes: forces, then motion, then derived values.
_IN_ORDER = ("ctrl", "act", "qacc", "qdd", "qacc_warmstart", "qvel", "qd", "qpos", "q")


class BadNumber(NamedTuple):
    """A bad number."""

    array: str  # name of the array
    place: tuple[int, ...]  # index in the array
    value: float
    why: str  # `not finite`, or the limit that is exceeded

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.place))}]" if self.place else ""
        return f"{self.array}{place} = {self.value:g} ({self.why})"


def group(name: str) -> str:
    """Kind of an array, as the quarantine guard names it: action, physics, obs, reward, ...; else info."""
    head = name.split("/")[0]
    return "physics" if head in _PHYSICS else head if head in _GROUPS else "info"


def in_causal_order(names: Iterable[str]) -> list[str]:
    """Sorts names in the order in which a bad number spreads: action, accelerations, positions, observation, reward."""

    def rank(name: str) -> tuple[int, int, str]:
        kind, last = group(name), name.split("/", 1)[-1]
        is_ordered = kind == "physics" and last in _IN_ORDER
        return (
            _GROUPS.index(kind),
            _IN_ORDER.index(last) if is_ordered else len(_IN_ORDER),
            name,
        )

    return sorted(names, key=rank)


def find_bad_numbers(arrays: Arrays, limits: QuarantineConfig) -> list[BadNumber]:
    """The first bad number of each array of one environment after its step, in the order in which it spreads."""
    floats = {name: array for name, array in arrays.items() if np.issubdtype(array.dtype, np.floating)}
    found = {name: bad for name, array in floats.items() if (bad := _first_bad(name, array, *_limit(name, limits)))}
    for kind in ("action", "physics", "metrics", "info"):
        of_kind = {name: array for name, array in floats.items() if group(name) == kind}
        if limits.max_other_norm is None or found.keys() & of_kind.keys():
            continue
        limit = min(limits.max_other_norm, GREATEST_NORM)
        # Float64 does not overflow here: all values are finite.
        if math.sqrt(sum(float(np.sum(np.square(array.astype(np.float64)))) for array in of_kind.values())) > limit:
            name = max(of_kind, key=lambda name: magnitude(of_kind[name]))
            index, value = _greatest(of_kind[name])
            found[name] = BadNumber(name, index, value, f"the norm of all {kind} is beyond {limit:g}")
    return [found[name] for name in in_causal_order(found)]


def magnitude(array: np.ndarray) -> float:
    """The largest finite absolute value; 0 if no number is finite."""
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def _limit(name: str, limits: QuarantineConfig) -> tuple[float | None, str]:
    """The limit of an array's elements, and the start of the text that names it."""
    kind, last = group(name), name.split("/", 1)[-1]
    if kind == "done":
        return 1.0, ""
    key = {"obs": "max_abs_observation", "reward": "max_abs_reward"}.get(kind)
    if kind == "physics":
        key = "max_abs_state" if last in COORDINATES else "max_abs_acceleration" if last in ACCELERATIONS else None
    return (None, "") if key is None else (getattr(limits, key), f"guards.quarantine.{key}=")


def _first_bad(name: str, array: np.ndarray, limit: float | None, key: str) -> BadNumber | None:
    wrong = ~np.isfinite(array)
    why = "not finite"
    if not wrong.any() and limit is not None:
        wrong, why = ~(np.abs(array) <= limit), f"beyond {key}{limit:g}"
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    return BadNumber(name, index, float(array[index]), why)


def _greatest(array: np.ndarray) -> tuple[tuple[int, ...], float]:
    index = tuple(int(i) for i in np.unravel_index(np.argmax(np.abs(array)), array.shape))
    return index, float(array[index])
