"""The screen of a run: a live display on a terminal, plain lines elsewhere, or no output."""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text


@dataclass
class Progress:
    """Progress of a run; None means unknown.

    Attributes:
        total: Environment steps of the whole run.
        step: Environment steps so far.
        sps: Environment steps per second of training.
        pace: Seconds per environment step of late, with evaluations and saving.
        episode_return: The latest return.
        evaluated_at: Step of the evaluation with this return; None if training episodes gave the return.
        length: Mean episode length of the evaluation.
        aborted: Share of aborted evaluation episodes.
        trips: Trips of all guards.
    """

    total: int
    step: int = 0
    sps: float | None = None
    pace: float | None = None
    episode_return: float | None = None
    evaluated_at: int | None = None
    length: float | None = None
    aborted: float | None = None
    trips: int = 0

    def eta(self) -> str:
        """Remaining time at the pace of late; before the pace is known, at the speed of training."""
        pace = self.pace
        if pace is None and self.sps is not None and self.sps > 0:
            pace = 1 / self.sps
        if pace is None or not math.isfinite(pace):
            return "--"
        return duration(max(self.total - self.step, 0) * pace)

    def line(self) -> str:
        """One line with aligned columns."""
        width = len(f"{self.total:,}")
        share = min(100 * self.step / self.total, 100.0)
        columns = [
            f"step {self.step:>{width},} / {self.total:,}",
            f"{share:5.1f} %",
            f"{number(self.sps, ',.0f'):>9} steps/s",
            f"ETA {self.eta():>8}",
            f"return {number(self.episode_return, ',.2f'):>10}",
            f"trips {self.trips:,}",
        ]
        return "  ".join(columns) + self._origin()

    def _origin(self) -> str:
        """The origin of the return, unless this step has evaluated."""
        if self.episode_return is None or self.evaluated_at == self.step:
            return ""
        return (
            "  in training" if self.evaluated_at is None else f"  evaluated {self.step - self.evaluated_at:,} steps ago"
        )

    def short(self) -> str:
        """The line beside the progress bar."""
        speed, value = number(self.sps, ",.0f"), number(self.episode_return, ",.2f")
        steps = f"{self.step:,}/{self.total:,}"
        origin = "training" if self.evaluated_at is None else "evaluated"
        return f"{steps}  {speed}/s  ETA {self.eta()}  {origin} {value}  trips {self.trips:,}"

    def evaluation(self) -> str:
        """The part of the line about an evaluation."""
        length = "" if self.length is None else f"  length {number(self.length, ',.1f')}"
        aborted = f"  aborted {100 * self.aborted:.1f} %" if self.aborted else ""
        return f"  evaluated{length}{aborted}"


class Terminal(Console):
    """A rich console that raises at a broken pipe, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError instead of exiting."""
        raise BrokenPipeError


class Screen:
    """A rich console with a live display on a terminal, and plain lines without colour elsewhere.

    Args:
        terminal: Rich console to write to.
        live: Whether to show a bar while training and a spinner while compiling.
        title: Printed once, above everything else.
        interval: Seconds between two plain lines of progress.
        clock: Returns seconds; for tests.
    """

    def __init__(self, terminal: Console, live: bool, title: str, interval: float, clock: Callable[[], float]):
        self._terminal = terminal
        self._live = live
        self._title = title
        self._interval = interval
        self._clock = clock
        self._last = -math.inf
        self._bar: Bar | None = None
        self._spinner: Bar | None = None
        if live:
            atexit.register(self.close)  # a crash must not leave the terminal without its cursor

    def line(self, text: str, style: str | None) -> None:
        """Prints a permanent line above the live display."""
        title, self._title = self._title, ""
        if title:
            self._print(Text(title, style="bold"))
        self._print(Text(text, style=style or ""))

    def show(self, progress: Progress, evaluation: bool) -> None:
        """Shows progress. An evaluation prints a permanent line; other plain lines appear once per interval."""
        if self._live:
            self._move_bar(progress)
        elif not evaluation and self._clock() - self._last < self._interval:
            return
        if evaluation or not self._live:
            self._last = self._clock()
            self.line(progress.line() + (progress.evaluation() if evaluation else ""), "cyan")

    def begin(self, what: str) -> None:
        """Shows the current work: a spinner with the elapsed time instead of the bar, or a plain line."""
        if not self._live:
            self.line(f"{what} ...", None)
            return
        self.spin(what)

    def spin(self, what: str) -> None:
        """Shows the current work on a terminal, and nothing elsewhere."""
        if not self._live:
            return
        self.close()  # rich allows one live display at a time
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._spinner = Bar(*columns, console=self._terminal, transient=True, refresh_per_second=4)
        self._spinner.add_task(f"{what} ...", total=None)
        self._spinner.start()

    def end(self, outcome: str) -> None:
        """Replaces the spinner by a line; the bar returns at the next progress."""
        self.close()
        self.line(outcome, "dim")

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints two columns. Long commands are not wrapped, so that they can be copied."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self._print(Text.assemble((f"  {name:<{width}}  ", "bold"), value))

    def close(self) -> None:
        """Removes bar and spinner; may be called again."""
        live, self._bar, self._spinner = (self._bar, self._spinner), None, None
        for display in filter(None, live):
            display.stop()

    def _print(self, text: Text) -> None:
        encoding = self._terminal.encoding
        text.plain = text.plain.encode(encoding, "replace").decode(encoding)
        self._terminal.print(text, soft_wrap=True)

    def _move_bar(self, progress: Progress) -> None:
        if self._bar is None:
            # Fits into 80 columns.
            columns = (BarColumn(bar_width=10), TextColumn("{task.fields[line]}", markup=False))
            self._bar = Bar(*columns, console=self._terminal, transient=True, refresh_per_second=4)
            self._bar.add_task("", total=progress.total, line="")
            self._bar.start()
        done = min(progress.step, progress.total)
        self._bar.update(self._bar.task_ids[0], completed=done, line=progress.short(), refresh=True)


def open_screen(
    mode: Literal["auto", "rich", "plain", "off"],
    title: str,
    interval: float,
    stream: TextIO | None = None,
    terminal: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Screen:
    """Opens the screen of a console.

    Args:
        mode: `auto` is a live display on a terminal and plain lines elsewhere; `off` prints nothing.
        title: Printed once, above everything else.
        interval: Seconds between two plain lines of progress.
        stream: File to write to; None for standard output.
        terminal: Rich console to write to instead; None to create one.
        clock: Returns seconds; for tests.
    """
    if mode == "auto":
        out = stream or sys.stdout
        mode = "rich" if terminal is not None or getattr(out, "isatty", bool)() else "plain"
    if mode == "rich":
        terminal = terminal or Terminal(file=stream)
        if not terminal.is_dumb_terminal:  # a dumb terminal cannot redraw a line
            return Screen(terminal, True, title, interval, clock)
    plain = Terminal(file=stream, color_system=None, force_jupyter=False, quiet=mode == "off")
    return Screen(plain, False, title, interval, clock)


def number(value: float | None, form: str) -> str:
    """A formatted number; `--` if it is None or not finite."""
    return "--" if value is None or not math.isfinite(value) else format(value, form)


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss, with days in front if there are any."""
    days, rest = divmod(round(seconds), 86_400)
    clock = f"{rest // 3600}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}d {clock}" if days else clock
