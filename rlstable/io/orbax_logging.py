"""Hides orbax's log lines and tracebacks. The run reports the same failures as events."""

from __future__ import annotations

import asyncio.base_events
import logging
import sys
import traceback
from collections.abc import Callable
from typing import Any

_NAMES = ("orbax", "ocdbt", "tensorstore")


class _OrbaxFilter(logging.Filter):
    """Drops log records of orbax, and records of asyncio about its tasks, which a failed save leaves."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name != "asyncio":
            return "/orbax/" not in record.pathname
        error = record.exc_info[1] if record.exc_info else None
        trace = "" if error is None else "".join(traceback.format_exception(error))
        text = f"{record.getMessage()} {trace}".lower()
        return not any(name in text for name in _NAMES)


_FILTER = _OrbaxFilter()


def silence_orbax() -> None:
    """Hides orbax's log records and tracebacks from now on; may be called again."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_FILTER)  # a filter is added only once
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)


class _UnraisableHook:
    """Hides errors of TensorStore's threads about closed event loops."""

    def __init__(self, hook: Callable[[Any], object]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        trace = unraisable.exc_traceback
        # A call from C++ has no Python caller, so its outermost frame is asyncio's own.
        from_native = trace is not None and trace.tb_frame.f_code.co_filename == asyncio.base_events.__file__
        if not (from_native and "Event loop is closed" in str(unraisable.exc_value)):
            self._hook(unraisable)
