"""Log records of orbax are silenced, other records are not."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest

from rlstable.io.orbax_logging import silence_orbax


def record(name, path, message, error=None):
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord(name, logging.ERROR, path, 1, message, (), info)


@pytest.fixture(autouse=True)
def silence():
    silence_orbax()


def test_log_records_of_orbax_are_dropped_and_other_records_are_kept():
    absl, waiting = logging.getLogger("absl"), logging.getLogger("asyncio")
    assert not absl.filter(record("absl", "/site-packages/orbax/checkpoint/x.py", "Failed to run 6 Handler Commit"))
    assert absl.filter(record("absl", "/home/me/train.py", "my own line"))
    assert not waiting.filter(record("asyncio", "/asyncio/base_events.py", 'Error in "x" in OCDBT database'))
    assert waiting.filter(record("asyncio", "/asyncio/base_events.py", "Task exception was never retrieved"))
    assert waiting.filter(record("asyncio", "/asyncio/base_events.py", "Task exception", ValueError("mine")))


def test_closed_event_loop_is_silent_only_in_threads_of_c(monkeypatch):
    heard = []
    hook = sys.unraisablehook
    monkeypatch.setattr(hook, "_hook", heard.append)
    loop = asyncio.new_event_loop()
    loop.close()

    class Unraisable:
        def __init__(self, trace):
            self.exc_value, self.exc_traceback = error, trace

    with pytest.raises(RuntimeError, match="Event loop is closed") as caught:
        loop.call_soon_threadsafe(print)
    error = caught.value
    hook(Unraisable(error.__traceback__.tb_next))  # as a thread of C++ calls it: asyncio's frame is the outermost
    assert not heard
    hook(Unraisable(error.__traceback__))
    assert len(heard) == 1
