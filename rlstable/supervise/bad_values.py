"""The numbers of an environment step by name, which of them are bad, and in which order a bad one travels.

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
NOT_FINITE = "not finite"
_PHYSICS = ("pipeline_state", "data")
_GROUPS = ("action", "physics", "obs", "reward", "done", "metrics", "info")
# Physics in the order of causes: forces, then motion, then derived values.
_IN_ORDER = ("ctrl", "act", "qacc", "qdd", "qacc_warmstart", "qvel", "qd", "qpos", "q")


class Bad(NamedTuple):
    """A number that is wrong.

    Attributes:
        array: Its array.
        place: Its place there.
        value: The number.
        why: `not finite`, or beyond which limit.
    """

    array: str
    place: tuple[int, ...]
    value: float
    why: str

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.place))}]" if self.place else ""
        return f"{self.array}{place} = {self.value:g} ({self.why})"


def group(name: str) -> str:
    """Kind of an array, in the quarantine's words: action, physics, obs, reward, ..."""
    head = name.split("/")[0]
    return "physics" if head in _PHYSICS else head


def in_order(names: Iterable[str]) -> list[str]:
    """Names in the order in which a bad number travels: action, accelerations, positions, observation, reward."""

    def rank(name: str) -> tuple[int, int, str]:
        own, last = group(name), name.split("/", 1)[-1]
        main = own == "physics" and last in _IN_ORDER
        return (
            _GROUPS.index(own) if own in _GROUPS else len(_GROUPS),
            _IN_ORDER.index(last) if main else len(_IN_ORDER),
            name,
        )

    return sorted(names, key=rank)


def bad_ones(arrays: Arrays, limits: QuarantineConfig) -> list[Bad]:
    """The first bad number of every array that has one, in the order in which a bad number travels.

    Args:
        arrays: Of one environment, after its step.
        limits: Beyond which a number is bad.
    """
    floats = {name: array for name, array in arrays.items() if np.issubdtype(array.dtype, np.floating)}
    found = {name: bad for name, array in floats.items() if (bad := _first_bad(name, array, _limit(name, limits)))}
    for kind in ("action", "physics", "metrics", "info"):
        own = {name: array for name, array in floats.items() if group(name) == kind}
        if limits.max_other_norm is None or found.keys() & own.keys():
            continue
        limit = min(limits.max_other_norm, GREATEST_NORM)
        # Not too large for float64: nothing here is infinite.
        if math.sqrt(sum(float(np.sum(np.square(array.astype(np.float64)))) for array in own.values())) > limit:
            name = max(own, key=lambda name: magnitude(own[name]))
            index, value = _greatest(own[name])
            found[name] = Bad(name, index, value, f"the norm of all {kind} is beyond {limit:g}")
    return [found[name] for name in in_order(found)]


def magnitude(array: np.ndarray) -> float:
    """The largest finite magnitude, 0 if no number is finite."""
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def _limit(name: str, limits: QuarantineConfig) -> float | None:
    kind, last = group(name), name.split("/", 1)[-1]
    if kind == "physics" and last in COORDINATES:
        return limits.max_abs_state
    if kind == "physics" and last in ACCELERATIONS:
        return limits.max_abs_acceleration
    return {"obs": limits.max_abs_observation, "reward": limits.max_abs_reward, "done": 1.0}.get(kind)


def _first_bad(name: str, array: np.ndarray, limit: float | None) -> Bad | None:
    wrong = ~np.isfinite(array)
    why = NOT_FINITE
    if not wrong.any() and limit is not None:
        wrong, why = ~(np.abs(array) <= limit), f"beyond {limit:g}"
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    return Bad(name, index, float(array[index]), why)


def _greatest(array: np.ndarray) -> tuple[tuple[int, ...], float]:
    index = tuple(int(i) for i in np.unravel_index(np.argmax(np.abs(array)), array.shape))
    return index, float(array[index])
