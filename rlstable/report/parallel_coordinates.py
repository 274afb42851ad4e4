"""Parallel coordinates of a sweep: a line per job through its varied settings to its return."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np

from rlstable.report.chart import readable
from rlstable.report.sweep import Job

_WIDTH, _HEIGHT, _SIDE, _TOP, _BOTTOM = 1000.0, 332.0, 70.0, 52.0, 26.0
_LOG_FROM = 50.0  # least ratio of positive values for a logarithmic axis
_FEW = 6  # an axis with more numbers marks only the least and the greatest
_LEAST_GAP = 0.07  # of the height between two marks of a few numbers; closer numbers get equal distances


def parallel_coordinates(jobs: Sequence[Job], keys: Sequence[str]) -> str:
    """Returns an SVG with a line per job through its varied values to its return.

    The result is empty if fewer than two jobs have a return.

    Args:
        jobs: The jobs of the sweep.
        keys: Keys that vary.
    """
    scored = [job for job in jobs if job.score is not None]
    if len(scored) < 2:
        return ""
    axes = [_Axis(key, [job.values.get(key, "") for job in scored]) for key in keys]
    axes.append(_Axis("return", [repr(job.score) for job in scored], may_be_log=False))
    places = np.linspace(_SIDE, _WIDTH - _SIDE, len(axes))
    scores = np.array([job.score for job in scored], np.float64)
    order = np.argsort(np.argsort(scores)) / max(len(scored) - 1, 1)
    lines = []
    for rank, index in sorted(zip(order, range(len(scored)), strict=True)):
        points = " ".join(f"{x:.1f},{axis.places[index]:.1f}" for x, axis in zip(places, axes, strict=True))
        overrides = ", ".join(f"{key}={value}" for key, value in scored[index].values.items())
        style = f"stroke: color-mix(in oklab, var(--c0) {100 * rank:.0f}%, var(--c1)); opacity: {0.35 + 0.6 * rank:.2f}"
        title = html.escape(f"{overrides}: {scored[index].score:,.1f}")
        lines.append(f'<polyline class="line" style="{style}" points="{points}"><title>{title}</title></polyline>')
    drawn = "".join(axis.drawn(x, index) for index, (x, axis) in enumerate(zip(places, axes, strict=True)))
    return (
        f'<svg class="timeline" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" '
        f'aria-label="varied settings and the return">{"".join(lines)}<g class="axes">{drawn}</g></svg>'
    )


class _Axis:
    """A vertical axis with numbers to scale or words at equal distances.

    Args:
        name: Name of the axis.
        texts: A value per job.
        may_be_log: Whether a wide range gets a logarithmic scale.
    """

    def __init__(self, name: str, texts: Sequence[str], may_be_log: bool = True):
        self._name = name
        numbers = [_as_number(text) for text in texts]
        bottom, top = _HEIGHT - _BOTTOM, _TOP
        if all(number is not None for number in numbers):
            values = np.array(numbers, np.float64)
            if may_be_log and values.min() > 0 and values.max() / values.min() >= _LOG_FROM:
                values = np.log10(values)
            span = values.max() - values.min()
            shares = (values - values.min()) / span if span > 0 else np.full(len(values), 0.5)
            if may_be_log and 1 < len(set(numbers)) <= _FEW and np.diff(np.unique(shares)).min() < _LEAST_GAP:
                shares = np.unique(values, return_inverse=True)[1] / (len(set(numbers)) - 1)
            marked = {float(number): share for number, share in zip(numbers, shares, strict=True) if number is not None}
            kept = sorted(marked) if len(marked) <= _FEW else [min(marked), max(marked)]
            self._marks = [(readable(number), marked[number]) for number in kept]
        else:
            words = sorted(set(texts))
            shares = np.array([(words.index(text) + 0.5) / len(words) for text in texts])
            self._marks = [(word or "–", (place + 0.5) / len(words)) for place, word in enumerate(words)]
        self._scale = lambda share: bottom + share * (top - bottom)
        self.places = self._scale(shares)

    def drawn(self, x: float, index: int) -> str:
        """Returns the axis as SVG; the marks of the first axis are on its outer side, where no line crosses.

        Args:
            x: Position.
            index: Number of the axis; names are in two rows in turn, so that long ones do not overlap.
        """
        beside, anchor = (x - 6, "end") if x <= _SIDE else (x + 6, "start")
        at, name_anchor = x, "middle"
        if x <= _SIDE:
            at, name_anchor = 0.0, "start"
        elif x >= _WIDTH - _SIDE:
            at, name_anchor = _WIDTH, "end"
        marks = "".join(
            f'<text class="tick" x="{beside:.1f}" y="{self._scale(share) + 4:.1f}" text-anchor="{anchor}">'
            f"{html.escape(text)}</text>"
            for text, share in self._marks
        )
        return (
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP:g}" y2="{_HEIGHT - _BOTTOM:g}"/>'
            f'<text class="lane" x="{at:.1f}" y="{_TOP - (36 if index % 2 else 14):g}" text-anchor="{name_anchor}">'
            f"{html.escape(self._name)}</text>"
            f"{marks}"
        )


def _as_number(text: str) -> float | None:
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
