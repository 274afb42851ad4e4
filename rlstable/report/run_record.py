"""Reads a run folder in any state: metrics, events, settings and result."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlstable.config import ConfigError
from rlstable.config.schema import expand_home
from rlstable.io.outcome import Outcome, outcome_of
from rlstable.io.run_folder import read_result, read_settings, seed_folders

Settings = dict[str, Any]
_COMMON_FIELDS = ("step", "time", "kind")
_MOST = 1e300  # greatest drawn number; differences of greater numbers overflow
_LAST = {"step": 2.0**63, "time": 1e11}  # greatest step and time


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The content of a run folder.

    Attributes:
        folder: The run folder.
        settings: Configuration, by dotted key.
        rows: Lines of `metrics.jsonl`.
        events: Lines of `events.jsonl`.
        result: Content of `result.json`; None if the run has not ended or was killed.
        machine: Content of `machine.json`, device and versions; empty without the file.
        torn: Number of unreadable lines.
    """

    folder: Path
    settings: Settings
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    result: dict[str, Any] | None
    machine: dict[str, Any]
    torn: int

    @property
    def name(self) -> str:
        """Name of the run on a page."""
        return "/".join(self.folder.absolute().parts[-2:])

    @property
    def steps(self) -> float:
        """Greatest step of a row or an event."""
        steps = [row["step"] for row in (*self.rows, *self.events) if isinstance(row.get("step"), int)]
        return float(max(steps, default=0))

    @functools.cached_property
    def moments(self) -> np.ndarray:
        """Times of all rows and events in order, seconds since 1970, `[N]`."""
        return np.sort([row["time"] for row in (*self.rows, *self.events) if "time" in row]).astype(np.float64)

    @functools.cached_property
    def _breaks(self) -> tuple[np.ndarray, np.ndarray]:
        """Times at which the run was resumed, and the seconds that it had rested until then, `[N]` each."""
        resumed = np.array(sorted(event["time"] for event in self.of_kind("resumed") if "time" in event), np.float64)
        # Not the other events: a process logs some of its start before it logs that it has resumed the run.
        last = np.sort([row["time"] for row in (*self.rows, *self.of_kind("stopped", "error")) if "time" in row])
        if not last.size:
            return np.array([]), np.array([])
        before = np.minimum(last[np.maximum(np.searchsorted(last, resumed) - 1, 0)], resumed)
        return resumed, np.cumsum(resumed - before)

    def seconds_at(self, times: np.ndarray) -> np.ndarray:
        """Returns the seconds that the run had run at some times, without those between a stop and a resume, `[N]`.

        Args:
            times: Seconds since 1970, `[N]`.
        """
        if not self.moments.size:
            return np.zeros(len(times))
        resumed, rested = self._breaks
        rest = np.concatenate([[0.0], rested])[np.searchsorted(resumed, times, side="right")]
        return np.maximum(times - self.moments[0] - rest, 0.0)

    def rows_with(self, key: str) -> list[dict[str, Any]]:
        """Returns the rows in which a metric is finite."""
        return [row for row in self.rows if _is_number(row.get(key)) and "step" in row]

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps and the finite values of a metric, `[N]` each."""
        found = np.array([(row["step"], row[key]) for row in self.rows_with(key)], np.float64).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    def last(self, key: str) -> float | None:
        """Returns the last value of a metric; None without values."""
        values = self.series(key)[1]
        return float(values[-1]) if values.size else None

    @functools.cached_property
    def outcome(self) -> Outcome:
        """Outcome of the run; while it trains, the last and the best evaluation so far."""
        returns = self.series("eval/episode_reward")[1]
        if self.result is not None or not returns.size:
            return outcome_of(self.result)
        return outcome_of(None)._replace(value=float(returns[-1]), best=float(returns.max()))

    @property
    def guards(self) -> list[str]:
        """Names of the guards that tripped."""
        return sorted({str(event.get("guard")) for event in self.of_kind("guard_tripped")})

    def trips(self, guard: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps at which a guard tripped and the numbers of trips, `[N]` each.

        The events count them, one event per iteration, because a rollback also resets the counters of the metrics.
        """
        events = [event for event in self.of_kind("guard_tripped") if event.get("guard") == guard]
        causes = [{key: event[key] for key in event if key not in _COMMON_FIELDS} for event in events]
        counts = [sum(count for count in by_cause.values() if _is_number(count)) for by_cause in causes]
        return np.array([event.get("step", 0) for event in events], np.float64), np.array(counts, np.float64)

    @property
    def trip_count(self) -> float:
        """Number of trips of all guards."""
        return sum(float(self.trips(guard)[1].sum()) for guard in self.guards)

    @property
    def warnings(self) -> list[tuple[str, str]]:
        """Names and texts of the warnings in `result.json`."""
        value = (self.result or {}).get("warnings")
        warnings = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
        return [(str(warning.get("name")), str(warning.get("text"))) for warning in warnings]

    @property
    def signs(self) -> dict[str, dict[str, Any]]:
        """Signs of trouble in `result.json`, by name."""
        value = (self.result or {}).get("signs")
        signs = value if isinstance(value, dict) else {}
        return {name: sign for name, sign in signs.items() if isinstance(sign, dict)}

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """Returns the events of some kinds, in order."""
        return [event for event in self.events if event.get("kind") in kinds]


def read_record(folder: str | Path) -> RunRecord:
    """Reads a run folder, also of a run that is running, was killed, or has another version of rlstable.

    Raises:
        ConfigError: The folder is not a run folder.
    """
    folder = expand_home(folder)
    settings = flat(read_settings(folder))
    (rows, torn_rows), (events, torn_events) = (_lines(folder / name) for name in ("metrics.jsonl", "events.jsonl"))
    return RunRecord(
        folder, settings, rows, events, read_result(folder), _machine(folder / "machine.json"), torn_rows + torn_events
    )


def read_records(folder: str | Path) -> list[RunRecord]:
    """Reads a run folder, or the run folders of its seeds; errors as for `read_record`."""
    folder = expand_home(folder)
    started = [seed for seed in seed_folders(folder) if (seed / "config.yaml").is_file()]
    return [read_record(each) for each in started or [folder]]


def last_row(folder: Path) -> dict[str, Any]:
    """Returns the last row that a run logged, without step and time; empty without rows."""
    rows = _lines(folder / "metrics.jsonl")[0]
    return {key: value for key, value in (rows[-1] if rows else {}).items() if key not in ("step", "time")}


def flat(settings: Mapping[str, Any], prefix: str = "") -> Settings:
    """Returns the values by dotted key."""
    found: Settings = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(records: Iterable[RunRecord]) -> dict[str, list[Any]]:
    """Returns the settings that differ between runs: values by key, one per run; None if a run lacks the key."""
    settings = [record.settings for record in records]
    keys = dict.fromkeys(key for run in settings for key in run)
    values = {key: [run.get(key) for run in settings] for key in keys}
    return {key: by_run for key, by_run in values.items() if any(value != by_run[0] for value in by_run)}


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the objects of a file of JSON lines, and the number of unreadable lines.

    The last line of a killed run can be torn. A line with an impossible step or time is unreadable, too.
    """
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise ConfigError(f"run: {path} cannot be read: {error.strerror}") from error
    rows, torn = [], 0
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and all(_is_number(row.get(key, 0), last) for key, last in _LAST.items()):
            rows.append(row)
        else:
            torn += 1
    return rows, torn


def _machine(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_number(value: Any, most: float = _MOST) -> bool:
    # NaN and infinity fail this comparison. It works for integers of any length.
    return isinstance(value, int | float) and not isinstance(value, bool) and -most < value < most
