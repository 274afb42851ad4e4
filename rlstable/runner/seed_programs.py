"""The training setup and the evaluator of one seed, at its present precision level and memory plan."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlstable.compilation.xla import Compiling
from rlstable.config import Config
from rlstable.config.supervise import X64
from rlstable.device import hosts, sharding
from rlstable.envs.float64 import computes_in_float64
from rlstable.guards.base import MoreGuards
from rlstable.guards.env import Quarantine
from rlstable.io.versions import versions
from rlstable.policy.evaluator import Evaluator
from rlstable.ppo.state import Metrics, TrainState
from rlstable.render.recording import EpisodeRecorder
from rlstable.runner.host_state import HostState
from rlstable.runner.setup import Program, TrainingSetup
from rlstable.runner.setup_cache import Factories, LogEvent, ProgramKey, SetupCache
from rlstable.supervise import arithmetic
from rlstable.supervise.ladder import Ladder, Level, LevelChange, PrecisionSigns
from rlstable.supervise.memory_plan import MemoryPlan, MemoryPlanner, is_out_of_memory

# Returns a random key. Deriving a key costs more than an iteration that draws nothing should pay.
Key = Callable[[], jax.Array]


class SeedPrograms:
    """Selects the training setup and the evaluator of one seed, by precision level and memory plan.

    Attributes:
        mesh: The devices of this seed.
        device_count: Number of devices of all seeds.
        ladder: The precision ladder.
        shared: Whether several seeds share the programs.

    Args:
        config: The whole configuration.
        mesh: The devices.
        more_guards: The user's guards, by site and name.
        compiling: Context manager that shows the name of the program that is compiling.
        event: Called as `event(kind, **fields)`.
        host: The run's host state, with the memory of the ladder and the memory plan.
        factories: Factories of setups and evaluators; None for an ordinary run.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        more_guards: MoreGuards,
        compiling: Compiling,
        event: LogEvent,
        host: HostState,
        factories: Factories | None = None,
    ):
        self.mesh = mesh
        self.device_count = mesh.size if factories is None else mesh.size * factories.devices
        self.shared = factories is not None and factories.shared
        self._config = config
        self._compiling = compiling
        self._event = event
        self._host = host
        self._setups = SetupCache(config, mesh, more_guards, compiling, event, factories)
        self._memory = MemoryPlanner(config, mesh, event)
        self._distinct: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.reload_ladder()

    def reload_ladder(self) -> None:
        """Takes the precision level from the host state, after the host state was read from a checkpoint."""
        precision, ladder = self._config.precision, self._config.supervise.ladder
        start = Level(precision.matmul, precision.network)

        def distinct(levels: tuple[str, ...]) -> tuple[str, ...]:
            if X64 in levels[1:] and not computes_in_float64(self._setups.setup(start, self._host.plan).single):
                levels = tuple(level for level in levels if level != X64)
            if levels not in self._distinct:  # measured once, because all processes must ask equally often
                measure = functools.partial(_distinct_levels, self._compiling, self._event, levels)
                self._distinct[levels] = tuple(hosts.from_writer("levels", measure))
            return self._distinct[levels]

        self.ladder = Ladder(ladder, start, self._host.rungs, distinct, self.shared)

    @property
    def level(self) -> Level:
        """The present precision level."""
        return self.ladder.level

    @property
    def key(self) -> ProgramKey:
        """Key of the program that computes the next iteration."""
        return self.level, str(self._host.plan)

    @property
    def setup(self) -> TrainingSetup:
        """The training setup at the present level and size."""
        return self._setups.setup(self.level, self._host.plan)

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator at the present level."""
        return self._setups.evaluator(self.level, self._host.plan)

    def recorder(self) -> EpisodeRecorder:
        """A new recorder of episodes at the present level."""
        return self._setups.recorder(self.level, self._host.plan)

    @property
    def num_envs(self) -> int:
        """Number of training environments."""
        return self._host.plan.of(self._config).ppo.num_envs

    @property
    def versions(self) -> dict[str, str]:
        """Versions of rlstable and its libraries, and the kind of device."""
        return {**versions(), "device": sharding.device_kind(self.mesh)}

    @property
    def machine(self) -> dict[str, Any]:
        """Device and versions, for `machine.json`."""
        return {**self.versions, "devices": self.device_count, "processors": os.cpu_count()}

    def shapes(self, level: Level, num_envs: int, restore_info: bool) -> TrainState:
        """Shapes of a training state at a precision level, a number of environments and a way to reset them."""
        same = (level, num_envs, restore_info) == (self.level, self.num_envs, self.setup.env.restore_info)
        return self.setup.shapes() if same else self._setups.shapes(level, num_envs, restore_info)

    def to_current_level(self, state: TrainState, key: jax.Array) -> TrainState:
        """Converts a training state of another precision level to the present one.

        Args:
            state: At any level.
            key: Random key for its pool of first states.
        """
        return self.setup.convert_state(self.setup.refill_pool(state, key) if self.setup.env.uses_pool else state)

    def fitting(self, compile_program: Callable[[], Program]) -> tuple[int | None, Program | None]:
        """Compiles a program and checks it against the memory of the device.

        Returns:
            The bytes that the program needs, if known, and the program, or None if the program does not fit.
        """
        program: Program | None = None
        needed: int | None = None
        try:
            program = compile_program()
            needed = self._memory.needed(program)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # A program that does not fit in one process is smaller in all of them, by the same plan.
        answers = hosts.gather("fits", [needed, program is not None and self._memory.fits(needed)])
        needs = [need for need, _ in answers if need is not None]
        needed = max(needs) if len(needs) == len(answers) else None
        return needed, program if all(fits for _, fits in answers) else None

    def smaller_plan(self, needed: int | None) -> MemoryPlan:
        """The next smaller memory plan.

        Args:
            needed: Bytes that the present plan needs; None if the device refused the memory.

        Raises:
            OutOfMemory: There is no smaller plan.
        """
        return self._memory.smaller(self._host.plan, needed)

    def take_plan(self, state: TrainState, plan: MemoryPlan, key: Key) -> TrainState:
        """Takes a memory plan; returns the state for it, with fewer environments if the plan has fewer."""
        before = self.num_envs
        self._host.plan = dataclasses.replace(plan)
        if self.num_envs == before:
            return state
        return self.setup.convert_state(self.setup.reset_envs_and_pool(state, key()))

    def climb(self, state: TrainState, key: jax.Array) -> TrainState:
        """Climbs one precision level if possible; returns the state at the level that is then the present one."""
        before = self.level
        return self._converted(state, before, self.ladder.climb("remedy"), lambda: key)

    def follow_ladder(self, state: TrainState, metrics: Metrics, key: Key) -> TrainState:
        """Records an iteration in the precision ladder; returns the state at the level that is then the present one.

        Args:
            state: After the iteration.
            metrics: Of the iteration, on the host.
            key: Returns the random key for the resets of a new level.

        Raises:
            NeedsOwnProgram: A new level is due, but other seeds share the program.
        """
        before = self.level
        change = self.ladder.watch(_precision_signs(self.setup, self._config, state, metrics))
        return self._converted(state, before, change, key)

    def _converted(self, state: TrainState, before: Level, change: LevelChange | None, key: Key) -> TrainState:
        """The state after a change of level, which is logged; the same state if there is no change."""
        if change is None:
            return state
        self._event("precision_changed", level=str(change.to), before=str(before), cause=change.cause)
        return self.to_current_level(state, key())


def _precision_signs(setup: TrainingSetup, config: Config, state: TrainState, metrics: Metrics) -> PrecisionSigns:
    """Signs of trouble with the precision in an iteration."""
    updates = config.ppo.num_updates_per_batch * config.ppo.num_minibatches
    rejected = sum(int(np.sum(metrics.trips[name])) for name in setup.ppo.update_guards)
    scale, accepted = setup.precision.loss_scale, float(metrics.values["training/accepted_share"])
    collapsed = scale is not None and accepted < 0.5 and float(state.tuning.loss_scale) <= scale.floor
    return PrecisionSigns(
        bad_state="finite_state" in metrics.trips and bool(np.any(metrics.trips["finite_state"])),
        not_finite=_not_finite(setup, metrics) * config.env.action_repeat / config.env_steps_per_iteration,
        rejected=rejected / updates,
        scale_collapsed=collapsed,
    )


def _not_finite(setup: TrainingSetup, metrics: Metrics) -> int:
    """Samples with a number that is not finite or overflows; outliers, and limits chosen for a task, do not count."""
    count = int(np.sum(metrics.trips.get("finite_samples", 0)))
    quarantine = setup.ppo.env.guards.get("quarantine")
    if isinstance(quarantine, Quarantine):
        counts = dict(zip(quarantine.causes, metrics.trips["quarantine"], strict=True))
        count += sum(int(counts[cause]) for cause in quarantine.causes_of_overflow)
    return count


def _distinct_levels(compiling: Compiling, event: LogEvent, levels: tuple[str, ...]) -> tuple[str, ...]:
    """Measures which levels this device distinguishes; logs levels that have no effect."""
    with compiling("a check of matrix products"):
        measured = arithmetic.measure([level for level in levels if level != X64])
        exact = X64 in levels and arithmetic.measure_x64() == 0.0
    for level, kind in arithmetic.undelivered(measured).items():
        event("precision_not_delivered", level=level, measured=kind)
    if X64 in levels and not exact:
        event("precision_not_delivered", level=X64, measured="float32")
    return (*arithmetic.distinct_levels(measured), *((X64,) if exact else ()))
