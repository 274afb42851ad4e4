"""The supervisor: rolls a training state back under a remedy, moves on the precision ladder, and shrinks memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rlstable import faults
from rlstable.compilation.xla import Compiling
from rlstable.config import Config
from rlstable.config.supervise import X64, Remedy
from rlstable.device import sharding
from rlstable.guards.base import MoreGuards
from rlstable.io.versions import versions
from rlstable.policy.evaluator import Evaluator
from rlstable.ppo.state import SPECS, Metrics, TrainState
from rlstable.runner.decision import Decision, decide
from rlstable.runner.host_state import HostState
from rlstable.runner.setup import Program, TrainingSetup
from rlstable.runner.setup_cache import Factories, LogEvent, ProgramKey, SetupCache
from rlstable.supervise import arithmetic, remedies, snapshots
from rlstable.supervise.ladder import Change, Ladder, Level, NeedsOwnProgram, Signs
from rlstable.supervise.memory_plan import Memory, MemoryPlan, OutOfMemory, exhausted
from rlstable.supervise.recovery import Recovery
from rlstable.supervise.snapshots import Saved, Snapshot, Snapshots
from rlstable.supervise.stop_reasons import StopReason

# Returns a random key. Deriving a key costs more than an iteration that draws nothing should pay.
Key = Callable[[], jax.Array]


class Supervisor:
    """Keeps the states that a run may roll back to, and applies decisions to the training state.

    Attributes:
        snapshots: The states that a run may roll back to.

    Args:
        config: The whole configuration.
        mesh: The devices.
        more_guards: The user's guards, by site and name.
        compiling: Context manager that tells the user what is compiling.
        event: Called as `event(kind, **fields)`.
        host: The run's host state; the supervisor reads and changes it.
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
        self._config = config
        self._mesh = mesh
        self._compiling = compiling
        self._event = event
        self._host = host
        self._setups = SetupCache(config, mesh, more_guards, compiling, event, factories)
        self._recovery = Recovery(config.supervise.recovery)
        self._memory = Memory(config, mesh, event)
        self.snapshots = Snapshots(mesh)
        self.recall()

    def recall(self) -> None:
        """Takes the precision level from the host state, after that was read from a checkpoint."""
        precision, ladder = self._config.precision, self._config.supervise.ladder
        start = Level(precision.matmul, precision.network)
        delivered = functools.partial(_delivered, self._compiling, self._event)
        self._ladder = Ladder(ladder, start, self._host.rungs, delivered, self.shared)

    @property
    def level(self) -> Level:
        """The present precision level."""
        return self._ladder.level

    @property
    def program_key(self) -> ProgramKey:
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

    @property
    def shared(self) -> bool:
        """Whether several seeds share the programs."""
        return self._setups.shared

    @property
    def versions(self) -> dict[str, str]:
        """Versions of rlstable and its libraries, and the kind of device."""
        return {**versions(), "device": sharding.device_kind(self._mesh)}

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self._mesh.size

    @property
    def num_envs(self) -> int:
        """Number of training environments."""
        return self._host.plan.of(self._config).ppo.num_envs

    def to_current_level(self, state: TrainState, key: jax.Array) -> TrainState:
        """Converts a training state of another precision level to the present one.

        Args:
            state: At any level.
            key: Random key for its pool of first states.
        """
        return self.setup.convert_state(self.setup.refill_pool(state, key) if self.setup.env.uses_pool else state)

    def fitting(self, compile_program: Callable[[], Program]) -> tuple[int | None, Program | None]:
        """Compiles a program and checks it against the memory of the device.

        Args:
            compile_program: Compiles the program.

        Returns:
            The bytes that the program needs, if known, and the program, or None if the program does not fit.
        """
        try:
            program = compile_program()
        except jax.errors.JaxRuntimeError as error:
            if not exhausted(error):
                raise
            return None, None
        needed = self._memory.needed(program)
        return needed, program if self._memory.fits(needed) else None

    def shrunk(self, state: TrainState, needed: int | None, key: Key) -> TrainState:
        """Takes a smaller memory plan; returns the state for it.

        Args:
            state: The training state.
            needed: Bytes that the present plan needs; None if the device refused the memory.
            key: Returns the random key for resets.

        Raises:
            OutOfMemory: There is no smaller plan.
        """
        return self.take_plan(state, self._memory.smaller(self._host.plan, needed), key)

    def take_plan(self, state: TrainState, plan: MemoryPlan, key: Key) -> TrainState:
        """Takes a memory plan; returns the state for it, with fewer environments if the plan has fewer."""
        before = self.num_envs
        self._host.plan = dataclasses.replace(plan)
        if self.num_envs == before:
            return state
        return self.setup.convert_state(self.setup.reset_envs_and_pool(state, key()))

    def shrink_after_oom(self, state: TrainState, key: jax.Array) -> TrainState:
        """Rolls back to the last good state with a smaller memory plan, after the device refused memory.

        Args:
            state: Input of the iteration that failed; its arrays may be gone.
            key: Random key for resets.

        Raises:
            OutOfMemory: There is no smaller plan, or no state to roll back to.
        """
        good = self.snapshots.last_good
        if good.empty:
            raise OutOfMemory(
                "The device refused memory while training, and without supervise.recovery.enabled=true there is "
                "nothing to go back to; set it, or raise ppo.gradient_accumulation, and resume."
            )
        self._host.plan = self._memory.smaller(self._host.plan, None)
        key = jax.random.fold_in(key, good.iteration)
        state = self.setup.reset_envs_and_pool(good.restored(state, self._mesh), key)
        return self._rolled_back(self.setup.convert_state(state), good)

    def keep(self, state: TrainState) -> None:
        """Keeps a good state as the last good one."""
        if self._config.supervise.recovery.enabled:
            self.snapshots.last_good.keep(state, self._host.iteration, self._host.step)

    def keep_is_due(self) -> bool:
        """Whether this iteration's good state is kept: if it is also saved, and at intervals in between."""
        config, iteration = self._config, self._host.iteration
        return any(iteration % every == 0 for every in (config.supervise.recovery.every, config.checkpoint.every))

    def like(self, level: Level, num_envs: int) -> Saved:
        """Shapes of a checkpoint at a precision level and a number of environments; the parts `NAMES` may be absent."""
        same = (level, num_envs) == (self.level, self.num_envs)
        return snapshots.template(self.setup.shapes() if same else self._setups.shapes(level, num_envs))

    def read(self, saved: Saved, origins: snapshots.Origins, **tuning: Any) -> TrainState:
        """The training state of a checkpoint; its snapshots become the ones to roll back to.

        Args:
            saved: A checkpoint.
            origins: Origins of its snapshots.
            **tuning: Numbers of `Tuning` that the configuration has changed.
        """
        enabled = self._config.supervise.recovery.enabled
        state = self.snapshots.load(saved, self._host.iteration, origins if enabled else {}, **tuning)
        self._host.step = int(state.counters.env_steps)
        if self.snapshots.last_good.empty:
            self.keep(state)
        return state

    def watch(self, state: TrainState, metrics: Metrics, good: bool, key: Key) -> TrainState:
        """Records an iteration without failure: takes remedies back and moves on the precision ladder.

        Args:
            state: After the iteration.
            metrics: Of the iteration, on the host.
            good: Whether the state is good and the iteration learned something.
            key: Returns the random key for the resets of a new level.

        Raises:
            NeedsOwnProgram: A new level is due, but other seeds share the program.
        """
        # The ladder first: if it raises, nothing else has changed.
        before = self._ladder.level
        change = self._ladder.watch(_signs(self.setup, self._config, state, metrics))
        if change is not None:
            state = self._moved(state, before, change, key())
        self._host.attempts, remedy = self._recovery.after(self._host.attempts, good)
        if remedy is not None:
            state = sharding.place(remedies.take_back(remedy, state), self._mesh, SPECS)
            self._event("remedy_taken_back", remedy=str(remedy), after=self._host.attempts.stretch)
        return state

    def decide(self, cause: StopReason | None, finished: bool) -> Decision:
        """The decision after an iteration; nothing is changed. Arguments and errors as for `decision.decide`."""
        return decide(cause, finished, self._host, self._recovery, self._applicable)

    def roll_back(self, decision: Decision, state: TrainState, key: jax.Array) -> TrainState:
        """Rolls back to a snapshot under the remedy of a decision.

        Args:
            decision: To roll back.
            state: The present state.
            key: Random key for resets.

        Returns:
            The state to continue from.
        """
        plan, host = decision.plan, self._host
        assert decision.cause is not None and plan is not None and plan.remedy is not None
        collapse = decision.cause is StopReason.policy_collapsed
        good = self.snapshots.best if collapse else self.snapshots.last_good
        host.attempts = plan.attempts
        number = plan.attempts.count
        key = jax.random.fold_in(jax.random.fold_in(key, good.iteration), 2**31 + number)
        state = self._restore(good, state, plan.remedy, key)
        self._event(
            "rolled_back",
            cause=decision.cause.name,
            attempt=number,
            remedy=str(plan.remedy),
            to_iteration=good.iteration,
            lost_steps=host.step - good.step,
        )
        return self._rolled_back(state, good)

    def _rolled_back(self, state: TrainState, to: Snapshot) -> TrainState:
        """Counts what a rollback lost. The logged step, trained and lost steps together, stays the same."""
        host = self._host
        host.attempts.lost_iterations += host.iteration - to.iteration
        host.attempts.lost_steps += host.step - to.step
        host.iteration, host.step = to.iteration, to.step
        host.episodes = int(state.counters.episodes)
        host.idle, host.drawn = 0, False
        self.snapshots.forget_later(state, to.iteration, to.step)
        self.keep(state)
        return state

    def _restore(self, good: Snapshot, state: TrainState, remedy: Remedy, key: jax.Array) -> TrainState:
        """A snapshot under a remedy, with this attempt's own random numbers and clean environments."""
        scales = {name: getattr(state.tuning, name) for name in remedies.SCALES}
        state = good.restored(state, self._mesh)
        # The factors of the remedies now in effect: some remedies may have been taken back since the snapshot.
        hold = jnp.zeros_like(state.tuning.policy_hold)  # refit_critic holds for one attempt only
        tuning = dataclasses.replace(state.tuning, policy_hold=hold, **scales)
        state = dataclasses.replace(state, tuning=tuning)
        if remedy.name == "raise_precision":
            before = self._ladder.level
            change = self._ladder.climb("remedy")
            if change is not None:
                state = self._moved(state, before, change, key)
        state = self.setup.reset_envs_and_pool(state, key)
        if state.fault is not None:
            state = faults.after_rollback(state, self._host.iteration - good.iteration)
        state = dataclasses.replace(state, key=jax.random.fold_in(state.key, self._host.attempts.count))
        state = remedies.apply(remedy, state, self.setup.ppo.optimizer)
        return self.setup.convert_state(state)

    def _applicable(self, remedy: Remedy) -> bool:
        if remedy.name != "raise_precision" or not self._ladder.can_climb():
            return remedy.name != "raise_precision"
        if self.shared:
            raise NeedsOwnProgram("its next remedy is raise_precision")
        return True

    def _moved(self, state: TrainState, before: Level, change: Change, key: jax.Array) -> TrainState:
        self._event("precision_changed", level=str(change.to), before=str(before), cause=change.cause)
        return self.to_current_level(state, key)


def _signs(setup: TrainingSetup, config: Config, state: TrainState, metrics: Metrics) -> Signs:
    """Signs of trouble with the precision in an iteration."""
    updates = config.ppo.num_updates_per_batch * config.ppo.num_minibatches
    rejected = sum(int(np.sum(metrics.trips[name])) for name in setup.ppo.update_guards)
    scale, accepted = setup.precision.loss_scale, float(metrics.values["training/accepted_share"])
    collapsed = scale is not None and accepted < 0.5 and float(state.tuning.loss_scale) <= scale.floor
    return Signs(
        bad_state="finite_state" in metrics.trips and bool(np.any(metrics.trips["finite_state"])),
        invalid=1.0 - float(metrics.values.get("training/valid_share", 1.0)),
        rejected=rejected / updates,
        scale_collapsed=collapsed,
    )


def _delivered(compiling: Compiling, event: LogEvent, levels: tuple[str, ...]) -> tuple[str, ...]:
    """The levels that this device distinguishes, as measured; levels without effect are reported."""
    with compiling("a check of matrix products"):
        measured = arithmetic.measure([level for level in levels if level != X64])
        exact = X64 in levels and arithmetic.measure_x64() == 0.0
    for level, kind in arithmetic.undelivered(measured).items():
        event("precision_not_delivered", level=level, measured=kind)
    if X64 in levels and not exact:
        event("precision_not_delivered", level=X64, measured="float32")
    return (*arithmetic.distinct_levels(measured), *((X64,) if exact else ()))
