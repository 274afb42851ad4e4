"""The training loop on the host: iterate, evaluate, log, save, stop. A run trains one seed, or several together."""

from __future__ import annotations

import contextlib
import importlib
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from rlstable.compilation.ffi import interruptible
from rlstable.compilation.xla import check_flags
from rlstable.config import Config
from rlstable.config.schema import expand_home
from rlstable.device import hosts
from rlstable.device.sharding import fetch
from rlstable.envs.objects import Environments
from rlstable.io.console import Console
from rlstable.io.kept_model import resumed_env
from rlstable.io.run_folder import default_run_dir, forget_result
from rlstable.policy.evaluator import EvaluationMetrics, Evaluator, PolicySnapshot
from rlstable.ppo.guards import MoreGuards
from rlstable.ppo.state import Metrics
from rlstable.runner.after_iteration import final_stop_reason, finish_iteration, record_iteration, roll_back_to_plan
from rlstable.runner.evaluation import CONFIRMED_AT, compare_with_best, confirm, evaluate
from rlstable.runner.kept_teacher import load_teacher
from rlstable.runner.listener import Listener, Listeners, Row
from rlstable.runner.log import Callback
from rlstable.runner.opening import Opening
from rlstable.runner.programs import Programs, mesh_of, require_same_run
from rlstable.runner.seed import Seed
from rlstable.runner.seeds import Result, Seeds
from rlstable.runner.setup import Program
from rlstable.runner.stopping import StopRequest
from rlstable.runner.summary import header
from rlstable.supervise.memory import OutOfMemory, is_out_of_memory
from rlstable.supervise.signals import Signals
from rlstable.supervise.stop_reasons import FROM_OUTSIDE, StopReason, nothing_to_train

_NO_WAY_BACK = (
    "The device refused memory while training. Several processes, or a run with supervise.recovery.enabled=false, "
    "cannot take a smaller plan: resume with a larger ppo.gradient_accumulation or a smaller env.envs_per_pass."
)


class TrainingLoop:
    """Trains `config.seeds` seeds at once with one compiled program.

    Each seed has its own guards, remedies, rollbacks and stop reason. A finished seed stays in the batch because the
    program's shape is fixed; its results are ignored. With several seeds, each has a folder `seed-<seed>`.

    `run_dir`, `callback`, `more_guards` and `listeners` are those of `rlstable.fit`. `signals` are handlers that the
    caller has installed, None to install them during `run`. `environments` are objects of the user, None to load the
    configured environment. Raises `ConfigError` if the configuration, the environment, the folder or a flag of JAX is
    unusable.
    """

    def __init__(
        self,
        config: Config,
        run_dir: str | Path | None,
        callback: Callback | None = None,
        more_guards: MoreGuards | None = None,
        signals: Signals | None = None,
        environments: Environments | None = None,
        listeners: Iterable[Listener] = (),
    ):
        self.config = config
        check_flags()
        hosts.start(config.distributed)
        mesh = mesh_of(config.devices, config.env, config.eval)
        require_same_run(config.seeds, config.model_dump(mode="json"), mesh)
        # Only the writer makes a folder, whose name contains the time.
        self.run_dir = expand_home(
            hosts.from_writer("run_dir", lambda: str(run_dir or default_run_dir(config.resume, config.env.name)))
        )
        shown = hosts.of_writer(config.logging.console, "off")
        whole_from = config.ppo.num_envs * config.env.training_length
        self._console = Console(shown, config.total_steps, whole_from=whole_from)
        env = resumed_env(config.env, config.resume, self.run_dir, self._console.message)
        self.config = config = config.model_copy(update={"env": env})
        self._stop_request = StopRequest(
            self._console, self._save_and_end, self._last_save, signals, config.supervise.max_wall_time
        )
        own = hosts.of_writer(listeners, ())
        self._listeners = Listeners(own, self._console, lambda kind, **fields: self.programs.event(kind, **fields))
        self._last_seconds = 0.0
        self._advice: str | None = None
        listening = self.run_dir, callback, self._console, self._listeners
        self._seeds = Seeds(config.each_seed, config.env_steps_per_iteration, config.env.has_name, *listening)
        teacher = load_teacher(config.ppo.teacher, config.resume, self.run_dir)
        self.programs = Programs(config, mesh, more_guards or {}, self._stop_request.compiling, environments, teacher)
        if self.programs.mesh.size < mesh.size:
            others = "start a process for each other device with CUDA_VISIBLE_DEVICES"
            self._console.message(f"1 of {mesh.size} devices trains all {config.seeds} seeds; {others}")
        Opening(config, self.programs, *listening).open(self._seeds)
        self._listeners.opened(self.run_dir, self.seeds)

    @property
    def seeds(self) -> dict[int, Seed]:
        """The seeds that this process trains, by seed."""
        return self._seeds.opened

    @property
    def single(self) -> Seed:
        """The seed of a run with one seed."""
        (seed,) = self.seeds.values()
        return seed

    def run(self) -> Result:
        """Trains every seed until it stops. However the run ends, the run folder has the stop reason."""
        with self._stop_request.catching_signals():
            return self._run()

    @property
    def received_signal(self) -> int | None:
        """The number of the signal that ended `run`; None without one."""
        return self._stop_request.received

    def advance(self) -> dict[int, StopReason]:
        """Runs one iteration and the steps due after it; returns the stop reasons of the seeds that have ended."""
        training = self._seeds.training
        metrics = self._iterate(training)
        return {} if metrics is None else self._finish_iteration(training, metrics)

    def close(self) -> None:
        """Releases the folders if `run` is not called; `run` releases them itself. May be called again."""
        self._seeds.close()

    def _run(self) -> Result:
        stop_reason: StopReason | None = StopReason.error
        try:
            self._train()
            hosts.from_writer("ended", lambda: True)  # a process returns after the writer has written `result.json`
            stop_reason = None  # each seed has a stop reason
        except BaseException as error:  # also the second signal, and SystemExit of a callback
            ending = hosts.announce(*_cause(error), error)
            stop_reason = StopReason[ending.stop_reason]
            if not isinstance(error, Exception):
                raise
            self._explain(ending, error)
            if stop_reason is StopReason.error and ending.is_own:
                raise
        finally:
            result = self._seeds.finish(stop_reason, self._advice)
        return result

    def _train(self) -> None:
        before = {number: seed.ended_before for number, seed in self._seeds.unfinished.items()}
        ended = {number: reason for number, reason in before.items() if reason is not None}
        reasons = {*ended.values(), *(result.stop_reason for result in self._seeds.results.values())}
        if ended.keys() == self._seeds.unfinished.keys():
            self._console.message(nothing_to_train(reasons, self.config.total_steps, self.config.eval.target_return))
        self._end(ended)
        if self._seeds.unfinished:
            self._compile(self._seeds.training)
            # The first collective of gloo fails after 30 s, and one process may compile for longer than another.
            hosts.gather("compiled", True)
            requested, _ = self._stop_request.agreed(float("-inf"))  # before or during the compilation
            if requested is not None:
                self._end(dict.fromkeys(self._seeds.unfinished, requested))
        while self._seeds.unfinished:
            self.advance()

    def _compile(self, training: dict[int, Seed]) -> None:
        """Prints the header, compiles, and evaluates the policies of a new run if the configuration says so."""
        first = next(iter(training.values()))
        self._console.header(header(first, self.config.seeds, self.run_dir))
        if any(seed.schedule.evaluates for seed in training.values()):
            hosts.from_writer("begun", lambda: self._evaluator(training).begin(self._policies(training)))
        if self.config.checkpoint.enabled:
            importlib.import_module("orbax.checkpoint")  # takes a moment, while the programs compile
        self._program(training)
        if self.config.eval.at_start and not any(seed.host.logged_iteration for seed in training.values()):
            for number, metrics in self._evaluate(training, training).items():
                training[number].log.first_row(metrics)
            self._seeds.show_rows()

    def _evaluator(self, training: dict[int, Seed]) -> Evaluator:
        return self.programs.evaluator(next(iter(training.values())).host)

    def _policies(self, training: dict[int, Seed]) -> list[PolicySnapshot]:
        return list(self._seeds.policies(training).values())

    def _program(self, training: dict[int, Seed]) -> Program:
        """The program of the next iteration. Until it fits, all seeds take smaller memory plans.

        Raises `OutOfMemory` if no memory plan fits.
        """
        host = next(iter(training.values())).host
        while True:
            program, needed = self.programs.iteration(host, self._seeds.states(training))
            if program is not None:
                return program
            self._seeds.take_plan(self.programs.memory.smaller(host.plan, needed))

    def _iterate(self, training: dict[int, Seed]) -> dict[int, Metrics] | None:
        """Trains the seeds for one iteration; None if the device refused memory, so that they were rolled back."""
        program = self._program(training)
        if any(seed.schedule.evaluates_next for seed in training.values()):
            # Compile before the iteration: a signal during compilation saves the present state.
            hosts.from_writer("ready", lambda: self._evaluator(training).prepare(self._policies(training)))
        started = time.perf_counter()
        number, expected = max(seed.host.iteration for seed in training.values()) + 1, self._last_seconds or None
        reminder = self._console.working(f"iteration {number}", expected)
        try:
            with reminder, interruptible():
                results = program.each(self._seeds.states(training))
                metrics = fetch(self._seeds.store(results, training))
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._roll_back_to_smaller_plan(training)
            return None
        self._last_seconds = time.perf_counter() - started
        return metrics  # type: ignore[no-any-return]

    def _roll_back_to_smaller_plan(self, training: dict[int, Seed]) -> None:
        """Rolls all seeds back to their last good states with a smaller memory plan.

        Raises `OutOfMemory` without a smaller plan, or without a state to roll back to.
        """
        if not all(seed.may_roll_back_to_plan for seed in training.values()):
            raise OutOfMemory(_NO_WAY_BACK)
        plan = self.programs.memory.smaller(next(iter(training.values())).host.plan, None)
        for seed in training.values():
            roll_back_to_plan(seed, plan)
            seed.saving.save_at_once(seed.state)
        self._seeds.take_plan(plan)

    def _finish_iteration(self, training: dict[int, Seed], metrics: dict[int, Metrics]) -> dict[int, StopReason]:
        """Evaluates, logs, saves and ends the seeds that an iteration trained."""
        if self.config.seeds > 1 and not self._seeds.gone:
            forget_result(self.run_dir)  # not sooner: a run that cannot start loses nothing
        seconds = self._last_seconds
        due = [number for number, seed in training.items() if record_iteration(seed, metrics[number], seconds)]
        evaluations = self._evaluate(training, due) if due else {}
        self._compare_suspects(training, evaluations)
        # Asked once for all seeds, so that all of them stop after the same iteration.
        requested, saves = self._stop_request.agreed(seconds, any([seed.saving.due for seed in training.values()]))
        own_reasons = {
            number: self._finish_iteration_of(seed, metrics[number], evaluations.get(number, {}), requested, saves)
            for number, seed in training.items()
        }
        self._seeds.show_rows()
        if evaluations and requested is None:
            for number in evaluations:
                self._listeners.evaluated(training[number])
            hosts.gather("listened", True)  # a collective must not wait for what a listener compiles
        if any(seed.log.stopped_by_callback for seed in training.values()):
            requested = requested or StopReason.stopped
        requested = requested or self._stop_request.requested_since(seconds)  # while the state was saved
        stop_reasons = {number: own_reasons.get(number) or requested for number in self._seeds.unfinished}
        # Save every seed before the first one ends, since ending takes time. Waiting seeds are saved already.
        for number, seed in training.items():
            if stop_reasons[number] is not None:
                seed.saving.save_if_due(seed.state)
        return self._end({number: reason for number, reason in stop_reasons.items() if reason is not None})

    def _finish_iteration_of(
        self, seed: Seed, metrics: Metrics, evaluation: Row, requested: StopReason | None, saves: bool
    ) -> StopReason | None:
        """Logs, decides and saves for one seed; with several seeds, an error ends this seed alone."""
        try:
            return finish_iteration(seed, metrics, evaluation, requested, saves)
        except Exception as error:
            if self.config.seeds == 1:
                raise
            traceback.print_exc()
            seed.event("error", message=f"{type(error).__name__}: {error}")
            return StopReason.error

    def _evaluate(self, training: dict[int, Seed], due: Any) -> dict[int, EvaluationMetrics]:
        """Metrics of the present policies of the seeds that are due.

        If the evaluation does not fit, raises `OutOfMemory` after every good state is saved.
        """
        try:
            with self._console.working("evaluating the policy"):
                metrics = evaluate(self._evaluator(training), self._seeds.policies(training))
        except OutOfMemory:
            for seed in training.values():
                seed.saving.save_if_good(seed.state)  # the run ends with everything that it has learned
            raise
        return {number: metrics[number] for number in due}

    def _compare_suspects(self, training: dict[int, Seed], evaluations: dict[int, EvaluationMetrics]) -> None:
        """Compares policies whose return may have collapsed with the best ones, if memory allows."""
        found = [seed for number, seed in training.items() if seed.return_check.suspects(evaluations.get(number, {}))]
        if found:
            evaluator = self.programs.evaluator(found[0].host)
            with contextlib.suppress(OutOfMemory), self._console.working("comparing the policy with the best one"):
                compare_with_best(evaluator, self._seeds.policies(training), found)

    def _end(self, stop_reasons: dict[int, StopReason]) -> dict[int, StopReason]:
        """Confirms the best policies of seeds that end now, and ends these seeds; the other seeds continue."""
        stop_reasons = {n: final_stop_reason(self.seeds[n], reason) for n, reason in stop_reasons.items()}
        seeds = [self.seeds[number] for number, reason in stop_reasons.items() if reason in CONFIRMED_AT]
        if seeds:
            evaluator, requested = self.programs.evaluator(seeds[0].host), self._stop_request.requested
            with self._console.working("confirming the best policy in fresh episodes"):
                # The evaluation program takes `config.seeds` policies at a time.
                confirm(seeds, evaluator.evaluate, self.config.seeds, requested)
        for number, reason in stop_reasons.items():
            self._seeds.end(number, reason, self._advice)
        return stop_reasons

    def _save_and_end(self, stop_reason: StopReason) -> StopReason:
        """Saves every good state that is not saved, and ends the run. Another thread calls this during compilation."""
        for seed in self._seeds.unfinished.values():
            seed.saving.save_if_due(seed.state)
        if not self._seeds.opened and not self._seeds.results:
            return stop_reason  # while the first seed opens
        return self._seeds.finish(stop_reason, self._advice).stop_reason

    def _last_save(self) -> str:
        """The last checkpoint in a few words; of several seeds the oldest one."""
        if not self.config.checkpoint.enabled:
            return "checkpoint.enabled=false saves nothing"
        steps = [seed.saving.saved_step for seed in self._seeds.unfinished.values()]
        saved = [step for step in steps if step is not None]
        if len(saved) < len(steps) or not saved:
            return "nothing has been saved yet"
        return f"the last checkpoint is of step {min(saved):,}"

    def _explain(self, ending: hosts.Ending, error: Exception) -> None:
        """Tells why the run fails: in the log of an error, else in the advice."""
        if isinstance(error, OutOfMemory):
            self._advice = str(error)
        else:
            for seed in self._seeds.unfinished.values():
                seed.event("error", message=f"{type(error).__name__}: {error}")
        if StopReason[ending.stop_reason] not in FROM_OUTSIDE:  # a signal explains itself
            self._advice = ending.advice or self._advice


def _cause(error: BaseException) -> tuple[str, int, str]:
    """The stop reason of an error, its exit code, and a message for the other processes."""
    message = f"process {hosts.index()}: {type(error).__name__}: {error}"
    reason = StopReason.error
    if isinstance(error, OutOfMemory):
        reason, message = StopReason.out_of_memory, str(error)
    elif isinstance(error, KeyboardInterrupt):  # the second signal does not wait for the iteration
        reason, message = StopReason.interrupted, f"process {hosts.index()} was interrupted"
    return reason.name, reason.exit_code, message
