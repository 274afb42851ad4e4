"""JAX and XLA: unusable flags, compiler options, the cache of compiled programs, and dispatch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jaxlib import version as jaxlib

from rlstable.config import ConfigError
from rlstable.device import hosts
from rlstable.device import machine as processor
from rlstable.io.private_folder import make_private, user_cache, writable_by_others

Options = dict[str, Any]  # of the compiler; the type that JAX declares lacks integers
# Context manager that shows the user what is compiling.
Compiling = Callable[[str], contextlib.AbstractContextManager[None]]

_DEBUG = "JAX would end the run at the first bad number, before a guard can reject it; the guards name step and value"
# Flags with which no run works, and the reason; JAX's own error names the flag that forbids a transfer or a promotion.
_UNUSABLE = {
    "jax_debug_nans": _DEBUG,
    "jax_debug_infs": _DEBUG,
    "jax_enable_x64": "training computes in float32; precision.matmul=highest or x64 is more precise",
    "jax_disable_jit": "training runs compiled programs; debug reset and step of your environment alone",
}
_MOST_BYTES = 2**31  # on disk; JAX deletes the least recently used programs first
_WORTH_SECONDS = 0.2  # programs that compile faster than this are not cached
# Reductions in a fixed order, and no choice of kernels by measured speed.
_DETERMINISTIC = {"gpu": {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}}

# XLA rejects an unknown option, and jaxlib 0.11 dropped this one.
NO_FUSION_EMITTERS = {"xla_cpu_use_fusion_emitters": False} if jaxlib.__version_info__ < (0, 11) else {}
# Such a program compiles in a quarter of the time and runs half as fast.
_QUICK = {"cpu": {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True, **NO_FUSION_EMITTERS}}


def check_flags() -> None:
    """Raises ConfigError if the shell or the user's program has set a flag of JAX with which no run works."""
    for name, reason in _UNUSABLE.items():
        if getattr(jax.config, name, False):  # another version of JAX may lack a flag
            raise ConfigError(f"{name.upper()}=True: {reason}; unset {name.upper()}")


def compiler_options(deterministic: bool, quickly: bool = False) -> dict[str, bool | int] | None:
    """Non-default XLA options, or None. A CPU is deterministic without options.

    `deterministic`: the same program on the same device gives the same bits.
    """
    table = _DETERMINISTIC if deterministic else {}
    return table.get(jax.default_backend(), {}) | (quick_options() if quickly else {}) or None


def quick_options() -> dict[str, bool | int]:
    """XLA options for programs whose compile time matters more than their speed."""
    return _QUICK.get(jax.default_backend(), {})


def enable_program_cache(folder: str | None) -> str | None:
    """Makes JAX cache compiled programs on disk. Returns why the folder cannot be used, or None.

    `auto` is a folder below `$XDG_CACHE_HOME` or `~/.cache`; None wants no cache. A folder that another user could
    write to is not used, because compiled programs are executed. If JAX already has a folder
    (`JAX_COMPILATION_CACHE_DIR`), `auto` keeps that folder, unchecked.
    """
    if folder is None or (folder == "auto" and _known_folder()):
        return None
    if folder == "auto" and hosts.count() > 1 and jax.default_backend() != "cpu":
        # JAX writes the cache in process 0 only, and the processes that compile a program for GPUs divide the timing of
        # its kernels: they would wait for a process that finds the program in the cache.
        return "processes with accelerators must share one; set compile_cache to a folder that all hosts can write"
    root = user_cache() / "programs" if folder == "auto" else Path(folder).expanduser()
    # JAX's key does not contain the processor type, and machines may share a home.
    path = root.absolute() / processor.fingerprint()
    try:
        make_private(path)
        writable = writable_by_others(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if writable is not None:
        return f"{writable}, or set compile_cache to a folder that only you can write"
    if not os.access(path, os.W_OK):
        return f"{path}: cannot be written"
    if _known_folder() != str(path):
        jax.config.update("jax_compilation_cache_dir", str(path))
        jax.config.update("jax_compilation_cache_max_size", _MOST_BYTES)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_SECONDS)
        compilation_cache.reset_cache()  # else JAX ignores a folder that is set after the first compilation
    return None


def program_cache_folder() -> Path | None:
    """The folder of JAX's compilation cache; None without a cache, or if the cache is not in a file system."""
    folder = _known_folder()
    usable = folder and "://" not in folder and jax.config.values["jax_enable_compilation_cache"]
    return Path(folder) if folder and usable else None


def _known_folder() -> str | None:
    return getattr(jax.config, "jax_compilation_cache_dir", None)


def use_one_thread() -> None:
    """Makes programs on a CPU compute in one thread, unless the user has set their number (NPROC), before JAX starts.

    XLA divides every large enough operation among threads. With small networks waking them takes longer, and C MuJoCo
    has the other cores. Evaluations and resets compute in one thread, too.
    """
    os.environ.setdefault("NPROC", "1")


def disable_async_dispatch() -> None:
    """Makes programs on a CPU run in the calling thread. Must run before JAX is initialised; JAX ignores it afterwards.

    With asynchronous dispatch, programs that call Python can hang (jax #25861).
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
