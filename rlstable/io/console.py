"""The console of a run: prints progress, events and the summary."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TextIO

from rlstable.io.progress_reminder import ProgressReminder
from rlstable.io.screens import Progress, open_screen

_SAMPLES = 50  # rows over which the pace is measured
_TRIPS = re.compile(r"guards/[^/]+/trips")
# Events that are not trouble; their lines have no exclamation mark.
_GOOD_EVENTS = frozenset(
    {
        "started", "resumed", "saved", "checkpoint_saved_again", "sink_recovered", "environments_redrawn",
        "backend_chosen", "compiler_options_unknown", "seed_ended", "best_confirmed", "episode_recorded",
        "sign_recovered",
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
    """The sink that prints on the console.

    Attributes:
        working: `with working(what, expected):` prints "still running" lines during long work.

    `with busy(what):` does the same and shows the work on a terminal, in place of the progress bar.

    Args:
        mode: `auto` shows a live display on a terminal and plain lines elsewhere.
        total_steps: Environment steps of the whole run.
        title: Name of the run, usually its environment.
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
        self._progress = Progress(total=int(total_steps))
        self._interval = interval
        self._verbose = verbose
        self._clock = clock
        self.working = ProgressReminder(patience, self.message, clock).working
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)
        self._step = 0
        self._trips: dict[str, int] = {}
        self._pending_trips: dict[str, Counter[str]] = {}
        self._printed_at: dict[str, float] = {}
        self._screen = open_screen(mode, title, interval, stream, terminal, clock)

    def log(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Shows progress and return."""
        now = self._progress
        now.step = self._step = int(step)
        now.sps = metrics.get("training/sps", now.sps)
        now.pace = self._pace()
        if "eval/episode_reward" in metrics:
            now.evaluated_at = now.step
            now.episode_return = metrics["eval/episode_reward"]
            now.length = metrics.get("eval/avg_episode_length")
            now.aborted = metrics.get("eval/aborted_share")
        elif now.evaluated_at is None:
            now.episode_return = metrics.get("episode/sum_reward", now.episode_return)
        self._trips |= {key: int(value or 0) for key, value in metrics.items() if _TRIPS.fullmatch(key)}
        now.trips = sum(self._trips.values())
        self._print_trips()
        evaluation = any(key.startswith("eval/") for key in metrics)
        self._try(lambda: self._screen.show(now, evaluation))
        if self._verbose:
            self._try(lambda: self._screen.line(describe_learning(self._step, metrics), "dim"))

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Prints one line for one event."""
        self._step = int(step)
        if kind == "stopped":
            return  # the summary reports it
        if kind == "guard_tripped" and "guard" in fields:
            counts = {cause: n for cause, n in fields.items() if isinstance(n, int)}
            self._pending_trips.setdefault(str(fields["guard"]), Counter()).update(counts)
            self._print_trips()
        else:
            self._print_event(kind in _GOOD_EVENTS or fields.get("how") == "typed", describe_event(kind, fields))

    def _pace(self) -> float | None:
        """Seconds per environment step over the latest rows; None before the second row and after a rollback."""
        if self._samples and self._step <= self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((self._clock(), self._step))
        (started, first), (ended, last) = self._samples[0], self._samples[-1]
        return (ended - started) / (last - first) if ended > started else None

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Context manager: shows on a terminal that something other than training takes time."""
        self._try(lambda: self._screen.spin(what))
        try:
            with self.working(what):
                yield
        finally:
            self._try(lambda: self._screen.close())

    def header(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints a table of names and values when a run starts."""
        self._try(lambda: self._screen.table(rows))

    @contextlib.contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Context manager: shows that a program compiles, and then how long it took."""
        started = self._clock()
        self._try(lambda: self._screen.begin(f"compiling {name}"))
        outcome = f"failed to compile {name} after"
        try:
            with self.working(f"compiling {name}"):
                yield
            outcome = f"compiled {name} in"
        finally:
            took = self._clock() - started
            self._try(lambda: self._screen.end(f"{outcome} {took:.1f} s"))

    def message(self, text: str) -> None:
        """Prints a line."""
        self._try(lambda: self._screen.line(text, None))

    def summary(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints a table of names and values, and ends the live display."""
        self.close()
        self._try(lambda: self._screen.table(rows))

    def close(self) -> None:
        """Prints pending trips and ends the live display; may be called again."""
        self._print_trips(force=True)
        self._try(lambda: self._screen.close())

    def _print_event(self, good: bool, text: str) -> None:
        line = f"{'-' if good else '!'} step {self._step:,}  {text}"
        self._try(lambda: self._screen.line(line, None if good else "yellow"))

    def _print_trips(self, force: bool = False) -> None:
        """Prints pending trips, at most one line per guard and interval, unless forced."""
        for guard, counts in list(self._pending_trips.items()):
            since = self._clock() - self._printed_at.get(guard, float("-inf"))
            if force or since >= self._interval:
                del self._pending_trips[guard]
                self._printed_at[guard] = self._clock()
                total = sum(counts.values())
                causes = ", ".join(f"{cause} {n:,}" for cause, n in counts.items())
                self._print_event(False, f"{guard}: {total:,} {'trip' if total == 1 else 'trips'} ({causes})")

    def _try(self, call: Callable[[], None]) -> None:
        """Calls the screen. If a pipe or terminal is closed, the run continues and nothing more is shown."""
        try:
            call()
        except (OSError, ValueError):
            self._screen = open_screen("off", "", 0.0)


def describe_event(kind: str, fields: Mapping[str, Any]) -> str:
    """An event as one line.

    | event | line |
    |---|---|
    | `configuration_changed` | `kind: key: old -> new (how)` |
    | `sign` | `sign name: text` |
    | `sign_recovered` | `sign name recovered` |
    | other | `kind: key value, ...`; a mapping becomes `key (name value, ...)` |
    """
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
