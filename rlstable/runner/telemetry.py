"""Turns metrics of iterations into rows: rates, means over a logging interval, counters, memory."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import psutil

from rlstable.config import Config
from rlstable.device.packed import PackedDict
from rlstable.ppo.iteration import PPO
from rlstable.ppo.state import Metrics
from rlstable.runner.result import Row


class Telemetry:
    """Collects the metrics of a logging interval.

    Attributes:
        last_seconds: Duration of the last iteration; None before the first.

    Args:
        config: The whole configuration.
        ppo: For the names of guards and causes.
    """

    def __init__(self, config: Config, ppo: PPO):
        self._steps = config.env_steps_per_iteration
        sites: list[Any] = [ppo.env.guards, ppo.batch_guards, ppo.update_guards, ppo.state_guards]
        self._causes = {name: guard.causes for site in sites for name, guard in site.items()}
        self._metrics: list[Metrics] = []
        self._seconds = 0.0
        self.last_seconds: float | None = None
        self._process = psutil.Process()

    def add(self, metrics: Metrics, seconds: float) -> None:
        """Adds the metrics and the duration of one iteration."""
        self._metrics.append(metrics)
        self._seconds += seconds
        self.last_seconds = seconds

    def trips(self, metrics: Metrics) -> dict[str, dict[str, int]]:
        """Trips of an iteration by guard and cause; only guards that tripped."""
        return {
            name: {cause: int(n) for cause, n in zip(self._causes[name], counts, strict=True) if n}
            for name, counts in metrics.trips.items()
            if np.any(counts)
        }

    def flush(self, walltime: float) -> Row:
        """Returns the row of the interval that ends now, and starts the next interval.

        Args:
            walltime: Seconds of training so far.
        """
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
