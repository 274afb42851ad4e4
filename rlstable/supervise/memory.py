"""Memory: the need of a compiled program, the limit of the device, and plans that need less.

A plan divides minibatches into smaller parts, steps fewer environments per pass, or has fewer environments. The first
two compute the same results; only fewer environments change the training. Decisions must not depend on the free memory,
or a run would not be reproducible: `limit` depends on the configuration and the machine only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlstable.config import ConfigError
from rlstable.config.ppo import PPOConfig
from rlstable.config.run import EnvConfig
from rlstable.config.schema import divisors
from rlstable.config.supervise import MemoryConfig
from rlstable.device import hosts

# Shares of the limit. Above `TIGHT` an event is logged, because evaluation and resets need memory besides the program;
# above `FULL` the program does not fit.
TIGHT, FULL = 0.8, 0.95
# Names of the levers, in the order in which they are tried; each as long as it helps.
LEVERS = ("gradient_accumulation", "envs_per_pass", "num_envs")
_NO_RELIEF = 0.9  # share of the memory needed before; a lever that still needs more is not tried further
_LEAST_PASS = 8  # environments in the smallest pass; smaller passes take longer and save no memory
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
    or of the machine. A `configured` limit in GiB takes precedence.
    """
    if configured is not None:
        return int(configured * 2**30)
    reported = (device.memory_stats() or {}).get("bytes_limit")
    if reported is None:
        return host_total() if device.platform == "cpu" else None
    return int(reported)


def host_total(root: Path = Path("/")) -> int:
    """Bytes of main memory that this process may use: of the machine, or the lowest limit of its control groups."""
    import psutil

    return min([psutil.virtual_memory().total, *_group_limits(root)])


def require_states(states: Any, num_envs: int, counts: Mapping[str, int]) -> None:
    """Raises a `ConfigError` if the environments' first states do not fit into the host's memory and swap space.

    No memory plan can divide them. The sizes are lower bounds, so a configuration that might fit passes. `states` are
    the shapes of `num_envs` environments, `counts` the numbers of states that a run holds, by the key that sets each.
    """
    import psutil

    size, host = bytes_of(states), host_total() + int(psutil.swap_memory().total)
    for key, count in counts.items():
        if size * count > host * num_envs:
            raise ConfigError(
                f"{key}: the states of {count:,} environments take at least {readable(size * count // num_envs)} of "
                f"the {readable(host)} memory of this machine; at most {host * num_envs // size:,} could fit"
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


@dataclasses.dataclass
class MemoryPlan:
    """Sizes that replace configured sizes, as plain JSON; None keeps the configured size. Saved with the run."""

    gradient_accumulation: int | None = None
    envs_per_pass: int | None = None
    num_envs: int | None = None  # only if it is smaller

    def of(self, ppo: PPOConfig, env: EnvConfig) -> tuple[PPOConfig, EnvConfig]:
        """The sections of a configuration under this plan."""
        num_envs = None if self.num_envs is None else min(self.num_envs, ppo.num_envs)
        sizes = {"gradient_accumulation": self.gradient_accumulation, "num_envs": num_envs}
        changed = {name: value for name, value in sizes.items() if value is not None}
        passes = {} if self.envs_per_pass is None else {"envs_per_pass": self.envs_per_pass}
        return ppo.model_copy(update=changed), env.model_copy(update=passes)

    def __str__(self) -> str:
        parts = [f"{name} {value}" for name in LEVERS if (value := getattr(self, name)) is not None]
        return ", ".join(parts) or "as configured"


def smallest(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    """The plan with the smallest value of each lever over several plans."""
    parts = {name: [value for plan in plans if (value := getattr(plan, name)) is not None] for name in LEVERS}
    least = {"gradient_accumulation": max, "envs_per_pass": min, "num_envs": min}
    return MemoryPlan(**{name: least[name](values, default=None) for name, values in parts.items()})


def smaller(
    ppo: PPOConfig, env: EnvConfig, plan: MemoryPlan, lever: str, devices: int, factor: int = 2
) -> MemoryPlan | None:
    """The plan with one lever a step of the size `factor` further; None if the lever is at its end."""
    ppo, env = plan.of(ppo, env)
    value: int | None
    if lever == "gradient_accumulation":
        now, share = ppo.gradient_accumulation, ppo.batch_size // devices
        value = None if now == share else min(n for n in divisors(share) if n >= min(factor * now, share))
    elif lever == "envs_per_pass":
        share = ppo.num_envs // devices
        now = min(env.envs_per_pass or share, share)
        value = None if now <= _LEAST_PASS else max(now // factor, _LEAST_PASS)
    else:
        value = _fewer_envs(ppo, devices, factor)
    return None if value is None else dataclasses.replace(plan, **{lever: value})


def _fewer_envs(ppo: PPOConfig, devices: int, factor: int) -> int | None:
    """The greatest number of environments that divides the batch and fits the devices; None if there is none."""
    at_most = max(ppo.num_envs // factor, min(devices, ppo.num_envs - 1))
    for count in sorted(divisors(ppo.rows), reverse=True):
        if count <= at_most and count % devices == 0:
            try:
                ppo.model_copy(update={"num_envs": count}).require_devices(devices)
            except ConfigError:
                continue
            return count
    return None


class OutOfMemory(Exception):
    """No memory plan fits. The message names settings that would fit."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that a device refused memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


class MemoryPlanner:
    """Compares the memory that training needs with the limit, and plans with less memory."""

    def __init__(self, settings: MemoryConfig, ppo: PPOConfig, env: EnvConfig, mesh: Any, event: Callable[..., None]):
        self._adapts = settings.adapt
        self._configured = ppo, env
        self._event = event
        self._mesh = mesh
        own = limit(mesh.local_devices[0], settings.limit_gib)
        # The same in all processes, because their programs must be the same.
        limits = [one for one in hosts.gather("memory_limit", own) if one is not None]
        self._limit = min(limits, default=None)
        self._lever = 0
        self._needed_before: int | None = None
        self._tight_logged = False

    def needed(self, program: Any) -> int | None:
        """Bytes that a compiled program needs, as planned by the compiler; None if unknown."""
        return needed(footprint(program.executable), self._mesh)

    def fits(self, needed: int | None) -> bool:
        """Whether a program may run; the first program near the limit is logged."""
        if needed is None or self._limit is None:
            return True
        if needed > TIGHT * self._limit and not self._tight_logged:
            self._tight_logged = True
            self._event("memory_tight", needed=readable(needed), limit=readable(self._limit))
        return needed <= FULL * self._limit or not self._adapts

    def smaller(self, plan: MemoryPlan, needed: int | None) -> MemoryPlan:
        """A plan that needs less memory than a plan that needs `needed` bytes; None if the device refused them.

        Raises `OutOfMemory` without a smaller plan.
        """
        if needed is not None and self._needed_before is not None and needed > _NO_RELIEF * self._needed_before:
            self._lever += 1
        self._needed_before = needed
        factor = 2 if needed is None or self._limit is None else max(2, math.ceil(needed / self._limit))
        while self._adapts and self._lever < len(LEVERS):
            smaller_plan = smaller(*self._configured, plan, LEVERS[self._lever], self._mesh.size, factor)
            if smaller_plan is not None:
                sizes = {} if needed is None else {"needed": readable(needed), "limit": readable(self._limit or 0)}
                self._event("memory_planned", plan=str(smaller_plan), **sizes)
                return smaller_plan
            self._lever += 1
        raise OutOfMemory(self._advice(plan, needed))

    def _advice(self, plan: MemoryPlan, needed: int | None) -> str:
        if not self._adapts:
            return "The device refused memory; set supervise.memory.adapt=true or use smaller networks."
        need = "" if needed is None else f"Training needs {readable(needed)} of {readable(self._limit or 0)} "
        limit = "" if needed is None else f"a limit of {needed / FULL / 2**30:.3g} GiB would be enough, or "
        return (
            f"{need or 'The device refused memory '}with {plan}; {limit}use smaller networks, "
            "a smaller ppo.batch_size, ppo.num_minibatches or ppo.unroll_length."
        )
