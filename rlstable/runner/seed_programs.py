"""The training setup and the evaluator of one seed, at its present precision level and memory plan."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from rlstable.compilation.xla import Compiling
from rlstable.config import Config
from rlstable.config.supervise import MATMUL_LEVELS, X64
from rlstable.device import hosts, sharding
from rlstable.device.precision import Level
from rlstable.envs.float64 import computes_in_float64
from rlstable.guards.base import MoreGuards
from rlstable.io.versions import versions
from rlstable.policy.evaluator import Evaluator
from rlstable.ppo.state import TrainState
from rlstable.render.recording import EpisodeRecorder
from rlstable.runner.host_state import HostState
from rlstable.runner.setup import Program, TrainingSetup
from rlstable.runner.setup_cache import Factories, LogEvent, ProgramKey, SetupCache
from rlstable.supervise.memory_plan import MemoryPlan, MemoryPlanner, is_out_of_memory
from rlstable.supervise.stop_reasons import StopReason

# Returns a random key. Deriving a key costs more than an iteration that draws nothing should pay.
Key = Callable[[], jax.Array]
_CURED_BY_PRECISION = (StopReason.state_not_finite, StopReason.no_update_accepted, StopReason.physics_unstable)


class SeedPrograms:
    """Selects the training setup and the evaluator of one seed, by precision level and memory plan.

    Attributes:
        mesh: The devices of this seed.
        device_count: Number of devices of all seeds.
        shared: Whether several seeds share the programs.

    Args:
        config: The whole configuration.
        mesh: The devices.
        more_guards: The user's guards, by site and name.
        compiling: Context manager that shows the name of the program that is compiling.
        event: Called as `event(kind, **fields)`.
        host: The run's host state, with the precision level and the memory plan.
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

    @property
    def level(self) -> Level:
        """The present precision level."""
        steps = self._host.attempts.precision_steps
        return self._levels[min(steps, len(self._levels) - 1)] if steps else self._configured_level

    @property
    def _configured_level(self) -> Level:
        return Level(self._config.precision.matmul, self._config.precision.network)

    @functools.cached_property
    def _levels(self) -> tuple[Level, ...]:
        """The configured level, then networks in float32, then higher levels of matrix products."""
        ladder, start = self._config.supervise.ladder, self._configured_level
        matmul = [name for name in ladder.matmul if MATMUL_LEVELS.index(name) > MATMUL_LEVELS.index(start.matmul)]
        if jax.default_backend() == "cpu":  # whose products are float32 at every level
            matmul = [name for name in matmul if name == X64]
        if not computes_in_float64(self._setups.setup(start, self._host.plan).single):
            matmul = [name for name in matmul if name != X64]
        return tuple(dict.fromkeys((start, *(Level(name, "float32") for name in (start.matmul, *matmul)))))

    def levels_for(self, cause: StopReason) -> int:
        """Number of precision levels above the configured one that may cure a cause of failure."""
        if not self._config.supervise.ladder.enabled or cause not in _CURED_BY_PRECISION:
            return 0
        physics = cause is StopReason.physics_unstable  # networks do not compute in float64
        return sum(physics or level.matmul != X64 for level in self._levels[1:])

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

    def changed_level(self, state: TrainState, before: Level, cause: str, key: Key) -> TrainState:
        """The state at the present level, whose change from the level `before` is logged; key as for the pool."""
        if self.level == before:
            return state
        self._event("precision_changed", level=str(self.level), before=str(before), cause=cause)
        return self.to_current_level(state, key())
