"""The training loop on the host: iterate, evaluate, log, save, stop. A run with one seed is a fleet of one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from rlstable.compilation.ffi import interruptible
from rlstable.compilation.jax_flags import check_flags
from rlstable.compilation.programs import SharedBuilds
from rlstable.config import Config, ConfigError
from rlstable.config.schema import expand_home
from rlstable.device import hosts
from rlstable.device.precision import Level
from rlstable.device.seed_devices import SeedDevices, device_count_for
from rlstable.device.sharding import fetch
from rlstable.device.shared import has_shared
from rlstable.envs.objects import Environments
from rlstable.guards.base import MoreGuards
from rlstable.io import store
from rlstable.io.console import Console, SeedConsole
from rlstable.io.outcome import outcome_of
from rlstable.io.run_folder import (
    default_run_dir,
    forget_result,
    open_run_dir,
    read_result,
    require_the_same_seeds,
    seed_folder,
    seed_folders,
    write_config,
)
from rlstable.policy.evaluator import Evaluator, make_evaluator
from rlstable.ppo.state import Metrics
from rlstable.runner.after_iteration import finish_iteration
from rlstable.runner.confirm import CONFIRMED_AT, confirm
from rlstable.runner.evaluation import compare_with_best, evaluate
from rlstable.runner.finish import finish_seeds
from rlstable.runner.header import header
from rlstable.runner.iteration_time import REMEDY, long_iteration
from rlstable.runner.live_page import LivePage
from rlstable.runner.processes import connect
from rlstable.runner.recordings import Recordings
from rlstable.runner.result import Result, Row
from rlstable.runner.seed_log import Callback
from rlstable.runner.seed_run import SeedRun
from rlstable.runner.setup import TrainingSetup
from rlstable.runner.setup_cache import DEFAULT_FACTORIES, Factories
from rlstable.runner.slots import Slots
from rlstable.runner.stopping import StopRequest
from rlstable.supervise.memory_plan import OutOfMemory, is_out_of_memory, smallest
from rlstable.supervise.signals import Signals
from rlstable.supervise.stop_reasons import FROM_OUTSIDE, StopReason, nothing_to_train, stays_ended

_OUT_OF_MEMORY = (
    "The device of a process refused memory for an iteration. Several processes cannot continue with a smaller plan: "
    "resume with a larger ppo.gradient_accumulation or a smaller env.envs_per_pass."
)


_OPEN_FILES = 3  # of each seed: lock, rows and events
_OTHER_FILES = 100  # of libraries


class TrainingLoop:
    """Trains `config.seeds` seeds at once with one compiled program.

    Each seed has its own guards, remedies, rollbacks and stop reason. A finished seed stays in the batch because the
    program's shape is fixed; its results are ignored. With several seeds, each has a folder `seed-<seed>`.

    Attributes:
        config: The configuration.
        run_dir: The run folder.
        seeds: The seeds that this process trains, by seed.

    Args:
        config: The configuration.
        run_dir: The run folder; None for the resumed folder, else `runs/<env>/<time>`.
        callback: Called as `callback(step, row)` with every row; returning True stops the run. With several seeds it
            is called with the rows of each seed, which have the key `seed`.
        more_guards: The user's guards, by site (`env`, `batch`, `update`, `state`) and name.
        signals: Signal handlers that the caller has installed; None to install them during `run`.
        factories: Factories of setups and evaluators; None for an ordinary run. `rlstable.replay` passes its own.
        environments: Environment objects of the user; None to load the configured environment.

    Raises:
        ConfigError: The configuration, the environment, the folder or a flag of JAX is unusable.
    """

    def __init__(
        self,
        config: Config,
        run_dir: str | Path | None,
        callback: Callback | None = None,
        more_guards: MoreGuards | None = None,
        signals: Signals | None = None,
        factories: Factories | None = None,
        environments: Environments | None = None,
    ):
        self.config = config
        check_flags()
        mesh = connect(config)
        # Only the writer makes a folder, whose name contains the time.
        self.run_dir = expand_home(
            hosts.from_writer("run_dir", lambda: str(run_dir or default_run_dir(config.resume, config.env.name)))
        )
        several = config.seeds > 1
        title = f"{config.env.name}, {config.seeds} seeds" if several else config.env.name
        shown = config.logging.console if hosts.is_writer() else "off"
        self._console = Console(shown, config.total_steps, title)
        self._stop_request = StopRequest(
            self._console, self._save_and_end, self._last_save, signals, config.supervise.max_wall_time
        )
        self._slots = Slots(config.each_seed)
        self._recordings = Recordings()
        self._last_seconds = 0.0
        self._advice: str | None = None
        self.seeds: dict[int, SeedRun] = {}
        self.results: dict[int, Result] = {}
        self._fields: dict[int, dict[str, Any]] = {}
        self._callback = callback
        self._rows: list[Row] = []
        self._page = LivePage(self.run_dir, lambda: all(run.log.logbook.in_place for run in self.seeds.values()))
        if several:
            devices = device_count_for(config.seeds, mesh.size, config.devices)
            if devices < mesh.size:
                self._console.message(f"{devices} of {mesh.size} devices train, as many as divide {config.seeds} seeds")
            factories = self._shared_factories(devices)
        if environments is not None:
            factories = dataclasses.replace(factories or DEFAULT_FACTORIES, environments=environments)

        def open_seed(config: Config, folder: Path, callback: Callback | None, console: Console) -> None:
            args = (more_guards, console, self._stop_request, factories, self._page)
            self.seeds[config.seed] = SeedRun(config, folder, callback, *args)

        if not several:
            open_seed(config, self.run_dir, callback, self._console)
            return
        try:
            self._open_seeds(open_seed)
            self._refuse_shared_leaves()
            self._agree_on_program()
        except BaseException:
            self.close()
            for folder in seed_folders(self.run_dir):
                with contextlib.suppress(OSError):
                    folder.rmdir()  # only empty folders: a failed start leaves nothing behind
            raise

    def _open_seeds(self, open_seed: Callable[[Config, Path, Callback, Console], None]) -> None:
        """Opens the unfinished ones of several seeds. The folder above them is locked until they hold their own locks.

        Raises:
            ConfigError: The folder is unusable, or the configuration lacks a seed of the folder.
        """
        config, run_dir = self.config, self.run_dir
        _require_open_files(config.seeds)
        resumes, lock = open_run_dir(run_dir, config.resume, config.seeds)
        shown: set[str] = set()
        group = "/".join(run_dir.absolute().parts[-2:])
        with contextlib.ExitStack() as locked:
            locked.callback(lock.release)
            if resumes:
                require_the_same_seeds(run_dir, config.each_seed)
            for seed in config.each_seed:
                folder = seed_folder(run_dir, seed)
                fields = read_result(folder) if resumes else None
                if fields is not None and stays_ended(fields, config):
                    value = outcome_of(fields).value
                    reason = StopReason[fields["stop_reason"]]
                    self._fields[seed] = fields
                    self.results[seed] = Result(reason, folder, fields["step"], {}, [], policy_return=value)
                else:
                    console = SeedConsole(self._console, seed, shown)
                    open_seed(config.of_seed(seed, group), folder, functools.partial(self._take_row, seed), console)
            write_config(run_dir, config.model_dump(mode="json"))

    def _take_row(self, seed: int, step: int, row: Row) -> Any:
        """Passes a row of one of several seeds to the callback, and keeps it for the line of all seeds."""
        self._rows.append(row)
        return self._callback is not None and self._callback(step, {"seed": seed, **row})

    def _show_rows(self) -> None:
        """Shows the new rows of several seeds as one line."""
        rows, self._rows = self._rows, []
        if rows:
            self._console.log(max(run.host.logged_step for run in self.seeds.values()), over_seeds(rows))

    def _shared_factories(self, devices: int) -> Factories:
        """Factories of the programs of several seeds, divided over a number of devices."""
        build = functools.partial(TrainingSetup, seed_devices=SeedDevices(devices) if devices > 1 else None)
        return Factories(SharedBuilds(build), SharedBuilds(make_evaluator), shared=True, devices=devices)

    @property
    def single(self) -> SeedRun:
        """The seed of a run with one seed."""
        (run,) = self.seeds.values()
        return run

    def run(self) -> Result:
        """Trains every seed until it stops. However the run ends, the run folder has the stop reason."""
        with self._stop_request.catching_signals():
            return self._run()

    def advance(self) -> dict[int, StopReason]:
        """Runs one iteration and the steps due after it; returns the stop reasons of the seeds that have ended."""
        training = self._training
        iterate = self._slots.program(training, self._unfinished)
        if any(run.schedule.evaluates_next for run in training.values()):
            # Compile before the iteration: a signal during compilation saves the present state.
            if hosts.is_writer():
                self._evaluator.prepare(list(self._slots.policies(training).values()))
                self._recordings.prepare(training.values())
            hosts.gather("ready", True)  # a collective must not wait for a compilation
        started = time.perf_counter()
        number, expected = max(run.host.iteration for run in training.values()) + 1, self._last_seconds or None
        reminder = self._console.working(f"iteration {number}", expected)
        try:
            with reminder, self._stop_request.iterating(expected), interruptible():
                results = iterate.each(self._slots.states(training))
                metrics = fetch(self._slots.store(results, training))
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if hosts.count() > 1:  # the other processes wait in the iteration, and a collective cannot be interrupted
                raise OutOfMemory(_OUT_OF_MEMORY) from error
            for run in training.values():
                run.shrink_after_oom()
            self._slots.take_plan_of(training, self._unfinished)
            return {}
        self._last_seconds = time.perf_counter() - started
        return self._finish_iteration(training, metrics)

    def close(self) -> None:
        """Releases the folders if `run` is not called; `run` releases them itself. May be called again."""
        for run in self.seeds.values():
            run.close()

    def _run(self) -> Result:
        stop_reason: StopReason | None = StopReason.error
        try:
            self._train()
            hosts.from_writer("ended", lambda: True)  # a process returns after the writer has written `result.json`
            stop_reason = None  # each seed has a stop reason
        except OutOfMemory as error:
            ending = hosts.announce(StopReason.out_of_memory.name, StopReason.out_of_memory.exit_code, str(error))
            self._advice, stop_reason = str(error), StopReason[ending.stop_reason]
            self._advise(ending)
        except KeyboardInterrupt:
            stop_reason = StopReason.interrupted  # the second signal does not wait for the iteration
            hosts.announce(stop_reason.name, stop_reason.exit_code, f"process {hosts.index()} was interrupted")
            raise
        except Exception as error:
            ending = hosts.cause_of(error, StopReason.error.name, StopReason.error.exit_code)
            stop_reason = StopReason[ending.stop_reason]
            self._advise(ending)
            for run in self._unfinished.values():
                run.event("error", message=f"{type(error).__name__}: {error}")
            if stop_reason is StopReason.error and ending.process == hosts.index():
                raise
        except BaseException as error:  # SystemExit of a callback
            error_text = f"process {hosts.index()}: {type(error).__name__}: {error}"
            hosts.announce(StopReason.error.name, StopReason.error.exit_code, error_text)
            raise
        finally:
            result = self._finish(stop_reason)
        return result

    def _train(self) -> None:
        ended = {seed: reason for seed, run in self._unfinished.items() if (reason := run.ended_before) is not None}
        reasons = {*ended.values(), *(result.stop_reason for result in self.results.values())}
        if ended.keys() == self._unfinished.keys():
            self._console.message(nothing_to_train(reasons, self.config))
        self._end(ended)
        if not self._unfinished:
            return
        training = self._training
        first = next(iter(training.values()))
        self._console.header(header(self.config, first, self.run_dir))
        parameters = sum(x.size for x in jax.tree.leaves(first.state.params))
        if (long := long_iteration(self.config, first.programs.setup.loaded, parameters)) is not None:
            self._console.message(f"{long}; {REMEDY}")
        self._slots.fill(training)
        if hosts.is_writer() and any(run.schedule.evaluates for run in training.values()):
            self._evaluator.begin(list(self._slots.policies(training).values()))
        if hosts.is_writer() and self.config.checkpoint.enabled:
            store.preload()  # while the programs compile
        self._slots.program(training, self._unfinished)
        self._evaluate_untrained(training)
        # The first collective of gloo fails after 30 s, and one process may compile for longer than another.
        hosts.gather("compiled", True)
        requested, _ = self._stop_request.agreed(float("-inf"))  # before or during the compilation
        if requested is not None:
            self._end(dict.fromkeys(self._unfinished, requested))
        while self._unfinished:
            self.advance()

    def _evaluate_untrained(self, training: dict[int, SeedRun]) -> None:
        """Evaluates the policies of a new run before its first iteration, if the configuration says so."""
        if not self.config.eval.at_start or any(run.host.iteration for run in training.values()):
            return
        for seed, metrics in evaluate(
            self._evaluator, self._slots, training, training, self._console, self._stops
        ).items():
            training[seed].log.first_row(metrics)
        self._show_rows()

    def _finish_iteration(self, training: dict[int, SeedRun], metrics: dict[int, Metrics]) -> dict[int, StopReason]:
        """Evaluates, logs, saves and ends the seeds that an iteration trained."""
        if self.config.seeds > 1:
            forget_result(self.run_dir)  # not sooner: a run that cannot start loses nothing
        due = [seed for seed, run in training.items() if run.record_iteration(metrics[seed], self._last_seconds)]
        evaluations = evaluate(self._evaluator, self._slots, training, due, self._console, self._stops) if due else {}
        if hosts.is_writer():
            self._recordings.record(training[seed] for seed in evaluations)
        suspects = [seed for seed, run in training.items() if run.return_check.suspects(evaluations.get(seed, {}))]
        if suspects:
            compare_with_best(self._evaluator, self._slots, training, suspects, self._console, self._stops)
        # Asked once for all seeds, so that all of them stop after the same iteration.
        outdated = hosts.is_writer() and any(run.saving.outdated for run in training.values())
        requested, saves = self._stop_request.agreed(self._last_seconds, outdated)
        own_reasons = {
            seed: self._finish_iteration_of(run, metrics[seed], evaluations.get(seed, {}), requested, saves)
            or requested
            for seed, run in training.items()
        }
        self._show_rows()
        if any(run.log.stopped_by_callback for run in training.values()):
            requested = requested or StopReason.stopped
        if hosts.count() == 1:
            requested = requested or self._stop_request.requested(self._last_seconds)  # while the state was saved
        stop_reasons = {seed: own_reasons.get(seed) or requested for seed in self._unfinished}
        # Save every seed before the first one ends, since ending takes time. Waiting seeds are saved already.
        for seed, run in training.items():
            if stop_reasons[seed] is not None:
                run.saving.save_if_due(run.state)
        ended = self._end({seed: reason for seed, reason in sorted(stop_reasons.items()) if reason is not None})
        for seed in ended.keys() & training.keys():
            self._slots.keep_last_state(seed, training[seed].state)
        return ended

    def _finish_iteration_of(
        self, run: SeedRun, metrics: Metrics, evaluation: Row, requested: StopReason | None, saves: bool
    ) -> StopReason | None:
        """Logs, decides and saves for one seed; with several seeds, an error ends this seed alone."""
        try:
            return finish_iteration(run, metrics, evaluation, requested, saves)
        except Exception as error:
            if self.config.seeds == 1:
                raise
            traceback.print_exc()
            run.event("error", message=f"{type(error).__name__}: {error}")
            return StopReason.error

    def _stops(self) -> bool:
        """Whether a stop request abandons an evaluation."""
        return self._stop_request.requested(0.0) is not None

    def _end(self, stop_reasons: dict[int, StopReason]) -> dict[int, StopReason]:
        """Confirms the best policies of seeds that end now, and ends these seeds; the other seeds continue."""
        stop_reasons = {seed: self.seeds[seed].final_stop_reason(reason) for seed, reason in stop_reasons.items()}
        runs = [self.seeds[seed] for seed, reason in stop_reasons.items() if reason in CONFIRMED_AT]
        if runs and hosts.is_writer():
            # The evaluation program takes `config.seeds` policies at a time.
            requested = self._stop_request.requested
            with self._console.busy("confirming the best policy in fresh episodes"):
                confirm(
                    runs, lambda policies: self._evaluator.evaluate(policies, self._stops), self.config.seeds, requested
                )
        for seed, reason in stop_reasons.items():
            self._end_seed(seed, reason)
        return stop_reasons

    def _end_seed(self, seed: int, stop_reason: StopReason) -> None:
        run = self.seeds[seed]
        if self._advice is not None and run.advice is None:
            run.advice = self._advice
        if self._unfinished.keys() == {seed}:
            self._page.stop()  # the page at the end stays
        self._fields[seed], result = run.finish(stop_reason)
        self.results[seed] = result
        if self.config.seeds > 1:
            failed = not result.stop_reason.succeeded and result.stop_reason not in FROM_OUTSIDE
            fields = {"seed": seed, "stop_reason": result.stop_reason.name}
            self._console.event(run.host.logged_step, "seed_given_up" if failed else "seed_ended", fields)

    def _refuse_shared_leaves(self) -> None:
        """Refuses environments that keep arrays of all environments together: MJX-Warp has no axis for seeds.

        Raises:
            ConfigError: The environments have such arrays.
        """
        if any(has_shared(run.state.env_state) for run in self.seeds.values()):
            raise ConfigError(
                f"seeds: {self.config.env.name} keeps the contacts of all environments in one array (MJX-Warp), which "
                "cannot be mapped over seeds; train one seed per process with seeds=1, or use impl=jax"
            )

    def _agree_on_program(self) -> None:
        """Ends resumed seeds that need another program; the other seeds take the smallest memory plan of any seed."""
        precision = self.config.precision
        for seed, run in self._unfinished.items():
            level = run.programs.level
            if level != Level(precision.matmul, precision.network):
                self._end_seed(seed, run.needs_own_program(f"its precision is now {level}"))
        plan = smallest([run.host.plan for run in self._unfinished.values()])
        for run in self._unfinished.values():
            run.take_plan(plan)

    @property
    def _unfinished(self) -> dict[int, SeedRun]:
        """The seeds that have not ended."""
        return {seed: run for seed, run in self.seeds.items() if seed not in self.results}

    @property
    def _training(self) -> dict[int, SeedRun]:
        """The seeds of the next iteration; after a crash, the seeds with the oldest checkpoints catch up first."""
        unfinished = self._unfinished
        behind = min(run.host.logged_step for run in unfinished.values()) + self.config.env_steps_per_iteration
        return {seed: run for seed, run in unfinished.items() if run.host.logged_step < behind}

    @property
    def _evaluator(self) -> Evaluator:
        return next(iter(self.seeds.values())).programs.evaluator

    def _save_and_end(self, stop_reason: StopReason) -> StopReason:
        """Saves every good state that is not saved, and ends the run. Another thread calls this during compilation."""
        for run in self._unfinished.values():
            run.saving.save_if_due(run.state)
        return self._finish(stop_reason).stop_reason

    def _last_save(self) -> str:
        """The last checkpoint in a few words; of several seeds the oldest one."""
        if not self.config.checkpoint.enabled:
            return "checkpoint.enabled=false saves nothing"
        steps = [run.saving.saved_step for run in self._unfinished.values()]
        saved = [step for step in steps if step is not None]
        if len(saved) < len(steps) or not saved:
            return "nothing has been saved yet"
        return f"the last checkpoint is of step {min(saved):,}"

    def _advise(self, ending: hosts.Ending) -> None:
        """Explains a failure of another process, or of all; a signal explains itself."""
        if hosts.count() > 1 and StopReason[ending.stop_reason] not in FROM_OUTSIDE:
            self._advice = ending.message
        if ending.process != hosts.index():
            print(f"rlstable: {ending.stop_reason}: {ending.message}", file=sys.stderr, flush=True)

    def _finish(self, stop_reason: StopReason | None) -> Result:
        """Ends the unfinished seeds and the run."""
        with contextlib.closing(self):
            for seed in self._unfinished:
                self._end_seed(seed, stop_reason or StopReason.error)
            if self.config.seeds == 1:
                return self.results[self.config.seed]
            results = [self.results[seed] for seed in self.config.each_seed if seed in self.results]
            advice = self._advice
            return finish_seeds(self._fields, results, stop_reason, advice, self.config, self.run_dir, self._console)


def over_seeds(rows: list[Row]) -> Row:
    """One row for the console: sums of trips and rates, means of all other numbers."""
    numbers: dict[str, list[float]] = {}
    for key, value in (item for row in rows for item in row.items()):
        if value is not None and math.isfinite(value):
            numbers.setdefault(key, []).append(value)
    summed = ("guards/", "training/sps")
    return {key: sum(found) / (1 if key.startswith(summed) else len(found)) for key, found in numbers.items()}


def _require_open_files(seeds: int) -> None:
    """Checks that the process may open the files of all seeds.

    Raises:
        ConfigError: It may not.
    """
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = (limit - _OTHER_FILES) // _OPEN_FILES
    if limit != resource.RLIM_INFINITY and seeds > most:
        raise ConfigError(
            f"seeds: {seeds} seeds keep {seeds * _OPEN_FILES} files open, and this process may open {limit}; train at "
            f"most {most} seeds at once, or raise the limit with ulimit -n"
        )
