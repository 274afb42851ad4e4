"""Mean, median and interquartile mean of several returns, each with an interval.

Every run imports this and few need it: `scipy.stats`, a third of what a run imports before its environment, waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

_RESAMPLES = 10_000
# Numbers drawn at a time: a thousand episodes need no gigabyte for their interval.
_AT_ONCE = 2_000_000
CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A number, and where it lies with 95 % confidence; None where a single value says nothing of that."""

    value: float
    low: float | None
    high: float | None


def interquartile_mean(values: Any, axis: int = -1) -> Any:
    """The mean of the middle half of the values.

    Less noisy than the median and, unlike the mean, deaf to a few strange episodes (Agarwal et al. 2021, "Deep
    reinforcement learning at the edge of the statistical precipice").
    """
    from scipy import stats

    return stats.trim_mean(values, 0.25, axis=axis)


STATISTICS: dict[str, Callable[..., Any]] = {"mean": np.mean, "median": np.median, "iqm": interquartile_mean}


def estimate(values: Any, statistic: Callable[..., Any] = np.mean) -> Estimate:
    """A statistic of independent values with its 95 % interval, a percentile bootstrap that always draws alike.

    Args:
        values: One or more finite numbers, an array or a sequence.
        statistic: Of an array along `axis`.

    Raises:
        ValueError: There are no values, or one is not finite.
    """
    values = np.asarray(values, np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"estimate: finite values are needed, got {values}")
    value = float(statistic(values, axis=0))
    if values.size == 1:
        return Estimate(value, None, None)
    from scipy import stats

    found = stats.bootstrap(
        (values,),
        statistic,
        confidence_level=CONFIDENCE,
        n_resamples=_RESAMPLES,
        batch=max(1, _AT_ONCE // values.size),
        method="percentile",
        rng=np.random.default_rng(0),
        vectorized=True,
    ).confidence_interval
    return Estimate(value, float(found.low), float(found.high))
