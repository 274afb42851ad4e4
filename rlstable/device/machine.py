"""The processor: its name, and a key of its kind."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def name() -> str:
    """The processor's name as its maker gives it; its architecture if the system does not say."""
    named = _values("model name")
    return named[0] if named else platform.processor() or platform.machine()


def fingerprint() -> str:
    """A short name of its kind, the same on all that run the same machine code."""
    told = [platform.machine(), platform.processor(), *sorted({*_values("model name", "flags", "Features")})]
    return f"{platform.machine()}-{hashlib.blake2s(' '.join(told).encode(), digest_size=6).hexdigest()}"


def _values(*keys: str) -> list[str]:
    """Values of these keys in Linux's list of cores."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return []
    parts = (line.partition(":") for line in lines)
    return [value.strip() for key, _, value in parts if key.strip() in keys]


def share_of_cores(devices: int) -> int:
    """Threads for each of this process's devices, at least one.

    Args:
        devices: That may call at once.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // devices)
