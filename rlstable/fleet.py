"""Several seeds of one configuration, trained at once by one program: a fleet of runs that decide each for itself.

Each seed is a run like any other, with its own folder, guards, remedies, rollbacks and ending; what they share is the
compiled iteration, which steps all of them side by side. A seed that has ended goes round with the others, and nobody
looks at what becomes of it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from rlstable import sharding
from rlstable.aggregate import fields_of, row_of
from rlstable.assembly import Assembly, Program
from rlstable.closing import close
from rlstable.config import Config, ConfigError
from rlstable.endings import Ending, command
from rlstable.evaluation import Evaluator, Worth, make_evaluator
from rlstable.guards.base import MoreGuards
from rlstable.io.console import Console
from rlstable.io.logbook import Logbook
from rlstable.io.rundir import open_run_dir, seed_folder, seed_folders, write_config, write_machine
from rlstable.io.seed_console import SeedConsole
from rlstable.leaving import Leaving
from rlstable.result import Result, Row
from rlstable.runner import Callback, Company, Runner
from rlstable.supervise.memory_plan import OutOfMemory, exhausted
from rlstable.supervise.signals import Signals
from rlstable.supervisor import Builds, Which


class Fleet:
    """`config.seeds` runs that train together.

    Attributes:
        config: What to run.
        run_dir: Where they are kept, each in a folder `seed-<seed>`.
        seeds: The runs, by seed.
        history: Every row of all of them together.

    Args:
        config: What to run.
        run_dir: Where it is kept.
        callback: Called as `callback(step, row)` with every row of all seeds together; returning True ends them.
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
        self.config = config
        self.run_dir = Path(run_dir)
        self.history: list[Row] = []
        self.seeds: dict[int, Runner] = {}
        self._callback = callback
        self._results: dict[int, Result] = {}
        self._last_evaluation: Row = {}
        self._programs: dict[Which, Program] = {}
        self._rows: dict[int, Row] = {}
        self._last_seconds = 0.0
        mesh = sharding.make_mesh(config.devices)
        if mesh.size > 1:
            raise ConfigError(
                f"seeds: {config.seeds} train together on one device, here are {mesh.size}; set devices=1"
            )
        title = f"{config.env.name}, {config.seeds} seeds"
        self._console = Console(config.sinks.console, config.total_steps, title)
        self._leaving = Leaving(self._console, self._leave, signals)
        self._logbook = Logbook(_without_wandb(config), self.run_dir, self._console)
        resumes, self._lock = open_run_dir(self.run_dir, config.resume, config.seeds)
        try:
            builds = Builds(_Once(Assembly), _Once(make_evaluator), shared=True)
            for seed in config.each_seed:
                self.seeds[seed] = self._open(seed, more_guards, builds)
            self._require_one_program()
            self._logbook.start(None, self.step if resumes else None)
            write_config(self.run_dir, config.model_dump(mode="json"))
            write_machine(self.run_dir, self.seeds[config.seed].machine)
        except BaseException:
            self.close()
            for folder in seed_folders(self.run_dir):
                with contextlib.suppress(OSError):
                    folder.rmdir()  # a mistake leaves nothing behind; what is not empty stays
            raise

    @property
    def step(self) -> int:
        """Environment steps that every seed that goes on was trained for, those given up included."""
        behind = [runner.logged_step for runner in self._going.values()]
        return min(behind) if behind else max(runner.logged_step for runner in self.seeds.values())

    def run(self) -> Result:
        """Trains every seed to its ending. Whatever these are, the folders say which."""
        with self._leaving.listening():
            return self._run()

    def _run(self) -> Result:
        ending = Ending.error
        try:
            self._loop()
        except OutOfMemory as error:
            self._console.message(str(error))
            ending = Ending.out_of_memory
        except KeyboardInterrupt:
            ending = Ending.interrupted  # the second one, which does not wait for the iteration
            raise
        except Exception as error:
            self._event("error", message=f"{type(error).__name__}: {error}")
            raise
        finally:
            result = self._finish(ending)
        return result

    def close(self) -> None:
        """Gives the folders free, as `run` does at its end; for a fleet that is not to be run. May be called again."""
        for runner in self.seeds.values():
            runner.close()
        self._logbook.close()
        self._lock.release()

    def _open(self, seed: int, more_guards: MoreGuards | None, builds: Builds) -> Runner:
        """The run of one seed, which tells its rows to this."""
        console = SeedConsole(self._console, seed, first=seed == self.config.seed)
        own = self.config.of_seed(seed, "/".join(self.run_dir.absolute().parts[-2:]))

        def hear(_: int, row: Row) -> None:
            self._rows[seed] = row

        company = Company(console, self._leaving, builds)
        return Runner(own, seed_folder(self.run_dir, seed), hear, more_guards, company=company)

    def _require_one_program(self) -> None:
        """Checks that all seeds stand where one program can go on with them."""
        first, *others = self.seeds.values()
        for runner in others:
            if runner.supervisor.which != first.supervisor.which:
                raise ConfigError(
                    f"resume: {first.run_dir} and {runner.run_dir} are at different precisions or sizes by now, which "
                    f"no program has both of; go on with each alone, {command('train', runner.run_dir, 'resume=')}"
                )

    @property
    def _going(self) -> dict[int, Runner]:
        """The seeds that have not ended."""
        return {seed: runner for seed, runner in self.seeds.items() if seed not in self._results}

    def _loop(self) -> None:
        for seed, runner in self._going.items():
            if runner.step >= self.config.total_steps:
                self._end(seed, Ending.completed)
        if self._going:
            self._program()
        stopped = self._leaving.ending  # while the program compiled, or before that
        if stopped is not None:
            for seed in self._going:
                self._end(seed, stopped)
        while self._going:
            self._advance()

    def _advance(self) -> None:
        """One iteration of all seeds, and what is due after it for those that go on."""
        everyone, going = list(self.seeds.values()), self._going
        iterate = self._program()
        if any(runner.evaluates_next for runner in going.values()):
            self._evaluator.prepare([runner.judged for runner in everyone])
        started = time.perf_counter()
        try:
            with self._console.working("an iteration", self._last_seconds or None):
                found = iterate.each(tuple(runner.state for runner in everyone))
                reports = jax.device_get([report for _, report in found])
        except jax.errors.JaxRuntimeError as error:
            if not exhausted(error):
                raise
            self._make_do()
            return
        self._last_seconds = time.perf_counter() - started
        for runner, (state, _) in zip(everyone, found, strict=True):
            runner.state = state
        told = {seed: report for seed, report in zip(self.seeds, reports, strict=True) if seed in going}
        due = [seed for seed, report in told.items() if going[seed].count(report, self._last_seconds)]
        worth = self._evaluate(due)
        for seed, report in told.items():
            ending = going[seed].conclude(report, worth.get(seed, {}))
            if ending is not None:
                self._end(seed, ending)
        self._tell(len(told))

    def _evaluate(self, due: list[int]) -> dict[int, Worth]:
        """What the policies of some seeds are worth; all are judged, since only that is always the same program."""
        if not due:
            return {}
        try:
            found = self._evaluator.judge([runner.judged for runner in self.seeds.values()])
        except OutOfMemory:
            for runner in self._going.values():
                runner.save_if_due()  # the run ends, with all that was learnt
            raise
        return {seed: worth for seed, worth in zip(self.seeds, found, strict=True) if seed in due}

    @property
    def _evaluator(self) -> Evaluator:
        return next(iter(self.seeds.values())).supervisor.evaluator

    def _program(self) -> Program:
        """The program of the next iteration, in as much memory as there is."""
        supervisor = next(iter(self._going.values())).supervisor
        while supervisor.which not in self._programs:
            states = tuple(runner.state for runner in self.seeds.values())
            needed, program = supervisor.fitting(functools.partial(supervisor.assembly.compiled, *states))
            if program is not None:
                self._programs[supervisor.which] = program
            else:
                for runner in self.seeds.values():
                    runner.shrink(needed)
        return self._programs[supervisor.which]

    def _make_do(self) -> None:
        """Goes back and on with a smaller plan, after the device has refused memory for an iteration."""
        going = self._going
        for runner in going.values():
            runner.make_do()
        some = next(iter(going.values())).state
        for seed in self._results:  # whose arrays went with the iteration
            self.seeds[seed].state = sharding.copied(some)

    def _tell(self, training: int) -> None:
        """One row for those that seeds have logged after this iteration, in which so many of them were trained."""
        rows, self._rows = self._rows, {}
        if not rows:
            return
        returns = [runner.host.last_return for runner in self.seeds.values()]
        row = row_of(list(rows.values()), returns, training)
        if "eval/episode_reward" in row:
            self._last_evaluation = row
        step = self.step
        self._logbook.log(step, row)
        self.history.append({"step": step, **row})
        if self._callback is not None and self._callback(step, row) is True:
            for runner in self._going.values():
                runner.stop()

    def _end(self, seed: int, ending: Ending) -> None:
        """The end of one seed; the others go on."""
        runner = self.seeds[seed]
        self._results[seed] = runner.finish(ending)
        of_its_own = not ending.succeeded and ending not in (Ending.interrupted, Ending.preempted, Ending.time_limit)
        self._event("seed_given_up" if of_its_own else "seed_ended", seed=seed, stop_reason=ending.name)

    def _event(self, kind: str, **fields: Any) -> None:
        self._logbook.event(self.step, kind, fields)

    def _leave(self, ending: Ending) -> None:
        """Saves what is not saved, and finishes."""
        for runner in self._going.values():
            runner.save_if_due()
        self._finish(ending)

    def _finish(self, ending: Ending) -> Result:
        """Ends the seeds that have not ended by now, and says how all of them did."""
        for seed in self._going:
            self._end(seed, ending)
        with contextlib.closing(self):
            own = {seed: runner.fields(self._results[seed].ending) for seed, runner in self.seeds.items()}
            fields = fields_of(own)
            self._event("stopped", **fields)
            ending = Ending[fields["stop_reason"]]
            saved = any(runner.saved for runner in self.seeds.values())
            close(ending, fields, self.run_dir, self._console, report=self.config.sinks.report, saved=saved)
            results = tuple(self._results[seed] for seed in self.seeds)
            return Result(ending, self.run_dir, self.step, self._last_evaluation, self.history, results)


def start(config: Config, run_dir: str | Path, *args: Any, **kwargs: Any) -> Runner | Fleet:
    """What trains a configuration, one seed or several; arguments and errors as for either."""
    kind = Fleet if config.seeds > 1 else Runner
    return kind(config, run_dir, *args, **kwargs)


def _without_wandb(config: Config) -> Config:
    """For the rows of all seeds together: Weights & Biases has those of each, as a group."""
    wandb = config.sinks.wandb.model_copy(update={"mode": "disabled"})
    return config.model_copy(update={"sinks": config.sinks.model_copy(update={"wandb": wandb})})


class _Once:
    """Builds of one kind, each made by whichever seed asks for it first.

    Args:
        build: Makes one, from a configuration and what the seeds have in common.
    """

    def __init__(self, build: Callable[..., Any]):
        self._build = build
        self._built: dict[str, Any] = {}

    def __call__(self, config: Config, *args: Any) -> Any:
        """The one for a configuration."""
        key = config.model_dump_json(exclude={"seed", "sinks", "resume"})
        if key not in self._built:
            self._built[key] = self._build(config, *args)
        return self._built[key]
