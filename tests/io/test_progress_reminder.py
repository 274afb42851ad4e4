"""Long work is told of, short work is not, and one thread does it all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rlstable.io.progress_reminder import ProgressReminder


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_what_is_inside_is_told_of_and_then_what_is_around_it() -> None:
    told: list[str] = []
    teller = ProgressReminder(0.02, told.append)
    with teller.working("outside"):
        with teller.working("inside", expected=7.0):
            until(lambda: told)
            assert set(told) == {"inside: 0 s of about 7 s so far"}
        until(lambda: "outside: 0 s so far" in told)


def test_short_work_is_not_told_of_and_costs_one_thread() -> None:
    told: list[str] = []
    teller = ProgressReminder(60.0, told.append)
    before = set(threading.enumerate())  # of which some may end meanwhile
    for _ in range(100):
        with teller.working("a moment"):
            pass
    assert told == []
    assert len(set(threading.enumerate()) - before) == 1


def test_the_thread_ends_where_nothing_is_left_and_another_begins() -> None:
    told: list[str] = []
    teller = ProgressReminder(0.02, told.append)
    for _ in range(2):
        with teller.working("again"):
            until(lambda: told)
        until(lambda: teller._thread is None)
        told.clear()
    assert not teller._under_way
