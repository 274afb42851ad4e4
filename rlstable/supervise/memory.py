"""Memory: the need of a compiled program, the limit of the device, and the memory in use.

Decisions must not depend on the free memory, or a run would not be reproducible: `limit` depends on the configuration
and the machine only. `live` is only printed.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlstable.config import Config, ConfigError

# Shares of the limit. Above `TIGHT` an event is logged, because evaluation and resets need memory besides the program;
# above `FULL` the program does not fit.
TIGHT, FULL = 0.8, 0.95
_STEP = 1024.0
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes that a compiled program needs on each device, as planned by the compiler."""

    arguments: int
    outputs: int
    aliased: int  # outputs that reuse donated arguments; counted in `arguments` and in `outputs`
    temporary: int

    @property
    def peak(self) -> int:
        """Largest number of bytes of data in use while the program runs."""
        return self.arguments + self.outputs - self.aliased + self.temporary


def footprint(compiled: Any) -> Footprint | None:
    """Memory that a compiled program needs on each device; None if the backend does not report it."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    # JAX's `peak_memory_in_bytes` leaves out temporary buffers on a CPU (jax 0.10).
    return Footprint(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
    )


def needed(program: Footprint | None, devices: Mesh) -> int | None:
    """Bytes that a program needs of the limit; several CPU devices of one process share one memory."""
    if program is None:
        return None
    return program.peak * (len(devices.local_devices) if devices.local_devices[0].platform == "cpu" else 1)


def limit(device: Any, configured: float | None = None) -> int | None:
    """Bytes that a program on this device may use, independent of the memory in use now; None if unknown.

    On a GPU this is the share that XLA may use (`XLA_PYTHON_CLIENT_MEM_FRACTION`), on a CPU the memory of the container
    or of the machine.
    A `configured` limit in GiB takes precedence.
    """
    if configured is not None:
        return int(configured * 2**30)
    reported = _statistic(device, "bytes_limit")
    return host_total() if reported is None and device.platform == "cpu" else reported


def live(device: Any) -> int | None:
    """Bytes in use on the device now; None if the device does not report it, as a CPU."""
    return _statistic(device, "bytes_in_use")


def host_total(root: Path = Path("/")) -> int:
    """Bytes of main memory that this process may use: of the machine, or the lowest limit of its control groups."""
    import psutil

    return min([psutil.virtual_memory().total, *_group_limits(root)])


def require_states(config: Config, states: Any) -> None:
    """Checks that the environments' first states fit into the host's memory and swap space, before they are drawn.

    No memory plan can divide them. The sizes are lower bounds, so a configuration that might fit passes.

    `states` are the shapes of `ppo.num_envs` environments. With `supervise.memory.adapt=false` nothing is checked.

    Raises:
        ConfigError: They are too large; the message has the largest number that could fit.
    """
    import psutil

    if not config.supervise.memory.adapt:
        return
    size, host = bytes_of(states), host_total() + int(psutil.swap_memory().total)
    counts = {"ppo.num_envs": config.ppo.num_envs, "eval.num_envs": config.eval.num_envs}
    for key, count in (counts | {"env.reset_pool_size": config.env.reset_pool_size}).items():
        if size * count > host * config.ppo.num_envs:
            raise ConfigError(
                f"{key}: the states of {count:,} environments take at least "
                f"{readable(size * count // config.ppo.num_envs)} of the {readable(host)} memory of this machine; at "
                f"most {host * config.ppo.num_envs // size:,} could fit"
            )


def bytes_of(shapes: Any) -> int:
    """Bytes of all arrays of a pytree, over all devices."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def readable(count: float) -> str:
    """Formats a number of bytes in powers of 1024: `512 bytes`, `1.5 GiB`."""
    size = float(count)
    for unit in _UNITS[:-1]:
        # 1023.95 would be printed as 1024.0 in this unit.
        if abs(size) < _STEP - 0.05:
            return f"{size:.0f} {unit}" if unit == _UNITS[0] else f"{size:.1f} {unit}"
        size /= _STEP
    return f"{size:,.1f} {_UNITS[-1]}"


def _statistic(device: Any, name: str) -> int | None:
    value = (device.memory_stats() or {}).get(name)
    return None if value is None else int(value)


def _group_limits(root: Path) -> list[int]:
    """Every memory limit of Linux control groups (version 2) on this process."""
    base, limits = root / "sys/fs/cgroup", []
    try:
        groups = [line[3:] for line in (root / "proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    except OSError:
        return []
    for path in groups:
        group = base / path.strip("/")
        # In a container the path may be a path of the host; then only the root of the mount exists.
        for folder in {base, group, *(parent for parent in group.parents if parent.is_relative_to(base))}:
            file = folder / "memory.max"
            text = file.read_text().strip() if file.is_file() else ""
            limits += [int(text)] if text.isdigit() else []  # `max` is no limit
    return limits
