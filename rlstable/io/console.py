"""The console of a run: a live display on a terminal, plain lines elsewhere, or no output."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from rlstable.io.progress import Progress, Reminder

_TRIPS = re.compile(r"guards/[^/]+/trips")
# Events that are not trouble; their lines have no exclamation mark.
_GOOD_EVENTS = frozenset(
    {
        "started", "resumed", "saved", "checkpoint_saved_again", "sink_recovered", "environments_redrawn",
        "backend_chosen", "seed_ended", "best_confirmed", "episode_recorded",
        "sign_recovered",
    }
)  # fmt: skip
# Events that are the same for all seeds are shown once.
_SHARED = frozenset(
    {
        "backend_chosen", "backend_fallback", "compile_cache_unusable", "configuration_changed",
        "environment_unwrapped", "environments_redrawn", "lock_unsupported", "memory_planned", "memory_tight",
        "precision_not_delivered", "versions_changed",
    }
)  # fmt: skip
# Metrics of a verbose line: name and format by key.
_LEARNING = {
    "training/policy_loss": ("policy loss", ".3g"),
    "training/v_loss": ("value loss", ".3g"),
    "training/entropy": ("entropy", ".3g"),
    "training/policy_distance": ("distance", ".2g"),
    "training/clip_fraction": ("clipped", ".0%"),
    "training/explained_variance": ("explained", ".2f"),
    "training/policy_dist_mean_std": ("std", ".2g"),
    "training/grad_norm": ("gradient", ".3g"),
    "training/learning_rate": ("rate", ".2g"),
    "training/value_learning_rate": ("value rate", ".2g"),
    "training/accepted_share": ("accepted", ".0%"),
    "training/valid_share": ("valid", ".1%"),
    "memory/host_mb": ("host MB", ",.0f"),
    "memory/device_mb": ("device MB", ",.0f"),
}


class Console:
    """Prints progress, events and the summary of a run.

    If a pipe or terminal is closed, the run continues and nothing more is shown.

    Attributes:
        working: `with working(what, expected):` prints "still running" lines during long work.

    Args:
        mode: `auto` shows a live display on a terminal and plain lines elsewhere.
        total_steps: Environment steps of the whole run.
        title: Name of the run, usually its environment; printed once, above everything else.
        interval: Seconds between two plain lines; an evaluation always gets a line. Trips of one guard within the
            interval are summed up in one line.
        verbose: Whether every row adds a line with losses and other learning metrics.
        patience: Seconds between two "still running" lines.
        stream: File to write to; None for standard output.
        terminal: Rich console to write to instead; None to create one.
        clock: Returns seconds; for tests.
    """

    def __init__(
        self,
        mode: Literal["auto", "rich", "plain", "off"],
        total_steps: int,
        title: str = "",
        *,
        interval: float = 5.0,
        verbose: bool = False,
        patience: float = 20.0,
        stream: TextIO | None = None,
        terminal: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._terminal, self._live = _open_terminal(mode, stream, terminal)
        self._progress = Progress(total=int(total_steps))
        self._title = title
        self._interval = interval
        self._verbose = verbose
        self._clock = clock
        self.working = Reminder(patience, self.message, clock).working
        self._trips: dict[str, int] = {}
        self._pending_trips: dict[str, Counter[str]] = {}
        self._printed_at: dict[str, float] = {}  # seconds, by guard
        self._last_line = -math.inf
        self._bar: Bar | None = None
        self._spinner: Bar | None = None
        if self._live:
            atexit.register(self.close)  # a crash must not leave the terminal without its cursor

    def log(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        now = self._progress
        now.add(int(step), metrics, self._clock())
        self._trips |= {key: int(value or 0) for key, value in metrics.items() if _TRIPS.fullmatch(key)}
        now.trips = sum(self._trips.values())
        self._print_trips()
        evaluation = any(key.startswith("eval/") for key in metrics)
        with self._showing():
            if self._live:
                self._move_bar()
            if evaluation or (not self._live and self._clock() - self._last_line >= self._interval):
                self._last_line = self._clock()
                self._line(now.line(evaluation), "cyan")
            if self._verbose:
                self._line(describe_learning(now.step, metrics), "dim")

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        self._progress.step = int(step)
        if kind == "stopped":
            return  # the summary reports it
        if kind == "guard_tripped" and "guard" in fields:
            counts = {cause: n for cause, n in fields.items() if isinstance(n, int)}
            self._pending_trips.setdefault(str(fields["guard"]), Counter()).update(counts)
            self._print_trips()
        else:
            self._print_event(kind in _GOOD_EVENTS or fields.get("how") == "typed", describe_event(kind, fields))

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Context manager: `working`, and on a terminal a spinner in place of the progress bar."""
        with self._showing():
            self._spin(what)
        try:
            with self.working(what):
                yield
        finally:
            self._end_display()

    @contextlib.contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Context manager: shows that a program compiles, and then how long it took."""
        started = self._clock()
        with self._showing():
            if self._live:
                self._spin(f"compiling {name}")
            else:
                self._line(f"compiling {name} ...")
        outcome = f"failed to compile {name} after"
        try:
            with self.working(f"compiling {name}"):
                yield
            outcome = f"compiled {name} in"
        finally:
            self._end_display()
            with self._showing():
                self._line(f"{outcome} {self._clock() - started:.1f} s", "dim")

    def message(self, text: str) -> None:
        with self._showing():
            self._line(text)

    def header(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints a table of names and values. Long commands are not wrapped, so that they can be copied."""
        width = max((len(name) for name, _ in rows), default=0)
        with self._showing():
            for name, value in rows:
                self._print(Text.assemble((f"  {name:<{width}}  ", "bold"), value))

    def summary(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints a table of names and values, and ends the live display."""
        self.close()
        self.header(rows)

    def close(self) -> None:
        """Prints pending trips and ends the live display; may be called again."""
        self._print_trips(force=True)
        self._end_display()

    def _print_event(self, good: bool, text: str) -> None:
        with self._showing():
            self._line(f"{'-' if good else '!'} step {self._progress.step:,}  {text}", "" if good else "yellow")

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

    @contextlib.contextmanager
    def _showing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):  # a closed pipe or terminal
            (self._terminal, self._live), self._bar, self._spinner = _open_terminal("off", None, None), None, None

    def _line(self, text: str, style: str = "") -> None:
        """Prints a permanent line above the live display."""
        title, self._title = self._title, ""
        if title:
            self._print(Text(title, style="bold"))
        self._print(Text(text, style=style))

    def _print(self, text: Text) -> None:
        encoding = self._terminal.encoding
        text.plain = text.plain.encode(encoding, "replace").decode(encoding)
        self._terminal.print(text, soft_wrap=True)

    def _spin(self, what: str) -> None:
        if not self._live:
            return
        self._end_display()  # rich allows one live display at a time
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._spinner = Bar(*columns, console=self._terminal, transient=True, refresh_per_second=4)
        self._spinner.add_task(f"{what} ...", total=None)
        self._spinner.start()

    def _move_bar(self) -> None:
        now = self._progress
        if self._bar is None:
            # Fits into 80 columns.
            columns = (BarColumn(bar_width=10), TextColumn("{task.fields[line]}", markup=False))
            self._bar = Bar(*columns, console=self._terminal, transient=True, refresh_per_second=4)
            self._bar.add_task("", total=now.total, line="")
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=min(now.step, now.total), line=now.short(), refresh=True)

    def _end_display(self) -> None:
        live, self._bar, self._spinner = (self._bar, self._spinner), None, None
        with self._showing():
            for display in filter(None, live):
                display.stop()


class SeedConsole(Console):
    """Passes events of one seed to the console of all seeds, which shows their common progress."""

    def __init__(self, console: Console, seed: int, shown: set[str]):
        super().__init__("off", total_steps=1)
        self._console = console
        self._name = f"seed {seed}"
        self._shown = shown

    def log(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Shows nothing."""

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

    def message(self, text: str) -> None:
        self._console.message(f"{self._name}: {text}")

    def summary(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints nothing; all seeds share one summary."""

    def close(self) -> None:
        """Does nothing; the display belongs to all seeds."""


class _Terminal(RichConsole):
    """A rich console that raises at a broken pipe, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _open_terminal(mode: str, stream: TextIO | None, terminal: RichConsole | None) -> tuple[RichConsole, bool]:
    """The terminal, and whether it has a live display."""
    if mode == "auto":
        mode = "rich" if terminal is not None or getattr(stream or sys.stdout, "isatty", bool)() else "plain"
    if mode == "rich":
        terminal = terminal or _Terminal(file=stream)
        if not terminal.is_dumb_terminal:  # a dumb terminal cannot redraw a line
            return terminal, True
    return _Terminal(file=stream, color_system=None, force_jupyter=False, quiet=mode == "off"), False


def describe_event(kind: str, fields: Mapping[str, Any]) -> str:
    """An event as one line, such as `kind: key value, ...`; a mapping becomes `key (name value, ...)`."""
    seed = f" of {_text(fields['of'])}" if "of" in fields else ""
    if kind == "sign" and {"sign", "text"} <= fields.keys():
        return f"sign {_text(fields['sign'])}{seed}: {_text(fields['text'])}"
    if kind == "sign_recovered" and "sign" in fields:
        return f"sign {_text(fields['sign'])}{seed} recovered"
    if kind == "configuration_changed" and {"key", "old", "new", "how"} <= fields.keys():
        old, new = setting(fields["old"]), setting(fields["new"])
        return f"{kind}: {_text(fields['key'])}: {old} -> {new} ({_text(fields['how'])})"
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


def describe_learning(step: int, metrics: Mapping[str, float | int | None]) -> str:
    """One line with losses and other learning metrics."""
    values = [(name, metrics[key], form) for key, (name, form) in _LEARNING.items() if metrics.get(key) is not None]
    return f"  step {step:,}  " + "  ".join(f"{name} {value:{form}}" for name, value, form in values)


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
