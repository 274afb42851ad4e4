"""Reads a sweep, groups its jobs by setting, and draws parallel coordinates of settings and returns."""

from __future__ import annotations

import dataclasses
import html
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlstable.config import ConfigError
from rlstable.io.run_folder import read_result, return_of
from rlstable.policy.statistics import Estimate, estimate, interquartile_mean
from rlstable.report.chart import readable

_WIDTH, _HEIGHT, _SIDE, _TOP, _BOTTOM = 1000.0, 320.0, 70.0, 40.0, 26.0
_LOG_FROM = 50.0  # least ratio of positive values for a logarithmic axis


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes:
        name: Name of its folder.
        values: Overrides as text by key, with the seed.
        result: Content of its `result.json`.
    """

    name: str
    values: dict[str, str]
    result: dict[str, Any]

    @property
    def score(self) -> float | None:
        """Best return, confirmed if possible; None without a return."""
        return return_of(self.result)

    @property
    def setting(self) -> tuple[tuple[str, str], ...]:
        """Overrides without seeds."""
        return tuple((key, value) for key, value in self.values.items() if key not in ("seed", "seeds"))


@dataclasses.dataclass(frozen=True)
class Setting:
    """Jobs that differ only in their seed.

    Attributes:
        values: Overrides of all jobs.
        jobs: The jobs.
    """

    values: tuple[tuple[str, str], ...]
    jobs: tuple[Job, ...]

    @property
    def iqm(self) -> Estimate | None:
        """Interquartile mean of the best returns, over jobs with a return."""
        scores = [job.score for job in self.jobs if job.score is not None]
        return estimate(scores, interquartile_mean) if scores else None

    @property
    def stop_reasons(self) -> dict[str, int]:
        """Number of jobs by stop reason."""
        names = [str(job.result.get("stop_reason")) for job in self.jobs]
        return {name: names.count(name) for name in dict.fromkeys(names)}


def read_sweep(folder: Path) -> list[Job]:
    """Returns the finished jobs of a sweep in order, one job per seed.

    Raises:
        ConfigError: No job has ended.
    """
    if not folder.is_dir():
        raise ConfigError(f"sweep: there is no folder {folder}; sweeps are in runs/sweeps/<time>")
    folders = sorted((path.parent for path in folder.glob("*/result.json")), key=_number)
    results = [(job.name, read_result(job)) for job in folders]
    jobs = [job for name, result in results if result is not None for job in _jobs(name, result)]
    if not jobs:
        raise ConfigError(f"sweep: no job in {folder} has ended; sweeps are in runs/sweeps/<time>; runs need run=...")
    return jobs


def settings_of(jobs: Sequence[Job]) -> list[Setting]:
    """Returns the settings, best first; settings without a return are last."""
    grouped: dict[tuple[tuple[str, str], ...], list[Job]] = {}
    for job in jobs:
        grouped.setdefault(job.setting, []).append(job)
    settings = [Setting(values, tuple(own)) for values, own in grouped.items()]
    return sorted(settings, key=lambda setting: -math.inf if setting.iqm is None else setting.iqm.value, reverse=True)


def parallel_coordinates(jobs: Sequence[Job]) -> str:
    """Returns an SVG with a line per job through its varied values to its best return.

    The result is empty if no setting varies or fewer than two jobs have a return.
    """
    scored = [job for job in jobs if job.score is not None]
    keys = [key for key in dict.fromkeys(key for job in jobs for key in job.values) if key not in ("seed", "seeds")]
    keys = [key for key in keys if len({job.values.get(key) for job in jobs}) > 1]
    if not keys or len(scored) < 2:
        return ""
    axes = [_Axis(key, [job.values.get(key, "") for job in scored]) for key in keys]
    axes.append(_Axis("best return", [repr(job.score) for job in scored], may_be_log=False))
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
    drawn = "".join(axis.drawn(x) for x, axis in zip(places, axes, strict=True))
    return (
        f'<svg class="timeline" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" '
        f'aria-label="varied settings and the best return">{drawn}{"".join(lines)}</svg>'
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
            marked = {float(number): share for number, share in zip(numbers, shares, strict=True) if number is not None}
            kept = sorted(marked) if len(marked) <= 6 else [min(marked), max(marked)]
            self._marks = [(readable(number), marked[number]) for number in kept]
        else:
            words = sorted(set(texts))
            shares = np.array([(words.index(text) + 0.5) / len(words) for text in texts])
            self._marks = [(word or "–", (place + 0.5) / len(words)) for place, word in enumerate(words)]
        self._scale = lambda share: bottom + share * (top - bottom)
        self.places = self._scale(shares)

    def drawn(self, x: float) -> str:
        """Returns the axis as SVG; the marks of the first axis are on its outer side, where no line crosses."""
        beside, anchor = (x - 6, "end") if x <= _SIDE else (x + 6, "start")
        marks = "".join(
            f'<text class="tick" x="{beside:.1f}" y="{self._scale(share) + 4:.1f}" text-anchor="{anchor}">'
            f"{html.escape(text)}</text>"
            for text, share in self._marks
        )
        return (
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP:g}" y2="{_HEIGHT - _BOTTOM:g}"/>'
            f'<text class="lane" x="{x:.1f}" y="{_TOP - 16:g}" text-anchor="middle">{html.escape(self._name)}</text>'
            f"{marks}"
        )


def _jobs(name: str, result: dict[str, Any]) -> list[Job]:
    """Returns the job of a folder, or one job per seed."""
    values = _values(result)
    if "seeds" not in result:
        return [Job(name, values, result)]
    return [Job(f"{name}/seed-{seed}", values | {"seed": seed}, own) for seed, own in result["seeds"].items()]


def _values(result: dict[str, Any]) -> dict[str, str]:
    overrides = [str(override).lstrip("+~") for override in result.get("overrides", [])]
    return dict(override.split("=", 1) for override in overrides if "=" in override)


def _as_number(text: str) -> float | None:
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _number(folder: Path) -> tuple[int, str]:
    return (int(folder.name), "") if folder.name.isdigit() else (sys.maxsize, folder.name)
