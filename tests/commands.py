"""Runs commands in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def exit_code(main: Callable[[Sequence[str] | None], None], *words: str) -> int:
    """Exit code of a command with the given arguments."""
    try:
        main(list(words))
    except SystemExit as caught:
        return int(caught.code or 0)
    return 0
