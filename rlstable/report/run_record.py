"""Reads a run folder in any state: metrics, events, settings and result."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlstable.config import ConfigError
from rlstable.config.schema import expand_home, flat
from rlstable.io.console import describe_event
from rlstable.io.files import parse_json, read, read_json
from rlstable.io.outcome import Outcome, outcome_of
from rlstable.io.run_folder import read_result, read_settings, seed_folders

RETURN = "eval/episode_reward"
_COMMON_FIELDS = ("step", "time", "kind")
_MOST = 1e300  # greatest drawn number; differences of greater numbers overflow
_LAST = {"step": 2.0**63, "time": 1e11}  # greatest step and time


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The content of a run folder."""

    folder: Path
    settings: dict[str, Any]  # configuration, by dotted key
    rows: list[dict[str, Any]]  # lines of metrics.jsonl
    events: list[dict[str, Any]]  # lines of events.jsonl
    result: dict[str, Any] | None  # content of result.json; None if the run has not ended or was killed
    machine: dict[str, Any]  # content of machine.json; empty without the file
    torn: int  # number of unreadable lines

    @property
    def name(self) -> str:
        return "/".join(self.folder.absolute().parts[-2:])

    @property
    def steps(self) -> float:
        """Greatest step of a row or an event."""
        steps = [row["step"] for row in (*self.rows, *self.events) if isinstance(row.get("step"), int)]
        return float(max(steps, default=0))

    def rows_with(self, key: str) -> list[dict[str, Any]]:
        """The rows in which a metric is finite."""
        return [row for row in self.rows if is_number(row.get(key)) and "step" in row]

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """The steps and the finite values of a metric, `[N]` each."""
        found = np.array([(row["step"], row[key]) for row in self.rows_with(key)], np.float64).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    def last(self, key: str) -> float | None:
        values = self.series(key)[1]
        return float(values[-1]) if values.size else None

    @functools.cached_property
    def outcome(self) -> Outcome:
        """Outcome of the run; while it trains, the last and the best evaluation so far."""
        returns = self.series(RETURN)[1]
        if self.result is not None or not returns.size:
            return outcome_of(self.result)
        return outcome_of(None)._replace(value=float(returns[-1]), best=float(returns.max()))

    def trips(self) -> dict[str, tuple[float, float, float]]:
        """The number of trips, and the first and the last step with a trip, by guard.

        The events count them, because a rollback also resets the counters of the metrics.
        """
        found: dict[str, tuple[float, float, float]] = {}
        for event in self.of_kind("guard_tripped"):
            step, guard = float(event.get("step", 0)), str(event.get("guard"))
            counts = [x for key, x in event.items() if key not in _COMMON_FIELDS and is_number(x)]
            total, first, last = found.get(guard, (0.0, step, step))
            found[guard] = total + sum(counts), min(first, step), max(last, step)
        return dict(sorted(found.items()))

    @property
    def trip_count(self) -> float:
        return sum(count for count, _, _ in self.trips().values())

    @property
    def warnings(self) -> list[tuple[str, str]]:
        """Names and texts of the warnings in `result.json`."""
        found = (self.result or {}).get("warnings")
        warnings = [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
        return [(str(warning.get("name")), str(warning.get("text"))) for warning in warnings]

    @property
    def signs(self) -> dict[str, dict[str, Any]]:
        """Signs of trouble in `result.json`, by name."""
        found = (self.result or {}).get("signs")
        signs = found if isinstance(found, dict) else {}
        return {name: sign for name, sign in signs.items() if isinstance(sign, dict)}

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("kind") in kinds]


def event_text(event: Mapping[str, Any]) -> str:
    """An event in one line, as on the console."""
    return describe_event(str(event.get("kind")), {key: x for key, x in event.items() if key not in _COMMON_FIELDS})


def read_record(folder: str | Path) -> RunRecord:
    """Reads a run folder, also of a run that is running or was killed; a `ConfigError` if it is none."""
    folder = expand_home(folder)
    settings = flat(read_settings(folder))
    (rows, torn_rows), (events, torn_events) = (_lines(folder / name) for name in ("metrics.jsonl", "events.jsonl"))
    try:
        machine = read_json(folder / "machine.json")
    except (OSError, ValueError):
        machine = {}
    machine = machine if isinstance(machine, dict) else {}
    return RunRecord(folder, settings, rows, events, read_result(folder), machine, torn_rows + torn_events)


def read_records(folder: str | Path) -> list[RunRecord]:
    folder = expand_home(folder)
    started = [seed for seed in seed_folders(folder) if (seed / "config.yaml").is_file()]
    return [read_record(each) for each in started or [folder]]


def differences(records: Iterable[RunRecord]) -> dict[str, list[Any]]:
    """The settings that differ between runs: values by key, one per run; None if a run lacks the key."""
    settings = [record.settings for record in records]
    values = {key: [run.get(key) for run in settings] for run in settings for key in run}
    return {key: by_run for key, by_run in values.items() if any(value != by_run[0] for value in by_run)}


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a file of JSON lines, and the number of unreadable lines.

    The last line of a killed run can be torn. A line with an impossible step or time is unreadable, too.
    """
    try:
        text = read(path).decode(errors="replace")
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise ConfigError(f"run: {path} cannot be read: {error.strerror}") from error
    rows, torn = [], 0
    for line in text.splitlines():
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and all(
            is_number(x := row.get(key, 0), most) and x >= 0 for key, most in _LAST.items()
        ):
            rows.append(row)
        else:
            torn += 1
    return rows, torn


def is_number(value: object, most: float = _MOST) -> bool:
    """Whether a value is a number that can be drawn."""
    # NaN and infinity fail this comparison. It works for integers of any length.
    return isinstance(value, int | float) and not isinstance(value, bool) and -most < value < most
