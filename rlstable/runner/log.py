"""The log of one seed: rows, events, signs of trouble, and the fields of `result.json`."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import psutil

from rlstable.device import hosts
from rlstable.device.packed import PackedDict
from rlstable.io.console import Console
from rlstable.io.logbook import Logbook
from rlstable.ppo.iteration import PPO
from rlstable.ppo.state import Metrics
from rlstable.runner.host_state import HostState
from rlstable.runner.listener import Listeners, Row
from rlstable.supervise.diagnosis import Signs, advice, warnings_of
from rlstable.supervise.stop_reasons import StopReason

Callback = Callable[[int, Row], Any]


@dataclasses.dataclass(eq=False)
class SeedLog:
    """Logs one seed. Events before the start of the logbook are kept and logged then."""

    number: int
    logbook: Logbook
    signs: Callable[[Callable[..., None]], Signs]
    host: HostState
    ppo: PPO
    callback: Callback | None
    console: Console
    listeners: Listeners
    stopped_by_callback: bool = False

    def __post_init__(self) -> None:
        self.telemetry = Telemetry(self.ppo)
        self._signs = self.signs(self.event)
        self.history: list[Row] = []
        self.last_evaluation: Row = {}
        self._trips: dict[str, Counter[str]] = {}  # since the last event
        # A script may pass the callback in process 0 only; the exchange needs all processes.
        self._has_callback = hosts.from_writer("has_callback", lambda: self.callback is not None)

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
            self.logbook.event(self.host.logged_step, kind, fields)

    def iteration(self, metrics: Metrics) -> None:
        """Counts the trips of an iteration and looks for signs of trouble."""
        host, ppo = self.host, self.ppo.settings.ppo
        if bool(metrics.healthy):
            values = {**metrics.values, "training/episodes": int(metrics.counters.episodes)}
            self._signs.record_iteration(host.signs, host.iteration, host.logged_step, values)
        trips = self.telemetry.trips(metrics)
        minibatches = ppo.num_updates_per_batch * ppo.num_minibatches
        counts = (metrics.values, trips, ppo.env_steps_per_iteration(1), minibatches, self.ppo.update_guards)
        host.tally.count(*counts, host.logged_step, bool(metrics.healthy))
        for name, causes in trips.items():
            self._trips.setdefault(name, Counter()).update(causes)

    def evaluation(self, metrics: Row) -> Row:
        """Records an evaluation; returns its part of the next row."""
        host = self.host
        host.evaluated += metrics["eval/epoch_eval_time"] or 0.0
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

    def first_row(self, metrics: Row) -> None:
        """Logs the evaluation of the untrained policy."""
        self._log_row(self.evaluation(metrics))

    def row(self, evaluation: Row, counts: Row) -> None:
        """Logs a row of the iterations since the last one, with the result of `evaluation` or without, and `counts`."""
        self.write_trips()
        self._log_row(self.telemetry.flush(self.host.elapsed) | evaluation | counts)

    def _log_row(self, row: Row) -> None:
        step = self.host.logged_step
        self.logbook.log(step, row)
        self.history.append({"step": step, **row})
        self.listeners.row(self.number, step, row)
        call = self.callback
        if self._has_callback and hosts.from_writer("callback", lambda: call is not None and call(step, row) is True):
            self.stopped_by_callback = True

    def result(
        self, stop_reason: StopReason, cause: StopReason | None, run_advice: str | None, more: dict[str, Any]
    ) -> dict[str, Any]:
        """The fields of `result.json`; `cause` is that of the last failed iteration.

        `run_advice` is by the component that ended the run, `more` are fields about the policy and `unsaved_steps`.
        """
        self.write_trips()
        host = self.host
        fields: dict[str, Any] = {
            "stop_reason": stop_reason.name,
            "exit_code": stop_reason.exit_code,
            "step": host.step,
            "return": host.last_return,
            "best_return": host.best_return,
            "last_return": host.last_return,
            **more,
            "seconds": round(host.elapsed, 1),
            "rollbacks": host.attempts.count,
            "signs": host.signs.logged,
            "warnings": [{"name": name, "text": text} for name, text in warnings_of(host.tally).items()],
        }
        if cause is not None and stop_reason in (cause, StopReason.recovery_exhausted):
            fields["cause"] = cause.name
            run_advice = advice(cause, host.attempts, host.signs.logged, host.tally)
        if run_advice is not None:
            fields["advice"] = run_advice
        return fields


class Telemetry:
    """Collects the metrics of a logging interval and makes a row of them: means, rates, counters, memory."""

    def __init__(self, ppo: PPO):
        self._steps = ppo.settings.env_steps_per_iteration
        sites: list[Any] = [ppo.env.guards, ppo.batch_guards, ppo.update_guards, ppo.state_guards]
        self._causes = {name: guard.causes for site in sites for name, guard in site.items()}
        self._metrics: list[Metrics] = []
        self._seconds = 0.0
        self._process = psutil.Process()

    def add(self, metrics: Metrics, seconds: float) -> None:
        self._metrics.append(metrics)
        self._seconds += seconds

    def trips(self, metrics: Metrics) -> dict[str, dict[str, int]]:
        """Trips of an iteration by guard and cause; only guards that tripped."""
        return {
            name: {cause: int(n) for cause, n in zip(self._causes[name], counts, strict=True) if n}
            for name, counts in metrics.trips.items()
            if np.any(counts)
        }

    def flush(self, walltime: float) -> Row:
        """The row of the interval that ends now, after `walltime` seconds of training; starts the next interval."""
        last = self._metrics[-1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a mean over no finite value is NaN, as intended
            packed_means = np.nanmean([metrics.values.whole for metrics in self._metrics], axis=0).tolist()
        means = {name: packed_means[place] for name, place in last.values.indices.items()}
        # Without an accepted update, NaN means "no value" and is left out; otherwise a NaN is logged.
        learned = means["training/accepted_share"] > 0
        # A return beside a loss that is not finite is one of environments with bad states.
        ruined = learned and not np.isfinite(means["training/v_loss"])
        ended = not np.isnan(means["episode/length"]) and not ruined
        row: Row = {
            name: value
            for name, value in means.items()
            if (ended or not name.startswith("episode/")) and (learned or not np.isnan(value))
        }
        row["training/sps"] = len(self._metrics) * self._steps / self._seconds
        row["training/walltime"] = walltime
        row["training/iteration"] = int(last.counters.iterations)
        row["training/updates"] = int(last.counters.updates)
        row["training/episodes"] = int(last.counters.episodes)
        row |= self._trip_counts(last.counters.trips)
        row |= self._memory()
        self._metrics, self._seconds = [], 0.0
        return row

    def _trip_counts(self, trips: PackedDict) -> Row:
        """Trips since the start of the run, by guard and by cause; causes without a trip are left out."""
        row: Row = {}
        if trips:
            counts = (trips.whole.hi.astype(np.uint64) << np.uint64(32) | trips.whole.lo).tolist()
            for name, place in trips.indices.items():
                row[f"guards/{name}/trips"] = sum(counts[place])
                if row[f"guards/{name}/trips"]:
                    by_cause = zip(self._causes[name], counts[place], strict=True)
                    row |= {f"guards/{name}/{cause}": count for cause, count in by_cause if count}
        return row

    def _memory(self) -> Row:
        """Memory of this process, and of the first device, if JAX reports it."""
        row: Row = {"memory/host_mb": self._process.memory_info().rss / 2**20}
        stats = jax.local_devices()[0].memory_stats()
        if stats:
            row["memory/device_mb"] = stats.get("bytes_in_use", 0) / 2**20
            row["memory/device_peak_mb"] = stats.get("peak_bytes_in_use", 0) / 2**20
        return row
