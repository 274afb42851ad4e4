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
_builds: weakref.WeakSet[Future[Any]] = weakref.WeakSet()


def available() -> bool:
    """Whether programs compile in a background thread. Not on an accelerator, where autotuning runs kernels."""
    import jax  # imported here, because a command that fails early uses `exit_process` without JAX

    return bool(jax.default_backend() == "cpu")


def build(program: Callable[[], Built], at_once: bool = False) -> Future[Built]:
    """Compiles programs one after another in a background thread, or in the caller's thread on an accelerator.

    Tracing holds Python's lock and compiling does not, so a program compiles while the caller traces the next one. Only
    one program compiles in the background at a time, to save memory; `at_once` compiles a small one beside it.
    """
    if available() and not at_once:
        building = _builder.submit(program)
        _builds.add(building)
        return building
    built: Future[Built] = Future()
    try:
        built.set_result(program())
    except Exception as error:
        built.set_exception(error)
    return built


def exit_process(end: SystemExit) -> NoReturn:
    """Ends the process without waiting for a program that still compiles.

    Python would wait for the thread, and a compilation cannot be stopped. With MJX that takes a minute or two, longer
    than the sender of a signal may wait.
    """
    if (hosts := sys.modules.get("rlstable.device.hosts")) is not None:
        hosts.leave(int(end.code or 0))
    if all(build.done() for build in list(_builds)):
        raise end
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(int(end.code or 0))
