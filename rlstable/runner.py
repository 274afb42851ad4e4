"""The host loop: iterate, judge, evaluate, log, checkpoint, go back and try again, stop by name."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlstable import __version__, faults, sharding
from rlstable.assembly import Assembly
from rlstable.config import Config, ConfigError
from rlstable.endings import Ending, describe
from rlstable.envs.capture import causes_of
from rlstable.guards.base import MoreGuards, check_more
from rlstable.io.checkpoint import Checkpoints
from rlstable.io.console import Console
from rlstable.io.lock import RunLock
from rlstable.io.logbook import Logbook
from rlstable.io.rundir import open_run_dir, write_config, write_result
from rlstable.policy import Policy, load_policy, policy_arrays, policy_spec
from rlstable.ppo.iteration import PPO
from rlstable.ppo.state import SPECS, Metrics, Slot, TrainState
from rlstable.supervise import advice, remedies
from rlstable.supervise.incident import Caught, Incidents
from rlstable.supervise.last_good import LastGood
from rlstable.supervise.recovery import Attempts, Plan, Recovery
from rlstable.supervise.signals import Signals
from rlstable.telemetry import Telemetry
from rlstable.versions import differences, versions

Row = dict[str, float | int | None]
Callback = Callable[[int, Row], Any]
# Numbers of the training state that checkpoints without a format do not have.
_LATER = ("tuning/clip_scale",)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves.

    Attributes:
        ending: Why it stopped.
        run_dir: Its folder.
        step: Environment steps trained, without those that were given up.
        metrics: The last evaluation's metrics, None where a number does not exist.
        history: Every logged row, `step` among its keys.
    """

    ending: Ending
    run_dir: Path
    step: int
    metrics: Row
    history: list[Row]

    @property
    def policy(self) -> Policy:
        """The best policy of the run."""
        return load_policy(self.run_dir)


@dataclasses.dataclass
class HostState:
    """The little that lives on the host; saved with the training state.

    Attributes:
        iteration: Iterations done, without those that were given up.
        last_return: Of the last evaluation; None where every episode was aborted.
        best_return: Best evaluation so far.
        idle: Iterations in a row of which no update was accepted.
        drawn: Whether anything was drawn from the pool of clean first states since it was filled.
        elapsed: Seconds of training so far, over all processes.
        wandb_run_id: To go on with the same wandb run.
        attempts: What recovery has tried.
        incidents: What was written of bad simulations.
    """

    iteration: int = 0
    last_return: float | None = None
    best_return: float | None = None
    idle: int = 0
    drawn: bool = False
    elapsed: float = 0.0
    wandb_run_id: str | None = None
    attempts: Attempts = dataclasses.field(default_factory=Attempts)
    incidents: Caught = dataclasses.field(default_factory=Caught)

    @classmethod
    def of(cls, saved: dict[str, Any]) -> HostState:
        """What a checkpoint holds of it."""
        attempts, incidents = Attempts(**saved.get("attempts", {})), Caught(**saved.get("incidents", {}))
        return cls(**saved | {"attempts": attempts, "incidents": incidents})


class Runner:
    """One run, from its configuration to its ending.

    Attributes:
        state: The training state.
        host: What is saved beside it.
        step: Environment steps trained, as a number that outlives the donated state.
        history: Every logged row.

    Args:
        config: What to run.
        run_dir: Where it is kept.
        callback: Called as `callback(step, row)` with every logged row; returning True ends the run.
        more_guards: Guards of your own, by site (`env`, `batch`, `update`, `state`) and name.
        signals: Entered already, where signals are to be heard before `run`.

    Raises:
        ConfigError: Anything about the configuration, the environment or the folder that cannot work.
    """

    def __init__(
        self,
        config: Config,
        run_dir: str | Path,
        callback: Callback | None = None,
        more_guards: MoreGuards | None = None,
        signals: Signals | None = None,
    ):
        more = more_guards or {}
        check_more(more, config.guards.model_dump().keys())
        self.config = config
        self.run_dir = Path(run_dir)
        self._started = time.monotonic()
        self._callback = callback
        self._signals = signals
        self._mesh = sharding.make_mesh(config.devices)
        config.require_devices(self._mesh.size)
        self.host = HostState()
        self.step = 0
        self.history: list[Row] = []
        self._last_evaluation: Row = {}
        self._stopped_by_callback = False
        self._cause: Ending | None = None
        self._unsaved = False
        self._console = Console(config.sinks.console, config.total_steps, config.env.name)
        self._assembly = Assembly(config, self._mesh, more, self._compiling)
        self._checkpoints = self._open_checkpoints()
        broken = [faults.FailingSink(config.fault)] if config.fault.site == "sinks" else []
        self._sinks = Logbook(config, self.run_dir, self._console, broken)
        self._telemetry = Telemetry(config, self.ppo)
        key = jax.random.PRNGKey(config.seed)
        key_init, key_resets, self._key_eval, self._key_redraw = jax.random.split(key, 4)
        self._lock: RunLock | None = None
        try:
            resumes, self._lock = open_run_dir(self.run_dir, config.resume)
            if self._lock.unsupported is not None:
                self._event("lock_unsupported", error=self._lock.unsupported)
            self.state: TrainState = self._assembly.first_state(key_init, key_resets)
            self.step = int(self.state.counters.env_steps)
            if resumes:
                self._resume()
            self._recovery = Recovery(config.supervise.recovery, self.host.attempts)
            self._incidents = self._open_incidents()
            self._last_good = LastGood()
            self._keep()
            write_config(self.run_dir, config.model_dump(mode="json"))
            self._sinks.start(self.host.wandb_run_id, None if config.resume is None else self.logged_step)
        except BaseException:
            self.close()
            raise

    @property
    def ppo(self) -> PPO:
        """What trains."""
        return self._assembly.ppo

    @property
    def logged_step(self) -> int:
        """Environment steps trained, those given up included: it never runs backwards."""
        return self.step + self.host.attempts.lost_steps

    def run(self) -> Result:
        """Trains to an ending. Whatever the ending, the run folder says which."""
        if self._signals is not None:
            return self._run()
        with Signals() as self._signals:
            return self._run()

    def _run(self) -> Result:
        ending = Ending.error
        try:
            ending = self._loop()
        except KeyboardInterrupt:
            ending = Ending.interrupted  # the second one, which does not wait for the iteration
            raise
        except Exception as error:
            self._event("error", message=f"{type(error).__name__}: {error}")
            raise
        finally:
            with contextlib.closing(self):
                result = self._finish(ending)
        return result

    def close(self) -> None:
        """Gives the run folder free, as `run` does at its end; for a run that is not to be run. May be called again."""
        self._checkpoints.close()
        self._sinks.close()
        if self._lock is not None:
            self._lock.release()

    def _open_checkpoints(self) -> Checkpoints:
        config = self.config
        args = (self.run_dir, config.checkpoint, lambda kind, fields: self._event(kind, **fields))
        if config.fault.site == "disk":
            return faults.FailingCheckpoints(config.fault, *args)
        return Checkpoints(*args)

    def _open_incidents(self) -> Incidents:
        causes, told = causes_of(self._assembly.env.guards), lambda kind, fields: self._event(kind, **fields)
        return Incidents(self.run_dir, self.config, causes, self._versions(), self.host.incidents, told)

    def _require_devices(self, host: Mapping[str, Any]) -> None:
        trained_on = host["devices"]
        if trained_on != self._mesh.size:
            raise ConfigError(
                f"devices: the run in {self.run_dir} was trained on {trained_on} devices, here are {self._mesh.size}; "
                f"its environments and random numbers are theirs, so resume it with devices={trained_on}"
            )

    def _resume(self) -> None:
        fresh = self.state.tuning
        # What was caught is on disk or of no interest: an empty slot does for the rest of the run.
        state, host = self._checkpoints.restore(
            dataclasses.replace(self.state, incident=None), check=self._require_devices, later=_LATER
        )
        self.state = dataclasses.replace(state, incident=self.state.incident)
        # What schedules and searches moved goes on; what was typed anew counts from here.
        old, new = host["config"], self.config.model_dump(mode="json")
        changed: dict[str, Any] = {}
        if old["ppo"]["learning_rate"] != new["ppo"]["learning_rate"]:
            changed["learning_rate"] = fresh.learning_rate
        if old["ppo"]["num_updates_per_batch"] != new["ppo"]["num_updates_per_batch"]:
            changed["epochs"] = fresh.epochs
        if old["precision"] != new["precision"]:
            changed["loss_scale"] = fresh.loss_scale
        self.state = dataclasses.replace(self.state, tuning=dataclasses.replace(self.state.tuning, **changed))
        self.host = HostState.of(host["host"])
        self.step = int(self.state.counters.env_steps)
        self._event("resumed", iteration=self.host.iteration, version=host["version"])
        different = differences(host.get("versions", {"rlstable": host["version"]}), self._versions())
        if different:
            self._event("versions_changed", **different)

    def _versions(self) -> dict[str, str]:
        return {**versions(), "device": sharding.device_kind(self._mesh)}

    def _loop(self) -> Ending:
        if self.step >= self.config.total_steps:
            return Ending.completed
        iterate = self._assembly.compiled(self.state)
        stopped = self._told_to_stop()  # while the program compiled, or before that
        if stopped is not None:
            return stopped
        while True:
            before = self.step
            metrics = self._iterate(iterate)
            if self._telemetry.split_is_due(self.host.iteration):
                self._telemetry.measure_split(iterate, self.state)
            ending = self._after_iteration(before, metrics)
            if ending is not None:
                return ending

    def _iterate(self, iterate: Callable[[TrainState], tuple[TrainState, Metrics]]) -> Metrics:
        """One iteration, and what the host keeps count of."""
        started = time.perf_counter()
        with self._console.working(f"iteration {self.host.iteration + 1}", self._telemetry.last_seconds):
            self.state, metrics = iterate(self.state)
            metrics = jax.device_get(metrics)
        self.step = int(metrics.counters.env_steps)
        elapsed = time.perf_counter() - started
        self._unsaved = True
        self.host.iteration += 1
        self.host.idle = 0 if metrics.values["training/accepted_share"] > 0 else self.host.idle + 1
        bad = any(metrics.trips[name].any() for name in self._assembly.env.guards)
        self.host.drawn |= bad or self.config.env.reset == "pool"
        self.host.elapsed += elapsed
        self._telemetry.add(metrics, elapsed)
        for name, causes in self._telemetry.trips(metrics).items():
            self._event("guard_tripped", guard=name, **causes)
        if self.state.incident is not None:
            self._note_incident(self.state.incident, bad)
        return metrics

    def _note_incident(self, slot: Slot, bad: bool) -> None:
        """Writes what was caught in this iteration if anything went bad, and empties the slots where that is due."""
        at = self.host.iteration + self.host.attempts.lost_iterations
        if bad and self._incidents.wanted(at):
            self._incidents.write(jax.device_get(slot), self.host.iteration, at)
        if self._incidents.opens_after(at):
            empty = sharding.place(np.zeros(slot.taken.shape, bool), self._mesh, sharding.SPLIT)
            self.state = dataclasses.replace(self.state, incident=dataclasses.replace(slot, taken=empty))

    def _after_iteration(self, before: int, metrics: Metrics) -> Ending | None:
        """Evaluates, logs, goes back, saves and redraws where these are due, and says whether the run is over."""
        config = self.config
        finished = self.step >= config.total_steps
        healthy = bool(metrics.healthy)
        row: Row = {}
        if healthy and self._crossed(before, config.eval.num_evals):
            row = self._evaluate()
        cause = self._cause_for_concern(metrics, finished)
        told = self._told_to_stop() is not None
        if row or finished or cause or told or self.host.iteration % config.sinks.log_every == 0:
            self._log(self._telemetry.flush(self.host.elapsed) | self._supervision() | row)
        if cause is not None:
            return self._try_again(cause)
        self._relax(healthy and self.host.idle == 0)
        self._redraw(before)  # before saving: what is saved is what the next iteration starts from
        ending = self._told_to_stop() or self._wants_to_stop(row) or (Ending.completed if finished else None)
        due = self._checkpoints.due(self.host.iteration) or bool(row) or ending is not None
        if healthy and due:
            self._save(row.get("eval/episode_reward"))
        if healthy and self.host.idle == 0 and (due or self.host.iteration % config.supervise.recovery.every == 0):
            self._keep()
        return ending

    def _cause_for_concern(self, metrics: Metrics, finished: bool) -> Ending | None:
        """The ending by a guard whose patience is at its end; a run must not complete with a state that is bad."""
        for name, exhausted in metrics.exhausted.items():
            if exhausted or (finished and name == "state" and metrics.trips[name].any()):
                return Ending.of_guard(name)
        update = self.config.guards.update
        return Ending.no_update_accepted if update.enabled and self.host.idle >= update.patience else None

    def _keep(self) -> None:
        """Makes this state the one to go back to."""
        if self.config.supervise.recovery.enabled:
            self._last_good.keep(self.state, self.host.iteration, self.step)

    def _try_again(self, cause: Ending) -> Ending | None:
        """Goes back to the last good state with the next remedy; the ending where there have been too many attempts."""
        self._cause = cause
        attempts = self.host.attempts
        plan = self._recovery.plan(cause.name, self.host.iteration + attempts.lost_iterations)
        if plan is None:
            tried = bool(attempts.recent) and cause is not Ending.physics_unstable
            return Ending.recovery_exhausted if tried else cause
        undone = self.host.iteration - self._last_good.iteration
        lost = self.step - self._last_good.step
        attempts.lost_iterations += undone
        attempts.lost_steps += lost
        self._roll_back(plan, undone)
        self._event(
            "rolled_back",
            cause=cause.name,
            attempt=plan.number,
            remedy=str(plan.remedy),
            to_iteration=self.host.iteration,
            lost_steps=lost,
        )
        # Before anything else can happen: a crash must not forget the attempt.
        self._save(None)
        self._checkpoints.wait()
        self._keep()
        return None

    def _roll_back(self, plan: Plan, undone: int) -> None:
        """The last good state under a remedy, with random numbers and clean environments of this attempt's own."""
        state = self._last_good.restored(self.state, self._mesh)
        self.host.iteration, self.step, self.host.idle = self._last_good.iteration, self._last_good.step, 0
        key = jax.random.fold_in(jax.random.fold_in(self._key_redraw, self.host.iteration), 2**31 + plan.number)
        state = self._assembly.redrawn(state, key)
        self.host.drawn = False
        if state.fault is not None:
            state = faults.carried_on(state, undone)
        state = dataclasses.replace(state, key=jax.random.fold_in(state.key, plan.number))
        self.state = self._placed(remedies.apply(plan.remedy, state, self.ppo.optimizer))

    def _relax(self, good: bool) -> None:
        """Takes a remedy back after a long healthy stretch."""
        remedy = self._recovery.healthy(good)
        if remedy is not None:
            self.state = self._placed(remedies.take_back(remedy, self.state))
            self._event("remedy_taken_back", remedy=str(remedy), after=self.host.attempts.stretch)

    def _told_to_stop(self) -> Ending | None:
        """The ending by a signal or by the clock."""
        number = None if self._signals is None else self._signals.received
        if number is not None:
            return Ending.interrupted if number == signal.SIGINT else Ending.preempted
        limit = self.config.supervise.max_wall_time
        if limit is None:
            return None
        next_one = self._telemetry.last_seconds or 0.0
        return Ending.time_limit if time.monotonic() - self._started + next_one > limit else None

    def _wants_to_stop(self, row: Row) -> Ending | None:
        value, target = row.get("eval/episode_reward"), self.config.eval.target_return
        if target is not None and value is not None and value >= target:
            return Ending.target_reached
        return Ending.stopped if self._stopped_by_callback else None

    def _crossed(self, before: int, times: int) -> bool:
        """Whether one of `times` equal parts of the run ended between the step before and now."""
        total = self.config.total_steps
        return min(self.step, total) * times // total > min(before, total) * times // total

    def _evaluate(self) -> Row:
        key = jax.random.fold_in(self._key_eval, self.host.iteration)
        row = self._assembly.evaluator.run(self.state, key)
        self._last_evaluation = row
        value = row["eval/episode_reward"]
        self.host.last_return = value
        if value is None:
            self._event("evaluation_void", aborted_share=row["eval/aborted_share"])
        elif self.host.best_return is None or value > self.host.best_return:
            self.host.best_return = float(value)
        return row

    def _supervision(self) -> Row:
        return {"supervise/rollbacks": self.host.attempts.count} if self.config.supervise.recovery.enabled else {}

    def _log(self, row: Row) -> None:
        step = self.logged_step
        self._sinks.log(step, row)
        self.history.append({"step": step, **row})
        if self._callback is not None and self._callback(step, row) is True:
            self._stopped_by_callback = True

    def _event(self, kind: str, **fields: Any) -> None:
        self._sinks.event(self.logged_step, kind, fields)

    def _save(self, score: float | None) -> None:
        if not self.config.checkpoint.enabled:
            return
        self.host.wandb_run_id = self._sinks.wandb_run_id
        host = {
            "host": dataclasses.asdict(self.host),
            "policy": policy_spec(self.ppo.networks, self.config.precision.matmul),
            "config": self.config.model_dump(mode="json"),
            "devices": self._mesh.size,
            "step": self.step,
            "return": score,
            "version": __version__,
            "versions": self._versions(),
        }
        state = dataclasses.replace(self.state, incident=None)
        self._checkpoints.save(self.host.iteration, state, policy_arrays(self.state), host, score=score)
        self._unsaved = False

    def _redraw(self, before: int) -> None:
        """Brax's `num_resets_per_eval` and the refill of the pool, both from clean resets."""
        ppo, env = self.config.ppo, self.config.env
        key = jax.random.fold_in(self._key_redraw, self.host.iteration)
        if ppo.num_resets_per_eval and self._crossed(
            before, max(self.config.eval.num_evals, 1) * ppo.num_resets_per_eval
        ):
            self.state = self._assembly.with_fresh_envs(self.state, key)
        due = env.reset_pool_refresh and self.host.iteration % env.reset_pool_refresh == 0
        if due and self.host.drawn:
            self.host.drawn = False
            self.state = self._assembly.with_fresh_pool(self.state, jax.random.fold_in(key, 1))

    def _placed(self, state: TrainState) -> TrainState:
        return sharding.place(state, self._mesh, SPECS)

    @contextlib.contextmanager
    def _compiling(self, name: str) -> Iterator[None]:
        """Says what compiles, and hears a signal meanwhile."""
        leaving = contextlib.nullcontext() if self._signals is None else self._signals.leaving_by(self._leave)
        with self._console.compiling(name), leaving:
            yield

    def _leave(self) -> None:
        """Saves what is not and ends the process; in another thread, while this one's is deaf."""
        ending = self._told_to_stop() or Ending.interrupted
        try:
            if self._unsaved:
                self._save(None)
            self._finish(ending)
            if self._signals is not None:
                self._signals.hand_on()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ending.exit_code)

    def _finish(self, ending: Ending) -> Result:
        self._checkpoints.close()
        result = Result(ending, self.run_dir, self.step, self._last_evaluation, self.history)
        fields: dict[str, Any] = {
            "stop_reason": ending.name,
            "exit_code": ending.exit_code,
            "step": self.step,
            "return": self.host.last_return,
            "best_return": self.host.best_return,
            "seconds": round(self.host.elapsed, 1),
            "rollbacks": self.host.attempts.count,
        }
        given_up = self._cause is not None and ending in (self._cause, Ending.recovery_exhausted)
        if given_up and self._cause is not None:
            fields |= {"cause": self._cause.name, "advice": advice.paragraph(self._cause, self.host.attempts)}
        self._event("stopped", **fields)
        try:
            write_result(self.run_dir, fields)
        except OSError as error:
            self._console.message(f"result.json could not be written: {error}")
        self._console.summary(describe(ending, fields, self.run_dir, self._checkpoints.latest() is not None))
        return result
