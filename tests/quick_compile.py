"""Compiling in a fraction of the time, without expensive LLVM optimisations and, where possible, fusion emitters.

Not for tests of XLA's output or of bitwise equality of two programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src import compiler  # no public API sets the options of all programs

from rlstable.compilation.xla import NO_FUSION_EMITTERS

_UNOPTIMIZED = "jax_disable_most_optimizations"
_OPTIONS = {**NO_FUSION_EMITTERS, "xla_cpu_parallel_codegen_split_count": 1}  # each part has a fixed cost


def environment() -> dict[str, str]:
    """Environment variables with which a subprocess compiles quickly."""
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in _OPTIONS.items())
    return {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": flags}


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Compiles every program inside quickly, except inside `ordinarily`."""
    # A GPU's compiler does not know this option.
    extra = _OPTIONS if jax.default_backend() == "cpu" else {}

    def options(*args: Any, make: Any = compiler.get_compile_options, **named: Any) -> Any:
        if jax.config.values[_UNOPTIMIZED]:
            named["env_options_overrides"] = {**extra, **(named.get("env_options_overrides") or {})}
        return make(*args, **named)

    with pytest.MonkeyPatch.context() as patch, _unoptimized(True):
        patch.setattr(compiler, "get_compile_options", options)
        yield


def ordinarily() -> contextlib.AbstractContextManager[None]:
    """Compiles as users do inside `quickly`, for tests of bitwise equality of two programs."""
    return _unoptimized(False)


@contextlib.contextmanager
def _unoptimized(value: bool) -> Iterator[None]:
    before = jax.config.values[_UNOPTIMIZED]
    jax.config.update(_UNOPTIMIZED, value)
    try:
        yield
    finally:
        jax.config.update(_UNOPTIMIZED, before)
