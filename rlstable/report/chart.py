"""Charts of lines over environment steps as SVG, coloured by the page's style sheet, readable without JavaScript."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 12.0, 12.0, 38.0
_SMALL, _LARGE = (440.0, 210.0, 4), (1000.0, 340.0, 8)  # width, height, and about how many numbers below
# A line with more points is drawn as means of groups, with a band from the least to the greatest value, so that spikes
# stay visible.
_BINS = 240
_LOG_FROM = 1e3  # least ratio of greatest to least value for a logarithmic scale


class Mark(NamedTuple):
    """A marked step or value of a chart."""

    text: str  # tooltip, and label of a value
    step: float | None = None  # None for a value that holds at all steps
    value: float | None = None  # None for an event without a value
    style: str = "plain"  # or good, warn, bad


class Line(NamedTuple):
    """A line of a chart."""

    name: str
    x: np.ndarray  # steps, [N]
    y: np.ndarray  # finite values, [N]
    colour: int = 0  # index in the style sheet
    band: tuple[np.ndarray, np.ndarray] | None = None  # lower and upper edge, [N] each
    dashed: bool = False
    thin: bool = False  # one of several seeds


class Scale(NamedTuple):
    """Converts the numbers of an axis, from `low` to `high`, to positions from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, values: np.ndarray | float) -> np.ndarray:
        low, high, numbers = self.low, self.high, np.asarray(values, np.float64)
        if self.log:
            low, high, numbers = math.log10(low), math.log10(high), np.log10(np.maximum(numbers, self.low))
        return np.asarray(self.start + (numbers - low) / (high - low) * (self.end - self.start))


def mean_of(lines: Sequence[Line], name: str, colour: int) -> Line:
    """The mean of the lines of seeds, with a band from the least to the greatest seed.

    Between its points a seed is interpolated, and beyond them it counts with its last value: a mean without the seeds
    that ended early, because they were good or bad, would mislead. Of a repeated step the last value counts.
    """
    latest = [dict(zip(line.x.tolist(), line.y.tolist(), strict=True)) for line in lines]
    steps = np.array(sorted(set().union(*latest)))
    values = np.stack([np.interp(steps, sorted(one), [one[step] for step in sorted(one)]) for one in latest])
    return Line(name, steps, values.mean(axis=0), colour, (values.min(axis=0), values.max(axis=0)))


def thinned(line: Line) -> Line:
    """The line with at most `_BINS` points, and with a band if points were grouped."""
    if len(line.x) <= _BINS:
        return line
    edges = np.linspace(0, len(line.x), _BINS + 1).astype(int)
    groups = [slice(a, b) for a, b in itertools.pairwise(edges)]
    low, high = line.band or (line.y, line.y)
    x, y = (np.array([values[group].mean() for group in groups]) for values in (line.x, line.y))
    band = np.array([low[group].min() for group in groups]), np.array([high[group].max() for group in groups])
    return line._replace(x=x, y=y, band=band)


def chart(
    title: str,
    lines: Sequence[Line],
    end: float,
    may_be_log: bool = False,
    large: bool = False,
    marks: Sequence[Mark] = (),
) -> str:
    """A chart of lines with points up to the step `end` as SVG, with the data of the page's cursor script.

    `may_be_log` allows a logarithmic scale for a wide range of positive numbers; `large` is as wide as the page.
    """
    width, height, about = _LARGE if large else _SMALL
    lines = [thinned(line) for line in lines]
    x = Scale(0.0, end or 1.0, _LEFT, width - _RIGHT)
    drawn = [part for line in lines for part in (line.y, *(line.band or ()))]
    values = np.concatenate([*drawn, [mark.value for mark in marks if mark.value is not None]])
    y = _y_scale(float(values.min()), float(values.max()), may_be_log, height)
    parts = [_grid(x, y, about)]
    parts += [_band(line.colour, x(line.x), y(line.band[0]), y(line.band[1])) for line in lines if line.band]
    parts += [_path(line, x, y) for line in lines]
    parts += [_mark(mark, x, y) for mark in marks]
    parts.append(f'<line class="cursor" y1="{y.end:g}" y2="{y.start:g}"/>')
    parts += [_points(line, x) for line in lines]
    return (
        f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
    )


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Returns about `about` round numbers between two numbers."""
    raw = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * min((1, 2, 2.5, 5, 10), key=lambda factor: abs(factor * power - raw))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * number for number in range(first, last + 1)]


def readable(value: float, step: float | None = None) -> str:
    """A number as a short text: 12.3k, 4M, 1e-05. Numbers that are `step` apart look different."""
    if value == 0:
        return "0"
    size = abs(value)
    digits = 3 if step is None else max(3, math.ceil(math.log10(size / step)) + 2)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit and size < limit * 1e3:
            return f"{value / limit:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def _y_scale(low: float, high: float, may_be_log: bool, height: float) -> Scale:
    log = may_be_log and low > 0 and high / low >= _LOG_FROM
    if not log:
        room = (high - low) * 0.05 or max(abs(high) * 0.1, 1e-6)
        low, high = low - room, high + room
    return Scale(low, high, height - _BOTTOM, _TOP, log)


def _grid(x: Scale, y: Scale, about: int) -> str:
    if y.log:
        exponents = range(math.ceil(math.log10(y.low)), math.floor(math.log10(y.high)) + 1)
        heights = [10.0**exponent for exponent in exponents[:: max(1, len(exponents) // 4)]]
    else:
        heights = ticks(y.low, y.high)
    step = heights[1] - heights[0] if len(heights) > 1 and not y.log else None
    found = [
        f'<line class="grid" x1="{x.start:g}" x2="{x.end:g}" y1="{(at := float(y(value))):.1f}" y2="{at:.1f}"/>'
        f'<text class="tick" x="{x.start - 6:g}" y="{at + 4:.1f}" text-anchor="end">{readable(value, step)}</text>'
        for value in heights
    ]
    found += [
        f'<text class="tick" x="{(at := float(x(value))):.1f}" y="{y.start + 16:g}" '
        f'text-anchor="{"end" if at > x.end - 12 else "middle"}">{readable(value)}</text>'
        for value in ticks(x.low, x.high, about)
    ]
    middle, below = (x.start + x.end) / 2, y.start + 32
    found.append(f'<text class="axis" x="{middle:g}" y="{below:g}" text-anchor="middle">environment steps</text>')
    return "".join(found)


def _mark(mark: Mark, x: Scale, y: Scale) -> str:
    label = html.escape(mark.text)
    if mark.step is None and mark.value is not None:
        at = float(y(mark.value))
        return (
            f'<line class="rule" x1="{x.start:g}" x2="{x.end:g}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text x="{x.start + 6:g}" y="{at - 5:.1f}">{label}</text>'
        )
    across, title = float(x(mark.step or 0.0)), f"<title>{label}</title>"
    if mark.value is None:
        ends = f'x1="{across:.1f}" x2="{across:.1f}" y1="{y.end:g}" y2="{y.start:g}"'
        return f'<g>{title}<line class="event {mark.style}" {ends}/></g>'
    return f'<circle class="mark {mark.style}" cx="{across:.1f}" cy="{float(y(mark.value)):.1f}" r="5">{title}</circle>'


def _polygon(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def _band(colour: int, x: np.ndarray, low: np.ndarray, high: np.ndarray) -> str:
    return f'<polygon class="band c{colour}" points="{_polygon(x, high)} {_polygon(x[::-1], low[::-1])}"/>'


def _path(line: Line, x: Scale, y: Scale) -> str:
    across, up = x(line.x), y(line.y)
    if len(across) == 1:
        return f'<circle class="dot c{line.colour}" cx="{across[0]:.1f}" cy="{up[0]:.1f}" r="3"/>'
    style = " dashed" * line.dashed + " thin" * line.thin
    return f'<polyline class="line c{line.colour}{style}" points="{_polygon(across, up)}"/>'


def _points(line: Line, x: Scale) -> str:
    points = [f"{a:.1f},{s:.10g},{v:.5g}" for a, s, v in zip(x(line.x), line.x, line.y, strict=True)]
    name = html.escape(line.name)
    return f'<metadata data-name="{name}" data-colour="{line.colour}" data-points="{";".join(points)}"></metadata>'
