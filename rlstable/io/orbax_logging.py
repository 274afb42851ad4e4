"""Hides orbax's log lines and tracebacks. The run reports the same failures as events."""

from __future__ import annotations

import asyncio.base_events
import logging
import sys
from collections.abc import Callable
from typing import Any

# A failed save leaves tasks in orbax's event loops; asyncio logs each with a traceback at garbage collection.
_LOGGERS = ("absl", "asyncio")
_NAMES = ("orbax", "ocdbt", "tensorstore")


class _OrbaxFilter(logging.Filter):
    """Drops log records of orbax and its libraries; passes all other records."""

    def filter(self, record: logging.LogRecord) -> bool:
        if "/orbax/" in record.pathname:
            return False
        if record.name != "asyncio":
            return True
        trace, error = [], record.exc_info[1] if record.exc_info else None
        while error is not None:
            frame = error.__traceback__
            while frame is not None:
                trace.append(frame.tb_frame.f_code.co_filename)
                frame = frame.tb_next
            error = error.__cause__ or error.__context__
        text = " ".join((record.getMessage(), *trace)).lower()
        return not any(name in text for name in _NAMES)


_FILTER = _OrbaxFilter()


def silence_orbax() -> None:
    """Hides orbax's log records and tracebacks from now on; may be called again."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_FILTER)  # a filter is added only once
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)


class _UnraisableHook:
    """Hides errors of TensorStore's threads about closed event loops; passes on all other errors."""

    def __init__(self, hook: Callable[[Any], object]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        trace = unraisable.exc_traceback
        # A call from C++ has no Python caller, so its outermost frame is asyncio's own.
        from_native = trace is not None and trace.tb_frame.f_code.co_filename == asyncio.base_events.__file__
        if not (from_native and "Event loop is closed" in str(unraisable.exc_value)):
            self._hook(unraisable)
