"""Traces, lowers and compiles programs. `trace_cache` skips the tracing."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from jax.stages import Compiled, Lowered, Wrapped

from rlstable.compilation import background
from rlstable.compilation.xla import Options, quick_options
from rlstable.device.precision import SINGLE, Precision
from rlstable.device.trees import PyTree

# Returns the arguments to trace a program with, or their shapes.
Arguments = Callable[[], tuple[PyTree, ...]]
Built = TypeVar("Built")

_MANY_CONSTANTS = 50 * 10**6  # bytes


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses Python's garbage collector: tracing makes many objects that stay in use, and searching them takes time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Compiler:
    """Compiles programs in a precision, with compiler options.

    `on_large_constants` is called with the bytes of a traced program's constants if they slow down its compilation.
    """

    def __init__(self, precision: Precision = SINGLE, options: Options | None = None):
        self.precision = precision
        self._options = options
        self.on_large_constants: Callable[[int], None] = lambda size: None

    def build(
        self,
        name: str,
        function: Wrapped,
        arguments: Arguments,
        donates: bool = False,
        rarely_used: bool = False,
        at_once: bool = False,
    ) -> Future[Compiled]:
        """Compiles a function from `jax.jit`, if possible in a background thread; `at_once` as for `background.build`.

        The name is unique among the programs of one configuration, and differs for other argument shapes. `arguments`
        is called if the program must be traced. A program is `rarely_used` if compiling takes longer than its runs.
        """
        return self._compiled(self._lower(name, function, arguments, donates), rarely_used, at_once)

    def outputs(self, name: str) -> PyTree:
        """Shapes and dtypes of a program's results; None if the program must be traced to know them."""
        del name

    def _lower(self, name: str, function: Wrapped, arguments: Arguments, donates: bool) -> Lowered:
        del name, donates  # only for the trace cache: `function` already donates
        args = arguments()
        with self.precision.compiled(), collector_paused():
            traced = function.trace(*args)
            size = sum(getattr(constant, "nbytes", 0) for constant in traced.jaxpr.consts)
            if size > _MANY_CONSTANTS:
                self.on_large_constants(size)
            return traced.lower()

    def _compiled(self, lowered: Lowered, rarely_used: bool, at_once: bool = False) -> Future[Compiled]:
        options = {**(self._options or {}), **(quick_options() if rarely_used else {})}
        return background.build(functools.partial(lowered.compile, options or None), at_once)
