"""The end of a run on a page: its stop reason, the style of the stop reason, and its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlstable.report.markup import text
from rlstable.supervise.stop_reasons import FROM_OUTSIDE, StopReason


def ending(result: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """Returns the stop reason of a run, its style and its meaning.

    Args:
        result: Content of its `result.json`; None if the run has not ended.
    """
    if result is None:
        return "not ended", "warn", "the run is still running, or was killed"
    name = str(result.get("stop_reason"))
    known = StopReason.__members__.get(name)
    style = "good" if known is not None and known.succeeded else "warn" if known in FROM_OUTSIDE else "bad"
    return name, style, "" if known is None else known.meaning


def coloured_ending(result: Mapping[str, Any] | None) -> str:
    """Returns the stop reason in its colour as HTML, with the meaning as tooltip."""
    name, style, meaning = ending(result)
    return f'<span class="{style}" title="{text(meaning)}">{text(name)}</span>'
