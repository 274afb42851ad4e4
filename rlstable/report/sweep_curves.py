"""Learning curves of a sweep: per setting the mean over its seeds, with a band from the least to the greatest seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlstable.report.chart import Line
from rlstable.report.markup import colour
from rlstable.report.sweep import RETURN, Job, Setting

NOTE = "of evaluations, mean over seeds; band from the least to the greatest seed"
ENDED = "; dashed: a seed that has ended counts with its last evaluation"


class Series(NamedTuple):
    """Evaluations of a seed.

    Attributes:
        steps: Steps, `[N]`, ascending.
        returns: Returns, `[N]`.
        ended: Whether the run has ended, so that its last evaluation is that of the policy it leaves.
    """

    steps: np.ndarray
    returns: np.ndarray
    ended: bool


def curves_of(settings: Sequence[Setting], keys: Sequence[str]) -> list[Line]:
    """Returns the learning curves of settings, the n-th in the n-th colour; settings without evaluations have none.

    Args:
        settings: The settings.
        keys: Keys that the names of the curves show.
    """
    lines = []
    for index, setting in enumerate(settings):
        series = [_series(job) for job in setting.jobs]
        name = setting.label(keys) if keys else "mean of seeds"
        lines += mean_over_seeds([one for one in series if one.steps.size], name, colour(index))
    return lines


def mean_over_seeds(series: Sequence[Series], name: str, of_colour: int) -> list[Line]:
    """Returns the mean over seeds as a line, solid where all seeds have evaluations and dashed from there on.

    A seed that was evaluated at other steps is interpolated between its evaluations. The dashed line holds the last
    evaluation of an ended seed: without the seeds that ended early, because they were good or bad, it would mislead. A
    seed that has not ended is left out beyond its last evaluation.

    Args:
        series: Evaluations of each seed, at least one each.
        name: Name of the line.
        of_colour: Index of the colour.
    """
    if not series:
        return []
    steps = np.unique(np.concatenate([one.steps for one in series]))
    held = [one.returns[-1] if one.ended else np.nan for one in series]
    values = np.stack(
        [np.interp(steps, one.steps, one.returns, np.nan, last) for one, last in zip(series, held, strict=True)]
    )
    first, last = max(one.steps[0] for one in series), min(one.steps[-1] for one in series)
    solid = np.flatnonzero((first <= steps) & (steps <= last))
    dashed = np.arange(solid[-1] if solid.size else 0, len(steps))  # begins where the solid line ends
    lines = [_line(name, steps, values, solid, of_colour)] if solid.size else []
    if dashed.size > 1 or not solid.size:
        lines.append(_line(f"{name}, some ended", steps, values, dashed, of_colour)._replace(dashed=True))
    return lines


def _line(name: str, steps: np.ndarray, values: np.ndarray, part: np.ndarray, of_colour: int) -> Line:
    drawn = values[:, part]
    low, mean, high = (reduce(drawn, axis=0) for reduce in (np.nanmin, np.nanmean, np.nanmax))
    return Line(name, steps[part], mean, of_colour, low, high)


def _series(job: Job) -> Series:
    """Returns the evaluations in the order of their steps, the last one of each step; a rollback repeats steps."""
    if job.record is None:
        return Series(np.array([]), np.array([]), job.result is not None)
    found, values = job.record.series(RETURN)
    latest = dict(zip(found, values, strict=True))
    steps = sorted(latest)
    return Series(np.array(steps), np.array([latest[step] for step in steps]), job.result is not None)
