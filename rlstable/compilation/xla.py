"""Compiles programs: progress messages, compiler options, and the cache of compiled programs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from rlstable.device import machine as processor
from rlstable.io.private_folder import make_private, writable_by_others
from rlstable.io.user_cache import user_cache

# Context manager that shows the user what is compiling.
Compiling = Callable[[str], contextlib.AbstractContextManager[None]]

_MOST_BYTES = 2**31  # kept on disk; what was used least lately goes first
_WORTH_SECONDS = 0.2  # of compiling, below which reading it back is hardly quicker
_DETERMINISTIC = {
    # No reduction whose order is left to chance, and no choice of kernels by how fast they happen to be just now.
    "gpu": {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0},
}

# A program that runs seldom runs half as fast, and is compiled in a quarter of the time.
_QUICK = {
    "cpu": {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
    },
}


def compiler_options(deterministic: bool) -> dict[str, bool | int] | None:
    """XLA options beyond the defaults; a CPU computes the same bits twice without them.

    Args:
        deterministic: Whether the same program on the same device must give the same bits.
    """
    return _DETERMINISTIC.get(jax.default_backend()) if deterministic else None


def quick_options() -> dict[str, bool | int]:
    """XLA options for programs whose compile time counts for more than their speed."""
    return _QUICK.get(jax.default_backend(), {})


def keep_programs(folder: str | None) -> str | None:
    """Has jax keep compiled programs on disk, for the next process that compiles the same.

    A folder that another user could write to is not used, since compiled programs are executed. If JAX has been given
    a folder already (`JAX_COMPILATION_CACHE_DIR`), `auto` keeps that folder, unchecked.

    Args:
        folder: Where; `auto` for a folder of the user's own, below `$XDG_CACHE_HOME` or `~/.cache`; None for nowhere.

    Returns:
        Why they cannot be kept, None where they can or need not be.
    """
    if folder is None or (folder == "auto" and _known_folder()):
        return None
    own = user_cache() / "programs"
    # jax's key does not say for which processor machine code is, and homes are shared among machines.
    place = (own if folder == "auto" else Path(folder).expanduser()).absolute() / processor.fingerprint()
    try:
        make_private(place)
        writable = writable_by_others(place)  # the files of this folder are executed
    except OSError as error:
        return f"{place}: {error.strerror}"
    if writable is not None:
        return f"{writable}, or set compile_cache to a folder that only you can write"
    if not os.access(place, os.W_OK):
        return f"{place}: cannot be written"
    if _known_folder() != str(place):
        jax.config.update("jax_compilation_cache_dir", str(place))
        jax.config.update("jax_compilation_cache_max_size", _MOST_BYTES)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_SECONDS)
        compilation_cache.reset_cache()  # else JAX ignores a folder that is set after the first compilation
    return None


def folder_of_programs() -> Path | None:
    """The folder of JAX's compilation cache in this process; None without one, or outside of a file system."""
    folder = _known_folder()
    usable = folder and "://" not in folder and jax.config.values["jax_enable_compilation_cache"]
    return Path(folder) if folder and usable else None


def _known_folder() -> str | None:
    folder: str | None = getattr(jax.config, "jax_compilation_cache_dir", None)
    return folder


def dispatch_inline() -> None:
    """Has programs run in the thread that calls them, which is heeded only before jax is first used on a CPU.

    Programs that call Python from within have been seen to wait for ever otherwise (jax #25861).
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
