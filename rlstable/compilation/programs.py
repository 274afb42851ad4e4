"""Traces, lowers and compiles a program. `trace_cache` skips the tracing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jax.stages import Lowered

from rlstable.compilation import background
from rlstable.compilation.xla import quick_options
from rlstable.device.precision import SINGLE, Precision

# Gives what a program is traced with: its arguments, or their shapes.
Arguments = Callable[[], tuple[Any, ...]]


class Programs:
    """Builds programs.

    Args:
        precision: Precision to compile in.
        options: Compiler options.
    """

    def __init__(self, precision: Precision = SINGLE, options: dict[str, Any] | None = None):
        self._precision = precision
        self._options = options

    def build(
        self, name: str, function: Any, arguments: Arguments, donates: bool = False, seldom: bool = False
    ) -> Future[Any]:
        """A compiled program; another thread compiles it where that is possible.

        Args:
            name: Distinguishes the programs of one configuration, and their argument shapes where the
                configuration does not.
            function: What `jax.jit` made.
            arguments: Called where it has to be traced.
            donates: Whether all its arguments are given to it for good.
            seldom: Whether it is run so seldom that its compiling takes longer than all its runs.
        """
        del name, donates  # that, jax knows of the function
        given = arguments()
        with self._precision.compiled():
            lowered = function.lower(*given)
        return self._compiled(lowered, seldom)

    def outputs(self, name: str) -> Any:
        """Shapes and types of the results of a program, where they are known without tracing it; None elsewhere."""
        del name

    def _compiled(self, lowered: Lowered, seldom: bool) -> Future[Any]:
        options = {**(self._options or {}), **(quick_options() if seldom else {})}
        return background.build(functools.partial(lowered.compile, options or None))
