"""A fleet: several seeds of one configuration, trained at once by one compiled program.

Each seed is a run with its own folder, guards, remedies, rollbacks and stop reason. All seeds share the compiled
iteration. A finished seed stays in the batch because the program's shape is fixed; its results are ignored.
"""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax

from rlstable.compilation.ffi import interruptible
from rlstable.compilation.once import SharedBuilds
from rlstable.compilation.xla import Compiling
from rlstable.config import Config, ConfigError
from rlstable.guards.base import MoreGuards
from rlstable.io.console import Console
from rlstable.io.logbook import Logbook
from rlstable.io.presence import Presence
from rlstable.io.run_folder import (
    forget_result,
    free_reserve,
    has_checkpoint,
    open_run_dir,
    read_result,
    seed_folder,
    seed_folders,
    seed_of,
)
from rlstable.io.seed_console import SeedConsole
from rlstable.io.thinning import History
from rlstable.io.trusted_folders import remember
from rlstable.policy.evaluator import EvaluationMetrics, Evaluator, make_evaluator
from rlstable.ppo.networks import Networks
from rlstable.ppo.state import Metrics
from rlstable.report.run_record import last_row
from rlstable.runner.aggregate import Fields, RowsOfSeeds, fields_of
from rlstable.runner.confirm import CONFIRMED_AT, confirm
from rlstable.runner.finish import close
from rlstable.runner.result import Result, Row
from rlstable.runner.runner import Runner
from rlstable.runner.seed_run import Callback, SeedRun, mesh_of
from rlstable.runner.setup import Program, TrainingSetup
from rlstable.runner.slots import FleetSlots
from rlstable.runner.stopping import StopRequest
from rlstable.runner.supervisor import Factories, LogEvent, ProgramKey
from rlstable.supervise.ladder import Level
from rlstable.supervise.memory_plan import OutOfMemory, exhausted, smallest
from rlstable.supervise.signals import Signals
from rlstable.supervise.stop_reasons import FROM_OUTSIDE, StopReason, stays_ended


class Fleet:
    """`config.seeds` runs that train together.

    Attributes:
        config: What to run.
        run_dir: Where they are kept, each in a folder `seed-<seed>`.
        seeds: The runs that were not at their end before, by seed.
        history: Rows of all of them together, those of long runs thinned (`io.thinning`).

    Args:
        config: What to run.
        run_dir: Where it is kept.
        callback: Called as `callback(step, row)` with every row of all seeds together; returning True ends them.
        more_guards: The user's guards, by site (`env`, `batch`, `update`, `state`) and name.
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
        self.config = config
        self.run_dir = Path(run_dir)
        self.history: list[Row] = History()
        self.seeds: dict[int, SeedRun] = {}
        self._callback = callback
        self._more_guards = more_guards
        self._results: dict[int, Result] = {}
        self._fields: dict[int, Fields] = {}
        self._slots = FleetSlots(config.each_seed)
        self._last_evaluation: Row = {}
        self._programs: dict[ProgramKey, Program] = {}
        self._rows = RowsOfSeeds()
        self._last_seconds = 0.0
        self._reached = 0
        self._ending: StopReason | None = None
        self._advice: str | None = None
        mesh = mesh_of(config)
        if mesh.size > 1:
            raise ConfigError(
                f"seeds: {config.seeds} train together on one device, here are {mesh.size}; set devices=1"
            )
        title = f"{config.env.name}, {config.seeds} seeds"
        self._console = Console(config.logging.console, config.total_steps, title, verbose=config.logging.verbose)
        self._stop_request = StopRequest(self._console, self._leave, signals, config.supervise.max_wall_time)
        self._logbook = Logbook(_without_wandb(config), self.run_dir, self._console)
        resumes, self._lock = open_run_dir(self.run_dir, config.resume, config.seeds)
        try:
            self._open(resumes)
            machine = next(iter(self.seeds.values())).machine if self.seeds else None
            settings = config.model_dump(mode="json")
            self._presence = Presence(self.run_dir, self._lock, self._logbook, settings, machine, self._event)
            remember(self.run_dir / "config.yaml", config)  # every seed says it where that is impossible
            ahead = [run.logged_step for run in self._going.values()]
            # Rows of iterations that some have still to catch up with were right, and those are the same again.
            self._logbook.start(None, max(ahead) if ahead and config.resume is not None else None)
        except BaseException:
            self.close()
            for folder in seed_folders(self.run_dir):
                with contextlib.suppress(OSError):
                    folder.rmdir()  # a mistake leaves nothing behind; what is not empty stays
            raise

    @property
    def step(self) -> int:
        """Environment steps that every unfinished seed was trained for, lost steps included."""
        return min((run.logged_step for run in self._going.values()), default=self._reached)

    def run(self) -> Result:
        """Trains every seed to its ending. Whatever these are, the folders say which."""
        with self._stop_request.listening():
            return self._run()

    def _run(self) -> Result:
        self._ending = StopReason.error
        try:
            self._loop()
            self._ending = None  # that of its seeds
        except OutOfMemory as error:
            self._advice = str(error)
            self._ending = StopReason.out_of_memory
        except KeyboardInterrupt:
            self._ending = StopReason.interrupted  # the second one, which does not wait for the iteration
            raise
        except Exception as error:
            for log_event in (self._event, *(run.event for run in self._going.values())):
                log_event("error", message=f"{type(error).__name__}: {error}")
            raise
        finally:
            result = self._finish()
        return result

    def close(self) -> None:
        """Gives the folders free, as `run` does at its end; for a fleet that is not to be run. May be called again."""
        for run in self.seeds.values():
            run.close()
        self._logbook.close()
        free_reserve(self.run_dir)
        self._lock.release()

    def _open(self, resumes: bool) -> None:
        """Opens every unfinished seed, so that one program can continue with all of them."""
        if resumes:
            self._require_the_same_seeds()
        shown: set[str] = set()
        builds = Factories(SharedBuilds(TrainingSetup), SharedBuilds(self._make_evaluator), shared=True)
        group = "/".join(self.run_dir.absolute().parts[-2:])
        for seed in self.config.each_seed:
            folder = seed_folder(self.run_dir, seed)
            fields = read_result(folder) if resumes else None
            if fields is not None and stays_ended(fields, self.config):
                ending = StopReason[fields["stop_reason"]]
                self._fields[seed], self._results[seed] = fields, Result(ending, folder, fields["step"], {}, [])
                self._rows.recall(seed, last_row(folder))
                continue
            console = SeedConsole(self._console, seed, shown)
            hear = functools.partial(self._rows.take, seed)
            own = self.config.of_seed(seed, group)
            self.seeds[seed] = run = SeedRun(own, folder, hear, self._more_guards, console, self._stop_request, builds)
            if resumes:
                self._rows.recall(seed, last_row(folder))
            self._reached = max(self._reached, run.logged_step)
        self._agree()

    def _require_the_same_seeds(self) -> None:
        """Checks that none of the seeds that were saved would be left behind."""
        there = [seed_of(folder) for folder in seed_folders(self.run_dir) if has_checkpoint(folder)]
        if not set(there) <= set(self.config.each_seed):
            raise ConfigError(
                f"seeds: {self.run_dir} holds seeds {min(there)} to {max(there)}, and not all of them are among those "
                f"from {self.config.seed} on; set seed={min(there)} seeds={max(there) - min(there) + 1}, or more"
            )

    def _make_evaluator(
        self, config: Config, networks: Networks, compiling: Compiling, _: LogEvent, single: Any
    ) -> Evaluator:
        """The evaluator of all seeds, which tells of itself as all of them."""
        return make_evaluator(config, networks, compiling, self._event, single)

    def _agree(self) -> None:
        """Ends seeds that need another program, and gives the others the smallest plan that any seed has."""
        precision = self.config.precision
        for seed, run in self._going.items():
            if run.supervisor.level != Level(precision.matmul, precision.network):
                self._end(seed, run.needs_own_program(f"it is at the precision {run.supervisor.level} by now"))
        plan = smallest([run.host.plan for run in self._going.values()])
        for run in self._going.values():
            run.take_plan(plan)

    @property
    def _going(self) -> dict[int, SeedRun]:
        """The seeds that have not ended."""
        return {seed: run for seed, run in self.seeds.items() if seed not in self._results}

    @property
    def _training(self) -> dict[int, SeedRun]:
        """The seeds that the next iteration is for; after a crash those that were saved earlier catch up first."""
        before = self.step + self.config.env_steps_per_iteration
        return {seed: run for seed, run in self._going.items() if run.logged_step < before}

    def _loop(self) -> None:
        trained = [seed for seed, run in self._going.items() if run.step >= self.config.total_steps]
        self._confirm(dict.fromkeys(trained, StopReason.completed))
        for seed in trained:
            self._end(seed, StopReason.completed)
        if self._going:
            training = self._training
            self._slots.fill(training)
            if any(run.evaluates for run in training.values()):
                self._evaluator.begin(self._slots.policies(training))  # compiled while the iteration is traced
            self._program()
        stopped = self._stop_request.ending  # while the program compiled, or before that
        if stopped is not None:
            for seed in self._going:
                self._end(seed, stopped)
        while self._going:
            self._advance()

    def _advance(self) -> None:
        """One iteration of the seeds that train, and what is due after it."""
        iterate, training = self._program(), self._training
        if any(run.evaluates_next for run in training.values()):
            self._evaluator.prepare(self._slots.policies(training))
        started = time.perf_counter()
        try:
            with self._console.working("an iteration", self._last_seconds or None), interruptible():
                found = iterate.each(self._slots.states(training))
                reports = jax.device_get(self._slots.put(found, training))
        except jax.errors.JaxRuntimeError as error:
            if not exhausted(error):
                raise
            for run in training.values():
                run.shrink_after_oom()
            self._take_plan_of(training)
            return
        self._last_seconds = time.perf_counter() - started
        self._take_in(training, reports)

    def _take_in(self, training: dict[int, SeedRun], reports: dict[int, Metrics]) -> None:
        """Evaluates, logs, saves and ends the seeds that an iteration trained."""
        self._logbook.wait()  # a seed that is saved is not ahead of the row of all
        with contextlib.suppress(OSError, ConfigError):  # said by the seeds, which cannot save
            self._presence.ensure()
        forget_result(self.run_dir)
        due = [seed for seed, run in training.items() if run.record_iteration(reports[seed], self._last_seconds)]
        evaluations = self._evaluate(due, training)
        self._compare([seed for seed, run in training.items() if run.suspects(evaluations.get(seed, {}))], training)
        # Once for all of them, or some would stop an iteration before the others.
        requested_stop = self._stop_request.requested(self._last_seconds)
        endings = {
            seed: self._finish_iteration(run, reports[seed], evaluations.get(seed, {}), requested_stop)
            or requested_stop
            for seed, run in training.items()
        }
        waiting = self._going.keys() - training.keys()
        over = all(endings.values()) and (requested_stop is not None or not waiting)
        if not waiting and self._tell(training, over):
            for seed, run in training.items():
                run.save_if_due()
                endings[seed] = endings[seed] or StopReason.stopped
        # Only now that all of them are saved: to end takes its time. Those that wait are as they were saved.
        ended = {
            seed: ending for seed in sorted(self._going) if (ending := endings.get(seed, requested_stop)) is not None
        }
        ended = {seed: self.seeds[seed].final_stop_reason(ending) for seed, ending in ended.items()}
        self._confirm(ended)
        for seed, ending in ended.items():
            self._end(seed, ending)
            if seed in training:
                self._slots.leave(seed, training[seed].state)

    def _finish_iteration(
        self, run: SeedRun, report: Metrics, evaluation: Row, requested_stop: StopReason | None
    ) -> StopReason | None:
        """The stop reason of a seed, None if it continues; an error ends this seed alone."""
        try:
            return run.finish_iteration(report, evaluation, lambda: requested_stop)
        except Exception as error:
            traceback.print_exc()
            run.event("error", message=f"{type(error).__name__}: {error}")
            return StopReason.error

    def _evaluate(self, due: list[int], training: dict[int, SeedRun]) -> dict[int, EvaluationMetrics]:
        """Evaluates all seeds and returns the results of some: a program for fewer seeds would be another program."""
        if not due:
            return {}
        try:
            found = self._evaluator.evaluate(self._slots.policies(training))
        except OutOfMemory:
            for run in training.values():
                run.save_if_good()  # the run ends, with all that was learnt
            raise
        return {seed: evaluation for seed, evaluation in zip(self.config.each_seed, found, strict=True) if seed in due}

    def _compare(self, suspected: list[int], training: dict[int, SeedRun]) -> None:
        """Plays the best policies of some seeds and their present ones in the same episodes, all places each time."""
        if not suspected:
            return
        places = dict(zip(self.config.each_seed, self._slots.policies(training), strict=True))
        best = places | {seed: training[seed].best_policy_snapshot for seed in suspected}
        now = places | {seed: training[seed].fresh_policy_snapshot for seed in suspected}
        with contextlib.suppress(OutOfMemory):
            sides = [self._evaluator.play(list(policies.values())) for policies in (best, now)]
            for seed, of_best, of_now in zip(self.config.each_seed, *sides, strict=True):
                if seed in suspected:
                    training[seed].compare(of_best, of_now)

    @property
    def _evaluator(self) -> Evaluator:
        return next(iter(self.seeds.values())).supervisor.evaluator

    def _program(self) -> Program:
        """The program of the next iteration, in as much memory as there is, and a state in every place."""
        training = self._training
        self._slots.fill(training)
        supervisor = next(iter(training.values())).supervisor
        while supervisor.which not in self._programs:
            states = self._slots.states(training)
            needed, program = supervisor.fitting(functools.partial(supervisor.assembly.compiled, *states))
            if program is not None:
                self._programs[supervisor.which] = program
            else:
                for run in training.values():
                    run.shrink(needed)
                self._take_plan_of(training)
        return self._programs[supervisor.which]

    def _take_plan_of(self, training: dict[int, SeedRun]) -> None:
        """Has those that wait make do with the plan of those that train, and fills the places with states for it."""
        plan = next(iter(training.values())).host.plan
        for run in self._going.values():
            run.take_plan(plan)
        self._slots.fill(training, renew=True)

    def _tell(self, training: Collection[int], over: bool) -> bool:
        """One row of all seeds, once those that train have logged theirs; whether the callback wants to stop."""
        returns = [own["return"] for own in self._fields.values()]
        row = self._rows.together(training, [*returns, *(run.host.last_return for run in self._going.values())], over)
        if row is None:
            return False
        if "eval/episode_reward" in row:
            self._last_evaluation = {key: row[key] for key in row if key.startswith(("eval/", "seeds/"))}
        self._reached = max(self._reached, self.step)
        self._logbook.log(self._reached, row)
        self.history.append({"step": self._reached, **row})
        return self._callback is not None and self._callback(self._reached, row) is True

    def _confirm(self, ended: dict[int, StopReason]) -> None:
        """Confirms the best policies of seeds that end now, in full batches of the one evaluation program."""
        runs = [self.seeds[seed] for seed, ending in ended.items() if ending in CONFIRMED_AT]
        if runs:
            confirm(
                runs,
                lambda policies: self._evaluator.evaluate(policies),
                self.config.seeds,
                self._stop_request.requested,
            )

    def _end(self, seed: int, ending: StopReason) -> None:
        """Ends one seed; the others continue."""
        run = self.seeds[seed]
        if self._advice is not None and run.advice is None:
            run.advice = self._advice
        self._reached = max(self._reached, run.logged_step)
        ending = run.final_stop_reason(ending)
        self._fields[seed] = run.fields(ending)
        self._results[seed] = run.finish(ending)
        of_its_own = not ending.succeeded and ending not in FROM_OUTSIDE
        self._event("seed_given_up" if of_its_own else "seed_ended", seed=seed, stop_reason=ending.name)

    def _event(self, kind: str, **fields: Any) -> None:
        self._logbook.event(max(self.step, self._reached), kind, fields)

    def _leave(self, ending: StopReason) -> None:
        """Saves what is not saved, and finishes."""
        self._ending = ending
        self._logbook.wait()
        for run in self._going.values():
            run.save_if_due()
        self._finish()

    def _finish(self) -> Result:
        """Ends the unfinished seeds and reports how all seeds ended."""
        with contextlib.closing(self):
            for seed in self._going:
                self._end(seed, self._ending or StopReason.error)
            fields = fields_of(self._fields, self._ending)
            if self._advice is not None:
                fields["advice"] = self._advice
            self._event("stopped", **fields)
            ending = StopReason[fields["stop_reason"]]
            saved = any(map(has_checkpoint, seed_folders(self.run_dir)))
            close(ending, fields, self.run_dir, self._console, report=self.config.logging.report, saved=saved)
            results = tuple(self._results[seed] for seed in self.config.each_seed if seed in self._results)
            return Result(ending, self.run_dir, self.step, self._last_evaluation, self.history, results)


def start(config: Config, run_dir: str | Path, *args: Any, **kwargs: Any) -> Runner | Fleet:
    """A `Runner` for one seed or a `Fleet` for several; arguments and errors as for either."""
    kind = Fleet if config.seeds > 1 else Runner
    return kind(config, run_dir, *args, **kwargs)


def _without_wandb(config: Config) -> Config:
    """For the rows of all seeds together: Weights & Biases has those of each, as a group."""
    wandb = config.logging.wandb.model_copy(update={"mode": "disabled"})
    return config.model_copy(update={"logging": config.logging.model_copy(update={"wandb": wandb})})
