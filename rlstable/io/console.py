"""The console of a run: a line per evaluation, event, and few seconds of long work; on a terminal a live bar."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TextIO

_TRIPS = re.compile(r"guards/[^/]+/trips")
# Events that are not trouble; their lines have no exclamation mark.
_GOOD_EVENTS = frozenset(
    {
        "resumed", "checkpoint_saved_again", "sink_recovered", "environments_redrawn", "best_confirmed",
        "episode_recorded", "sign_recovered", "configuration_changed",
        "symmetry_not_used",
    }
)  # fmt: skip
_PACE = 50  # rows over which the pace is measured
_BAR, _FRAME = 10, 0.2  # letters of the bar, and seconds between two drawings
_STYLES = {"dim": 2, "yellow": 33, "cyan": 36}  # codes of a terminal


@dataclasses.dataclass(eq=False)
class Console:
    """Prints progress, events and the summary of a run, in colours on a terminal.

    With the mode `auto` on a terminal or in a notebook, a bar below the lines shows the progress. Else
    training has a line every `interval` seconds at most. Long work (`with working(what, expected):`) one every
    `patience` seconds, and each evaluation one. Returns in training are shown from the step `whole_from` on: the first
    episodes to end are the short ones. Trips of one guard within the interval are summed up in one line. If a
    pipe or terminal is closed, the run continues and nothing more is shown.
    """

    mode: Literal["auto", "lines", "off"]
    total_steps: int
    _: dataclasses.KW_ONLY
    whole_from: int = 0
    interval: float = 5.0
    patience: float = 20.0
    stream: TextIO | None = None
    clock: Callable[[], float] = time.monotonic
    _drawn: float = -math.inf  # seconds
    _step: int = 0
    _sps: float | None = None  # environment steps per second of training; None is unknown
    _training: float | None = None  # return of the latest training episodes that were whole
    _return: float | None = None  # of the last evaluation; before it, of training episodes
    _evaluated_at: int | None = None  # step of the last evaluation

    def __post_init__(self) -> None:
        self._shows = self.mode != "off"
        self._coloured = is_terminal(self._out)
        live = self.mode == "auto" and (self._coloured or (self.stream is None and "ipykernel" in sys.modules))
        self._bar = "" if live else None  # the bar that is shown; None for lines only
        self._pace: deque[tuple[float, int]] = deque(maxlen=_PACE)  # seconds and steps of the latest rows
        self.working = Reminder(self.patience, self.message, self.clock).working
        self._trips: dict[str, int] = {}
        self._pending_trips: dict[str, Counter[str]] = {}
        self._printed_at: dict[str, float] = {}  # seconds, by guard
        self._last_line = -math.inf

    def log(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        now, evaluated = self.clock(), "eval/episode_reward" in metrics
        if self._pace and step <= self._pace[-1][1]:
            self._pace.clear()  # a rollback
        self._pace.append((now, step))
        self._step, self._sps = step, metrics.get("training/sps", self._sps)
        if step >= self.whole_from:
            self._training = metrics.get("episode/sum_reward", self._training)
        if evaluated:
            self._evaluated_at, self._return = step, metrics["eval/episode_reward"]
        elif self._evaluated_at is None:
            self._return = self._training
        self._trips |= {key: int(value or 0) for key, value in metrics.items() if _TRIPS.fullmatch(key)}
        self._print_trips()
        if evaluated or (self._bar is None and now - self._last_line >= self.interval):
            self._last_line = now
            self.message("  ".join(self._columns(metrics)), "cyan")
        if self._bar is not None and now - self._drawn >= _FRAME:
            self._drawn, erased = now, self._erased()
            self._bar = self._progress()
            self._write(erased + self._bar)

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        self._step = step
        if kind == "backend_chosen" or (kind == "stopped" and "of" not in fields):
            return  # the header has the physics, and the summary the stop
        if kind == "guard_tripped" and "guard" in fields:
            counts = {cause: n for cause, n in fields.items() if isinstance(n, int)}
            self._pending_trips.setdefault(str(fields["guard"]), Counter()).update(counts)
            self._print_trips()
        else:
            good = kind in _GOOD_EVENTS or fields.get("exit_code") == 0
            self._print_event(good, describe_event(kind, fields))

    @contextlib.contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Context manager: shows that a program compiles, and then how long it took."""
        started = self.clock()
        self.message(f"compiling {name} ...")
        outcome = f"failed to compile {name} after"
        try:
            with self.working(f"compiling {name}"):
                yield
            outcome = f"compiled {name} in"
        finally:
            self.message(f"{outcome} {self.clock() - started:.1f} s", "dim")

    def message(self, text: str, style: str = "") -> None:
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
        """Prints pending trips and removes the bar; may be called again."""
        self._print_trips(force=True)
        if self._bar:
            erased, self._bar = self._erased(), ""
            self._write(erased)

    def _columns(self, metrics: Mapping[str, float | int | None]) -> list[str]:
        """The columns of a line, and the facts of an evaluation."""
        width = len(f"{self.total_steps:,}")
        columns = [
            f"step {self._step:>{width},} / {self.total_steps:,}",
            f"{min(100 * self._step / self.total_steps, 100.0):5.1f} %",
            f"{_number(self._sps, ',.0f'):>9} steps/s",
            f"ETA {self._eta():>8}",
            f"return {_number(self._return, ',.2f'):>10}",
            f"trips {sum(self._trips.values()):,}",
        ]
        if self._evaluated_at == self._step:
            length, aborted = metrics.get("eval/avg_episode_length"), metrics.get("eval/aborted_share")
            columns.append("evaluated")
            columns += [] if length is None else [f"length {length:,.1f}"]
            columns += [f"aborted {100 * aborted:.1f} %"] if aborted else []
        elif self._return is not None:
            steps = None if self._evaluated_at is None else self._step - self._evaluated_at
            columns.append("in training" if steps is None else f"evaluated {steps:,} steps ago")
        return columns

    def _progress(self) -> str:
        """The bar and its numbers: returns of whole training episodes and of the last evaluation beside each other."""
        share = min(self._step / self.total_steps, 1.0)
        done, rest = ("━", "╌") if "utf" in (self._out.encoding or "").lower() else ("#", "-")
        evaluated = self._evaluated_at is not None
        columns = [
            f"{done * round(_BAR * share)}{rest * (_BAR - round(_BAR * share))} {100 * share:5.1f} %",
            f"ETA {self._eta()}",
            *([f"{_number(self._return, ',.2f')} evaluated"] if evaluated else []),
            f"{_number(self._training, ',.2f')} in training",
            f"trips {sum(self._trips.values()):,}",
            f"{_number(self._sps, ',.0f')} steps/s",
        ]
        return "  ".join(columns)[: shutil.get_terminal_size().columns - 1]

    def _erased(self) -> str:
        """Letters that remove the bar from its line, also in a notebook, which knows no codes of a terminal."""
        return f"\r{' ' * len(self._bar)}\r" if self._bar else ""

    def _eta(self) -> str:
        """Remaining time at the pace of the latest rows, evaluations included; at first, at the speed of training."""
        (started, first), (ended, last) = self._pace[0], self._pace[-1]
        pace = (ended - started) / (last - first) if ended > started else None
        if pace is None and self._sps is not None and self._sps > 0:
            pace = 1 / self._sps
        if pace is None or not math.isfinite(pace):
            return "--"
        days, rest = divmod(round(max(self.total_steps - self._step, 0) * pace), 86_400)
        clock = f"{rest // 3600}:{rest % 3600 // 60:02}:{rest % 60:02}"
        return f"{days}d {clock}" if days else clock

    def _print_event(self, good: bool, text: str) -> None:
        self.message(f"{'-' if good else '!'} step {self._step:,}  {text}", "" if good else "yellow")

    def _print_trips(self, force: bool = False) -> None:
        """Prints pending trips, at most one line per guard and interval, unless forced."""
        for guard, counts in list(self._pending_trips.items()):
            since = self.clock() - self._printed_at.get(guard, -math.inf)
            if force or since >= self.interval:
                del self._pending_trips[guard]
                self._printed_at[guard] = self.clock()
                total = sum(counts.values())
                causes = ", ".join(f"{cause} {n:,}" for cause, n in counts.items())
                self._print_event(False, f"{guard}: {total:,} {'trip' if total == 1 else 'trips'} ({causes})")

    def _print(self, text: str, style: str = "") -> None:
        encoding = self._out.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        if self._coloured and style:
            text = f"\x1b[{_STYLES[style]}m{text}\x1b[0m"
        self._write(f"{self._erased()}{text}\n{self._bar or ''}")

    @property
    def _out(self) -> TextIO:
        return self.stream or sys.stdout

    def _write(self, text: str) -> None:
        if not self._shows:
            return
        try:
            self._out.write(text)  # one call, because other threads print too
            self._out.flush()
        except (OSError, ValueError):  # a closed pipe or terminal
            self._shows = False


class SeedConsole(Console):
    """Passes events of one seed to the console of all seeds, which shows their common progress."""

    def __init__(self, console: Console, seed: int):
        super().__init__("off", total_steps=1)
        self._console = console
        self._name = f"seed {seed}"

    def log(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        pass

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "guard_tripped":  # the console sums trips by guard, so the seed is part of the guard's name
            fields = {**fields, "guard": f"{self._name}: {fields['guard']}"}
        elif kind == "stopped":
            fields = {"of": self._name, "stop_reason": fields["stop_reason"], "exit_code": fields["exit_code"]}
        else:
            fields = {"of": self._name, **fields}
        self._console.event(step, kind, fields)

    def message(self, text: str, style: str = "") -> None:
        self._console.message(f"{self._name}: {text}", style)


@dataclasses.dataclass
class _Work:
    what: str
    expected: str
    started: float
    printed: float


@dataclasses.dataclass(eq=False)
class Reminder:
    """Prints "still running" lines about the innermost long work, from one background thread."""

    patience: float
    write: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[_Work] = []
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def working(self, what: str, expected: float | None = None) -> Iterator[None]:
        """Context manager that prints lines while the block runs, which takes `expected` seconds if that is known."""
        now = self.clock()
        work = _Work(what, "" if expected is None else f" of about {expected:.0f} s", now, now)
        with self._lock:
            self._running.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(work)

    def _watch(self) -> None:
        while True:
            time.sleep(self.patience / 4)
            with self._lock:
                if not self._running:
                    self._thread = None
                    return
                work, now = self._running[-1], self.clock()
                if now - work.printed < self.patience:
                    continue
                work.printed = now
            self.write(f"{work.what}: {now - work.started:.0f} s{work.expected} so far")


def _number(value: float | None, form: str) -> str:
    return "--" if value is None or not math.isfinite(value) else format(value, form)


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def describe_event(kind: str, fields: Mapping[str, Any]) -> str:
    """An event as one line, such as `kind: key value, ...`; a mapping becomes `key (name value, ...)`."""
    seed = f" of {_text(fields['of'])}" if "of" in fields else ""
    if kind == "sign" and {"sign", "text"} <= fields.keys():
        return f"sign {_text(fields['sign'])}{seed}: {_text(fields['text'])}"
    if kind == "sign_recovered" and "sign" in fields:
        return f"sign {_text(fields['sign'])}{seed} recovered"
    if kind == "configuration_changed" and {"key", "old", "new"} <= fields.keys():
        return f"{kind}: {_text(fields['key'])}: {setting(fields['old'])} -> {setting(fields['new'])}"
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
