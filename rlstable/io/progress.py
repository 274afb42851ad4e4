"""Progress of a run as text, and "still running" lines during long work."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

_SAMPLES = 50  # rows over which the pace is measured


@dataclasses.dataclass
class Progress:
    """Progress of a run, in environment steps; None means unknown."""

    total: int
    step: int = 0
    sps: float | None = None  # environment steps per second of training
    episode_return: float | None = None
    evaluated_at: int | None = None  # step of the evaluation with this return; None if training episodes gave it
    length: float | None = None  # mean episode length of the evaluation
    aborted: float | None = None  # share of aborted evaluation episodes
    trips: int = 0  # of all guards
    _samples: deque[tuple[float, int]] = dataclasses.field(default_factory=lambda: deque(maxlen=_SAMPLES))

    def add(self, step: int, metrics: Mapping[str, float | int | None], now: float) -> None:
        if self._samples and step <= self._samples[-1][1]:
            self._samples.clear()  # a rollback
        self._samples.append((now, step))
        self.step, self.sps = step, metrics.get("training/sps", self.sps)
        if "eval/episode_reward" in metrics:
            self.evaluated_at, self.episode_return = step, metrics["eval/episode_reward"]
            self.length, self.aborted = metrics.get("eval/avg_episode_length"), metrics.get("eval/aborted_share")
        elif self.evaluated_at is None:
            self.episode_return = metrics.get("episode/sum_reward", self.episode_return)

    def eta(self) -> str:
        """Remaining time at the pace of the latest rows, evaluations included; at first, at the speed of training."""
        (started, first), (ended, last) = self._samples[0], self._samples[-1]
        pace = (ended - started) / (last - first) if ended > started else None
        if pace is None and self.sps is not None and self.sps > 0:
            pace = 1 / self.sps
        return "--" if pace is None or not math.isfinite(pace) else _duration(max(self.total - self.step, 0) * pace)

    def line(self, evaluation: bool) -> str:
        """One line with aligned columns, and the facts of an evaluation."""
        width = len(f"{self.total:,}")
        columns = [
            f"step {self.step:>{width},} / {self.total:,}",
            f"{min(100 * self.step / self.total, 100.0):5.1f} %",
            f"{_number(self.sps, ',.0f'):>9} steps/s",
            f"ETA {self.eta():>8}",
            f"return {_number(self.episode_return, ',.2f'):>10}",
            f"trips {self.trips:,}",
        ]
        if self.episode_return is not None and self.evaluated_at != self.step:
            steps = None if self.evaluated_at is None else self.step - self.evaluated_at
            columns.append("in training" if steps is None else f"evaluated {steps:,} steps ago")
        if evaluation:
            columns.append("evaluated")
            columns += [] if self.length is None else [f"length {self.length:,.1f}"]
            columns += [f"aborted {100 * self.aborted:.1f} %"] if self.aborted else []
        return "  ".join(columns)


def _number(value: float | None, form: str) -> str:
    return "--" if value is None or not math.isfinite(value) else format(value, form)


def _duration(seconds: float) -> str:
    days, rest = divmod(round(seconds), 86_400)
    clock = f"{rest // 3600}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}d {clock}" if days else clock


@dataclasses.dataclass
class _Work:
    what: str
    expected: str
    started: float
    printed: float


class Reminder:
    """Prints "still running" lines about the innermost long work, from one background thread."""

    def __init__(self, patience: float, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._patience = patience
        self._write = write
        self._clock = clock
        self._lock = threading.Lock()
        self._running: list[_Work] = []
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def working(self, what: str, expected: float | None = None) -> Iterator[None]:
        """Context manager that prints lines while the block runs, which takes `expected` seconds if that is known."""
        now = self._clock()
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
            time.sleep(self._patience / 4)
            with self._lock:
                if not self._running:
                    self._thread = None
                    return
                work, now = self._running[-1], self._clock()
                if now - work.printed < self._patience:
                    continue
                work.printed = now
            self._write(f"{work.what}: {now - work.started:.0f} s{work.expected} so far")
