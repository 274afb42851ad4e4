"""Charts: round ticks, no spike lost, gaps and wide ranges."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from rlstable.report.chart import Line, chart, mean_of, thinned


def test_thinned_line_keeps_a_spike() -> None:
    values = np.sin(np.linspace(0, 20, 10_000))
    values[1234] = 50.0
    line = thinned(Line("x", np.arange(10_000.0), values))
    assert len(line.x) == 240
    assert line.band is not None
    low, high = line.band
    assert high.max() == 50.0
    assert np.all(low <= line.y) and np.all(line.y <= high)


def test_chart_of_a_wide_range_is_logarithmic_if_allowed() -> None:
    line = Line("x", np.arange(5.0), 10.0 ** np.arange(5.0))
    assert np.allclose(np.diff(heights(chart("t", [line], 4.0, True)), 2), 0, atol=0.2)
    assert not np.allclose(np.diff(heights(chart("t", [line], 4.0)), 2), 0, atol=0.2)


def heights(svg: str) -> list[float]:
    """Of the points of its first line."""
    points = re.search(r'<polyline [^>]*points="([^"]*)"', svg)
    assert points is not None
    return [float(point.split(",")[1]) for point in points[1].split()]


@pytest.mark.parametrize("values", [[3.0], [0.0, 0.0, 0.0], [-1e300, 1e300]])
def test_charts_of_extreme_values_are_valid_svg(values: list[float]) -> None:
    y = np.array(values)
    band = Line("a<b", np.arange(float(len(y))), y, band=(y, y))
    text = chart('say "hello" <&>', [band], float(len(y)), True)
    assert ElementTree.fromstring(text).tag == "svg"
    assert "nan" not in text and "inf" not in text


def seed(curve: dict[float, float]) -> Line:
    return Line("", np.array(list(curve)), np.array(list(curve.values())))


def test_mean_of_seeds_covers_all_steps() -> None:
    """Other steps are interpolated, and a seed that ended early keeps its last value."""
    line = mean_of([seed({0: 0.0, 10: 10.0}), seed({5: 1.0, 15: 3.0})], "a", 0)
    assert (line.x.tolist(), line.y.tolist()) == ([0, 5, 10, 15], [0.5, 3.0, 6.0, 6.5])
    assert line.band is not None and [edge.tolist() for edge in line.band] == [[0, 1, 2, 3], [1, 5, 10, 10]]


def test_mean_of_seeds_takes_the_last_value_of_a_step_that_a_rollback_repeats() -> None:
    repeated = Line("", np.array([1.0, 3.0, 2.0, 3.0]), np.array([1.0, 9.0, 2.0, 3.0]))
    line = mean_of([repeated], "a", 0)
    assert (line.x.tolist(), line.y.tolist()) == ([1, 2, 3], [1, 2, 3])
