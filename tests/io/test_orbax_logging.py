"""Log records of orbax are silenced, other records are not."""

from __future__ import annotations

import logging

from rlstable.io.orbax_logging import silence_orbax


def record(name, path, message, error=None):
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord(name, logging.ERROR, path, 1, message, (), info)


def test_log_records_of_orbax_are_dropped_and_other_records_are_kept():
    silence_orbax()
    absl, waiting = logging.getLogger("absl"), logging.getLogger("asyncio")
    assert not absl.filter(record("absl", "/site-packages/orbax/checkpoint/x.py", "Failed to run 6 Handler Commit"))
    assert absl.filter(record("absl", "/home/me/train.py", "my own line"))
    assert not waiting.filter(record("asyncio", "/asyncio/base_events.py", 'Error in "x" in OCDBT database'))
    assert waiting.filter(record("asyncio", "/asyncio/base_events.py", "Task exception was never retrieved"))
    assert waiting.filter(record("asyncio", "/asyncio/base_events.py", "Task exception", ValueError("mine")))
