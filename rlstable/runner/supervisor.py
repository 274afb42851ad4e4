"""The supervisor: chooses a remedy after a failure, and owns the compiled programs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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
from rlstable.policy.evaluator import Evaluator, make_evaluator
from rlstable.ppo.state import SPECS, Metrics, TrainState
from rlstable.runner.host_state import HostState
from rlstable.runner.setup import Program, TrainingSetup
from rlstable.supervise import arithmetic, remedies, snapshots
from rlstable.supervise.ladder import Change, Ladder, Level, NeedsOwnProgram, Signs
from rlstable.supervise.memory_plan import Memory, MemoryPlan, OutOfMemory, exhausted
from rlstable.supervise.recovery import Plan, Recovery
from rlstable.supervise.return_watch import ReturnWatch
from rlstable.supervise.snapshots import NAMES, Saved, Snapshot
from rlstable.supervise.stop_reasons import StopReason

LogEvent = Callable[..., None]
# A random key costs more to make than it is worth in an iteration that draws nothing.
Key = Callable[[], jax.Array]

# A level of precision and a plan for memory: each pair is compiled once.
ProgramKey = tuple[Level, str]


@dataclasses.dataclass(frozen=True)
class Factories:
    """Factories of training setups and evaluators.

    Attributes:
        assembly: From the arguments of `TrainingSetup`.
        evaluator: From those of `make_evaluator`.
        shared: Whether it is for several seeds in one program, none of which may have it changed for itself.
    """

    assembly: Callable[..., TrainingSetup] = TrainingSetup
    evaluator: Callable[..., Evaluator] = make_evaluator
    shared: bool = False


ALONE = Factories()


class Rollback(NamedTuple):
    """The state from which a run continues after a rollback.

    Attributes:
        state: The last good one, under a remedy.
        iteration: How many it has behind it.
        step: Environment steps likewise.
    """

    state: TrainState
    iteration: int
    step: int


class Supervisor:
    """Builds what computes at the present level of precision and size, and decides what to do when guards give up.

    Args:
        config: The whole configuration.
        mesh: The devices.
        more_guards: Guards besides the configured ones, by site and name.
        compiling: Context manager that tells the user what is compiling.
        report: Called as `report(kind, **fields)` with every event.
        host: What it remembers of the run, and saves with it.
        builds: What builds what computes; None for a run by itself.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        more_guards: MoreGuards,
        compiling: Compiling,
        report: LogEvent,
        host: HostState,
        builds: Factories | None = None,
    ):
        self._config = config
        self._mesh = mesh
        self._more_guards = more_guards
        self._compiling = compiling
        self._report = report
        self._builds = ALONE if builds is None else builds
        self._assemblies: dict[ProgramKey, TrainingSetup] = {}
        self._programs: dict[ProgramKey, Program] = {}
        self._evaluators: dict[Level, Evaluator] = {}
        self._snapshots = {name: Snapshot() for name in NAMES}
        self._last_good = self._snapshots["last_good"]
        self.best = self._snapshots["best"]
        self._candidate = self._snapshots["candidate"]
        self.recall(host)

    def recall(self, host: HostState) -> None:
        """Takes over the host state of a run, new or saved."""
        config = self._config
        self._host = host
        self._recovery = Recovery(config.supervise.recovery, host.attempts)
        start = Level(config.precision.matmul, config.precision.network)
        self._ladder = Ladder(config.supervise.ladder, start, host.rungs, self._distinct, self._builds.shared)
        self._memory = Memory(config, self._mesh, self._report)
        guard = config.guards.return_watch
        watched = guard.enabled and config.supervise.recovery.enabled
        self.watch_of_return = ReturnWatch(guard.tolerance, guard.episodes, host.watch) if watched else None

    @property
    def level(self) -> Level:
        """The precision that is computed in."""
        return self._ladder.level

    @property
    def assembly(self) -> TrainingSetup:
        """The training setup at the present level and size."""
        if self.which not in self._assemblies:
            config = self._host.plan.of(_at_level(self._config, self.level))
            self._assemblies[self.which] = self._builds.assembly(config, self._mesh, self._more_guards, self._compiling)
        return self._assemblies[self.which]

    @property
    def shared(self) -> bool:
        """Whether programs are for several seeds."""
        return self._builds.shared

    @property
    def num_envs(self) -> int:
        """How many environments are trained in."""
        return self._host.plan.of(self._config).ppo.num_envs

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator at the present level, and at the configured size whatever the size of training."""
        if self.level not in self._evaluators:
            config, assembly = _at_level(self._config, self.level), self.assembly
            # One environment where both are the same. A user's environment may have a simulator, which both would
            # disturb, and on several devices each has a share of the cores.
            same = config.env.source == "brax" and not config.eval.env_kwargs and self._mesh.size == 1
            self._evaluators[self.level] = self._builds.evaluator(
                config, assembly.ppo.networks, self._compiling, self._report, assembly.single if same else None
            )
        return self._evaluators[self.level]

    @property
    def which(self) -> ProgramKey:
        """Which program the next iteration is computed by."""
        return self.level, str(self._host.plan)

    def to_current_level(self, state: TrainState, key: jax.Array) -> TrainState:
        """Converts a training state of another level of precision to the current one.

        Args:
            state: At any level.
            key: Random key for its pool of first states.
        """
        assembly = self.assembly
        return assembly.convert_state(assembly.refill_pool(state, key) if assembly.env.draws else state)

    def program(self, state: TrainState, key: Key) -> tuple[Program, TrainState]:
        """The training program of the present level, compiled at most once, and the state that goes into it.

        Where it needs more memory than there is, the plan is made smaller until it does not.

        Args:
            state: The training state.
            key: Gives the random key for resetting a smaller number of environments.

        Raises:
            OutOfMemory: It does not fit, however it is divided.
        """
        while self.which not in self._programs:
            needed, program = self.fitting(functools.partial(self.assembly.compiled, state))
            if program is not None:
                self._programs[self.which] = program
            else:
                state = self.shrunk(state, needed, key)
        return self._programs[self.which], state

    def fitting(self, compile_program: Callable[[], Program]) -> tuple[int | None, Program | None]:
        """A program, or None where it needs more memory than there is; before it the bytes it needs, if known.

        Args:
            compile_program: Compiles it.
        """
        try:
            program = compile_program()
        except jax.errors.JaxRuntimeError as error:
            if not exhausted(error):
                raise
            return None, None
        needed = self._memory.needed(program)
        return needed, program if self._memory.fits(needed) else None

    def shrink_after_oom(self, state: TrainState, iteration: int, step: int, key: jax.Array) -> Rollback:
        """Goes back to the last good state with a smaller plan, after the device has refused its memory.

        Args:
            state: The one that went into the iteration that failed; its arrays may be gone.
            iteration: Number of the iteration before.
            step: Environment steps then.
            key: Random key for resets.

        Raises:
            OutOfMemory: It does not fit, however it is divided.
        """
        good = self._last_good
        if good.empty:
            raise OutOfMemory(
                "The device refused memory while training, and without supervise.recovery.enabled=true there is "
                "nothing to go back to; set it, or raise ppo.gradient_accumulation, and resume."
            )
        host = self._host
        host.plan = self._memory.smaller(host.plan, None)
        state = self.assembly.reset_envs_and_pool(
            good.restored(state, self._mesh), jax.random.fold_in(key, good.iteration)
        )
        host.attempts.lost_iterations += iteration - good.iteration
        host.attempts.lost_steps += step - good.step
        state = self.assembly.convert_state(state)
        self._forget_later(state, good.iteration, good.step)
        return Rollback(state, good.iteration, good.step)

    def shrunk(self, state: TrainState, needed: int | None, key: Key) -> TrainState:
        """The state for a smaller plan; other environments where there are fewer of them.

        Args:
            state: The training state.
            needed: Bytes that the present plan needs; None where the device has refused them.
            key: Gives the random key for resets.

        Raises:
            OutOfMemory: There is no smaller one.
        """
        return self.take_plan(state, self._memory.smaller(self._host.plan, needed), key)

    def take_plan(self, state: TrainState, plan: MemoryPlan, key: Key) -> TrainState:
        """The state for a plan; arguments as for `shrunk`."""
        before = self.num_envs
        self._host.plan = dataclasses.replace(plan)
        return (
            state
            if self.num_envs == before
            else self.assembly.convert_state(self.assembly.reset_envs_and_pool(state, key()))
        )

    def keep(self, state: TrainState, iteration: int, step: int) -> None:
        """Makes a state the one to go back to; its verdict was read and was good."""
        if self._config.supervise.recovery.enabled:
            self._last_good.keep(state, iteration, step)

    def look(self, is_best: bool | None) -> None:
        """Takes in a look at the return: after the best one the candidate of before is the best state.

        Args:
            is_best: Whether it is the best so far; None where there was no look.
        """
        if is_best and not self._candidate.empty:
            self.best.become(self._candidate)

    def nominate(self, state: TrainState, iteration: int, step: int) -> None:
        """Takes a good state as the candidate for the best one, after a look at the return."""
        self._candidate.keep(state, iteration, step)

    def keep_best(self, state: TrainState, iteration: int, step: int) -> None:
        """Makes a good state the best one, after the greatest evaluation."""
        self.best.keep(state, iteration, step)

    def keep_is_due(self, iteration: int) -> bool:
        """Whether a good state is to be kept after this iteration: where one is to be saved too, and in between."""
        config = self._config
        return any(iteration % every == 0 for every in (config.supervise.recovery.every, config.checkpoint.every))

    def to_save(self, state: TrainState, iteration: int) -> tuple[TrainState, snapshots.Origins]:
        """The contents of a checkpoint, and the origins that `read` needs."""
        return snapshots.save(self._snapshots, state, iteration)

    def like(self, level: Level, num_envs: int) -> Saved:
        """Shapes of a checkpoint at some level and size; a checkpoint may lack the parts `NAMES`."""
        if (level, num_envs) == (self.level, self.num_envs):
            return snapshots.template(self.assembly.shapes())
        config = _at_level(self._config, level)
        config = config.model_copy(update={"ppo": config.ppo.model_copy(update={"num_envs": num_envs})})
        return snapshots.template(TrainingSetup(config, self._mesh, self._more_guards).shapes())

    def read(self, saved: Saved, origins: snapshots.Origins, iteration: int, **tuning: Any) -> TrainState:
        """The training state of a checkpoint; keeps what the run that saved it would have gone back to.

        Args:
            saved: What the checkpoint holds.
            origins: What `to_save` said of it.
            iteration: That of the checkpoint.
            **tuning: Numbers of `Tuning` that are others from now on.
        """
        enabled = self._config.supervise.recovery.enabled
        state = snapshots.load(self._snapshots, saved, iteration, origins if enabled else {}, **tuning)
        if self._last_good.empty:
            self.keep(state, iteration, int(state.counters.env_steps))
        return state

    def watch(self, state: TrainState, metrics: Metrics, good: bool, key: Key) -> TrainState:
        """Records an iteration without failure: relaxes remedies and moves on the ladder.

        Args:
            state: After it.
            metrics: Its report, on the host.
            good: Whether its state is good and it has learnt something.
            key: Gives the random key for what a new level or size draws.
        """
        # The ladder first: where it asks for what cannot be, nothing else has been changed.
        before = self._ladder.level
        change = self._ladder.watch(self._signs(state, metrics))
        if change is not None:
            state = self._moved(state, before, change, key())
        remedy = self._recovery.healthy(good)
        if remedy is not None:
            state = sharding.place(remedies.take_back(remedy, state), self._mesh, SPECS)
            self._report("remedy_taken_back", remedy=str(remedy), after=self._host.attempts.stretch)
        return state

    def try_again(
        self, cause: StopReason, state: TrainState, iteration: int, step: int, key: jax.Array
    ) -> Rollback | StopReason:
        """Goes back to the last good state with the next remedy.

        Args:
            cause: Of the patience that has ended.
            state: The present one.
            iteration: Its number.
            step: Its environment steps.
            key: Random key for resets.

        Returns:
            The state to continue from, or the stop reason after too many attempts.
        """
        collapse = cause is StopReason.policy_collapsed
        attempts, good = self._host.attempts, self.best if collapse else self._last_good
        plan = self._recovery.plan(cause.name, iteration + attempts.lost_iterations, self._applicable, collapse)
        if plan is None and collapse:
            return cause
        if plan is None:
            tried = bool(attempts.recent) and cause is not StopReason.physics_unstable
            return StopReason.recovery_exhausted if tried else cause
        lost_iterations, lost_steps = iteration - good.iteration, step - good.step
        key = jax.random.fold_in(jax.random.fold_in(key, good.iteration), 2**31 + plan.number)
        state = self._back(good, state, plan, lost_iterations, key)
        self._report(
            "rolled_back",
            cause=cause.name,
            attempt=plan.number,
            remedy=str(plan.remedy),
            to_iteration=good.iteration,
            lost_steps=lost_steps,
        )
        # Last, with the caller's step: the step that is logged is their sum, and stays what it was.
        attempts.lost_iterations += lost_iterations
        attempts.lost_steps += lost_steps
        self._forget_later(state, good.iteration, good.step)
        return Rollback(state, good.iteration, good.step)

    def _forget_later(self, state: TrainState, iteration: int, step: int) -> None:
        """After going back to a state: no best state, and no candidate for it, may lie ahead of the run.

        Snapshots are identified by their iteration, which occurs again after a rollback.
        """
        self._candidate.clear()
        if not self.best.empty and iteration <= self.best.iteration:
            # The state under its remedy, so that one checkpoint holds both.
            self.best.keep(state, iteration, step)

    def with_best_policy(self, state: TrainState) -> TrainState:
        """A state whose networks, optimizer and statistics are those of the best state, to end a run with.

        Counters stay: the steps were trained, and a later resume continues after them.
        """
        return state if self.best.empty else self.best.learnt(state, self._mesh)

    def _back(self, good: Snapshot, state: TrainState, plan: Plan, undone: int, key: jax.Array) -> TrainState:
        """A snapshot under a remedy, with random numbers and clean environments of this attempt's own."""
        scales = {name: getattr(state.tuning, name) for name in remedies.SCALES}
        state = good.restored(state, self._mesh)
        # The factors of the remedies now in effect: some remedies may have been taken back since the snapshot.
        hold = jnp.zeros_like(state.tuning.policy_hold)  # refit_critic holds for one attempt only
        tuning = dataclasses.replace(state.tuning, policy_hold=hold, **scales)
        state = dataclasses.replace(state, tuning=tuning)
        if plan.remedy.name == "raise_precision":
            before = self._ladder.level
            change = self._ladder.climb("remedy")
            if change is not None:
                state = self._moved(state, before, change, key)
        state = self.assembly.reset_envs_and_pool(state, key)
        if state.fault is not None:
            state = faults.carried_on(state, undone)
        state = dataclasses.replace(state, key=jax.random.fold_in(state.key, plan.number))
        state = remedies.apply(plan.remedy, state, self.assembly.ppo.optimizer)
        return self.assembly.convert_state(state)

    def _applicable(self, remedy: Remedy) -> bool:
        if remedy.name != "raise_precision" or not self._ladder.can_climb():
            return remedy.name != "raise_precision"
        if self._builds.shared:
            raise NeedsOwnProgram("its next remedy is raise_precision")
        return True

    def _moved(self, state: TrainState, before: Level, change: Change, key: jax.Array) -> TrainState:
        self._report("precision_changed", level=str(change.to), before=str(before), cause=change.cause)
        return self.to_current_level(state, key)

    def _signs(self, state: TrainState, metrics: Metrics) -> Signs:
        assembly, config = self.assembly, self._config
        updates = config.ppo.num_updates_per_batch * config.ppo.num_minibatches
        rejected = sum(int(np.sum(metrics.trips[name])) for name in assembly.ppo.update_guards)
        scale, accepted = assembly.precision.loss_scale, float(metrics.values["training/accepted_share"])
        collapsed = scale is not None and accepted < 0.5 and float(state.tuning.loss_scale) <= scale.floor
        return Signs(
            bad_state="state" in metrics.trips and bool(np.any(metrics.trips["state"])),
            invalid=1.0 - float(metrics.values.get("training/valid_share", 1.0)),
            rejected=rejected / updates,
            scale_collapsed=collapsed,
        )

    def _distinct(self, levels: tuple[str, ...]) -> tuple[str, ...]:
        """The levels that differ on this device, as measured; flags without effect are reported."""
        with self._compiling("a check of matrix products"):
            measured = arithmetic.measure([level for level in levels if level != X64])
            exact = X64 in levels and arithmetic.measure_x64() == 0.0
        for level, kind in arithmetic.undelivered(measured).items():
            self._report("precision_not_delivered", level=level, measured=kind)
        if X64 in levels and not exact:
            self._report("precision_not_delivered", level=X64, measured="float32")
        return (*arithmetic.distinct_levels(measured), *((X64,) if exact else ()))


def _at_level(config: Config, level: Level) -> Config:
    """The configuration at some level of precision."""
    precision = config.precision.model_copy(update=level._asdict())
    return config.model_copy(update={"precision": precision})
