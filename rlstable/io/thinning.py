"""Keeps the record of a long run bounded: drops old rows of metrics that nothing shows, and adds up old guard trips.

Rows and events are thinned once there are more than `MOST`. The newest `NEWEST` stay as they are. Of the older rows
stay the first, evenly spaced ones, every row of an evaluation, and in each stretch of steps the rows in which a metric
is least or greatest, so that curves keep their spikes. Older trips of one guard within a stretch become one event with
the sum of their counts; every other event stays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]
Read = Callable[[], Iterator[Entry]]

MOST = 10_000  # rows, and events
NEWEST = 1_000  # stay as they are
_SPACED = 2_000  # older rows, evenly over the steps
_STRETCHES = 50  # of steps, whose extremes stay
_LANES = 500  # stretches of steps in which trips of one guard are one event; the page shows fewer
_SPARED = ("step", "time", "kind", "guard")


def due(count: int, kept: int) -> bool:
    """Whether to thin; what cannot be thinned to half of `MOST` must not be thinned again with every entry.

    Args:
        count: Entries now.
        kept: Entries after the last time, 0 if there was none.
    """
    return count > max(MOST, 2 * kept)


def thinned_rows(read: Read) -> Iterator[Entry]:
    """The rows that stay, in their order.

    Args:
        read: Gives the rows from the first one on, with an ascending `step`; called three times, so that a long file
            need not be in memory.
    """
    kept, steps = set[int](), list[float]()
    for number, row in enumerate(read()):
        steps.append(row["step"])
        if any(key.startswith("eval/") for key in row):
            kept.add(number)
    old = max(len(steps) - NEWEST, 0)
    last, gap = -math.inf, _span(steps[:old]) / _SPACED
    for number in range(old):
        if steps[number] - last >= gap:
            last = steps[number]
            kept.add(number)
    numbered = enumerate(read())
    for start, end in _stretches(steps[:old], _STRETCHES):
        kept |= _extremes(itertools.islice(numbered, end - start))
    return (row for number, row in enumerate(read()) if number in kept or number >= old)


def thinned_events(read: Read) -> Iterator[Entry]:
    """The events that stay, with old trips added up; a sum has the step and the time of the first of its trips.

    Args:
        read: Gives the events from the first one on; called twice.
    """
    steps = [event["step"] for event in read()]
    events = read()
    for start, end in _stretches(steps[: max(len(steps) - NEWEST, 0)], _LANES):
        kept: list[Entry] = []
        sums: dict[str, dict[str, Any]] = {}
        for event in itertools.islice(events, end - start):
            if event.get("kind") != "guard_tripped":
                kept.append(event)
                continue
            guard = str(event.get("guard"))
            if guard in sums:
                _add(sums[guard], event)
            else:
                sums[guard] = dict(event)
                kept.append(sums[guard])
        yield from kept
    yield from events


class History(list[Any]):
    """Rows in memory, thinned as those on disk."""

    def __init__(self) -> None:
        super().__init__()
        self._kept = 0

    def append(self, row: Any) -> None:
        """Adds a row."""
        super().append(row)
        if due(len(self), self._kept):
            self[:] = list(thinned_rows(self.__iter__))
            self._kept = len(self)


def _add(total: dict[str, Any], event: Entry) -> None:
    for cause, count in event.items():
        if cause not in _SPARED and isinstance(count, int) and not isinstance(count, bool):
            total[cause] = total.get(cause, 0) + count
    total["added_up"] = True  # no count of trips: those are numbers


def _span(steps: Sequence[float]) -> float:
    # Events of a run that was killed and resumed go back in their steps.
    return float(max(steps) - min(steps)) if steps else 0.0


def _stretches(steps: Sequence[float], count: int) -> Iterator[tuple[int, int]]:
    """The first entry and the one after the last of every stretch of steps that has any."""
    length, start = _span(steps) / count, 0
    for number in range(1, len(steps) + 1):
        if number == len(steps) or steps[number] - steps[start] > length:
            yield start, number
            start = number


def _extremes(rows: Iterator[tuple[int, Entry]]) -> set[int]:
    """Numbers of the rows in which some metric is least or greatest."""
    least: dict[str, tuple[float, int]] = {}
    greatest: dict[str, tuple[float, int]] = {}
    for number, row in rows:
        for key, value in row.items():
            if isinstance(value, int | float) and math.isfinite(value):
                if key not in least or value < least[key][0]:
                    least[key] = value, number
                if key not in greatest or value > greatest[key][0]:
                    greatest[key] = value, number
    return {number for found in (least, greatest) for _, number in found.values()}
