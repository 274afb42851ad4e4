"""Compiles in a sixth of the time: without LLVM's expensive optimisations and XLA's emitters of fused kernels.

Not for tests of compiled programs themselves, nor for tests that two programs compute the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src import compiler  # JAX has no public setting for the options of all programs

_UNOPTIMIZED, _EMITTERS = "jax_disable_most_optimizations", "xla_cpu_use_fusion_emitters"
# The same settings for another process.
ENVIRONMENT = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": f"--{_EMITTERS}=false"}


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Applies to all programs compiled inside, except inside `ordinarily`."""

    def options(*args: Any, make: Any = compiler.get_compile_options, **named: Any) -> Any:
        if jax.config.values[_UNOPTIMIZED]:
            named["env_options_overrides"] = {_EMITTERS: False, **(named.get("env_options_overrides") or {})}
        return make(*args, **named)

    with pytest.MonkeyPatch.context() as patch, _unoptimized(True):
        patch.setattr(compiler, "get_compile_options", options)
        yield


def ordinarily() -> contextlib.AbstractContextManager[None]:
    """Compiles as usual inside `quickly`, where two programs of the same computation may differ in bits."""
    return _unoptimized(False)


@contextlib.contextmanager
def _unoptimized(value: bool) -> Iterator[None]:
    before = jax.config.values[_UNOPTIMIZED]
    jax.config.update(_UNOPTIMIZED, value)
    try:
        yield
    finally:
        jax.config.update(_UNOPTIMIZED, before)
