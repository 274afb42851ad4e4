"""One finding of a check: severity, place, text, and what to do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

Severity = Literal["note", "warning", "error"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing worth knowing.

    Attributes:
        severity: `note` is good to know, `warning` costs training quality or speed or may blow up, `error` will fail.
        check: Short name of the check, the same for every model.
        subject: Names of what it is about; empty for the model as a whole.
        what: What was found, with its numbers.
        advice: What to do, in one line.
        numbers: The numbers by name, in SI units, for programs.
    """

    severity: Severity
    check: str
    subject: tuple[str, ...]
    what: str
    advice: str
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)


def names(model: Any, kind: str, indices: Iterable[int]) -> tuple[str, ...]:
    """Names of a MuJoCo model's elements; what has none is called by its kind and number, `geom 3`.

    Args:
        model: A `mujoco.MjModel`.
        kind: `body`, `joint`, `geom`, `actuator` or `equality`.
        indices: Which.
    """
    import mujoco

    objects = mujoco.mjtObj
    types = {
        "body": objects.mjOBJ_BODY,
        "joint": objects.mjOBJ_JOINT,
        "geom": objects.mjOBJ_GEOM,
        "actuator": objects.mjOBJ_ACTUATOR,
        "equality": objects.mjOBJ_EQUALITY,
    }
    return tuple(mujoco.mj_id2name(model, types[kind], int(i)) or f"{kind} {int(i)}" for i in indices)


def short(value: float) -> str:
    """Three digits without powers of ten for what is large: `0.0125`, `2.8`, `1,400`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def listed(words: Sequence[str], most: int = 4) -> str:
    """Words with commas, the rest as a number: `a, b, c, d and 3 more`."""
    rest = len(words) - most
    return ", ".join(words[:most]) + (f" and {rest} more" if rest > 0 else "")
