"""The processor: its name, a fingerprint of its type, and its cores."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def name() -> str:
    """The processor's model name; its architecture if the system does not report a name."""
    models = _values("model name")
    return models[0] if models else platform.processor() or platform.machine()


def fingerprint() -> str:
    """A short hash of the processor type; equal on processors that run the same machine code."""
    features = [platform.machine(), platform.processor(), *sorted({*_values("model name", "flags", "Features")})]
    return f"{platform.machine()}-{hashlib.blake2s(' '.join(features).encode(), digest_size=6).hexdigest()}"


def _values(*keys: str) -> list[str]:
    """Values of these keys in `/proc/cpuinfo`."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return []
    parts = (line.partition(":") for line in lines)
    return [value.strip() for key, _, value in parts if key.strip() in keys]


def share_of_cores(devices: int) -> int:
    """Number of threads for each of several devices that compute at the same time, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // devices)
