"""Devices and drivers, versions, and the settings that change results or memory."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Mapping

import jax

from rlstable.device import machine
from rlstable.io.versions import versions

# Environment variables that change arithmetic, determinism, memory or the choice of device.
_VARIABLES = (
    "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS", "NVIDIA_TF32_OVERRIDE", "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_ENABLE_X64", "JAX_COMPILATION_CACHE_DIR", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR", "TF_GPU_ALLOCATOR",
)  # fmt: skip
_FLAGS = ("jax_default_matmul_precision", "jax_enable_x64", "jax_debug_nans")


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The machine and its settings.

    Attributes:
        devices: Devices of JAX in one line.
        driver: Driver and runtime of JAX's backend.
        nvidia: Name, driver and memory of each GPU by `nvidia-smi`; empty without GPUs.
        processor: Name of the CPU, and the number of cores that this process can use.
        versions: Versions by package.
        settings: JAX flags, and environment variables that are set.
    """

    devices: str
    driver: str
    nvidia: tuple[str, ...]
    processor: str
    versions: dict[str, str]
    settings: dict[str, str]

    @property
    def gpu_unused(self) -> bool:
        """Whether there is an NVIDIA GPU that JAX does not use."""
        return bool(self.nvidia) and "gpu" not in self.devices


def surroundings(environment: Mapping[str, str] = os.environ) -> Surroundings:
    """Collects the facts about this machine.

    Args:
        environment: Environment variables.
    """
    devices, driver = _devices()
    flags = {name: str(getattr(jax.config, name)) for name in _FLAGS}
    variables = {name: environment[name] for name in _VARIABLES if name in environment}
    return Surroundings(devices, driver, _nvidia(), _processor(), versions(), flags | variables)


def _devices() -> tuple[str, str]:
    """Returns devices and driver."""
    found = jax.devices()
    first = found[0]
    name = first.platform if first.device_kind == first.platform else f"{first.platform} ({first.device_kind})"
    driver = " ".join(str(first.client.platform_version).split())
    return f"{len(found)} x {name}", driver


def _nvidia() -> tuple[str, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()  # installed without a GPU or without its driver
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())


def _processor() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{machine.name()}, {cores} {'core' if cores == 1 else 'cores'}"
