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


def forget_what_stays() -> None:
    """Starts the collector if it is off, without the objects that exist now; to be called after the imports."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
