"""The host loop: iterate, judge, evaluate, log, checkpoint, go back and try again, stop by name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstable import __version__, faults, sharding
from rlstable.assembly import Program
from rlstable.closing import close
from rlstable.compiling import dispatch_inline, keep_programs
from rlstable.config import Config
from rlstable.endings import Ending, command
from rlstable.envs.capture import causes_of
from rlstable.evaluation import Judged, policy_of
from rlstable.guards.base import MoreGuards, check_more
from rlstable.host_state import HostState
from rlstable.io.checkpoint import Checkpoints
from rlstable.io.console import Console
from rlstable.io.lock import RunLock
from rlstable.io.logbook import Logbook
from rlstable.io.rundir import open_run_dir, write_config, write_machine
from rlstable.leaving import Leaving
from rlstable.policy import policy_arrays, policy_spec
from rlstable.ppo.iteration import PPO
from rlstable.ppo.state import Metrics, Slot, TrainState
from rlstable.result import Result, Row
from rlstable.resume import resume
from rlstable.supervise import advice
from rlstable.supervise.incident import Incidents
from rlstable.supervise.ladder import NeedsOwnProgram
from rlstable.supervise.last_good import SAVED_AS
from rlstable.supervise.memory_plan import OutOfMemory, exhausted
from rlstable.supervise.signals import Signals
from rlstable.supervisor import Builds, Rollback, Supervisor
from rlstable.telemetry import Telemetry
from rlstable.versions import differences, versions

Callback = Callable[[int, Row], Any]


class Company(NamedTuple):
    """What a run shares with the seeds that train beside it in one program.

    Attributes:
        console: Where people look.
        leaving: What a signal means to all of them.
        builds: What they compute with.
    """

    console: Console
    leaving: Leaving
    builds: Builds


class Runner:
    """One run, from its configuration to its ending.

    Attributes:
        state: The training state.
        host: What is saved beside it.
        step: Environment steps trained, as a number that outlives the donated state.
        history: Every logged row.
        supervisor: What stands between it and its end.

    Args:
        config: What to run.
        run_dir: Where it is kept.
        callback: Called as `callback(step, row)` with every logged row; returning True ends the run.
        more_guards: Guards of your own, by site (`env`, `batch`, `update`, `state`) and name.
        signals: Entered already, where signals are to be heard before `run`.
        builds: What builds what computes, None for the usual; `rlstable.replay` has one whose program records more.
        company: What it shares with the seeds that train beside it, None where it trains alone.

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
        builds: Builds | None = None,
        company: Company | None = None,
    ):
        more = more_guards or {}
        check_more(more, config.guards.model_dump().keys())
        self.config = config
        self.run_dir = Path(run_dir)
        self._started = time.monotonic()
        self._callback = callback
        if config.env.backend in ("native", "auto"):
            dispatch_inline()
        self._mesh = sharding.make_mesh(config.devices)
        config.require_devices(self._mesh.size)
        self.host = HostState()
        self.step = self._before = 0
        self.history: list[Row] = []
        self._last_evaluation: Row = {}
        self._stopped_by_callback = False
        self._cause: Ending | None = None
        self._advice: str | None = None
        self._unsaved = False
        if company is None:
            self._console = Console(config.sinks.console, config.total_steps, config.env.name)
            self._leaving = Leaving(self._console, self._leave, signals)
        else:
            self._console, self._leaving, builds = company
        self.supervisor = Supervisor(config, self._mesh, more, self._leaving.compiling, self._event, self.host, builds)
        self._checkpoints = self._open_checkpoints()
        broken = [faults.FailingSink(config.fault)] if config.fault.site == "sinks" else []
        self._sinks = Logbook(config, self.run_dir, self._console, broken)
        self._telemetry = Telemetry(config, self.ppo)
        key = jax.random.PRNGKey(config.seed)
        key_init, key_resets, self._key_eval, self._key_redraw = jax.random.split(key, 4)
        self._lock: RunLock | None = None
        not_kept = keep_programs(config.compile_cache)
        try:
            resumes, self._lock = open_run_dir(self.run_dir, config.resume, 1)
            if self._lock.unsupported is not None:
                self._event("lock_unsupported", error=self._lock.unsupported)
            if not_kept is not None:
                self._event("compile_cache_unusable", error=not_kept)
            self._tell_backend()
            fault = config.fault.of_seed(config.seed)
            self.state: TrainState = self.supervisor.assembly.first_state(key_init, key_resets, fault)
            self.step = int(self.state.counters.env_steps)
            if resumes:
                self._resume()
            self._incidents = self._open_incidents()
            if not resumes:
                self._keep()
            write_config(self.run_dir, config.model_dump(mode="json"))
            write_machine(self.run_dir, self.machine)
            self._sinks.start(self.host.wandb_run_id, None if config.resume is None else self.logged_step)
        except BaseException:
            self.close()
            raise

    @property
    def ppo(self) -> PPO:
        """What trains."""
        return self.supervisor.assembly.ppo

    @property
    def logged_step(self) -> int:
        """Environment steps trained, those given up included: it never runs backwards."""
        return self.step + self.host.attempts.lost_steps

    @property
    def machine(self) -> dict[str, Any]:
        """What it is computed on and with."""
        return {**self._versions(), "devices": self._mesh.size, "processors": os.cpu_count()}

    def run(self) -> Result:
        """Trains to an ending. Whatever the ending, the run folder says which."""
        with self._leaving.listening():
            return self._run()

    def _run(self) -> Result:
        ending = Ending.error
        try:
            ending = self._loop()
        except OutOfMemory as error:
            self._advice = str(error)
            ending = Ending.out_of_memory
        except KeyboardInterrupt:
            ending = Ending.interrupted  # the second one, which does not wait for the iteration
            raise
        except Exception as error:
            self._event("error", message=f"{type(error).__name__}: {error}")
            raise
        finally:
            result = self.finish(ending)
        return result

    def close(self) -> None:
        """Gives the run folder free, as `run` does at its end; for a run that is not to be run. May be called again."""
        self._checkpoints.close()
        self._sinks.close()
        if self._lock is not None:
            self._lock.release()

    def _tell_backend(self) -> None:
        """Says what simulates where that was left open."""
        chosen = self.supervisor.assembly.loaded
        if self.config.env.backend != "auto":
            return
        if chosen.because is None:
            self._event("backend_chosen", backend=chosen.backend)
        else:
            self._event("backend_fallback", backend=chosen.backend, because=chosen.because)

    def _open_checkpoints(self) -> Checkpoints:
        config = self.config
        args = (self.run_dir, config.checkpoint, lambda kind, fields: self._event(kind, **fields))
        if config.fault.site == "disk":
            return faults.FailingCheckpoints(config.fault, *args)
        return Checkpoints(*args)

    def _open_incidents(self) -> Incidents:
        causes = causes_of(self.supervisor.assembly.env.guards)
        return Incidents(self.run_dir, self.config, causes, self._versions(), self.host.incidents, self._event)

    def _resume(self) -> None:
        found = resume(self._checkpoints, self.config, self._mesh.size, self.supervisor, self.state)
        self.state, self.host = found.state, found.host
        self.step = int(self.state.counters.env_steps)
        if found.other_envs:
            self.state = self.supervisor.assembly.redrawn(self.state, self._key_of_iteration(2))
            self._event("environments_redrawn", num_envs=self.supervisor.num_envs)
        if found.other_envs or found.other_precision:
            self.state = self.supervisor.adopt(self.state, self._key_of_iteration(2))
        self.state = self.supervisor.assembly.with_empty_slots(self.state)
        self._event("resumed", iteration=self.host.iteration, version=found.version)
        different = differences(found.versions, self._versions())
        if different:
            self._event("versions_changed", **different)

    def _versions(self) -> dict[str, str]:
        return {**versions(), "device": sharding.device_kind(self._mesh)}

    def _loop(self) -> Ending:
        if self.step >= self.config.total_steps:
            return Ending.completed
        self._program()
        stopped = self._leaving.ending  # while the program compiled, or before that
        if stopped is not None:
            return stopped
        ending = None
        while ending is None:
            ending = self.advance()
        return ending

    def advance(self) -> Ending | None:
        """One iteration, and what is due after it; the ending where that was the last one."""
        iterate = self._program()
        if self.evaluates_next:
            # Now, between two iterations: a signal while it compiles saves the state as it is.
            self.supervisor.evaluator.prepare([self.judged])
        started = time.perf_counter()
        try:
            with self._console.working(f"iteration {self.host.iteration + 1}", self._telemetry.last_seconds):
                self.state, metrics = iterate(self.state)
                metrics = jax.device_get(metrics)
        except jax.errors.JaxRuntimeError as error:
            if not exhausted(error):
                raise
            self.make_do()
            return None
        evaluates = self.count(metrics, time.perf_counter() - started)
        if self._telemetry.split_is_due(self.host.iteration):
            self._telemetry.measure_split(iterate.__call__, self.state)
        return self.conclude(metrics, self._evaluate() if evaluates else {})

    @property
    def judged(self) -> Judged:
        """The present policy, to be judged in the episodes of this iteration."""
        return policy_of(self.state, jax.random.fold_in(self._key_eval, self.host.iteration))

    @property
    def evaluates_next(self) -> bool:
        """Whether an evaluation is due after the next iteration, if that is a healthy one."""
        return self._crossed(self.step, self.config.eval.num_evals, self.step + self.config.env_steps_per_iteration)

    def make_do(self) -> None:
        """Goes back and on with a smaller plan, after the device has refused memory for an iteration."""
        key = self._key_of_iteration(3)
        self._go_back(self.supervisor.make_do(self.state, self.host.iteration, self.step, key))

    def shrink(self, needed: int | None) -> None:
        """Takes a smaller plan for a program that needs more memory than there is; arguments as for the supervisor."""
        self.state = self.supervisor.shrunk(self.state, needed, functools.partial(self._key_of_iteration, 3))

    def stop(self) -> None:
        """Has it end after the next iteration."""
        self._stopped_by_callback = True

    def save_if_due(self) -> None:
        """Saves a good state that is not saved."""
        if self._unsaved:
            self._save(None)

    @property
    def saved(self) -> bool:
        """Whether there is a checkpoint."""
        return self._checkpoints.latest() is not None

    def _leave(self, ending: Ending) -> None:
        self.save_if_due()
        self.finish(ending)

    def _program(self) -> Program:
        """The program of the next iteration, and the state as it takes it."""
        program, self.state = self.supervisor.program(self.state, functools.partial(self._key_of_iteration, 3))
        return program

    def count(self, metrics: Metrics, seconds: float) -> bool:
        """Takes in the report of an iteration, whose state is this one's by now.

        Args:
            metrics: The report, on the host.
            seconds: How long it took.

        Returns:
            Whether an evaluation is due, for `conclude`.
        """
        evaluates = self.evaluates_next and bool(metrics.healthy)
        self._before = self.step
        self.step = int(metrics.counters.env_steps)
        self._unsaved = bool(metrics.healthy)  # a bad state is never saved
        self.host.iteration += 1
        self.host.idle = 0 if metrics.values["training/accepted_share"] > 0 else self.host.idle + 1
        bad = any(metrics.trips[name].any() for name in self.supervisor.assembly.env.guards)
        self.host.drawn |= bad or self.config.env.reset == "pool"
        self.host.elapsed += seconds
        self._telemetry.add(metrics, seconds)
        for name, causes in self._telemetry.trips(metrics).items():
            self._event("guard_tripped", guard=name, **causes)
        if self.state.incident is not None:
            self._note_incident(self.state.incident, bad)
        return evaluates

    def _note_incident(self, slot: Slot, bad: bool) -> None:
        """Writes what was caught in this iteration if anything went bad, and empties the slots where that is due."""
        at = self.host.iteration + self.host.attempts.lost_iterations
        if bad and self._incidents.wanted(at):
            level, envs = self.supervisor.level, self.state.env_state.done.shape[0]
            self._incidents.write(jax.device_get(slot), self.host.iteration, at, level._asdict(), envs)
        if self._incidents.opens_after(at):
            empty = sharding.place(np.zeros(slot.taken.shape, bool), self._mesh, sharding.SPLIT)
            self.state = dataclasses.replace(self.state, incident=dataclasses.replace(slot, taken=empty))

    def conclude(self, metrics: Metrics, worth: Row) -> Ending | None:
        """Logs, goes back, saves and redraws where these are due after an iteration.

        Args:
            metrics: Its report, which was counted.
            worth: Of its policy, where that was evaluated, else empty.

        Returns:
            The ending where it was the last iteration.
        """
        config = self.config
        finished = self.step >= config.total_steps
        healthy = bool(metrics.healthy)
        row = self._judged(worth) if worth else {}
        cause = self._cause_for_concern(metrics, finished)
        told = self._told_to_stop() is not None
        if row or finished or cause or told or self.host.iteration % config.sinks.log_every == 0:
            self._log(self._telemetry.flush(self.host.elapsed) | self._supervision() | row)
        if cause is not None:
            return self._try_again(cause)
        # Before saving: what is saved is what the next iteration starts from.
        learns = healthy and self.host.idle == 0
        key = functools.partial(self._key_of_iteration, 2)
        try:
            self.state = self.supervisor.watch(self.state, metrics, learns, key)
        except NeedsOwnProgram as error:
            if healthy:
                self._save(row.get("eval/episode_reward"))
            return self._frozen(error)
        self._redraw(self._before)
        ending = self._told_to_stop() or self._wants_to_stop(row) or (Ending.completed if finished else None)
        due = self._checkpoints.due(self.host.iteration) or bool(row) or ending is not None
        # Neither the disk nor the clock may have a say in this: a stopped run goes back to where it would have.
        if learns and (row or self.supervisor.keep_is_due(self.host.iteration)):
            self._keep()
        if healthy and due:
            self._save(row.get("eval/episode_reward"))
        return ending

    def _cause_for_concern(self, metrics: Metrics, finished: bool) -> Ending | None:
        """The ending by a guard whose patience is at its end; a run must not complete with a state that is bad."""
        for name, over in metrics.exhausted.items():
            if over or (finished and name == "state" and metrics.trips[name].any()):
                return Ending.of_guard(name)
        update = self.config.guards.update
        return Ending.no_update_accepted if update.enabled and self.host.idle >= update.patience else None

    def _keep(self) -> None:
        """Makes this state the one to go back to."""
        self.supervisor.keep(self.state, self.host.iteration, self.step)

    def _try_again(self, cause: Ending) -> Ending | None:
        """Goes back to the last good state; the ending where there have been too many attempts."""
        self._cause = cause
        try:
            found = self.supervisor.try_again(cause, self.state, self.host.iteration, self.step, self._key_redraw)
        except NeedsOwnProgram as error:
            return self._frozen(error)
        if isinstance(found, Ending):
            return found
        self._go_back(found)
        return None

    def _frozen(self, asked: NeedsOwnProgram) -> Ending:
        """The ending of a seed that could only go on in a program of its own."""
        self._advice = f"It could go on alone, {command('train', self.run_dir, 'resume=')}: {asked}."
        return Ending.needs_own_program

    def _go_back(self, to: Rollback) -> None:
        self.state, self.host.iteration, self.step = to
        self.host.idle, self.host.drawn = 0, False
        self._keep()
        # Before anything else can happen: a crash must not forget the attempt.
        self._save(None)
        self._checkpoints.wait()

    def _told_to_stop(self) -> Ending | None:
        """The ending by a signal, or by the clock: after at least one iteration, or a run could never get on."""
        by_signal, limit = self._leaving.ending, self.config.supervise.max_wall_time
        if by_signal is not None or limit is None:
            return by_signal
        next_one = self._telemetry.last_seconds or 0.0
        return Ending.time_limit if time.monotonic() - self._started + next_one > limit else None

    def _wants_to_stop(self, row: Row) -> Ending | None:
        value, target = row.get("eval/episode_reward"), self.config.eval.target_return
        if target is not None and value is not None and value >= target:
            return Ending.target_reached
        return Ending.stopped if self._stopped_by_callback else None

    def _crossed(self, before: int, times: int, after: int | None = None) -> bool:
        """Whether one of `times` equal parts of the run ended between a step and a later one, by default now."""
        total, after = self.config.total_steps, self.step if after is None else after
        return min(after, total) * times // total > min(before, total) * times // total

    def _evaluate(self) -> Row:
        try:
            return self.supervisor.evaluator.judge([self.judged])[0]
        except OutOfMemory:
            self.save_if_due()  # the run ends, with all that was learnt
            raise

    def _judged(self, worth: Row) -> Row:
        """The metrics of an evaluation, which is kept count of."""
        self.host.evaluated += worth["eval/epoch_eval_time"] or 0.0
        self._last_evaluation = row = {**worth, "eval/walltime": self.host.evaluated}
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
        saved, kept = self.supervisor.to_save(self.state, self.host.iteration)
        host = {
            "host": dataclasses.asdict(self.host),
            SAVED_AS: kept,
            "policy": policy_spec(self.ppo.networks, self.ppo.precision.matmul),
            "config": self.config.model_dump(mode="json"),
            "devices": self._mesh.size,
            "num_envs": self.supervisor.num_envs,
            "level": self.supervisor.level,
            "step": self.step,
            "return": score,
            "version": __version__,
            "versions": self._versions(),
        }
        saved = dataclasses.replace(saved, incident=None)
        self._checkpoints.save(self.host.iteration, saved, policy_arrays(self.state), host, score=score)
        self._unsaved = False

    def _redraw(self, before: int) -> None:
        """Brax's `num_resets_per_eval` and the refill of the pool, both from clean resets."""
        ppo, env = self.config.ppo, self.config.env
        if ppo.num_resets_per_eval and self._crossed(
            before, max(self.config.eval.num_evals, 1) * ppo.num_resets_per_eval
        ):
            self.state = self.supervisor.assembly.with_fresh_envs(self.state, self._key_of_iteration(0))
        due = env.reset_pool_refresh and self.host.iteration % env.reset_pool_refresh == 0
        if due and self.host.drawn:
            self.host.drawn = False
            self.state = self.supervisor.assembly.with_fresh_pool(self.state, self._key_of_iteration(1))

    def _key_of_iteration(self, purpose: int) -> jax.Array:
        """A random key for what is drawn between two iterations."""
        key = jax.random.fold_in(self._key_redraw, self.host.iteration)
        return jax.random.fold_in(key, purpose) if purpose else key

    def finish(self, ending: Ending) -> Result:
        """Ends it: waits for what is being saved, says how it ended, and gives the folder free."""
        with contextlib.closing(self):
            return self._finish(ending)

    def _finish(self, ending: Ending) -> Result:
        self._checkpoints.close()
        fields = self.fields(ending)
        self._event("stopped", **fields)
        close(ending, fields, self.run_dir, self._console, report=self.config.sinks.report, saved=self.saved)
        return Result(ending, self.run_dir, self.step, self._last_evaluation, self.history)

    def fields(self, ending: Ending) -> dict[str, Any]:
        """What `result.json` says of it with this ending."""
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
            fields["cause"] = self._cause.name
            self._advice = advice.paragraph(self._cause, self.host.attempts)
        if self._advice is not None:
            fields["advice"] = self._advice
        return fields
