"""The log of one seed: rows, events, signs of trouble, and the fields of `result.json`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlstable import faults
from rlstable.config import Config
from rlstable.device import hosts
from rlstable.io.console import Console
from rlstable.io.logbook import Logbook
from rlstable.ppo.iteration import PPO
from rlstable.ppo.state import Metrics
from rlstable.runner.host_state import HostState
from rlstable.runner.live_page import LivePage
from rlstable.runner.result import Row
from rlstable.runner.telemetry import Telemetry
from rlstable.supervise.diagnosis import Signs, advice, warnings_of
from rlstable.supervise.stop_reasons import StopReason

Callback = Callable[[int, Row], Any]

# An evaluation share above this is logged, once this many seconds were spent on it.
_SLOW_SHARE, _SLOW_SECONDS = 0.25, 30.0


class SeedLog:
    """Logs one seed. Events before `start` are kept and logged then.

    Attributes:
        history: Logged rows.
        last_evaluation: Metrics of the last evaluation.
        stopped_by_callback: Whether the callback asked the run to stop.
        logbook: Writes rows and events to all outputs.
        telemetry: Metrics of the iterations since the last row; exists after `start`.

    Args:
        config: The whole configuration.
        run_dir: The run folder.
        callback: Called as `callback(step, row)` with every row, in the writer; returning True stops the run.
        console: The console.
        host: The run's host state.
        live_page: The report page of the run, which all seeds share.
    """

    telemetry: Telemetry

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        callback: Callback | None,
        console: Console,
        host: HostState,
        live_page: LivePage,
    ):
        self._config = config
        self._callback = callback
        self._host = host
        failing_sinks = [faults.FailingSink(config.fault.of_seed(config.seed))] if config.fault.site == "sinks" else []
        pages = [live_page] if config.logging.report else []
        self.logbook = Logbook(config, run_dir, console, [*failing_sinks, *pages])
        self._signs = Signs(config, self.event)
        self.history: list[Row] = []
        self.last_evaluation: Row = {}
        self.stopped_by_callback = False
        self._opened = time.perf_counter()
        self._before = (0.0, 0.0)  # seconds of training and of evaluation in earlier processes
        self._warned_of_evaluation = False
        self._trips: dict[str, Counter[str]] = {}  # since the last event

    def start(self, ppo: PPO) -> None:
        """Opens the outputs, in the writer. Must run when the first step of the run is known.

        Args:
            ppo: For the names of guards and causes.
        """
        self._update_guards = ppo.update_guards
        # A script may pass the callback in process 0 only; the exchange needs all processes.
        self._has_callback = hosts.from_writer("has_callback", lambda: self._callback is not None)
        self.telemetry = Telemetry(self._config, ppo)
        self._before = (self._host.elapsed, self._host.evaluated)
        if hosts.is_writer():
            self.logbook.start(self._host.wandb_run_id, None if self._config.resume is None else self._host.logged_step)

    def event(self, kind: str, **fields: Any) -> None:
        """Logs one event, in the writer, after the trips before it."""
        self.write_trips()
        self._write_event(kind, fields)

    def write_trips(self) -> None:
        """Logs one event per guard with the sums of its trips since the last event, row or save."""
        trips, self._trips = self._trips, {}
        for guard, causes in trips.items():
            self._write_event("guard_tripped", {"guard": guard, **causes})

    def _write_event(self, kind: str, fields: dict[str, Any]) -> None:
        if hosts.is_writer():
            self.logbook.event(self._host.logged_step, kind, fields)

    def iteration(self, metrics: Metrics) -> None:
        """Counts the trips of an iteration and looks for signs of trouble.

        Args:
            metrics: Of the iteration, on the host.
        """
        host, config = self._host, self._config
        if bool(metrics.healthy):
            values = {**metrics.values, "training/episodes": int(metrics.counters.episodes)}
            self._signs.record_iteration(host.signs, host.iteration, host.logged_step, values)
        trips = self.telemetry.trips(metrics)
        transitions = config.env_steps_per_iteration // config.env.action_repeat
        minibatches = config.ppo.num_updates_per_batch * config.ppo.num_minibatches
        counts = (metrics.values, trips, transitions, minibatches, self._update_guards)
        host.tally.count(*counts, host.logged_step, bool(metrics.healthy))
        for name, causes in trips.items():
            self._trips.setdefault(name, Counter()).update(causes)

    def evaluation(self, metrics: Row) -> Row:
        """Records an evaluation; returns its part of the next row."""
        host = self._host
        host.evaluated += metrics["eval/epoch_eval_time"] or 0.0
        self._warn_of_slow_evaluation()
        self.last_evaluation = row = {**metrics, "eval/walltime": host.evaluated}
        value = row["eval/episode_reward"]
        host.last_return = value
        self._signs.record_evaluation(host.signs, host.logged_step, metrics)
        host.tally.count_evaluation(value)
        if value is None:
            self.event("evaluation_void", aborted_share=row["eval/aborted_share"])
        elif host.best_return is None or value > host.best_return:
            host.best_return = float(value)
        return row

    def _warn_of_slow_evaluation(self) -> None:
        """Logs once that evaluation takes much of the time, with the keys to change."""
        training, evaluation = self._seconds_here()
        if self._warned_of_evaluation or evaluation < _SLOW_SECONDS:
            return
        share = evaluation / (training + evaluation)
        if share > _SLOW_SHARE:
            self._warned_of_evaluation = True
            sizes = self._config.eval
            remedy = f"lower eval.num_envs={sizes.num_envs} or eval.num_evals={sizes.num_evals}"
            self.event("evaluation_slow", share=round(share, 2), remedy=remedy)

    def _seconds_here(self) -> tuple[float, float]:
        """Seconds of training and of evaluation in this process."""
        return self._host.elapsed - self._before[0], self._host.evaluated - self._before[1]

    def first_row(self, metrics: Row) -> None:
        """Logs the evaluation of the untrained policy, before the first iteration."""
        self._log_row(self.evaluation(metrics))

    def row(self, evaluation: Row) -> None:
        """Logs a row of the iterations since the last one.

        Args:
            evaluation: From `evaluation`; empty if the policy was not evaluated.
        """
        self.write_trips()
        host, config = self._host, self._config
        row = self.telemetry.flush(host.elapsed) | evaluation
        if config.supervise.recovery.enabled:
            row["supervise/rollbacks"] = host.attempts.count
            if config.guards.return_watch.enabled:
                row["guards/return_watch/trips"] = host.watch.collapses
        self._log_row(row)

    def _log_row(self, row: Row) -> None:
        step = self._host.logged_step
        self.logbook.log(step, row)
        self.history.append({"step": step, **row})
        if self._has_callback and hosts.from_writer("callback", lambda: self._call_back(step, row)):
            self.stopped_by_callback = True

    def _call_back(self, step: int, row: Row) -> bool:
        return self._callback is not None and self._callback(step, row) is True

    def result(
        self, stop_reason: StopReason, cause: StopReason | None, run_advice: str | None, more: dict[str, Any]
    ) -> dict[str, Any]:
        """The fields of `result.json`.

        Args:
            stop_reason: Why the run ended.
            cause: Cause of the last failed iteration, None if none failed.
            run_advice: Advice of the component that ended the run; None if there is none.
            more: Fields about the policy that the run hands over, and `unsaved_steps`, if any.
        """
        self.write_trips()
        host = self._host
        training, evaluation = self._seconds_here()
        fields: dict[str, Any] = {
            "stop_reason": stop_reason.name,
            "exit_code": stop_reason.exit_code,
            "step": host.step,
            "return": host.last_return,
            "best_return": host.best_return,
            "last_return": host.last_return,
            **more,
            "seconds": round(host.elapsed, 1),
            "wall_seconds": {
                "total": round(time.perf_counter() - self._opened, 1),
                "training": round(training, 1),
                "evaluation": round(evaluation, 1),
            },
            "rollbacks": host.attempts.count,
            "signs": host.signs.logged,
            "warnings": [warning._asdict() for warning in warnings_of(host.tally)],
        }
        if cause is not None and stop_reason in (cause, StopReason.recovery_exhausted):
            fields["cause"] = cause.name
            run_advice = advice(cause, host.attempts, host.signs.logged, host.tally)
        if run_advice is not None:
            fields["advice"] = run_advice
        return fields
