"""One seed's training as the host sees it: count, log, save, go back and try again, end by name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlstable import __version__, faults
from rlstable.compilation.xla import dispatch_inline, keep_programs
from rlstable.config import Config
from rlstable.device import sharding
from rlstable.envs.capture import causes_of
from rlstable.envs.vector import Episodes
from rlstable.guards.base import MoreGuards, check_more
from rlstable.io.checkpoint import Checkpoints
from rlstable.io.console import Console
from rlstable.io.lock import RunLock
from rlstable.io.logbook import Logbook
from rlstable.io.presence import Presence
from rlstable.io.run_folder import confirmed_of, forget_result, free_reserve, open_run_dir
from rlstable.io.thinning import History
from rlstable.io.trusted_folders import remember
from rlstable.io.versions import differences, versions
from rlstable.policy.evaluator import PolicySnapshot, policy_of, returns_of
from rlstable.policy.policy import policy_arrays, policy_spec
from rlstable.ppo.iteration import PPO
from rlstable.ppo.state import Metrics, Slot, TrainState
from rlstable.runner.finish import close
from rlstable.runner.host_state import HostState
from rlstable.runner.result import Result, Row
from rlstable.runner.resume import resume
from rlstable.runner.saving import Saving, finite
from rlstable.runner.schedule import Schedule
from rlstable.runner.stopping import StopRequest
from rlstable.runner.supervisor import Factories, Rollback, Supervisor
from rlstable.runner.telemetry import Telemetry
from rlstable.supervise import advice
from rlstable.supervise.incident import Incidents
from rlstable.supervise.ladder import NeedsOwnProgram
from rlstable.supervise.memory_plan import MemoryPlan
from rlstable.supervise.run_warnings import warnings_of
from rlstable.supervise.signs import Signs
from rlstable.supervise.stop_reasons import SAVED, StopReason, command

Callback = Callable[[int, Row], Any]
_NO_ITERATION = 2**32 - 1  # no run has so many iterations
_NOT_IN_EVENT = ("signs", "warnings")  # fields of `result.json` that the event `stopped` lacks


def mesh_of(config: Config) -> Mesh:
    """The devices of a configuration. Must run before JAX is initialised; JAX ignores the dispatch flag afterwards."""
    given = (config.env.kwargs or {}, config.eval.env_kwargs or {})
    if not {"native", "auto"}.isdisjoint((config.env.backend, *(kwargs.get("backend") for kwargs in given))):
        dispatch_inline()
    return sharding.make_mesh(config.devices)


class SeedRun:
    """One seed of a configuration on the host; a `Runner` or `Fleet` calls its methods around each iteration.

    After an iteration call `record_iteration`, evaluate if it says so, and `finish_iteration`; at the end `finish`.

    Attributes:
        config: What is run.
        run_dir: Where it is kept.
        state: The training state.
        host: What is saved beside it.
        step: Environment steps trained, as a number that outlives the donated state.
        history: Logged rows, those of long runs thinned (`io.thinning`).
        supervisor: What stands between it and its end.
        telemetry: What its iterations reported.
        advice: What to do about its ending, where there is something to say.
        confirmed: Fields `confirmed_*` of `result.json`; empty if no best policy is confirmed.

    Args:
        config: What to run.
        run_dir: Where it is kept.
        callback: Called as `callback(step, row)` with every logged row; returning True ends it.
        more_guards: The user's guards, by site (`env`, `batch`, `update`, `state`) and name.
        console: Where people look.
        stop_request: What a signal means to it.
        builds: What builds what computes, None for the usual.

    Raises:
        ConfigError: Anything about the configuration, the environment or the folder that cannot work.
    """

    def __init__(
        self,
        config: Config,
        run_dir: str | Path,
        callback: Callback | None,
        more_guards: MoreGuards | None,
        console: Console,
        stop_request: StopRequest,
        builds: Factories | None,
    ):
        more = more_guards or {}
        check_more(more, config.guards.model_dump().keys())
        self.config = config
        self.run_dir = Path(run_dir)
        self._schedule = Schedule(config)
        self._fault = config.fault.of_seed(config.seed)
        self._callback = callback
        self._console = console
        self._stop_request = stop_request
        self._mesh = mesh_of(config)
        config.require_devices(self._mesh.size)
        not_kept = keep_programs(config.compile_cache)
        self.host = HostState()
        self.step = self._before = self._episodes = 0
        self.history: list[Row] = History()
        self.advice: str | None = None
        self.confirmed: dict[str, Any] = {}
        self._last_evaluation: Row = {}
        self._stopped_by_callback = self._goes_on = False
        self._cause: StopReason | None = None
        self._unsaved = self._healthy = self._collapsed = self._evaluated_best = False
        self._unsaved_steps = 0
        self._last_score: float | None = None
        self._look: bool | None = None
        self._best_again: float | None = None
        self.supervisor = Supervisor(config, self._mesh, more, stop_request.compiling, self.event, self.host, builds)
        self._checkpoints = self._open_checkpoints()
        broken = [faults.FailingSink(self._fault)] if config.fault.site == "sinks" else []
        self._sinks = Logbook(config, self.run_dir, console, broken)
        self._signs = Signs(config, self.event)
        self.telemetry = Telemetry(config, self.ppo)
        key = jax.random.PRNGKey(config.seed)
        key_init, key_resets, self._key_eval, self._key_redraw = jax.random.split(key, 4)
        self._lock: RunLock | None = None
        self._saving: Saving | None = None
        try:
            resumes, self._lock = open_run_dir(self.run_dir, config.resume, 1)
            if self._lock.unsupported is not None:
                self.event("lock_unsupported", error=self._lock.unsupported)
            if not_kept is not None:
                self.event("compile_cache_unusable", error=not_kept)
            self._tell_backend()
            # What resumes, or has a program together with others, asks for another one.
            ahead = not resumes and not self.supervisor.shared
            self.state: TrainState = self.supervisor.assembly.first_state(key_init, key_resets, self._fault, ahead)
            self.step = int(self.state.counters.env_steps)
            if resumes:
                self._resume()
            self._incidents = self._open_incidents()
            if not resumes:
                self._keep()
            settings = config.model_dump(mode="json")
            presence = Presence(self.run_dir, self._lock, self._sinks, settings, self.machine, self.event)
            self._saving = Saving(self._checkpoints, presence, self.step, lambda: self.host.signs, self.event)
            not_remembered = remember(self.run_dir / "config.yaml", config)
            if not_remembered is not None:
                self.event("folder_not_remembered", error=not_remembered)
            self._sinks.start(self.host.wandb_run_id, None if config.resume is None else self.logged_step)
            if config.checkpoint.enabled:
                self._saving.look_at_room(self.state)
        except BaseException:
            self.close()
            raise

    @property
    def ppo(self) -> PPO:
        """The PPO of the present level and size."""
        return self.supervisor.assembly.ppo

    @property
    def logged_step(self) -> int:
        """Environment steps trained, those given up included: it never runs backwards."""
        return self.step + self.host.attempts.lost_steps

    @property
    def machine(self) -> dict[str, Any]:
        """Device and versions, for `machine.json`."""
        return {**self._versions(), "devices": self._mesh.size, "processors": os.cpu_count()}

    @property
    def policy_snapshot(self) -> PolicySnapshot:
        """The present policy, to be judged in the episodes of this iteration."""
        return policy_of(self.state, jax.random.fold_in(self._key_eval, self.host.iteration))

    @property
    def in_fresh_episodes(self) -> PolicySnapshot:
        """The present policy, in episodes that no evaluation of training plays."""
        return policy_of(self.state, jax.random.fold_in(self._key_eval, _NO_ITERATION))

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints on disk."""
        return self._checkpoints

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation is still to come."""
        return self._schedule.evaluates(self.step, self.config.total_steps)

    @property
    def evaluates_next(self) -> bool:
        """Whether an evaluation is due after the next iteration, if that is a healthy one."""
        return self._schedule.evaluates(self.step, self.step + self.config.env_steps_per_iteration)

    def record_iteration(self, metrics: Metrics, seconds: float) -> bool:
        """Records an iteration, after `state` was replaced by the iteration's result.

        Args:
            metrics: The report, on the host.
            seconds: How long it took.

        Returns:
            Whether an evaluation is due, for `finish_iteration`.
        """
        evaluates = self.evaluates_next and bool(metrics.healthy)
        if not self._goes_on:
            self._goes_on = True
            forget_result(self.run_dir)  # not sooner: what cannot start loses nothing
            self.confirmed = {}
        self._before = self.step
        self.step = int(metrics.counters.env_steps)
        # Not saveable yet: the evaluation and reset due after this iteration have not happened.
        self._unsaved, self._healthy = False, bool(metrics.healthy)
        self.host.iteration += 1
        self.host.idle = 0 if metrics.values["training/accepted_share"] > 0 else self.host.idle + 1
        bad = any(metrics.trips[name].any() for name in self.supervisor.assembly.env.guards)
        self.host.drawn |= bad or self.config.env.reset == "pool"
        self.host.elapsed += seconds
        self.telemetry.add(metrics, seconds)
        self._look_at_training(metrics)
        if self._healthy:
            self._signs.look(self.host.signs, self.host.iteration, self.logged_step, metrics.values)
        trips = self.telemetry.trips(metrics)
        self._tally(metrics, trips)
        for name, causes in trips.items():
            self.event("guard_tripped", guard=name, **causes)
        if self.state.incident is not None:
            self._note_incident(self.state.incident, bad)
        return evaluates

    def suspects(self, evaluation: Row) -> bool:
        """Whether the return may have collapsed, so that `compare` has to say whether it has.

        Args:
            evaluation: Of the present policy, where that was evaluated, else empty.
        """
        watch, best = self.supervisor.watch_of_return, self.supervisor.best
        self._collapsed = self._evaluated_best = False
        if watch is None or not self._healthy:
            return False
        value = evaluation.get("eval/episode_reward")
        if evaluation:
            self._evaluated_best = watch.evaluate(value)
        ends_below = self._finished and watch.ends_below(value)
        return (watch.suspects or ends_below) and not best.empty and best.iteration < self.host.iteration

    @property
    def best_policy_snapshot(self) -> PolicySnapshot:
        """The policy of the best state, to be evaluated in the same episodes as `fresh_policy_snapshot`."""
        params, statistics = self.supervisor.best.policy
        return PolicySnapshot(params, statistics, self._key_of_comparison)

    @property
    def fresh_policy_snapshot(self) -> PolicySnapshot:
        """The present policy, to be evaluated in episodes that no evaluation has had."""
        return policy_of(self.state, self._key_of_comparison)

    def compare(self, best: Episodes, now: Episodes) -> None:
        """Takes in episodes of the best policy and of the present one, from the same first states."""
        watch = self.supervisor.watch_of_return
        if watch is None:
            return
        of_best, of_now = returns_of(best), returns_of(now)
        returns = {
            "best_return": float(np.nanmean(of_best)) if np.isfinite(of_best).any() else None,
            "return": float(np.nanmean(of_now)) if np.isfinite(of_now).any() else None,
            "best_iteration": self.supervisor.best.iteration,
        }
        worse = watch.is_worse(of_best, of_now, self._finished)
        self._collapsed = worse is True
        if self._collapsed:
            watch.confirmed()
            self.event("guard_tripped", guard="return_watch", collapsed=1)
            self.event("return_collapsed", **returns)
            self._best_again = returns["best_return"]
        elif worse is None:
            watch.wait()
            self.event("return_fall_unclear", **returns)
        else:
            watch.refute(of_best, of_now)
            self.event("return_fall_refuted", **returns)

    def finish_iteration(
        self, metrics: Metrics, evaluation: Row, requested_stop: Callable[[], StopReason | None]
    ) -> StopReason | None:
        """Logs, goes back, saves and redraws where these are due after an iteration.

        Args:
            metrics: Its report, which was counted.
            evaluation: Of its policy, where that was evaluated, else empty.
            requested_stop: Gives the stop reason that a signal or the clock requests.

        Returns:
            The ending where it was the last iteration.
        """
        finished = self._finished
        healthy = bool(metrics.healthy)
        row = self._record_evaluation(evaluation) if evaluation else {}
        cause = self._cause_for_concern(metrics, finished)
        if cause is None and self._collapsed:
            cause = StopReason.policy_collapsed
        asked = requested_stop() is not None
        if row or finished or cause or asked or self._schedule.logs(self.host.iteration):
            self._log(row)
        score = row.get("eval/episode_reward")
        if cause is StopReason.policy_collapsed and finished:
            cause, score = None, self._take_best_policy()  # no steps are left in which the fall could be made good
        if cause is not None:
            return self._try_again(cause)
        # Before saving: what is saved is what the next iteration starts from.
        learns = healthy and self.host.idle == 0
        key = functools.partial(self._key_of_iteration, 2)
        try:
            self.state = self.supervisor.watch(self.state, metrics, learns, key)
        except NeedsOwnProgram as error:
            if healthy:
                self._save(score)
            return self.needs_own_program(str(error))
        self._redraw()
        self._unsaved = healthy
        if healthy and self._saving is not None:
            self._saving.good(self.host.iteration, self.step)
        ending = requested_stop() or self._wants_to_stop(row) or (StopReason.completed if finished else None)
        due = self._checkpoints.due(self.host.iteration) or bool(row) or ending is not None
        # Neither the disk nor the clock may have a say in this: a stopped run goes back to where it would have.
        if learns and (row or self.supervisor.keep_is_due(self.host.iteration)):
            self._keep()
        if learns and self._evaluated_best:
            self.supervisor.keep_best(self.state, self.host.iteration, self.step)
        if learns and self._look is not None:
            self.supervisor.nominate(self.state, self.host.iteration, self.step)
        if healthy and due:
            self._save(score)
        return ending

    def shrink_after_oom(self) -> None:
        """Goes back and on with a smaller plan, after the device has refused memory for an iteration."""
        key = self._key_of_iteration(3)
        self._go_back(self.supervisor.shrink_after_oom(self.state, self.host.iteration, self.step, key))

    def needs_own_program(self, why: str) -> StopReason:
        """The stop reason of a seed that can only continue in a separate program."""
        self.advice = f"It could go on alone, {command('train', self.run_dir, 'resume=')}: {why}."
        return StopReason.needs_own_program

    def shrink(self, needed: int | None) -> None:
        """Takes a smaller plan for a program that needs more memory than there is; arguments as for the supervisor."""
        self.state = self.supervisor.shrunk(self.state, needed, functools.partial(self._key_of_iteration, 3))

    def take_plan(self, plan: MemoryPlan) -> None:
        """Takes a plan for memory that others have come to; other environments where there are fewer of them."""
        if plan != self.host.plan:
            self.event("memory_planned", plan=str(plan))
            self.state = self.supervisor.take_plan(self.state, plan, functools.partial(self._key_of_iteration, 3))

    def save_if_due(self) -> None:
        """Saves a good state that is not saved, between two iterations."""
        if self._unsaved:
            self._save(None)

    def save_if_good(self) -> None:
        """Saves a good state in the middle of what is due after its iteration, where that cannot be done."""
        if self._healthy:
            self._save(None)

    def final_stop_reason(self, ending: StopReason) -> StopReason:
        """The stop reason after a check of what is saved; `not_saved` replaces one that promises the last state.

        May be called again with the result.
        """
        if self._saving is not None and self.config.checkpoint.enabled:
            ending = self._ending_by_what_is_saved(self._saving, ending)
        if ending.succeeded and not finite(policy_arrays(self.state)):
            ending = StopReason.state_not_finite
        return ending

    def _ending_by_what_is_saved(self, saving: Saving, ending: StopReason) -> StopReason:
        if ending in SAVED and self._healthy and saving.vanished:
            self._save(self._last_score)  # into a run folder that is written again
        self._unsaved_steps = saving.unsaved_steps()
        ending = saving.ending(ending)
        if ending is StopReason.not_saved:
            self.advice = saving.advice
        return ending

    def finish(self, ending: StopReason) -> Result:
        """Ends it: waits for what is being saved, says how it ended, and gives the folder free."""
        with contextlib.closing(self):
            return self._finish(ending)

    def fields(self, ending: StopReason) -> dict[str, Any]:
        """The fields of `result.json` for a stop reason."""
        fields: dict[str, Any] = {
            "stop_reason": ending.name,
            "exit_code": ending.exit_code,
            "step": self.step,
            "return": self.host.last_return,
            "best_return": self.host.best_return,
            **self.confirmed,
            **({"unsaved_steps": self._unsaved_steps} if self._unsaved_steps else {}),
            "seconds": round(self.host.elapsed, 1),
            "rollbacks": self.host.attempts.count,
            "signs": self.host.signs.said,
            "warnings": [warning._asdict() for warning in warnings_of(self.host.tally)],
        }
        given_up = self._cause is not None and ending in (self._cause, StopReason.recovery_exhausted)
        if given_up and self._cause is not None:
            fields["cause"] = self._cause.name
            self.advice = advice.paragraph(self._cause, self.host.attempts, self.host.signs.said, self.host.tally)
        if self.advice is not None:
            fields["advice"] = self.advice
        return fields

    def close(self) -> None:
        """Gives the run folder free, as `run` does at its end; for a run that is not to be run. May be called again."""
        with contextlib.ExitStack() as closing:  # whatever interrupts it, the next run must find the folder free
            if self._lock is not None:
                closing.callback(self._lock.release)
                if self._saving is None or not self._saving.presence.taken:
                    closing.callback(free_reserve, self.run_dir)
            closing.callback(self._sinks.close)
            closing.callback(self._checkpoints.close)

    def _tell_backend(self) -> None:
        """Says what simulates where that was left open."""
        chosen = self.supervisor.assembly.loaded
        if self.config.env.backend != "auto":
            return
        if chosen.because is None:
            self.event("backend_chosen", backend=chosen.backend)
        else:
            self.event("backend_fallback", backend=chosen.backend, because=chosen.because)

    def _open_checkpoints(self) -> Checkpoints:
        config = self.config
        args = (self.run_dir, config.checkpoint, self._hear_checkpoints)
        if config.fault.site == "disk":
            return faults.FailingCheckpoints(self._fault, *args)
        return Checkpoints(*args)

    def _hear_checkpoints(self, kind: str, fields: dict[str, Any]) -> None:
        self.event(kind, **fields)
        if self._saving is not None:
            self._saving.hear(kind, self.logged_step)

    def _open_incidents(self) -> Incidents:
        causes = causes_of(self.supervisor.assembly.env.guards)
        return Incidents(self.run_dir, self.config, causes, self._versions(), self.host.incidents, self.event)

    def _resume(self) -> None:
        found = resume(self._checkpoints, self.config, self._mesh.size, self.supervisor, self.state)
        self.state, self.host = found.state, found.host
        self.confirmed = confirmed_of(self.run_dir)
        self.step = int(self.state.counters.env_steps)
        self._episodes = int(self.state.counters.episodes)
        if found.other_envs:
            self.state = self.supervisor.assembly.reset_envs_and_pool(self.state, self._key_of_iteration(2))
            self.event("environments_redrawn", num_envs=self.supervisor.num_envs)
        if found.other_envs or found.other_precision:
            self.state = self.supervisor.to_current_level(self.state, self._key_of_iteration(2))
        self.state = self.supervisor.assembly.with_empty_slots(self.state)
        self.event("resumed", iteration=self.host.iteration, version=found.version)
        for change in found.changes:
            self.event("configuration_changed", **change._asdict())
        different = differences(found.versions, self._versions())
        if different:
            self.event("versions_changed", **different)

    def _versions(self) -> dict[str, str]:
        return {**versions(), "device": sharding.device_kind(self._mesh)}

    def _note_incident(self, slot: Slot, bad: bool) -> None:
        """Writes what was caught in this iteration if anything went bad, and empties the slots where that is due."""
        at = self.host.iteration + self.host.attempts.lost_iterations
        if bad and self._incidents.wanted(at):
            level, envs = self.supervisor.level, self.state.env_state.done.shape[0]
            self._incidents.write(jax.device_get(slot), self.host.iteration, at, level._asdict(), envs)
        if self._incidents.opens_after(at):
            empty = sharding.place(np.zeros(slot.taken.shape, bool), self._mesh, sharding.SPLIT)
            self.state = dataclasses.replace(self.state, incident=dataclasses.replace(slot, taken=empty))

    def _cause_for_concern(self, metrics: Metrics, finished: bool) -> StopReason | None:
        """The ending by a guard whose patience is at its end; a run must not complete in a bad or untrained state."""
        for name, over in metrics.exhausted.items():
            if over or (finished and name == "state" and metrics.trips[name].any()):
                return StopReason.of_guard(name)
        update = self.config.guards.update
        idle = update.enabled and self.host.idle >= update.patience
        untrained = finished and int(metrics.counters.updates) == 0
        return StopReason.no_update_accepted if idle or untrained else None

    def _tally(self, metrics: Metrics, trips: dict[str, dict[str, int]]) -> None:
        """Takes an iteration into the counts over the whole run."""
        config = self.config
        transitions = config.env_steps_per_iteration // config.env.action_repeat
        minibatches = config.ppo.num_updates_per_batch * config.ppo.num_minibatches
        self.host.tally.count(metrics.values, trips, transitions, minibatches, self.ppo.update_guards)

    def _look_at_training(self, metrics: Metrics) -> None:
        """Takes the training episodes of an iteration into the return watch; what is bad is not looked at."""
        episodes, self._look = int(metrics.counters.episodes) - self._episodes, None
        self._episodes += episodes
        watch = self.supervisor.watch_of_return
        if watch is not None and self._healthy:
            self._look = watch.train(float(metrics.values["episode/sum_reward"]), episodes)
            self.supervisor.look(self._look)

    def _keep(self) -> None:
        """Makes this state the one to go back to."""
        self.supervisor.keep(self.state, self.host.iteration, self.step)

    def _try_again(self, cause: StopReason) -> StopReason | None:
        """Goes back to the last good state; the ending where there have been too many attempts."""
        self._cause = cause
        try:
            found = self.supervisor.try_again(cause, self.state, self.host.iteration, self.step, self._key_redraw)
        except NeedsOwnProgram as error:
            return self.needs_own_program(str(error))
        if isinstance(found, StopReason):
            if found is StopReason.policy_collapsed:
                self._save(self._take_best_policy())
                self._checkpoints.wait()
            return found
        self._go_back(found)
        return None

    def _take_best_policy(self) -> float | None:
        """Replaces a collapsed policy by the best one; returns the best policy's return in fresh episodes."""
        self.state = self.supervisor.with_best_policy(self.state)
        self.host.last_return = self._best_again
        return self._best_again

    @property
    def _finished(self) -> bool:
        return self.step >= self.config.total_steps

    def _go_back(self, to: Rollback) -> None:
        self.state, self.host.iteration, self.step = to
        self._episodes = int(self.state.counters.episodes)
        self.host.idle, self.host.drawn = 0, False
        self._keep()
        # Before anything else can happen: a crash must not forget the attempt.
        self._save(None)
        self._checkpoints.wait()

    def _wants_to_stop(self, row: Row) -> StopReason | None:
        value, target = row.get("eval/episode_reward"), self.config.eval.target_return
        if target is not None and value is not None and value >= target:
            return StopReason.target_reached
        return StopReason.stopped if self._stopped_by_callback else None

    def _record_evaluation(self, evaluation: Row) -> Row:
        """The metrics of an evaluation, which is kept count of."""
        self.host.evaluated += evaluation["eval/epoch_eval_time"] or 0.0
        self._last_evaluation = row = {**evaluation, "eval/walltime": self.host.evaluated}
        value = row["eval/episode_reward"]
        self.host.last_return = value
        self._signs.evaluate(self.host.signs, self.logged_step, evaluation)
        self.host.tally.evaluate(value)
        if value is None:
            self.event("evaluation_void", aborted_share=row["eval/aborted_share"])
        elif self.host.best_return is None or value > self.host.best_return:
            self.host.best_return = float(value)
        return row

    def _log(self, evaluation: Row) -> None:
        """Writes a row of the iterations since the last one."""
        step, row = self.logged_step, self.telemetry.flush(self.host.elapsed) | evaluation
        if self.config.supervise.recovery.enabled:
            row["supervise/rollbacks"] = self.host.attempts.count
        if self.supervisor.watch_of_return is not None:
            row["guards/return_watch/trips"] = self.host.watch.collapses
        self._sinks.log(step, row)
        self.history.append({"step": step, **row})
        if self._callback is not None and self._callback(step, row) is True:
            self._stopped_by_callback = True

    def event(self, kind: str, **fields: Any) -> None:
        """Tells and writes down one thing that happened to it."""
        self._sinks.event(self.logged_step, kind, fields)

    def _save(self, score: float | None) -> None:
        if not self.config.checkpoint.enabled or self._saving is None:
            return
        self.host.wandb_run_id = self._sinks.wandb_run_id
        saved, origins = self.supervisor.to_save(self.state, self.host.iteration)
        host = {
            "host": dataclasses.asdict(self.host),
            **origins,
            "policy": policy_spec(self.ppo.networks, self.ppo.precision.matmul),
            "config": self.config.model_dump(mode="json"),
            "devices": self._mesh.size,
            "num_envs": self.supervisor.num_envs,
            "level": self.supervisor.level,
            "backend": self.supervisor.assembly.loaded.backend,
            "step": self.step,
            "return": score,
            "version": __version__,
            "versions": self._versions(),
        }
        saved = dataclasses.replace(saved, incident=None)
        self._sinks.wait()  # a run that resumes from here has all rows until here
        self._saving.save(self.host.iteration, self.step, saved, policy_arrays(self.state), host, score)
        self._last_score, self._unsaved = score, False

    def _redraw(self) -> None:
        """Environments and the pool, both from clean resets, where that is due."""
        if self._schedule.resets(self._before, self.step):
            self.state = self.supervisor.assembly.reset_envs(self.state, self._key_of_iteration(0))
        if self.host.drawn and self._schedule.refills(self.host.iteration):
            self.host.drawn = False
            self.state = self.supervisor.assembly.refill_pool(self.state, self._key_of_iteration(1))

    @property
    def _key_of_comparison(self) -> jax.Array:
        return jax.random.fold_in(self._key_of_iteration(4), self.host.attempts.count)

    def _key_of_iteration(self, purpose: int) -> jax.Array:
        """A random key for what is drawn between two iterations."""
        key = jax.random.fold_in(self._key_redraw, self.host.iteration)
        return jax.random.fold_in(key, purpose) if purpose else key

    def _finish(self, ending: StopReason) -> Result:
        ending = self.final_stop_reason(ending)
        self._checkpoints.close()
        fields = self.fields(ending)
        self.event("stopped", **{name: value for name, value in fields.items() if name not in _NOT_IN_EVENT})
        self._sinks.wait()  # the page reads it
        saved = self._checkpoints.latest() is not None
        taken = self._saving is not None and self._saving.presence.taken
        report = self.config.logging.report
        close(ending, fields, self.run_dir, self._console, report=report, saved=saved, taken=taken)
        return Result(ending, self.run_dir, self.step, self._last_evaluation, self.history)
