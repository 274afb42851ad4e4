"""The ways to show a run: a live display on a terminal, plain lines, or nothing."""

from __future__ import annotations

import atexit
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO


@dataclass
class Progress:
    """Progress of a run; None is unknown."""

    total: int
    step: int = 0
    sps: float | None = None
    episode_return: float | None = None
    length: float | None = None
    aborted: float | None = None
    trips: int = 0

    def eta(self) -> str:
        """Time left at the present speed."""
        if self.sps is None or not self.sps > 0 or not math.isfinite(self.sps):
            return "--"
        return duration(max(self.total - self.step, 0) / self.sps)

    def line(self) -> str:
        """One aligned line; in one run all of them have their columns in the same places."""
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
        return "  ".join(columns)

    def short(self) -> str:
        """The line beside a bar, which shows the share done."""
        speed, value = number(self.sps, ",.0f"), number(self.episode_return, ",.2f")
        steps = f"{self.step:,}/{self.total:,}"
        return f"{steps}  {speed}/s  ETA {self.eta()}  return {value}  trips {self.trips:,}"

    def evaluation(self) -> str:
        """The part of the line about an evaluation."""
        length = "" if self.length is None else f"  length {number(self.length, ',.1f')}"
        aborted = f"  aborted {100 * self.aborted:.1f} %" if self.aborted else ""
        return f"  evaluated{length}{aborted}"


class Screen(Protocol):
    """Output of a console."""

    def line(self, text: str, style: str | None) -> None:
        """Prints a line that stays."""

    def show(self, progress: Progress, evaluation: bool) -> None:
        """Shows progress; an evaluation leaves a line that stays."""

    def begin(self, what: str) -> None:
        """Something that takes long begins."""

    def end(self, outcome: str) -> None:
        """It has ended."""

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints names and values."""

    def close(self) -> None:
        """Ends what is live."""


class Off:
    """Shows nothing."""

    def line(self, text: str, style: str | None) -> None:
        """Nothing."""

    def show(self, progress: Progress, evaluation: bool) -> None:
        """Nothing."""

    def begin(self, what: str) -> None:
        """Nothing."""

    def end(self, outcome: str) -> None:
        """Nothing."""

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Plain:
    """Lines of text, without colour: for log files and pipes."""

    def __init__(self, title: str, interval: float, stream: TextIO | None, clock: Callable[[], float]):
        self._interval = interval
        self._stream = stream
        self._clock = clock
        self._last = -math.inf
        self._title = title

    def line(self, text: str, style: str | None) -> None:
        """Prints a line, at once."""
        del style
        # Looked up now: a redirected standard output is meant for the run's lines too.
        stream = self._stream or sys.stdout
        encoding = getattr(stream, "encoding", None) or "utf-8"
        title, self._title = self._title, ""
        for part in (title, text) if title else (text,):
            print(part.encode(encoding, "replace").decode(encoding), file=stream, flush=True)

    def show(self, progress: Progress, evaluation: bool) -> None:
        """Prints a line of progress, if the last one is long enough ago or it tells of an evaluation."""
        now = self._clock()
        if evaluation or now - self._last >= self._interval:
            self._last = now
            self.line(progress.line() + (progress.evaluation() if evaluation else ""), None)

    def begin(self, what: str) -> None:
        """Prints a line before."""
        self.line(f"{what} ...", None)

    def end(self, outcome: str) -> None:
        """Prints a line after."""
        self.line(outcome, None)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints two columns."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self.line(f"  {name:<{width}}  {value}", None)

    def close(self) -> None:
        """Nothing is live here."""


class Rich:
    """A live display: a bar while training, a spinner while compiling, lines above them."""

    def __init__(self, title: str, terminal: Any):
        self._title = title  # printed once, above everything
        self._terminal = terminal
        self._bar: Any = None
        self._spinner: Any = None
        atexit.register(self.close)  # a crash must not leave the terminal without its cursor

    def line(self, text: str, style: str | None) -> None:
        """Prints a line above what is live."""
        from rich.text import Text

        title, self._title = self._title, ""
        for part, look in ((title, "bold"), (text, style)) if title else ((text, style),):
            self._terminal.print(Text(part, style=look or ""), soft_wrap=True)

    def show(self, progress: Progress, evaluation: bool) -> None:
        """Moves the bar; the result of an evaluation stays above it."""
        if self._bar is None:
            self._start_bar(progress)
        done = min(progress.step, progress.total)
        self._bar.update(self._bar.task_ids[0], completed=done, line=progress.short(), refresh=True)
        if evaluation:
            self.line(progress.line() + progress.evaluation(), "cyan")

    def begin(self, what: str) -> None:
        """Shows a spinner and the time that has passed, in place of the bar."""
        from rich.progress import Progress as Bar
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        self.close()  # rich has one live display at a time
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._spinner = Bar(*columns, console=self._terminal, transient=True, refresh_per_second=4)
        self._spinner.add_task(f"{what} ...", total=None)
        self._spinner.start()

    def end(self, outcome: str) -> None:
        """Puts a line in the spinner's place; the bar comes back with the next progress."""
        self.close()
        self.line(outcome, "dim")

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints two columns; a long command stays on one line, so that it can be copied."""
        from rich.text import Text

        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self._terminal.print(Text.assemble((f"  {name:<{width}}  ", "bold"), value), soft_wrap=True)

    def close(self) -> None:
        """Takes bar and spinner off the screen."""
        live, self._bar, self._spinner = (self._bar, self._spinner), None, None
        for display in filter(None, live):
            display.stop()

    def _start_bar(self, progress: Progress) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        # All of it fits into 80 columns, for a humanoid too.
        columns = (BarColumn(bar_width=10), TextColumn("{task.fields[line]}", markup=False))
        self._bar = Bar(*columns, console=self._terminal, transient=True, refresh_per_second=4)
        self._bar.add_task("", total=progress.total, line="")
        self._bar.start()


def number(value: float | None, form: str) -> str:
    """A number in a format, `--` where there is none."""
    return "--" if value is None or not math.isfinite(value) else format(value, form)


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss, with days before that where there are any."""
    days, rest = divmod(round(seconds), 86_400)
    clock = f"{rest // 3600}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}d {clock}" if days else clock
