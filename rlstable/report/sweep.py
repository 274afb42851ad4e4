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
from rlstable.io.outcome import outcome_of
from rlstable.io.run_folder import read_overrides, read_result, seed_folder, seed_folders, seed_of
from rlstable.policy.statistics import Estimate, estimate, interquartile_mean, probability_of_improvement
from rlstable.report.ending import ending
from rlstable.report.run_record import RunRecord, read_record
from rlstable.supervise.stop_reasons import train_command

Values = tuple[tuple[str, str], ...]  # overrides without seeds: keys and values as text
RETURN = "eval/episode_reward"
_FILES = ("result.json", "overrides.json", "config.yaml")  # a job's folder has at least one of these
_SEED_KEYS = ("seed", "seeds")
_FEW_SEEDS = 5  # with fewer seeds, bootstrap intervals are too narrow
_LEAST_SEEDS = 3  # with fewer seeds, no two settings are told apart


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a sweep, or one seed of a run with several seeds.

    Attributes:
        name: Path of its folder from the folder of the sweep.
        folder: Its run folder.
        overrides: Overrides as Hydra read them; None if unknown, because the job has not ended and left no list.
        result: Content of its `result.json`; None if the job has not ended.
        seed: Seed, if the job trains several; else None.
    """

    name: str
    folder: Path
    overrides: tuple[str, ...] | None
    result: dict[str, Any] | None
    seed: str | None = None

    @property
    def values(self) -> dict[str, str]:
        """Overrides as text by key, with the seed of one of several."""
        pairs = [override.lstrip("+~").split("=", 1) for override in self.overrides or () if "=" in override]
        return {key: _unescaped(value) for key, value in pairs} | ({} if self.seed is None else {"seed": self.seed})

    @property
    def setting(self) -> Values | None:
        """Overrides without seeds; None if unknown."""
        if self.overrides is None:
            return None
        return tuple((key, value) for key, value in self.values.items() if key not in _SEED_KEYS)

    @property
    def score(self) -> float | None:
        """Return of the policy that the run hands over, confirmed if possible; None without a return."""
        return outcome_of(self.result).value

    @functools.cached_property
    def record(self) -> RunRecord | None:
        """Metrics and events; None if the run left no configuration."""
        try:
            return read_record(self.folder)
        except ConfigError:
            return None


@dataclasses.dataclass(frozen=True)
class Setting:
    """Jobs that differ only in their seed.

    Attributes:
        values: Overrides of all jobs.
        jobs: The jobs.
    """

    values: Values
    jobs: tuple[Job, ...]

    @property
    def scores(self) -> list[float]:
        """Returns of the jobs with a return."""
        return [job.score for job in self.jobs if job.score is not None]

    @functools.cached_property
    def iqm(self) -> Estimate | None:
        """Interquartile mean of the returns; None without a return."""
        return estimate(self.scores, interquartile_mean) if self.scores else None

    @property
    def stop_reasons(self) -> dict[str, list[Job]]:
        """Jobs by stop reason."""
        found: dict[str, list[Job]] = {}
        for job in self.jobs:
            found.setdefault(ending(job.result)[0], []).append(job)
        return found

    def label(self, keys: Sequence[str]) -> str:
        """Returns the values of some keys, such as `ppo.learning_rate=0.001`."""
        return " ".join(f"{key}={value}" for key, value in self.values if key in keys) or "default"

    def better_than(self, other: Setting) -> Estimate | None:
        """Returns the probability that a seed of this setting returns more than one of the other; None if unknown."""
        return probability_of_improvement(self.scores, other.scores) if self.scores and other.scores else None

    @property
    def command(self) -> str:
        """The command that trains this setting."""
        (first, *others) = self.jobs
        left_out = {"sweep", "seed"} if others else {"sweep"}  # the launcher, and a seed that is one of several
        return train_command([word for word in first.overrides or () if word.split("=", 1)[0] not in left_out])


def read_sweep(folder: Path) -> list[Job]:
    """Returns the jobs of a sweep in order, one job per seed, also those that have not ended.

    Raises:
        ConfigError: There is no job.
    """
    if not folder.is_dir():
        raise ConfigError(f"sweep: there is no folder {folder}; sweeps are in runs/sweeps/<time>")
    folders = [path for path in folder.iterdir() if any((path / name).is_file() for name in _FILES)]
    jobs = [job for path in sorted(folders, key=job_number) for job in _jobs(path)]
    if not jobs:
        raise ConfigError(f"sweep: {folder} holds no job; sweeps are in runs/sweeps/<time>; runs need run=...")
    return jobs


def settings_of(jobs: Sequence[Job]) -> list[Setting]:
    """Returns the settings, best first; settings without a return are last, and jobs of unknown settings left out."""
    grouped: dict[Values, list[Job]] = {}
    for job in jobs:
        if job.setting is not None:
            grouped.setdefault(job.setting, []).append(job)
    settings = [Setting(values, tuple(own)) for values, own in grouped.items()]
    return sorted(settings, key=_rank, reverse=True)


def _rank(setting: Setting) -> tuple[float, float]:
    """Returns the interquartile mean, then the mean, because seeds that reach the same target have equal returns."""
    return (-math.inf, 0.0) if setting.iqm is None else (setting.iqm.value, sum(setting.scores) / len(setting.scores))


def split_keys(settings: Sequence[Setting]) -> tuple[list[str], list[str]]:
    """Returns the keys whose values vary between settings, and the keys with one value."""
    values = [dict(setting.values) for setting in settings]
    keys = dict.fromkeys(key for own in values for key in own)
    varied = [key for key in keys if len({own.get(key) for own in values}) > 1]
    return varied, [key for key in keys if key not in varied]


def how_sure(settings: Sequence[Setting], keys: Sequence[str]) -> str:
    """Returns whether the seeds tell the best setting from the next one, as a text; empty if nothing is to compare.

    Args:
        settings: Settings, best first.
        keys: Keys that vary.
    """
    if len(settings) < 2 or settings[0].iqm is None:
        return ""
    best, following = settings[:2]
    found, other, chance = best.iqm, following.iqm, best.better_than(following)
    if found is None or other is None or chance is None:
        return "No other setting has a return."
    seeds = min(len(best.scores), len(following.scores))
    apart = f"The seeds do not tell this setting from the next one, {following.label(keys)}: "
    if seeds < _LEAST_SEEDS or found.low is None or other.high is None:
        return f"{apart}{'one seed is' if seeds == 1 else 'two seeds are'} not enough."
    probability = f"{chance.value:.2f} {interval(chance, '.2f')}"
    if found.low <= other.high:
        return f"{apart}the 95 % intervals overlap. This setting returns more with a probability of {probability}."
    few = f" Intervals of fewer than {_FEW_SEEDS} seeds are too narrow." if seeds < _FEW_SEEDS else ""
    return f"Better than the next setting, {following.label(keys)}, with a probability of {probability}.{few}"


def interval(found: Estimate, form: str = ",.1f") -> str:
    """Returns the interval of an estimate as text, such as `[0.60, 1.00]`; empty for a single value."""
    return "" if found.low is None or found.high is None else f"[{found.low:{form}}, {found.high:{form}}]"


def _jobs(folder: Path) -> list[Job]:
    """Returns the job of a folder, or one job per seed."""
    result = read_result(folder)
    recorded = (result or {}).get("overrides")
    overrides = tuple(map(str, recorded)) if isinstance(recorded, list) else read_overrides(folder)
    if overrides is None and result is not None:
        overrides = ()
    by_seed = {str(seed_of(path)): read_result(path) for path in seed_folders(folder)} if result is None else None
    if result is not None and isinstance(result.get("seeds"), dict):
        by_seed = {
            seed: own if isinstance(own, dict) else None for seed, own in result["seeds"].items() if seed.isdigit()
        }
    if not by_seed:
        return [Job(folder.name, folder, overrides, result)]
    return [
        Job(f"{folder.name}/{path.name}", path, overrides, own, seed)
        for seed, own in by_seed.items()
        for path in [seed_folder(folder, int(seed))]
    ]


def _unescaped(value: str) -> str:
    """Returns a value without the backslashes that Hydra writes before special characters outside quotes."""
    return value if value.startswith(("'", '"')) else re.sub(r"\\(.)", r"\1", value)


def job_number(folder: Path) -> tuple[int, str]:
    """Returns a key that sorts the folders of jobs: by number, folders with another name last."""
    return (int(folder.name), "") if folder.name.isdigit() else (sys.maxsize, folder.name)
