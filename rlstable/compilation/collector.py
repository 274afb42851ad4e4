"""Python's garbage collector while programs are traced."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pauses the collector: tracing makes many objects that stay in use, and searching them takes time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def exclude_existing_objects() -> None:
    """Starts the collector if it is off. It then ignores the objects that exist now. Call it after the imports."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
