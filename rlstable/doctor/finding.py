"""A finding of a check: severity, subject, text and advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

Severity = Literal["note", "warning", "error"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding.

    Attributes:
        severity: `note` is good to know, `warning` costs quality or speed or can blow up, `error` will fail.
        check: Short name of the check, the same for every model.
        subject: Names of the elements; empty for the model as a whole.
        what: Text with the numbers.
        advice: Advice in one line.
        numbers: Numbers by name in SI units, for programs.
    """

    severity: Severity
    check: str
    subject: tuple[str, ...]
    what: str
    advice: str
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)


def names(model: Any, kind: str, indices: Iterable[int]) -> tuple[str, ...]:
    """Returns names of a MuJoCo model's elements; an element without a name is called by kind and index: `geom 3`.

    Args:
        model: A `mujoco.MjModel`.
        kind: `body`, `joint`, `geom`, `actuator` or `equality`.
        indices: Indices of the elements.
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
    """Returns a number with three digits and without large powers of ten: `0.0125`, `2.8`, `1,400`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def listed(words: Sequence[str], most: int = 4) -> str:
    """Returns the first words and the number of further words: `a, b, c, d and 3 more`."""
    rest = len(words) - most
    return ", ".join(words[:most]) + (f" and {rest} more" if rest > 0 else "")
