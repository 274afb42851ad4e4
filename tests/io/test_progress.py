"""Progress reminders: lines about long operations, none about short ones, and one thread for all."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from rlstable.io.console import Reminder


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_reminder_names_the_innermost_operation() -> None:
    told: list[str] = []
    teller = Reminder(0.02, told.append)
    with teller.working("outside"):
        with teller.working("inside", expected=7.0):
            until(lambda: told)
            assert all(re.fullmatch(r"inside: \d+ s of about 7 s so far", line) for line in told)
        until(lambda: any(re.fullmatch(r"outside: \d+ s so far", line) for line in told))


def test_short_operations_print_nothing_and_share_one_thread() -> None:
    told: list[str] = []
    teller = Reminder(60.0, told.append)
    before = set(threading.enumerate())  # of which some may end meanwhile
    for _ in range(100):
        with teller.working("a moment"):
            pass
    assert told == []
    assert len(set(threading.enumerate()) - before) == 1
