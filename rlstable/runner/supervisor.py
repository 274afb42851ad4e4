"""The supervisor: decides after an iteration, and rolls a training state back under a remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlstable import faults
from rlstable.config import Config
from rlstable.config.supervise import RAISE_PRECISION, Remedy
from rlstable.device import sharding
from rlstable.ppo.state import SPECS, TrainState
from rlstable.runner.decision import Decision, decide
from rlstable.runner.host_state import HostState
from rlstable.runner.seed_programs import Key, SeedPrograms
from rlstable.runner.setup_cache import LogEvent
from rlstable.supervise import remedies
from rlstable.supervise.diagnosis import FAILURE_REPEATS
from rlstable.supervise.memory_plan import OutOfMemory
from rlstable.supervise.recovery import Recovery
from rlstable.supervise.snapshots import Origins, SavedState, Snapshot, Snapshots
from rlstable.supervise.stop_reasons import StopReason


class Supervisor:
    """Keeps the states that a run may roll back to, decides after an iteration, and rolls back.

    Attributes:
        snapshots: The states that a run may roll back to.

    Args:
        config: The whole configuration.
        programs: The training setup at the present precision level and memory plan.
        event: Called as `event(kind, **fields)`.
        host: The run's host state; the supervisor reads and changes it.
    """

    def __init__(self, config: Config, programs: SeedPrograms, event: LogEvent, host: HostState):
        self._config = config
        self._programs = programs
        self._event = event
        self._host = host
        guards = config.guards
        patience = {"policy_diverged": guards.policy.patience, "value_loss_exploded": guards.value_loss.patience}
        self._recovery = Recovery(config.supervise.recovery, patience)
        self.snapshots = Snapshots(programs.mesh)

    def keep(self, state: TrainState) -> None:
        """Keeps a good state as the last good one."""
        if self._config.supervise.recovery.enabled:
            self.snapshots.last_good.keep(state, self._host.iteration, self._host.step)

    def keep_is_due(self) -> bool:
        """Whether to keep this iteration's state: every `recovery.every` and every `checkpoint.every` iterations."""
        config, iteration = self._config, self._host.iteration
        return any(iteration % every == 0 for every in (config.supervise.recovery.every, config.checkpoint.every))

    def read(self, saved: SavedState, origins: Origins, **tuning: Any) -> TrainState:
        """Reads a checkpoint: returns its training state, and takes its snapshots to roll back to.

        Args:
            saved: The arrays of the checkpoint.
            origins: Iterations and steps of its snapshots.
            **tuning: Numbers of `Tuning` that the configuration has changed.
        """
        enabled = self._config.supervise.recovery.enabled
        state = self.snapshots.load(saved, self._host.iteration, origins if enabled else {}, **tuning)
        self._host.step = int(state.counters.env_steps)
        if self.snapshots.last_good.empty:
            self.keep(state)
        return state

    def watch(self, state: TrainState, good: bool, key: Key) -> TrainState:
        """Records an iteration without failure; takes the latest remedy back after a long healthy stretch.

        Args:
            state: The training state after the iteration.
            good: Whether the state is good and the iteration learned something.
            key: Returns the random key for the pool of first states at another precision.
        """
        level = self._programs.level
        self._host.attempts, remedy = self._recovery.after(self._host.attempts, good)
        if remedy is None:
            return state
        self._event("remedy_taken_back", remedy=str(remedy), after=self._host.attempts.stretch)
        if remedy.name == RAISE_PRECISION:
            return self._programs.changed_level(state, level, "healthy", key)
        return sharding.place(remedies.take_back(remedy, state), self._programs.mesh, SPECS)

    def decide(self, cause: StopReason | None, finished: bool) -> Decision:
        """The decision after an iteration; nothing is changed. Arguments as for `decision.decide`."""
        programs = self._programs
        return decide(cause, finished, self._host, self._recovery, programs.levels_for, programs.shared)

    def roll_back(self, decision: Decision, state: TrainState, key: jax.Array) -> TrainState:
        """Rolls back to a snapshot under the remedy of a decision.

        Args:
            decision: The decision to roll back.
            state: The present state.
            key: Random key for resets.

        Returns:
            The state to continue from.
        """
        plan, host = decision.plan, self._host
        assert decision.cause is not None and plan is not None and plan.remedy is not None
        collapse = decision.cause is StopReason.policy_collapsed
        good = self.snapshots.best if collapse else self.snapshots.last_good
        level = self._programs.level
        host.attempts = plan.attempts
        number = plan.attempts.count
        key = jax.random.fold_in(jax.random.fold_in(key, good.iteration), 2**31 + number)
        state = self._restore(good, state)
        state = self._programs.changed_level(state, level, decision.cause.name, lambda: key)
        state = self._apply(plan.remedy, state, host.iteration - good.iteration, key)
        self._event(
            "rolled_back",
            cause=decision.cause.name,
            attempt=number,
            remedy=str(plan.remedy),
            to_iteration=good.iteration,
            lost_steps=host.step - good.step,
        )
        return self._rewind_host(state, good)

    def pass_over(self, decision: Decision) -> None:
        """Reports once, as a sign, that the run continues after a failure because a rollback would repeat it."""
        host, cause = self._host, decision.cause
        assert cause is not None
        if FAILURE_REPEATS in host.signs.records:
            return
        since = host.logged_iteration - host.attempts.recent[-1]["at"]
        text = (
            f"{cause.name} came again {since} iterations after the rollback, where it had come before: the cause is "
            "what the environment shows, so there is no further rollback for it; see what changes in the environment"
        )
        host.signs.log(FAILURE_REPEATS, host.logged_step, text)
        self._event("sign", sign=FAILURE_REPEATS, text=text, value=float(since))

    def shrink_after_oom(self, state: TrainState, key: jax.Array) -> TrainState:
        """Rolls back to the last good state with a smaller memory plan, after the device refused memory.

        Args:
            state: Input of the iteration that failed; its arrays may be deleted.
            key: Random key for resets.

        Raises:
            OutOfMemory: There is no smaller plan, or no state to roll back to.
        """
        good, programs = self.snapshots.last_good, self._programs
        if good.empty:
            raise OutOfMemory(
                "The device refused memory while training, and supervise.recovery.enabled=false keeps no state to "
                "roll back to; set supervise.recovery.enabled=true or raise ppo.gradient_accumulation, and resume."
            )
        self._host.plan = programs.smaller_plan(None)
        self._host.attempts.lost_iterations += 1  # the one that failed
        key = jax.random.fold_in(key, good.iteration)
        state = programs.setup.reset_envs_and_pool(good.restored(state, programs.mesh), key)
        return self._rewind_host(programs.setup.convert_state(state), good)

    def _rewind_host(self, state: TrainState, to: Snapshot) -> TrainState:
        """Sets the host's counts back to a snapshot, and adds the difference to the lost steps and iterations.

        `HostState.logged_step`, the sum of trained and lost steps, does not change.
        """
        host = self._host
        host.attempts.lost_iterations += host.iteration - to.iteration
        host.attempts.lost_steps += host.step - to.step
        host.iteration, host.step = to.iteration, to.step
        host.episodes = int(state.counters.episodes)
        host.iterations_without_update, host.healthy_needed, host.pool_used = 0, 0, False
        self.snapshots.forget_later(state, to.iteration, to.step)
        self.keep(state)
        return state

    def _restore(self, good: Snapshot, state: TrainState) -> TrainState:
        """A snapshot, with the factors of the remedies now in effect: some may have been taken back since then."""
        scales = {name: getattr(state.tuning, name) for name in remedies.SCALES}
        state = good.restored(state, self._programs.mesh)
        hold = jnp.zeros_like(state.tuning.policy_hold)  # refit_critic holds for one attempt only
        tuning = dataclasses.replace(state.tuning, policy_hold=hold, **scales)
        return dataclasses.replace(state, tuning=tuning)

    def _apply(self, remedy: Remedy, state: TrainState, lost_iterations: int, key: jax.Array) -> TrainState:
        """The state under a remedy, with clean environments and new random numbers for this attempt."""
        setup = self._programs.setup
        state = setup.reset_envs_and_pool(state, key)
        if state.fault is not None:
            state = faults.after_rollback(state, lost_iterations)
        state = dataclasses.replace(state, key=jax.random.fold_in(state.key, self._host.attempts.count))
        return setup.convert_state(remedies.apply(remedy, state, setup.ppo.optimizer))
