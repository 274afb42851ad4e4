"""Lines over steps as SVG: drawn once in Python, coloured by the page's style, readable without a script."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_WIDTH, _HEIGHT = 440.0, 190.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 10.0, 12.0, 22.0
# More points than this are drawn as the mean of their neighbourhood, with a band from the least to the greatest, so
# that no spike is lost.
_BINS = 240
_LOG_FROM = 1e3  # ratio of greatest to least from which a scale that may be logarithmic is


class Line(NamedTuple):
    """A line of a chart.

    Attributes:
        name: For the legend and the cursor.
        x: Steps, `[N]`.
        y: Values, `[N]`, finite.
        colour: The number of its colour.
        low: Lower edge of a band around it, `[N]`; None for none.
        high: Upper edge.
        dashed: Whether it is a lesser line.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    dashed: bool = False


class Scale(NamedTuple):
    """Scale of an axis: numbers to positions.

    Attributes:
        low: The number at the start.
        high: The number at the end.
        start: Its place.
        end: Its place.
        log: Whether equal ratios are equally long.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, values: np.ndarray | float) -> np.ndarray:
        """Places of numbers."""
        low, high, numbers = self.low, self.high, np.asarray(values, np.float64)
        if self.log:
            low, high, numbers = math.log10(low), math.log10(high), np.log10(np.maximum(numbers, self.low))
        return np.asarray(self.start + (numbers - low) / (high - low) * (self.end - self.start))


def thinned(line: Line) -> Line:
    """A line of few enough points, with a band where some were left out."""
    if len(line.x) <= _BINS:
        return line
    edges = np.linspace(0, len(line.x), _BINS + 1).astype(int)
    groups = [slice(a, b) for a, b in itertools.pairwise(edges)]
    low = line.y if line.low is None else line.low
    high = line.y if line.high is None else line.high
    return line._replace(
        x=np.array([line.x[group].mean() for group in groups]),
        y=np.array([line.y[group].mean() for group in groups]),
        low=np.array([low[group].min() for group in groups]),
        high=np.array([high[group].max() for group in groups]),
    )


def chart(title: str, lines: Sequence[Line], end: float, may_be_log: bool = False) -> str:
    """A chart as SVG, with what a script needs for a cursor in its attributes.

    Args:
        title: What is on it, for those who do not see it.
        lines: One or more, of one point or more each.
        end: The greatest step of all charts, so that they can be compared.
        may_be_log: Whether a wide range of positive numbers is shown on a logarithmic scale.
    """
    lines = [thinned(line) for line in lines]
    x = Scale(0.0, max(end, 1.0), _LEFT, _WIDTH - _RIGHT)
    y = _upright(lines, may_be_log)
    marks = [_grid(x, y)]
    marks += [_band(line.x, line.low, line.high, line.colour, x, y) for line in lines if line.low is not None]
    marks += [_path(line, x, y) for line in lines]
    data = "".join(_points(line, x, y) for line in lines)
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{html.escape(title)}">'
        f'{"".join(marks)}<line class="cursor" y1="{_TOP:g}" y2="{_HEIGHT - _BOTTOM:g}"/>{data}</svg>'
    )


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers between two numbers, some `about` of them."""
    span = high - low
    raw = span / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * min((1, 2, 2.5, 5, 10), key=lambda factor: abs(factor * power - raw))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * number for number in range(first, last + 1)]


def readable(value: float, step: float | None = None) -> str:
    """A number in few letters: 12.3k, 4M, 1e-05.

    Args:
        value: The number.
        step: The distance to its neighbours, from which it has to be told; None where it stands alone.
    """
    if value == 0:
        return "0"
    size = abs(value)
    digits = 3 if step is None else max(3, math.ceil(math.log10(size / step)) + 2)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit and size < limit * 1e3:
            return f"{value / limit:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def _upright(lines: Sequence[Line], may_be_log: bool) -> Scale:
    values = np.concatenate([part for line in lines for part in (line.y, line.low, line.high) if part is not None])
    low, high = float(values.min()), float(values.max())
    log = may_be_log and low > 0 and high / low >= _LOG_FROM
    if not log:
        room = (high - low) * 0.05 or max(abs(high) * 0.1, 1e-6)
        low, high = low - room, high + room
    return Scale(low, high, _HEIGHT - _BOTTOM, _TOP, log)


def _grid(x: Scale, y: Scale) -> str:
    if y.log:
        exponents = range(math.ceil(math.log10(y.low)), math.floor(math.log10(y.high)) + 1)
        stride = max(1, len(exponents) // 4)
        heights = [10.0**exponent for exponent in exponents[::stride]]
    else:
        heights = ticks(y.low, y.high)
    step = heights[1] - heights[0] if len(heights) > 1 and not y.log else None
    found = []
    for value in heights:
        at = float(y(value))
        found.append(f'<line class="grid" x1="{_LEFT:g}" x2="{_WIDTH - _RIGHT:g}" y1="{at:.1f}" y2="{at:.1f}"/>')
        found.append(
            f'<text class="tick" x="{_LEFT - 6:g}" y="{at + 3.5:.1f}" text-anchor="end">{readable(value, step)}</text>'
        )
    for value in ticks(x.low, x.high):
        at = float(x(value))
        anchor = "end" if at > _WIDTH - _RIGHT - 12 else "middle"
        found.append(
            f'<text class="tick" x="{at:.1f}" y="{_HEIGHT - 6:g}" text-anchor="{anchor}">{readable(value)}</text>'
        )
    return "".join(found)


def _band(steps: np.ndarray, low: np.ndarray, high: Any, colour: int, x: Scale, y: Scale) -> str:
    across = x(steps)
    there = [f"{a:.1f},{b:.1f}" for a, b in zip(across, y(high), strict=True)]
    back = [f"{a:.1f},{b:.1f}" for a, b in zip(across[::-1], y(low)[::-1], strict=True)]
    return f'<polygon class="band c{colour}" points="{" ".join(there + back)}"/>'


def _path(line: Line, x: Scale, y: Scale) -> str:
    places = list(zip(x(line.x), y(line.y), strict=True))
    dashed = " dashed" if line.dashed else ""
    if len(places) == 1:
        return f'<circle class="dot c{line.colour}" cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3"/>'
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    return f'<polyline class="line c{line.colour}{dashed}" points="{points}"/>'


def _points(line: Line, x: Scale, y: Scale) -> str:
    """A line's points for the cursor: place, step and value of each."""
    told = [f"{a:.1f},{s:.0f},{v:.5g}" for a, s, v in zip(x(line.x), line.x, line.y, strict=True)]
    name = html.escape(line.name)
    return f'<metadata data-name="{name}" data-colour="{line.colour}" data-points="{";".join(told)}"></metadata>'
