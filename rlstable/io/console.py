"""The console of a run: one line per evaluation, per event, and per few seconds of training."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TextIO

from rlstable.io.progress import Progress, Reminder

_TRIPS = re.compile(r"guards/[^/]+/trips")
# Events that are not trouble; their lines have no exclamation mark.
_GOOD_EVENTS = frozenset(
    {
        "resumed", "saved", "checkpoint_saved_again", "sink_recovered", "environments_redrawn", "backend_chosen",
        "compiler_options_unknown", "seed_ended", "best_confirmed", "episode_recorded", "sign_recovered",
        "configuration_changed",
    }
)  # fmt: skip
# Events that are the same for all seeds are shown once.
_SHARED = frozenset(
    {
        "backend_chosen", "backend_fallback", "compile_cache_unusable", "compiler_options_unknown",
        "configuration_changed", "environment_unwrapped", "environments_redrawn",
        "large_constants", "memory_planned", "memory_tight", "versions_changed",
    }
)  # fmt: skip
_STYLES = {"bold": 1, "dim": 2, "yellow": 33, "cyan": 36}  # codes of a terminal


class Console:
    """Prints progress, events and the summary of a run.

    If a pipe or terminal is closed, the run continues and nothing more is shown.

    Attributes:
        working: `with working(what, expected):` prints "still running" lines during long work.

    Args:
        mode: `auto` colours the lines on a terminal.
        interval: Seconds between two lines of training; an evaluation always gets a line. Trips of one guard within the
            interval are summed up in one line.
        patience: Seconds between two "still running" lines.
    """

    def __init__(
        self,
        mode: Literal["auto", "plain", "off"],
        total_steps: int,
        title: str = "",
        *,
        interval: float = 5.0,
        patience: float = 20.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._shows = mode != "off"
        self._coloured = mode == "auto" and _is_terminal(stream or sys.stdout)
        self._stream = stream
        self._progress = Progress(total=int(total_steps))
        self._title = title
        self._interval = interval
        self._clock = clock
        self.working = Reminder(patience, self.message, clock).working
        self._trips: dict[str, int] = {}
        self._pending_trips: dict[str, Counter[str]] = {}
        self._printed_at: dict[str, float] = {}  # seconds, by guard
        self._last_line = -math.inf

    def log(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        now = self._progress
        now.add(int(step), metrics, self._clock())
        self._trips |= {key: int(value or 0) for key, value in metrics.items() if _TRIPS.fullmatch(key)}
        now.trips = sum(self._trips.values())
        self._print_trips()
        evaluation = any(key.startswith("eval/") for key in metrics)
        if evaluation or self._clock() - self._last_line >= self._interval:
            self._last_line = self._clock()
            self.message(now.line(evaluation), "cyan")

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        self._progress.step = int(step)
        if kind == "stopped":
            return  # the summary reports it
        if kind == "guard_tripped" and "guard" in fields:
            counts = {cause: n for cause, n in fields.items() if isinstance(n, int)}
            self._pending_trips.setdefault(str(fields["guard"]), Counter()).update(counts)
            self._print_trips()
        else:
            self._print_event(kind in _GOOD_EVENTS, describe_event(kind, fields))

    @contextlib.contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Context manager: shows that a program compiles, and then how long it took."""
        started = self._clock()
        self.message(f"compiling {name} ...")
        outcome = f"failed to compile {name} after"
        try:
            with self.working(f"compiling {name}"):
                yield
            outcome = f"compiled {name} in"
        finally:
            self.message(f"{outcome} {self._clock() - started:.1f} s", "dim")

    def message(self, text: str, style: str = "") -> None:
        title, self._title = self._title, ""
        if title:
            self._print(title, "bold")
        self._print(text, style)

    def header(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints a table of names and values. Long commands are not wrapped, so that they can be copied."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self._print(f"  {name:<{width}}  {value}")

    def summary(self, rows: Sequence[tuple[str, str]]) -> None:
        self.close()
        self.header(rows)

    def close(self) -> None:
        """Prints pending trips; may be called again."""
        self._print_trips(force=True)

    def _print_event(self, good: bool, text: str) -> None:
        self.message(f"{'-' if good else '!'} step {self._progress.step:,}  {text}", "" if good else "yellow")

    def _print_trips(self, force: bool = False) -> None:
        """Prints pending trips, at most one line per guard and interval, unless forced."""
        for guard, counts in list(self._pending_trips.items()):
            since = self._clock() - self._printed_at.get(guard, -math.inf)
            if force or since >= self._interval:
                del self._pending_trips[guard]
                self._printed_at[guard] = self._clock()
                total = sum(counts.values())
                causes = ", ".join(f"{cause} {n:,}" for cause, n in counts.items())
                self._print_event(False, f"{guard}: {total:,} {'trip' if total == 1 else 'trips'} ({causes})")

    def _print(self, text: str, style: str = "") -> None:
        if not self._shows:
            return
        stream = self._stream or sys.stdout
        encoding = stream.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        if self._coloured and style:
            text = f"\x1b[{_STYLES[style]}m{text}\x1b[0m"
        try:
            stream.write(text + "\n")  # one call, because other threads print too
            stream.flush()
        except (OSError, ValueError):  # a closed pipe or terminal
            self._shows = False


class SeedConsole(Console):
    """Passes events of one seed to the console of all seeds, which shows their common progress."""

    def __init__(self, console: Console, seed: int, shown: set[str]):
        super().__init__("off", total_steps=1)
        self._console = console
        self._name = f"seed {seed}"
        self._shown = shown

    def log(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        pass

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Prints the event with its seed; prints a shared event once, without a seed."""
        if kind in _SHARED:
            text = f"{step} {kind} {fields}"
            if text not in self._shown:
                self._shown.add(text)
                self._console.event(step, kind, fields)
        elif kind == "guard_tripped":
            # The console sums trips by guard, so the seed is part of the guard's name.
            self._console.event(step, kind, {**fields, "guard": f"{self._name}: {fields['guard']}"})
        else:
            self._console.event(step, kind, {"of": self._name, **fields})

    def message(self, text: str, style: str = "") -> None:
        self._console.message(f"{self._name}: {text}", style)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def describe_event(kind: str, fields: Mapping[str, Any]) -> str:
    """An event as one line, such as `kind: key value, ...`; a mapping becomes `key (name value, ...)`."""
    seed = f" of {_text(fields['of'])}" if "of" in fields else ""
    if kind == "sign" and {"sign", "text"} <= fields.keys():
        return f"sign {_text(fields['sign'])}{seed}: {_text(fields['text'])}"
    if kind == "sign_recovered" and "sign" in fields:
        return f"sign {_text(fields['sign'])}{seed} recovered"
    if kind == "configuration_changed" and {"key", "old", "new"} <= fields.keys():
        old, new = setting(fields["old"]), setting(fields["new"])
        return f"{kind}: {_text(fields['key'])}: {old} -> {new}"
    parts = []
    for key, value in fields.items():
        if isinstance(value, Mapping):
            inner = ", ".join(f"{name} {_text(item)}" for name, item in value.items())
            parts.append(f"{key} ({inner})")
        else:
            parts.append(f"{key} {_text(value)}")
    return f"{kind}: {', '.join(parts)}" if parts else kind


def setting(value: Any) -> str:
    """The value of a setting on one line, with all digits."""
    return _text(value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False))


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return "[" + " ".join(map(_text, value)) + "]"
    return " ".join(str(value).split())
