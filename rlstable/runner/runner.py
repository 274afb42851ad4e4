"""The host loop of one run: compile, iterate, evaluate, and hear signals meanwhile."""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path

import jax
import numpy as np

from rlstable.compilation.ffi import interruptible
from rlstable.config import Config
from rlstable.guards.base import MoreGuards
from rlstable.io.console import Console
from rlstable.runner.confirm import CONFIRMED_AT, confirm
from rlstable.runner.result import Result, Row
from rlstable.runner.seed_run import Callback, SeedRun
from rlstable.runner.setup import Program
from rlstable.runner.stopping import StopRequest
from rlstable.runner.supervisor import Factories
from rlstable.supervise.memory_plan import OutOfMemory, exhausted
from rlstable.supervise.signals import Signals
from rlstable.supervise.stop_reasons import StopReason


class Runner(SeedRun):
    """One run, from its configuration to its ending.

    Args:
        config: What to run.
        run_dir: Where it is kept.
        callback: Called as `callback(step, row)` with every logged row; returning True ends the run.
        more_guards: The user's guards, by site (`env`, `batch`, `update`, `state`) and name.
        signals: Entered already, where signals are to be heard before `run`.
        builds: What builds what computes, None for the usual; `rlstable.replay` has one whose program records more.

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
        builds: Factories | None = None,
    ):
        console = Console(config.logging.console, config.total_steps, config.env.name, verbose=config.logging.verbose)
        stop_request = StopRequest(console, self._leave, signals, config.supervise.max_wall_time)
        super().__init__(config, run_dir, callback, more_guards, console, stop_request, builds)

    def run(self) -> Result:
        """Trains to an ending. Whatever the ending, the run folder says which."""
        with self._stop_request.listening():
            return self._run()

    def _run(self) -> Result:
        ending = StopReason.error
        try:
            ending = self.final_stop_reason(self._loop())
            if ending in CONFIRMED_AT:
                confirm(
                    [self],
                    lambda policies: self.supervisor.evaluator.evaluate(policies),
                    1,
                    self._stop_request.requested,
                )
        except OutOfMemory as error:
            self.advice = str(error)
            ending = StopReason.out_of_memory
        except KeyboardInterrupt:
            ending = StopReason.interrupted  # the second one, which does not wait for the iteration
            raise
        except Exception as error:
            self.event("error", message=f"{type(error).__name__}: {error}")
            raise
        finally:
            result = self.finish(ending)
        return result

    def _loop(self) -> StopReason:
        if self.step >= self.config.total_steps:
            return StopReason.completed
        if self.evaluates:
            self.supervisor.evaluator.begin([self.policy_snapshot])  # compiled while the iteration is traced
        self._program()
        stopped = self._stop_request.ending  # while the program compiled, or before that
        if stopped is not None:
            return stopped
        ending = None
        while ending is None:
            ending = self.advance()
        return ending

    def advance(self) -> StopReason | None:
        """One iteration, and what is due after it; the ending where that was the last one."""
        iterate = self._program()
        if self.evaluates_next:
            # Now, between two iterations: a signal while it compiles saves the state as it is.
            self.supervisor.evaluator.prepare([self.policy_snapshot])
        started = time.perf_counter()
        try:
            working = self._console.working(f"iteration {self.host.iteration + 1}", self.telemetry.last_seconds)
            with working, interruptible():
                self.state, metrics = iterate(self.state)
                # Waits for it. `jax.device_get` takes four times as long on a CPU, where there is nothing to copy.
                metrics = jax.tree.map(np.asarray, metrics)
        except jax.errors.JaxRuntimeError as error:
            if not exhausted(error):
                raise
            self.shrink_after_oom()
            return None
        evaluates = self.record_iteration(metrics, time.perf_counter() - started)
        if self.telemetry.split_is_due(self.host.iteration):
            self.telemetry.measure_split(iterate.__call__, self.state)
        evaluation = self._evaluate() if evaluates else {}
        if self.suspects(evaluation):
            self._compare()
        return self.finish_iteration(metrics, evaluation, self._requested_stop)

    def _program(self) -> Program:
        """The program of the next iteration, and the state as it takes it."""
        program, self.state = self.supervisor.program(self.state, functools.partial(self._key_of_iteration, 3))
        return program

    def _evaluate(self) -> Row:
        try:
            return self.supervisor.evaluator.evaluate([self.policy_snapshot])[0]
        except OutOfMemory:
            self.save_if_good()  # the run ends, with all that was learnt
            raise

    def _compare(self) -> None:
        """Plays the best policy and the present one in the same episodes; without memory for that nothing is done."""
        evaluator = self.supervisor.evaluator
        with contextlib.suppress(OutOfMemory):
            self.compare(
                evaluator.play([self.best_policy_snapshot])[0], evaluator.play([self.fresh_policy_snapshot])[0]
            )

    def _requested_stop(self) -> StopReason | None:
        return self._stop_request.requested(self.telemetry.last_seconds or 0.0)

    def _leave(self, ending: StopReason) -> None:
        self.save_if_due()
        self.finish(ending)
