"""Keeps orbax's log lines and tracebacks off the terminal: every failure they tell of is an event of the run."""

from __future__ import annotations

import asyncio.base_events
import logging
import sys
from collections.abc import Callable
from typing import Any

# A failed save leaves tasks behind in orbax's event loops; asyncio logs each with a traceback when it is collected.
_LOGGERS = ("absl", "asyncio")
_NAMES = ("orbax", "ocdbt", "tensorstore")


class _NotOfOrbax(logging.Filter):
    """Drops records that orbax or the library it writes with has caused; all other records pass."""

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
        said = " ".join((record.getMessage(), *trace)).lower()
        return not any(name in said for name in _NAMES)


_FILTER = _NotOfOrbax()


def silence_orbax() -> None:
    """Drops orbax's log records and tracebacks from now on; may be called again."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_FILTER)  # the same filter is added once
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)


class _UnraisableHook:
    """Drops what TensorStore's threads print of an event loop that orbax has closed; passes on everything else."""

    def __init__(self, hook: Callable[[Any], object]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        trace = unraisable.exc_traceback
        # A call from C++ has no Python caller, so its outermost frame is asyncio's own.
        from_outside = trace is not None and trace.tb_frame.f_code.co_filename == asyncio.base_events.__file__
        if not (from_outside and "Event loop is closed" in str(unraisable.exc_value)):
            self._hook(unraisable)
