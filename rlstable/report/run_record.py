"""Reads a run folder in any state: rows, events, settings and the end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlstable.config import ConfigError
from rlstable.io.run_folder import read_result, read_settings, seed_folders

Settings = dict[str, Any]
_OF_EVERY_EVENT = ("step", "time", "kind")
_MOST = 1e300  # of what is drawn; differences of numbers beyond it are none
_LAST = {"step": 2.0**63, "time": 1e11}  # of any step, and of any date


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run, as its folder tells it.

    Attributes:
        folder: Of the run.
        settings: Its configuration, flat: values by dotted key.
        rows: Every line of `metrics.jsonl`.
        events: Every line of `events.jsonl`.
        result: What `result.json` says, None where the run has not ended or was killed.
        machine: What `machine.json` says of device and versions, empty where it is not there.
        torn: Lines that could not be read.
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
        """The name of the run on a page."""
        return "/".join(self.folder.absolute().parts[-2:])

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and finite values of a metric, `[N]` each; a gap is left out."""
        points = [(row["step"], row[key]) for row in self.rows if _is_number(row.get(key)) and "step" in row]
        found = np.array(points, np.float64).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    def last(self, key: str) -> float | None:
        """The last value of a metric, None where there never was one."""
        values = self.series(key)[1]
        return float(values[-1]) if values.size else None

    @property
    def guards(self) -> list[str]:
        """The guards that ever tripped, by name."""
        return sorted({str(event.get("guard")) for event in self.of_kind("guard_tripped")})

    def trips(self, guard: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps at which a guard tripped, and how often there, `[N]` each.

        By the events, which are one per iteration: counters go back with the state when a run does.
        """
        own = [event for event in self.of_kind("guard_tripped") if event.get("guard") == guard]
        causes = [{key: event[key] for key in event if key not in _OF_EVERY_EVENT} for event in own]
        counts = [sum(count for count in found.values() if _is_number(count)) for found in causes]
        return np.array([event.get("step", 0) for event in own], np.float64), np.array(counts, np.float64)

    @property
    def warnings(self) -> list[tuple[str, str]]:
        """Names and texts of the warnings in `result.json`."""
        found = (self.result or {}).get("warnings")
        own = [warning for warning in found if isinstance(warning, dict)] if isinstance(found, list) else []
        return [(str(warning.get("name")), str(warning.get("text"))) for warning in own]

    @property
    def lasting_signs(self) -> set[str]:
        """Signs of trouble that lasted to the end of the run."""
        found = (self.result or {}).get("signs")
        own = found if isinstance(found, dict) else {}
        return {name for name, sign in own.items() if isinstance(sign, dict) and sign.get("lasts")}

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """Events of some kinds, in their order."""
        return [event for event in self.events if event.get("kind") in kinds]


def read_record(folder: str | Path) -> RunRecord:
    """Reads a run folder, also of a run that is running, was killed, or is of another version.

    Raises:
        ConfigError: It is no run folder.
    """
    folder = Path(folder)
    settings = flat(read_settings(folder))
    (rows, torn_rows), (events, torn_events) = (_lines(folder / name) for name in ("metrics.jsonl", "events.jsonl"))
    return RunRecord(
        folder, settings, rows, events, read_result(folder), _machine(folder / "machine.json"), torn_rows + torn_events
    )


def read_records(folder: str | Path) -> list[RunRecord]:
    """Reads a run folder, or those of the seeds that were trained together in it; errors as for `read_record`."""
    folder = Path(folder)
    begun = [own for own in seed_folders(folder) if (own / "config.yaml").is_file()]
    return [read_record(own) for own in begun or [folder]]


def last_row(folder: Path) -> dict[str, Any]:
    """The last row that a run logged, without its step and time; empty where there is none."""
    rows = _lines(folder / "metrics.jsonl")[0]
    return {key: value for key, value in (rows[-1] if rows else {}).items() if key not in ("step", "time")}


def flat(settings: Mapping[str, Any], prefix: str = "") -> Settings:
    """Values by dotted key."""
    found: Settings = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(stories: Iterable[RunRecord]) -> dict[str, list[Any]]:
    """The settings in which runs differ: values by key, one per run, None where a run has no such key."""
    settings = [story.settings for story in stories]
    keys = dict.fromkeys(key for own in settings for key in own)
    values = {key: [own.get(key) for own in settings] for key in keys}
    return {key: own for key, own in values.items() if any(value != own[0] for value in own)}


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a file of JSON lines, and how many lines are none: a killed run's last one may be torn.

    One that says of no step or time when it was is none either.
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
    # A comparison that NaN and infinity fail, and that an integer of any length passes or fails.
    return isinstance(value, int | float) and not isinstance(value, bool) and -most < value < most
