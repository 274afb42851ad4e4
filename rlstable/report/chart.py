"""Charts of lines over steps as SVG, coloured by the page's style sheet, readable without JavaScript."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 12.0, 12.0, 38.0
# A line with more points is drawn as means of groups, with a band from the least to the greatest value, so that spikes
# stay visible.
_BINS = 240
_LOG_FROM = 1e3  # least ratio of greatest to least value for a logarithmic scale


class Frame(NamedTuple):
    """Size of a chart, in units of its picture.

    Attributes:
        width: Width with labels.
        height: Height with labels.
        ticks: About this many round numbers on the horizontal axis.
    """

    width: float = 440.0
    height: float = 210.0
    ticks: int = 4


SMALL, LARGE = Frame(), Frame(1000.0, 340.0, 8)


UNITS = {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}  # seconds of each, greatest first


class Axis(NamedTuple):
    """Horizontal axis that the charts of a page share.

    Attributes:
        label: Its title: `environment steps`, or one of `UNITS`.
        end: Greatest number of all charts.
    """

    label: str
    end: float

    @property
    def over_steps(self) -> bool:
        """Whether the axis shows steps instead of time."""
        return self.label not in UNITS


class Mark(NamedTuple):
    """A marked step or value of a chart.

    Attributes:
        text: Tooltip, and label of a value.
        step: Number on the horizontal axis; None for a value that holds at all of them.
        value: Value; None for an event without a value.
        style: Style: `good`, `warn`, `bad` or `plain`.
    """

    text: str
    step: float | None = None
    value: float | None = None
    style: str = "plain"


class Line(NamedTuple):
    """A line of a chart.

    Attributes:
        name: Name at the cursor.
        x: Numbers on the horizontal axis, `[N]`.
        y: Values, `[N]`, finite.
        colour: Index of the colour in the style sheet.
        low: Lower edge of a band, `[N]`; None without a band.
        high: Upper edge of the band.
        dashed: Whether the line is dashed.
        thin: Whether the line is thin and pale, as one of several seeds.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    dashed: bool = False
    thin: bool = False


class Scale(NamedTuple):
    """Scale of an axis: converts numbers to positions.

    Attributes:
        low: Number at the start.
        high: Number at the end.
        start: Position of the start.
        end: Position of the end.
        log: Whether the scale is logarithmic.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, values: np.ndarray | float) -> np.ndarray:
        """Returns the positions of numbers."""
        low, high, numbers = self.low, self.high, np.asarray(values, np.float64)
        if self.log:
            low, high, numbers = math.log10(low), math.log10(high), np.log10(np.maximum(numbers, self.low))
        return np.asarray(self.start + (numbers - low) / (high - low) * (self.end - self.start))


def thinned(line: Line) -> Line:
    """Returns the line with at most `_BINS` points, and with a band if points were grouped."""
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


def chart(
    title: str,
    lines: Sequence[Line],
    axis: Axis,
    may_be_log: bool = False,
    frame: Frame = SMALL,
    marks: Sequence[Mark] = (),
) -> str:
    """Returns a chart as SVG, with the data of the page's cursor script.

    Args:
        title: Label for screen readers.
        lines: At least one line; each has at least one point.
        axis: The horizontal axis.
        may_be_log: Whether a wide range of positive numbers gets a logarithmic scale.
        frame: Size of the chart.
        marks: Marked steps and values.
    """
    lines = [thinned(line) for line in lines]
    x = Scale(0.0, axis.end or 1.0, _LEFT, frame.width - _RIGHT)
    y = _y_scale(lines, may_be_log, frame, [mark.value for mark in marks if mark.value is not None])
    parts = [_grid(x, y, frame, axis.label)]
    parts += [_band(line.x, line.low, line.high, line.colour, x, y) for line in lines if line.low is not None]
    parts += [_path(line, x, y) for line in lines]
    parts += [_mark(mark, x, y, frame) for mark in marks]
    data = "".join(_points(line, x, y) for line in lines)
    classes = f"chart {'by-step' if axis.over_steps else 'by-clock'} {'wide' if frame is LARGE else 'narrow'}"
    size = f"0 0 {frame.width:g} {frame.height:g}"
    parts.append(f'<line class="cursor" y1="{_TOP:g}" y2="{frame.height - _BOTTOM:g}"/>')
    return (
        f'<svg class="{classes}" data-axis="{axis.label}" viewBox="{size}" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(parts)}{data}</svg>'
    )


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Returns about `about` round numbers between two numbers."""
    span = high - low
    raw = span / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * min((1, 2, 2.5, 5, 10), key=lambda factor: abs(factor * power - raw))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * number for number in range(first, last + 1)]


def readable(value: float, step: float | None = None) -> str:
    """Returns a number as a short text: 12.3k, 4M, 1e-05.

    Args:
        value: The number.
        step: Distance between neighbouring numbers, which must look different; None for a single number.
    """
    if value == 0:
        return "0"
    size = abs(value)
    digits = 3 if step is None else max(3, math.ceil(math.log10(size / step)) + 2)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit and size < limit * 1e3:
            return f"{value / limit:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def _y_scale(lines: Sequence[Line], may_be_log: bool, frame: Frame, more: Sequence[float]) -> Scale:
    drawn = [part for line in lines for part in (line.y, line.low, line.high) if part is not None]
    values = np.concatenate([*drawn, np.array(more)])
    low, high = float(values.min()), float(values.max())
    log = may_be_log and low > 0 and high / low >= _LOG_FROM
    if not log:
        room = (high - low) * 0.05 or max(abs(high) * 0.1, 1e-6)
        low, high = low - room, high + room
    return Scale(low, high, frame.height - _BOTTOM, _TOP, log)


def _grid(x: Scale, y: Scale, frame: Frame, label: str) -> str:
    left, right, below = _LEFT, frame.width - _RIGHT, frame.height - _BOTTOM
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
        found.append(f'<line class="grid" x1="{left:g}" x2="{right:g}" y1="{at:.1f}" y2="{at:.1f}"/>')
        found.append(
            f'<text class="tick" x="{left - 6:g}" y="{at + 4:.1f}" text-anchor="end">{readable(value, step)}</text>'
        )
    for value in ticks(x.low, x.high, frame.ticks):
        at = float(x(value))
        anchor = "end" if at > right - 12 else "middle"
        found.append(
            f'<text class="tick" x="{at:.1f}" y="{below + 16:g}" text-anchor="{anchor}">{readable(value)}</text>'
        )
    middle = (left + right) / 2
    found.append(f'<text class="axis" x="{middle:g}" y="{below + 32:g}" text-anchor="middle">{label}</text>')
    return "".join(found)


def _mark(mark: Mark, x: Scale, y: Scale, frame: Frame) -> str:
    title = f"<title>{html.escape(mark.text)}</title>"
    if mark.step is None and mark.value is not None:
        at = float(y(mark.value))
        label = f'<text x="{_LEFT + 6:g}" y="{at - 5:.1f}">{html.escape(mark.text)}</text>'
        return f'<line class="rule" x1="{_LEFT:g}" x2="{frame.width - _RIGHT:g}" y1="{at:.1f}" y2="{at:.1f}"/>{label}'
    across = float(x(mark.step or 0.0))
    if mark.value is None:
        ends = f'x1="{across:.1f}" x2="{across:.1f}" y1="{_TOP:g}" y2="{frame.height - _BOTTOM:g}"'
        return f'<g>{title}<line class="event {mark.style}" {ends}/></g>'
    return f'<circle class="mark {mark.style}" cx="{across:.1f}" cy="{float(y(mark.value)):.1f}" r="5">{title}</circle>'


def _band(steps: np.ndarray, low: np.ndarray, high: Any, colour: int, x: Scale, y: Scale) -> str:
    across = x(steps)
    forth = [f"{a:.1f},{b:.1f}" for a, b in zip(across, y(high), strict=True)]
    back = [f"{a:.1f},{b:.1f}" for a, b in zip(across[::-1], y(low)[::-1], strict=True)]
    return f'<polygon class="band c{colour}" points="{" ".join(forth + back)}"/>'


def _path(line: Line, x: Scale, y: Scale) -> str:
    points = list(zip(x(line.x), y(line.y), strict=True))
    dashed = " dashed" * line.dashed + " thin" * line.thin
    if len(points) == 1:
        return f'<circle class="dot c{line.colour}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3"/>'
    text = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline class="line c{line.colour}{dashed}" points="{text}"/>'


def _points(line: Line, x: Scale, y: Scale) -> str:
    """Returns the position, number on the axis and value of each point, for the cursor."""
    points = [f"{a:.1f},{s:.10g},{v:.5g}" for a, s, v in zip(x(line.x), line.x, line.y, strict=True)]
    name = html.escape(line.name)
    return f'<metadata data-name="{name}" data-colour="{line.colour}" data-points="{";".join(points)}"></metadata>'
