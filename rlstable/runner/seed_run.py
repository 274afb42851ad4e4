"""One seed of a run on the host: its training state, its log and its checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlstable import faults
from rlstable.compilation import sources, xla
from rlstable.compilation.xla import disable_async_dispatch, enable_program_cache
from rlstable.config import Config, ConfigError
from rlstable.device import hosts, sharding
from rlstable.device import machine as processor
from rlstable.envs.capture import cause_names
from rlstable.envs.mujoco_model import model_of
from rlstable.guards.base import MoreGuards, check_more
from rlstable.io.checkpoint import Checkpoints
from rlstable.io.console import Console
from rlstable.io.lock import RunLock
from rlstable.io.run_folder import (
    confirmed_of,
    discard_start,
    forget_result,
    free_reserve,
    open_run_dir,
    read_result,
    write_first_files,
)
from rlstable.policy.evaluator import PolicySnapshot, snapshot_of
from rlstable.ppo.networks import Params
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.state import SPECS, Metrics, Slot, TrainState
from rlstable.runner.decision import Decision
from rlstable.runner.finish import finish_files
from rlstable.runner.host_state import HostState
from rlstable.runner.keys import SeedKeys
from rlstable.runner.live_page import LivePage
from rlstable.runner.result import Result
from rlstable.runner.resume import resume
from rlstable.runner.return_check import ReturnCheck
from rlstable.runner.saving import Saving
from rlstable.runner.schedule import Schedule
from rlstable.runner.seed_log import Callback, SeedLog
from rlstable.runner.seed_programs import SeedPrograms
from rlstable.runner.setup import TrainingSetup
from rlstable.runner.setup_cache import Factories
from rlstable.runner.stopping import StopRequest
from rlstable.runner.supervisor import Supervisor
from rlstable.supervise.incident import Incidents
from rlstable.supervise.memory_plan import MemoryPlan
from rlstable.supervise.stop_reasons import StopReason, command, stays_ended

_NOT_IN_EVENT = ("signs", "warnings")  # fields of `result.json` that the event `stopped` lacks


def mesh_of(config: Config) -> Mesh:
    """The devices of a configuration. Must run before JAX is initialised; JAX ignores the dispatch flag afterwards.

    Raises:
        ConfigError: The devices are not available.
    """
    kwargs = (config.env.kwargs or {}, config.eval.env_kwargs or {})
    if not {"native", "auto"}.isdisjoint((config.env.backend, *(one.get("backend") for one in kwargs))):
        disable_async_dispatch()
    mesh = sharding.make_mesh(config.devices if hosts.count() == 1 else None)
    if config.devices not in (None, mesh.size):
        raise ConfigError(
            f"devices: {config.devices} requested, but {hosts.count()} processes train on all of their {mesh.size} "
            "devices; set devices=null, and start each process with fewer devices"
        )
    return mesh


class SeedRun:
    """One seed of a run; the training loop calls its methods around each iteration.

    After an iteration the loop calls `record_iteration`, evaluates if that returns True, then calls
    `after_iteration.finish_iteration`; at the end of the run it calls `finish`.

    Attributes:
        config: The configuration, with this seed.
        run_dir: The folder of this seed.
        state: The training state.
        host: The host state, saved beside the training state.
        log: Rows and events.
        checkpoints: The checkpoints on disk.
        keys: The random keys.
        programs: The training setup and the evaluator.
        supervisor: Decides and rolls back.
        saving: Saves the states.
        schedule: Decides what is due after an iteration.
        return_check: Watches the return.
        cause: Cause of the last failed iteration; None if none failed.
        advice: Advice on the stop reason; None if there is none.
        confirmed: Fields `confirmed_*` of `result.json`; empty if no best policy is confirmed.

    Args:
        config: The configuration, with this seed.
        run_dir: The folder of this seed.
        callback: Called as `callback(step, row)` with every logged row; returning True stops the seed.
        more_guards: The user's guards, by site (`env`, `batch`, `update`, `state`) and name.
        console: The console.
        stop_request: Reacts to signals while a program compiles.
        factories: Factories of setups and evaluators; None for an ordinary run.
        live_page: The report page of the run, which all seeds share.

    Raises:
        ConfigError: The configuration, the environment or the folder is unusable.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        callback: Callback | None,
        more_guards: MoreGuards | None,
        console: Console,
        stop_request: StopRequest,
        factories: Factories | None,
        live_page: LivePage,
    ):
        more = more_guards or {}
        check_more(more, config.guards.model_dump().keys())
        self.config = config
        self.run_dir = run_dir
        self.host = HostState()
        self.cause: StopReason | None = None
        self.advice: str | None = None
        self.confirmed: dict[str, Any] = {}
        self.schedule = Schedule(config, self.host)
        self._fault = config.fault.of_seed(config.seed)
        self._console = console
        mesh = mesh_of(config)
        config.require_devices(mesh.size)
        cache_error = enable_program_cache(config.compile_cache)
        self._step_before = 0
        self._has_iterated = False
        self._reported_constants = False
        self.keys = SeedKeys(config.seed, self.host)
        self.log = SeedLog(config, run_dir, callback, console, self.host, live_page)
        self.event = self.log.event
        self.programs = SeedPrograms(config, mesh, more, stop_request.compiling, self.event, self.host, factories)
        self.supervisor = Supervisor(config, self.programs, self.event, self.host)
        setup = self.programs.setup  # an unusable environment is an error before the folder is made
        _require_model(config, setup.single)
        self._require_same_machines(more)
        self.checkpoints = self._open_checkpoints()
        self._lock: RunLock | None = None
        self._opened = False
        resumes = True
        try:
            resumes = hosts.from_writer("resumes", self._open_folder)
            if cache_error is not None:
                self.event("compile_cache_unusable", error=cache_error)
            if unknown := xla.unknown_options():
                self.event("compiler_options_unknown", options=list(unknown))
            if config.env.backend == "auto":
                _log_backend(setup, self.event)
            if setup.loaded.removed:
                kept = {key: getattr(config.env, key) for key in ("episode_length", "action_repeat")}
                self.event("environment_unwrapped", removed=list(setup.loaded.removed), **kept)
            setup.on_large_constants(self._report_constants)
            self._initialize_state(setup, resumes)
            self._open_files(self._lock)
            self._opened = True
        except BaseException:
            self.close()
            if hosts.is_writer() and not resumes:
                discard_start(self.run_dir)
            raise

    def _require_same_machines(self, more_guards: MoreGuards) -> None:
        """Checks that all processes compute the same numbers, because each process takes its own decisions from them.

        Raises:
            ConfigError: Software, sources, device, physics, processor or the user's guards differ.
        """
        if hosts.count() == 1:
            return
        versions = {name: version for name, version in self.programs.versions.items() if name != "python"}
        users = [getattr(self.programs.setup.single, "unwrapped", self.programs.setup.single)]
        users += [guard for guards in more_guards.values() for guard in guards.values()]
        on_cpu = jax.default_backend() == "cpu"
        own = versions | {
            "device": sorted({device.device_kind for device in self.programs.mesh.local_devices}),
            "processor": processor.fingerprint() if on_cpu else None,
            "physics": self.programs.setup.loaded.backend,
            "more_guards": {site: sorted(guards) for site, guards in more_guards.items()},
            "sources": sources.digest_of_modules("__main__", *sorted({type(each).__module__ for each in users})),
        }
        hosts.require_same("machine", own, "use equal machines with the same packages, sources and script")

    def _report_constants(self, size: int) -> None:
        """Logs the size of the arrays that the environment makes part of a program, once."""
        if not self._reported_constants:
            self._reported_constants = True
            problem = "arrays of the environment are part of each program, which takes time and memory to compile"
            self.event("large_constants", megabytes=size // 10**6, problem=f"{problem}; make the arrays smaller")

    def _open_folder(self) -> bool:
        """Creates and locks the run folder; returns whether the run resumes."""
        resumes, self._lock = open_run_dir(self.run_dir, self.config.resume, 1)
        return resumes

    def _initialize_state(self, setup: TrainingSetup, resumes: bool) -> None:
        """Makes the first state of a new run, or reads the state of a resumed one."""
        # A resumed seed may have another precision or memory plan. A shared program takes the states of all seeds.
        ahead = not resumes and not self.programs.shared
        self.state: TrainState = setup.first_state(self.keys.init, self.keys.resets, self._fault, ahead)
        if resumes:
            args = self.checkpoints, self.config, self.programs, self.supervisor, self.host
            self.state = resume(*args, self.state, functools.partial(self.keys.between, 2), self.event)
            self.confirmed = confirmed_of(self.run_dir)
        else:
            self.supervisor.keep(self.state)

    def _open_files(self, lock: RunLock | None) -> None:
        """Writes the first files of the run folder and opens the log."""
        config, host, programs, snapshots = self.config, self.host, self.programs, self.supervisor.snapshots
        self.return_check = ReturnCheck(config, host, self.keys, snapshots, self.event)
        causes = cause_names(programs.setup.env.guards)
        self._incidents = Incidents(self.run_dir, config, causes, programs.versions, host.incidents, self.event)
        if lock is not None:
            write_first_files(self.run_dir, config.model_dump(mode="json"), programs.machine)
        self.saving = Saving(config, host, programs, snapshots, self.log, self.checkpoints)
        self.log.start(programs.setup.ppo)

    @property
    def ended_before(self) -> StopReason | None:
        """The stop reason of a resumed seed with nothing left to train; None for a seed to train."""
        if self.schedule.finished:
            return StopReason.completed
        fields = hosts.from_writer("result", lambda: read_result(self.run_dir)) or {}
        reached = fields.get("stop_reason") == StopReason.target_reached.name and fields.get("step") == self.host.step
        return StopReason.target_reached if reached and stays_ended(fields, self.config) else None

    @property
    def records(self) -> bool:
        """Whether the policy of the evaluation after this iteration is recorded."""
        return self.schedule.records(self._step_before)

    @property
    def policy_snapshot(self) -> PolicySnapshot:
        """The present policy, for the evaluation episodes of this iteration."""
        return snapshot_of(self.state, self.keys.evaluation)

    @property
    def in_fresh_episodes(self) -> PolicySnapshot:
        """The present policy, for episodes that no evaluation of training plays."""
        return snapshot_of(self.state, self.keys.fresh_evaluation)

    @property
    def parameters(self) -> tuple[Params, Statistics]:
        """The network parameters and the observation statistics."""
        return self.state.params, self.state.normalizer

    def start_from(self, params: Params, statistics: Statistics) -> None:
        """Replaces the parameters and the observation statistics of a new run, before the first iteration.

        Args:
            params: Network parameters.
            statistics: Observation statistics.
        """
        state = dataclasses.replace(self.state, params=params, normalizer=statistics)
        self.state = sharding.place(state, self.programs.mesh, SPECS)
        self.supervisor.keep(self.state)

    def record_iteration(self, metrics: Metrics, seconds: float) -> bool:
        """Records an iteration whose result is already in `state`.

        Args:
            metrics: Metrics of the iteration, on the host.
            seconds: Duration of the iteration.

        Returns:
            Whether an evaluation is due, for `finish_iteration`.
        """
        healthy = bool(metrics.healthy)
        evaluates = self.schedule.evaluates_next and healthy
        if not self._has_iterated:
            self._has_iterated = True
            if hosts.is_writer():
                forget_result(self.run_dir)  # not sooner: a run that cannot start loses nothing
            self.confirmed = {}
        host = self.host
        host.replaced = None
        self._step_before, host.step = host.step, int(metrics.counters.env_steps)
        self.saving.record_iteration(healthy)
        host.iteration += 1
        learned = metrics.values["training/accepted_share"] > 0
        host.iterations_without_update = 0 if learned else host.iterations_without_update + 1
        if not healthy:  # a guard without patience may trip in many iterations, so the doubt has a bound
            host.healthy_needed = min(host.healthy_needed + 1, self.config.supervise.recovery.every)
        elif host.iterations_without_update == 0:
            host.healthy_needed = max(host.healthy_needed - 1, 0)
        bad = any(metrics.trips[name].any() for name in self.programs.setup.env.guards)
        host.pool_used |= bad or self.config.env.reset == "pool"
        host.elapsed += seconds
        self.log.telemetry.add(metrics, seconds)
        self.return_check.train(metrics)
        self.log.iteration(metrics)
        if self.state.incident is not None:
            self._record_incident(self.state.incident, bad)
        return evaluates

    def reset_if_due(self) -> None:
        """Resets the environments and refills the pool of first states, each if it is due."""
        setup = self.programs.setup
        if self.schedule.resets(self._step_before):
            self.state = setup.reset_envs(self.state, self.keys.between(0))
        if self.schedule.refills:
            self.host.pool_used = False
            self.state = setup.refill_pool(self.state, self.keys.between(1))

    def take_best_policy(self) -> float | None:
        """Replaces a collapsed policy by the best one; returns the best policy's return in fresh episodes."""
        host, check, best = self.host, self.return_check, self.supervisor.snapshots.best
        self.state = self.supervisor.snapshots.with_best_policy(self.state)
        host.replaced = {"iteration": best.iteration, "step": best.step, "fallen_return": check.fallen_return}
        host.last_return = check.best_return
        return host.last_return

    def roll_back(self, decision: Decision) -> None:
        """Applies a decision to roll back."""
        self.state = self.supervisor.roll_back(decision, self.state, self.keys.rollback)
        self._save_rollback()

    def shrink_after_oom(self) -> None:
        """Rolls back with a smaller memory plan, after the device refused memory for an iteration."""
        self.state = self.supervisor.shrink_after_oom(self.state, self.keys.between(3))
        self._save_rollback()

    def shrink(self, needed: int | None) -> None:
        """Takes a smaller memory plan for a program that needs `needed` bytes; None if the device refused them."""
        plan = self.programs.smaller_plan(needed)
        self.state = self.programs.take_plan(self.state, plan, functools.partial(self.keys.between, 3))

    def take_plan(self, plan: MemoryPlan) -> None:
        """Takes the memory plan of the other seeds, with fewer environments if the plan has fewer."""
        if plan != self.host.plan:
            self.event("memory_planned", plan=str(plan))
            self.state = self.programs.take_plan(self.state, plan, functools.partial(self.keys.between, 3))

    def needs_own_program(self, reason: str) -> StopReason:
        """The stop reason of a seed that can only continue in a separate program."""
        self.advice = f"It can continue alone, {command('train', self.run_dir, 'resume=')}: {reason}."
        return StopReason.needs_own_program

    def final_stop_reason(self, stop_reason: StopReason) -> StopReason:
        """Checks the saved states: returns the stop reason, or `not_saved` if the state that it promises is not saved.

        May be called again with the result.
        """
        stop_reason = self.saving.final_stop_reason(stop_reason, self.state)
        if stop_reason is StopReason.not_saved:
            self.advice = self.saving.advice
        return stop_reason

    def finish(self, stop_reason: StopReason) -> tuple[dict[str, Any], Result]:
        """Ends the seed: completes its files and releases its folder.

        Returns:
            The fields of `result.json`, and the result.
        """
        with contextlib.closing(self):
            stop_reason = self.final_stop_reason(stop_reason)
            unsaved = self.saving.unsaved_steps()
            more = {**self._policy_fields(), **({"unsaved_steps": unsaved} if unsaved else {})}
            self.checkpoints.close()
            fields = self.log.result(stop_reason, self.cause, self.advice, more)
            numbers = (self.host.step, self.log.last_evaluation, self.log.history)
            result = Result(stop_reason, self.run_dir, *numbers, policy_return=fields["return"])
            if not hosts.is_writer():
                return fields, result
            self.event("stopped", **{name: value for name, value in fields.items() if name not in _NOT_IN_EVENT})
            self.log.logbook.wait()  # the report page reads it
            saved = self.checkpoints.latest() is not None
            report = self.config.logging.report
            options = {"report": report, "saved": saved, "gone": self.saving.gone}
            options["env_by_name"] = self.config.env.source != "object"
            finish_files(stop_reason, fields, self.run_dir, self._console, **options)
            return fields, result

    def _policy_fields(self) -> dict[str, Any]:
        """Fields of `result.json` about the policy that the run hands over; read by `io.outcome`.

        `return` is measured in fresh episodes if possible, else by the evaluation that chose the policy.
        """
        checkpoints, fields = self.checkpoints, dict(self.confirmed)
        if not hosts.is_writer() or not self.config.checkpoint.enabled or self.saving.gone:
            return fields
        scores: dict[int, float | None] = dict(checkpoints.ranked())
        iteration: int | None = fields.get("confirmed_iteration", next(iter(scores), checkpoints.latest()))
        saved = None if iteration is None else checkpoints.host_data(iteration)
        if iteration is None or saved is None:
            return fields
        value = fields.get("confirmed_return", scores.get(iteration, self.host.last_return))
        known = [number for number in (value, self.host.best_return) if number is not None]
        fields |= {"return": value, "best_return": max(known, default=None)}
        origin = {"iteration": saved["host"]["iteration"], "step": saved["step"]} | (
            saved["host"].get("replaced") or {}
        )
        fields |= {"policy_iteration": origin["iteration"], "policy_step": origin["step"]}
        if self.host.replaced is not None:
            fields["fallen_return"] = self.host.replaced["fallen_return"]
        return fields

    def close(self) -> None:
        """Releases the folder, as `finish` does, for a seed that is not run. May be called again."""
        with contextlib.ExitStack() as closing:  # even if interrupted, so that the next run finds the folder free
            if self._lock is not None:
                closing.callback(self._lock.release)
                if self.log.logbook.in_place:
                    closing.callback(free_reserve, self.run_dir)
            closing.callback(self.log.logbook.close)
            closing.callback(self.checkpoints.close)

    def _open_checkpoints(self) -> Checkpoints:
        # The other processes only read.
        in_place = (lambda: self.log.logbook.in_place) if hosts.is_writer() else bool
        args = (self.run_dir, self.config.checkpoint, self._on_checkpoint_event, in_place)
        fails = self.config.fault.site == "disk"
        return faults.FailingCheckpoints(self._fault, *args) if fails else Checkpoints(*args)

    def _on_checkpoint_event(self, kind: str, fields: dict[str, Any]) -> None:
        self.event(kind, **fields)
        if self._opened:
            self.saving.on_checkpoint_event(kind)

    def _record_incident(self, slot: Slot, bad: bool) -> None:
        """Writes the environments captured in this iteration if any went bad, and empties the slots if that is due."""
        iteration, at = self.host.iteration, self.host.logged_iteration
        if bad and self._incidents.wanted(at):
            num_envs = self.state.env_state.done.shape[0]
            captured = jax.device_get(sharding.gathered(slot))
            memory = self.host.incidents

            def write() -> int:
                self._incidents.write(captured, iteration, at, self.programs.level._asdict(), num_envs)
                return memory.count

            memory.count, memory.last = hosts.from_writer("incidents", write), at
        if self._incidents.opens_after(at):
            empty = sharding.place(np.zeros(slot.taken.shape, bool), self.programs.mesh, sharding.SPLIT)
            self.state = dataclasses.replace(self.state, incident=dataclasses.replace(slot, taken=empty))

    def _save_rollback(self) -> None:
        """Saves at once after a rollback, so that a resume after a crash knows the attempt."""
        self.saving.save(self.state, None)
        self.checkpoints.wait()


def _require_model(config: Config, env: Any) -> None:
    """Checks that an environment can be drawn, if recordings are configured.

    Raises:
        ConfigError: The environment has no MuJoCo model.
    """
    if config.render.every and model_of(env) is None:
        raise ConfigError(
            f"render.every: {config.env.name} has no MuJoCo model to draw; set render.every=0, or choose an "
            "environment of MuJoCo"
        )


def _log_backend(setup: TrainingSetup, event: Callable[..., None]) -> None:
    """Logs which physics `env.backend=auto` chose."""
    loaded = setup.loaded
    if loaded.fallback_reason is None:
        event("backend_chosen", backend=loaded.backend)
    else:
        event("backend_fallback", backend=loaded.backend, because=loaded.fallback_reason)
