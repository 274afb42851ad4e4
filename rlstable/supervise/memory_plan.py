"""Plans that need less memory: smaller parts of a minibatch, fewer environments per pass, fewer environments.

The first two compute the same from the same experience; only the last is another training.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from rlstable.config import Config, ConfigError
from rlstable.supervise import memory
from rlstable.supervise.memory import FULL, TIGHT, readable

# The order in which they are tried; each as far as it helps.
LEVERS = ("gradient_accumulation", "envs_per_pass", "num_envs")
_NO_RELIEF = 0.9  # of what was needed before: a lever that brings no more than this is left alone
_LEAST_PASS = 8  # environments in a pass, below which nothing is saved but time lost


@dataclasses.dataclass
class MemoryPlan:
    """Sizes that differ from the configuration, as plain JSON; None for no difference. Saved with the run.

    Attributes:
        gradient_accumulation: Instead of `ppo.gradient_accumulation`.
        envs_per_pass: Instead of `env.envs_per_pass`.
        num_envs: Instead of `ppo.num_envs`, where that is more.
    """

    gradient_accumulation: int | None = None
    envs_per_pass: int | None = None
    num_envs: int | None = None

    def of(self, config: Config) -> Config:
        """The configuration under this plan."""
        num_envs = None if self.num_envs is None else min(self.num_envs, config.ppo.num_envs)
        ppo = {"gradient_accumulation": self.gradient_accumulation, "num_envs": num_envs}
        changed = {name: value for name, value in ppo.items() if value is not None}
        env = {} if self.envs_per_pass is None else {"envs_per_pass": self.envs_per_pass}
        return config.model_copy(
            update={"ppo": config.ppo.model_copy(update=changed), "env": config.env.model_copy(update=env)}
        )

    def __str__(self) -> str:
        parts = [f"{name} {value}" for name in LEVERS if (value := getattr(self, name)) is not None]
        return ", ".join(parts) or "as configured"


def smallest(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    """The plan that needs no more than any of some."""
    parts = {name: [value for plan in plans if (value := getattr(plan, name)) is not None] for name in LEVERS}
    least = {"gradient_accumulation": max, "envs_per_pass": min, "num_envs": min}
    return MemoryPlan(**{name: least[name](values, default=None) for name, values in parts.items()})


def smaller(config: Config, plan: MemoryPlan, lever: str, devices: int, factor: int = 2) -> MemoryPlan | None:
    """The plan with one lever a step further; None where it is at its end.

    Args:
        config: As it was configured.
        plan: The present one.
        lever: One of `LEVERS`.
        devices: How many share the work.
        factor: By how much, as far as the lever goes.
    """
    now = plan.of(config)
    step = {"gradient_accumulation": _more_parts, "envs_per_pass": _smaller_passes, "num_envs": _fewer_envs}[lever]
    value = step(now, devices, factor)
    return None if value is None else dataclasses.replace(plan, **{lever: value})


def _more_parts(config: Config, devices: int, factor: int) -> int | None:
    now, share = config.ppo.gradient_accumulation, config.ppo.batch_size // devices
    if now == share:
        return None
    return min(n for n in range(min(factor * now, share), share + 1) if share % n == 0)


def _smaller_passes(config: Config, devices: int, factor: int) -> int | None:
    share = config.ppo.num_envs // devices
    now = min(config.env.envs_per_pass or share, share)
    return None if now <= _LEAST_PASS else max(now // factor, _LEAST_PASS)


def _fewer_envs(config: Config, devices: int, factor: int) -> int | None:
    return fewer_envs(config, max(config.ppo.num_envs // factor, min(devices, config.ppo.num_envs - 1)), devices)


def fewer_envs(config: Config, at_most: int, devices: int) -> int | None:
    """The greatest number of environments that fits the batch and the devices; None if no number does.

    Args:
        config: As it was configured.
        at_most: No more than these.
        devices: How many share them.
    """
    for count in range(at_most, 0, -1):
        if config.ppo.rows % count == 0 and count % devices == 0:
            try:
                config.model_copy(update={"ppo": config.ppo.model_copy(update={"num_envs": count})}).require_devices(
                    devices
                )
            except ConfigError:
                continue
            return count
    return None


class OutOfMemory(Exception):
    """Training does not fit, however it is divided. Its text says what would."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device has refused memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


class MemoryPlanner:
    """Compares what training needs with what there is.

    Args:
        config: The whole configuration.
        mesh: The devices.
        report: Called as `report(kind, **fields)` with every event.
    """

    def __init__(self, config: Config, mesh: Any, report: Callable[..., None]):
        self._config = config
        self._report = report
        self._mesh = mesh
        self._limit = memory.limit(mesh.devices.flat[0], config.supervise.memory.limit_gib)
        self._lever = 0
        self._before: int | None = None
        self._told = False

    def needed(self, program: Any) -> int | None:
        """Bytes of the limit that a compiled program needs, as planned by the compiler; None if unknown."""
        return memory.needed(memory.footprint(program.executable), self._mesh)

    def fits(self, needed: int | None) -> bool:
        """Whether a program may run; a tight one is reported once."""
        if needed is None or self._limit is None:
            return True
        if needed > TIGHT * self._limit and not self._told:
            self._told = True
            self._report("memory_tight", needed=readable(needed), limit=readable(self._limit))
        return needed <= FULL * self._limit or not self._config.supervise.memory.adapt

    def smaller(self, plan: MemoryPlan, needed: int | None) -> MemoryPlan:
        """A plan that needs less.

        Args:
            plan: One that needs too much.
            needed: How many bytes; None where the device has refused them.

        Raises:
            OutOfMemory: There is no smaller plan.
        """
        if needed is not None and self._before is not None and needed > _NO_RELIEF * self._before:
            self._lever += 1
        self._before = needed
        factor = 2 if needed is None or self._limit is None else max(2, math.ceil(needed / self._limit))
        while self._config.supervise.memory.adapt and self._lever < len(LEVERS):
            found = smaller(self._config, plan, LEVERS[self._lever], self._mesh.size, factor)
            if found is not None:
                said = {} if needed is None else {"needed": readable(needed), "limit": readable(self._limit or 0)}
                self._report("memory_planned", plan=str(found), **said)
                return found
            self._lever += 1
        raise OutOfMemory(self._what_would_fit(plan, needed))

    def _what_would_fit(self, plan: MemoryPlan, needed: int | None) -> str:
        if not self._config.supervise.memory.adapt:
            return "The device refused memory; supervise.memory.adapt=true divides the work, or take smaller networks."
        least = "" if needed is None else f"Training needs {readable(needed)} of {readable(self._limit or 0)} "
        limit = "" if needed is None else f"a limit of {needed / FULL / 2**30:.3g} GiB would do, or "
        return (
            f"{least or 'The device refused memory '}with {plan}; {limit}smaller networks, a smaller ppo.batch_size, "
            "ppo.num_minibatches or ppo.unroll_length."
        )
