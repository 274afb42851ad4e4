"""Findings of the doctor, and geoms of a MuJoCo model that overlap."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

import mujoco
import numpy as np

from rlstable.robot.build import name_of

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

_DEEP = 1e-3  # least reported overlap at the start, in metres


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding: a `note` is good to know, a `warning` costs quality or speed or can blow up, an `error` will fail."""

    severity: Severity
    check: str
    subject: tuple[str, ...]
    what: str
    advice: str


def names(model: mujoco.MjModel, kind: str, indices: Iterable[int]) -> tuple[str, ...]:
    """Names of elements of a kind, such as `joint`."""
    return tuple(name_of(model, kind, int(i)) for i in indices)


def short(value: float) -> str:
    """A number with three digits and without large powers of ten: `0.0125`, `2.8`, `1,400`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def overlaps(model: mujoco.MjModel, home: np.ndarray | None = None) -> list[Finding]:
    """Finds geoms of moving bodies that overlap at the start, and so always rub."""
    data = mujoco.MjData(model)
    data.qpos[:] = model.qpos0 if home is None else home
    mujoco.mj_forward(model, data)
    moves = model.body_weldid[model.geom_bodyid] > 0
    deep = [one for one in data.contact if -one.dist > _DEEP and moves[one.geom].all()]
    if not deep:
        return []
    couples = dict.fromkeys("–".join(names(model, "geom", one.geom)) for one in deep)
    worst, start = -1000 * min(one.dist for one in deep), "qpos0" if home is None else "home"
    what = f"overlap each other by up to {worst:.1f} mm at {start}, and are pushed apart from the start"
    advice = "<exclude> for these two bodies, or thinner collision geoms"
    return [Finding("warning", "overlap at start", tuple(couples), what, advice)]
