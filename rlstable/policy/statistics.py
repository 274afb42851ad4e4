"""Mean, median and interquartile mean of several returns, with confidence intervals; imports `scipy.stats` late."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

_NUMBERS_PER_BATCH = 2_000_000  # of the bootstrap; bounds its memory


class Estimate(NamedTuple):
    """A statistic and its 95 % confidence interval; `low` and `high` are None for a single value."""

    value: float
    low: float | None
    high: float | None


def interquartile_mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """The mean of the middle half of the values.

    Less noisy than the median and, unlike the mean, robust to a few extreme episodes (Agarwal et al. 2021, "Deep
    reinforcement learning at the edge of the statistical precipice").
    """
    from scipy import stats

    return stats.trim_mean(values, 0.25, axis=axis)


STATISTICS: dict[str, Callable[..., np.ndarray]] = {"mean": np.mean, "median": np.median, "iqm": interquartile_mean}


def estimate(values: ArrayLike, statistic: Callable[..., np.ndarray] = np.mean) -> Estimate:
    """A statistic of independent values with its 95 % interval, by a percentile bootstrap with a fixed seed.

    `statistic` is a function of an array and its `axis`. Raises `ValueError` without values, or if one is not finite.
    """
    values = np.asarray(values, np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"estimate: values must be one or more finite numbers, got {values}")
    value = float(statistic(values, axis=0))
    if values.size == 1:
        return Estimate(value, None, None)
    from scipy import stats

    interval = stats.bootstrap(
        (values,),
        statistic,
        confidence_level=0.95,
        n_resamples=10_000,
        batch=max(1, _NUMBERS_PER_BATCH // values.size),
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(value, float(interval.low), float(interval.high))
