"""Compiles programs in a background thread while the main thread traces the next one."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

Built = TypeVar("Built")

_builder = ThreadPoolExecutor(1, "compiling")
_begun: weakref.WeakSet[Future[Any]] = weakref.WeakSet()


def possible() -> bool:
    """Whether something may compile beside something else: the compiler of an accelerator tries kernels out."""
    import jax  # here, since a command that has not come so far ends by this file too

    return bool(jax.default_backend() == "cpu")


def build(program: Callable[[], Built]) -> Future[Built]:
    """Builds programs in a background thread, one after another; in the caller's thread if that is not possible.

    Tracing runs in Python and compiling does not: a lowered program compiles while this thread traces another. Two
    programs at once would need the memory of both.

    Args:
        program: Compiles it.
    """
    if possible():
        building = _builder.submit(program)
        _begun.add(building)
        return building
    built: Future[Built] = Future()
    try:
        built.set_result(program())
    except Exception as error:
        built.set_exception(error)
    return built


def leave(end: SystemExit) -> NoReturn:
    """Ends the process as requested, without waiting for work that is no longer needed.

    Python would wait for the thread, and a compilation cannot be stopped: a minute or two with MJX, which the sender
    of a signal may not grant.

    Args:
        end: What asked for it, its code a number.
    """
    if all(program.done() for program in list(_begun)):
        raise end
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(int(end.code or 0))
