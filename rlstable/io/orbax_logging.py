"""Hides orbax's log lines. The run reports the same failures as events."""

from __future__ import annotations

import logging
import traceback

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
    """Hides orbax's log records from now on; may be called again."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_FILTER)  # a filter is added only once
