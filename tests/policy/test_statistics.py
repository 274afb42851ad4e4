"""Statistics of returns and their intervals."""

from __future__ import annotations

import numpy as np
import pytest
from commands import printed_by
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rlstable.policy.statistics import STATISTICS, Estimate, estimate, interquartile_mean

FEW = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30)


def test_scipy_is_imported_only_when_an_interval_is_computed() -> None:
    code = "import sys, rlstable.policy.statistics as e; "
    code += "print('scipy.stats' in sys.modules, e.interquartile_mean([1.0, 2.0]))"
    assert printed_by(code) == ["False 1.5"]


def test_interquartile_mean_is_the_mean_of_the_middle_half() -> None:
    assert interquartile_mean(np.array([-1e9, 1.0, 2.0, 3.0, 4.0, 1e9, 5.0, 0.0])) == 2.5


@pytest.mark.parametrize("name", STATISTICS)
@given(values=FEW)
def test_interval_lies_within_the_values_and_is_deterministic(name: str, values: list[float]) -> None:
    found = estimate(values, STATISTICS[name])
    assert found == estimate(values, STATISTICS[name])
    assert found.low is not None and found.high is not None
    slack = 1e-6 * max(map(abs, values))
    assert min(values) - slack <= found.low <= found.high + slack <= max(values) + 2 * slack


def test_interval_of_a_mean_is_close_to_the_normal_interval() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    low, high = stats.norm.interval(0.95, values.mean(), values.std(ddof=1) / np.sqrt(400))
    found = estimate(values)
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.02)


def test_interval_of_one_value_is_none_and_of_equal_values_a_point() -> None:
    assert estimate([5.0]) == Estimate(5.0, None, None)
    assert estimate([5.0, 5.0, 5.0]) == Estimate(5.0, 5.0, 5.0)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_statistics_reject_empty_and_non_finite_values(values: list[float]) -> None:
    with pytest.raises(ValueError, match="one or more finite numbers"):
        estimate(values)
