"""Reads a sweep, groups its jobs by setting, and ranks the settings over their seeds."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlstable.config import ConfigError
from rlstable.io.outcome import Outcome, outcome_of
from rlstable.io.printed_commands import train_command
from rlstable.io.run_folder import read_overrides, read_result, seed_folders, seed_of
from rlstable.policy.statistics import Estimate, estimate, interquartile_mean
from rlstable.report.markup import stop_reason
from rlstable.report.run_record import RunRecord, read_record
from rlstable.supervise.stop_reasons import StopReason

Values = tuple[tuple[str, str], ...]  # overrides without seeds: keys and values as text
_FILES = ("result.json", "overrides.json")  # a job's folder has at least one of these
_CUT_SHORT = ("not ended", StopReason.interrupted.name, StopReason.preempted.name)


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a sweep, or one seed of a run with several seeds."""

    name: str
    folder: Path
    overrides: tuple[str, ...]  # as Hydra read them
    result: dict[str, Any] | None  # content of result.json; None if the job has not ended
    seed: str | None = None  # one of several seeds

    @property
    def values(self) -> dict[str, str]:
        """Overrides as text by key, without the backslashes that Hydra writes before special characters."""
        pairs = [override.lstrip("+~").split("=", 1) for override in self.overrides if "=" in override]
        found = {key: x if x.startswith(("'", '"')) else re.sub(r"\\(.)", r"\1", x) for key, x in pairs}
        return found | ({} if self.seed is None else {"seed": self.seed})

    @property
    def setting(self) -> Values:
        return tuple((key, value) for key, value in self.values.items() if key not in ("seed", "seeds"))

    @functools.cached_property
    def record(self) -> RunRecord | None:
        try:
            return read_record(self.folder)
        except ConfigError:
            return None

    @property
    def outcome(self) -> Outcome:
        """The outcome of the job, so far if it has not ended."""
        return self.record.outcome if self.result is None and self.record is not None else outcome_of(self.result)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Jobs that differ only in their seed, and their common overrides."""

    values: Values
    jobs: tuple[Job, ...]

    @property
    def scores(self) -> list[float]:
        """Returns of the policies that the runs hand over, confirmed if possible."""
        return [score for job in self.jobs if (score := outcome_of(job.result).value) is not None]

    @functools.cached_property
    def iqm(self) -> Estimate | None:
        """Interquartile mean of the returns; None without a return."""
        return estimate(self.scores, interquartile_mean) if self.scores else None

    @property
    def rank(self) -> tuple[float, float]:
        """The interquartile mean, then the mean, because seeds that reach the same target have equal returns."""
        return (-math.inf, 0.0) if self.iqm is None else (self.iqm.value, sum(self.scores) / len(self.scores))

    def label(self, keys: Sequence[str]) -> str:
        """The values of some keys, such as `ppo.learning_rate=0.001`."""
        return " ".join(f"{key}={value}" for key, value in self.values if key in keys) or "default"

    @property
    def command(self) -> str:
        (first, *others) = self.jobs
        left_out = {"sweep", "seed"} if others else {"sweep"}  # the launcher, and a seed that is one of several
        return train_command([word for word in first.overrides or () if word.split("=", 1)[0] not in left_out])


def read_sweep(folder: Path) -> list[Job]:
    """The jobs of a sweep in order, one job per seed, also those that have not ended; a `ConfigError` without a job."""
    if not folder.is_dir():
        raise ConfigError(f"sweep: there is no folder {folder}; sweeps are in runs/sweeps/<time>")
    folders = [path for path in folder.iterdir() if any((path / name).is_file() for name in _FILES)]
    jobs = [job for path in sorted(folders, key=job_number) for job in _jobs(path)]
    if not jobs:
        raise ConfigError(f"sweep: {folder} holds no job; sweeps are in runs/sweeps/<time>; runs need run=...")
    return jobs


def settings_of(jobs: Sequence[Job]) -> list[Setting]:
    """The settings, best first; settings without a return are last."""
    grouped: dict[Values, list[Job]] = {}
    for job in jobs:
        grouped.setdefault(job.setting, []).append(job)
    return sorted((Setting(values, tuple(own)) for values, own in grouped.items()), key=lambda x: x.rank, reverse=True)


def varied_keys(settings: Sequence[Setting]) -> list[str]:
    values = [dict(setting.values) for setting in settings]
    keys = dict.fromkeys(key for own in values for key in own)
    return [key for key in keys if len({own.get(key) for own in values}) > 1]


def verdict(jobs: Sequence[Job], settings: Sequence[Setting]) -> tuple[str, str]:
    """The best setting with its return as a sentence, and the command that trains it.

    Without a best setting the sentence says why, and the command is empty. Settings whose interval reaches that of the
    best one tie with it. A single seed has no interval, and tells nothing apart.
    """
    unended = sum(stop_reason(job.result) in _CUT_SHORT for job in jobs)
    if unended:
        return f"No setting is the best: {unended:,} of {len(jobs):,} runs have not run to their end.", ""
    first, *others = settings
    best = first.iqm
    if best is None:
        return "No setting is the best: no run has a return.", ""
    scores = [own for setting in others if (own := setting.iqm) is not None]
    tied = sum(best.low is None or own.high is None or own.high >= best.low for own in scores)
    tie = f"; a tie with {counted(tied, 'other setting')}, more seeds tell them apart" if tied else ""
    label, found = first.label(varied_keys(settings)), f"{best.value:,.1f} {interval(best)}".removesuffix(" –")
    seeds = f"interquartile mean of {counted(len(first.scores), 'seed')}"
    return f"{'Highest return' if tied else 'Best setting'}: {label}, return {found}, {seeds}{tie}", first.command


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def interval(found: Estimate | None) -> str:
    """The interval of an estimate as text, such as `[6.0, 10.0]`; a dash for a single value."""
    return "–" if found is None or found.low is None else f"[{found.low:,.1f}, {found.high:,.1f}]"


def job_number(folder: Path) -> tuple[int, str]:
    """A key that sorts the folders of jobs: by number, folders with another name last."""
    return (int(folder.name), "") if folder.name.isdigit() else (sys.maxsize, folder.name)


def _jobs(folder: Path) -> list[Job]:
    result = read_result(folder)
    recorded = (result or {}).get("overrides")
    overrides = tuple(map(str, recorded)) if isinstance(recorded, list) else read_overrides(folder) or ()
    return [
        Job(f"{folder.name}/{path.name}", path, overrides, read_result(path), str(seed_of(path)))
        for path in seed_folders(folder)
    ] or [Job(folder.name, folder, overrides, result)]
