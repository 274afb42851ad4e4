"""How programs are compiled: who is told of it, and what the compiler is told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import jax

# Tells the user what is compiling, for as long as it takes.
Compiling = Callable[[str], contextlib.AbstractContextManager[None]]

_DETERMINISTIC = {
    # No reduction whose order is left to chance, and no choice of kernels by how fast they happen to be just now.
    "gpu": {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0},
}


def compiler_options(deterministic: bool) -> dict[str, bool | int] | None:
    """What XLA is told beyond its defaults; a CPU computes the same twice without being told.

    Args:
        deterministic: Whether the same program on the same device must give the same bits.
    """
    return _DETERMINISTIC.get(jax.default_backend()) if deterministic else None


def dispatch_inline() -> None:
    """Has programs run in the thread that calls them, which is heeded only before jax is first used on a CPU.

    Programs that call Python from within have been seen to wait for ever otherwise (jax #25861).
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
