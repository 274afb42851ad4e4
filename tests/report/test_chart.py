"""Charts: round ticks, no spike lost, gaps and wide ranges."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlstable.report.chart import Axis, Line, Scale, chart, readable, thinned, ticks


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 8))
def test_ticks_are_few_and_within_the_range(low: float, span: float, about: int) -> None:
    high = low + span
    assume(high - low > 1e-9 * abs(low))
    found = ticks(low, high, about)
    assert len(found) <= 2.5 * about + 1
    slack = 1e-6 * (high - low)
    assert all(low - slack <= value <= high + slack for value in found)
    assert np.allclose(np.diff(found, 2), 0, atol=1e-6 * max(abs(low), abs(high), 1e-6))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12345, "12.3k"),
        (4_000_000, "4M"),
        (-2500, "-2.5k"),
        (0.00012, "0.00012"),
        (999, "999"),
        (2**40, "1.1T"),
    ],
)
def test_numbers_on_an_axis_are_short(value: float, text: str) -> None:
    assert readable(value) == text


def test_neighbouring_ticks_have_different_labels() -> None:
    assert [readable(value, 0.05) for value in (11.85, 11.9, 11.95, 12.0)] == ["11.85", "11.9", "11.95", "12"]
    assert [readable(value, 2) for value in (1276, 1278, 1280)] == ["1.276k", "1.278k", "1.28k"]


def test_thinned_line_keeps_a_spike() -> None:
    values = np.sin(np.linspace(0, 20, 10_000))
    values[1234] = 50.0
    line = thinned(Line("x", np.arange(10_000.0), values))
    assert len(line.x) == 240
    assert line.high is not None and line.low is not None
    assert line.high.max() == 50.0
    assert np.all(line.low <= line.y) and np.all(line.y <= line.high)


def test_chart_of_a_wide_range_is_logarithmic_if_allowed() -> None:
    line = Line("x", np.arange(5.0), 10.0 ** np.arange(5.0))
    assert np.allclose(np.diff(heights(chart("t", [line], Axis("environment steps", 4.0), True)), 2), 0, atol=0.2)
    assert not np.allclose(np.diff(heights(chart("t", [line], Axis("environment steps", 4.0))), 2), 0, atol=0.2)


def heights(svg: str) -> list[float]:
    """Of the points of its first line."""
    points = re.search(r'<polyline [^>]*points="([^"]*)"', svg)
    assert points is not None
    return [float(point.split(",")[1]) for point in points[1].split()]


@pytest.mark.parametrize("values", [[3.0], [0.0, 0.0, 0.0], [-1e300, 1e300]])
def test_charts_of_extreme_values_are_valid_svg(values: list[float]) -> None:
    y = np.array(values)
    band = Line("a<b", np.arange(float(len(y))), y, low=y, high=y)
    text = chart('say "hello" <&>', [band], Axis("hours", float(len(y))), True)
    assert ElementTree.fromstring(text).tag == "svg"
    assert "nan" not in text and "inf" not in text


def test_chart_scale_is_linear_or_logarithmic() -> None:
    assert Scale(0, 10, 100, 200)(2.5) == 125
    assert math.isclose(float(Scale(1, 100, 0, 2, True)(10)), 1.0)
