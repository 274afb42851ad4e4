"""Saves the states of one seed: when, what, and what the run promises to have saved when it ends.

With several processes only the writer saves. The other processes call the same methods, because a split state is
gathered from all processes, and because all take the same decisions.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlstable import __version__, faults
from rlstable.config.faults import FaultConfig
from rlstable.config.run import CheckpointConfig
from rlstable.device import hosts, sharding
from rlstable.io.checkpoint import Checkpoints
from rlstable.io.lock import RunLock
from rlstable.io.printed_commands import command
from rlstable.policy.policy import policy_arrays, policy_spec
from rlstable.ppo.state import TrainState
from rlstable.runner.host_state import HostState
from rlstable.runner.kept_teacher import names_of
from rlstable.runner.log import SeedLog
from rlstable.runner.programs import Programs
from rlstable.supervise.snapshots import Snapshots
from rlstable.supervise.stop_reasons import SAVED, StopReason


@dataclasses.dataclass(eq=False)
class Saving:
    """Saves the states of one seed, and counts the steps that are not saved."""

    when: CheckpointConfig
    settings: dict[str, Any]  # the whole configuration, which a checkpoint has
    fault: FaultConfig
    run_dir: Path
    host: HostState
    programs: Programs
    snapshots: Snapshots
    log: SeedLog
    lock: RunLock | None = None  # of the run folder, in the writer
    _healthy: bool = False
    _unsaved: bool = False
    _last_score: float | None = None
    _last_good: int = 0  # environment steps up to the last good state, rolled back steps included

    def __post_init__(self) -> None:
        in_place = lambda: self.lock is not None and self.lock.in_place  # noqa: E731 - other processes only read
        args = (self.run_dir, self.when, lambda kind, fields: self.log.event(kind, **fields), in_place, self.settings)
        fails = self.fault.site == "disk"
        self.checkpoints = faults.FailingCheckpoints(self.fault, *args) if fails else Checkpoints(*args)
        self.steps: dict[int, int] = {}  # with rolled back ones, by number of a checkpoint that was read or written
        self._clock = time.monotonic
        self._saved_at = self._clock()  # or the start of the run

    @property
    def gone(self) -> bool:
        """Whether the run folder was deleted, moved or replaced; nothing more is written there, and the run ends."""
        return self.lock is not None and not self.lock.in_place

    @property
    def due(self) -> bool:
        """Whether a save is due by count, or by the clock since the last save or the start; the writer decides."""
        when = self.when
        if not hosts.is_writer() or not when.enabled:
            return False
        by_clock = when.every_minutes is not None and self._clock() - self._saved_at >= 60.0 * when.every_minutes
        return self.checkpoints.due(self.host.logged_iteration) or by_clock

    def record_iteration(self, healthy: bool) -> None:
        """Records an iteration, not saveable yet: the evaluation and reset due after it have not happened."""
        self._unsaved, self._healthy = False, healthy

    def finish_iteration(self) -> None:
        """Records that the state of the iteration may be saved, if it is good."""
        self._unsaved = self._healthy
        if self._healthy:
            self._last_good = self.host.logged_step

    def after_iteration(self, state: TrainState, score: float | None, asked: bool) -> bool:
        """Saves a healthy state if that is `asked`; returns False if the run folder is gone."""
        if self._healthy and asked:
            self.save(state, score)
            return not hosts.from_writer("gone", lambda: self.when.enabled and self.gone)
        return True

    def save_at_once(self, state: TrainState) -> None:
        """Saves after a rollback, so that a resume after a crash knows the attempt."""
        self.save(state, None)
        self.checkpoints.wait()

    def save_if_due(self, state: TrainState) -> None:
        """Saves a good state that is not saved, between two iterations."""
        if self._unsaved:
            self.save(state, None)

    def save_if_good(self, state: TrainState) -> None:
        """Saves a good state although the evaluation and reset after its iteration cannot be done."""
        if self._healthy:
            self.save(state, None)

    def save(self, state: TrainState, score: float | None) -> None:
        """Saves a state with the return of its evaluation; None if it was not evaluated."""
        if not self.when.enabled:
            return
        self._saved_at = self._clock()  # also if the save fails: `due` retries sooner
        host = self.host
        host.wandb_run_id = self.log.logbook.wandb_run_id
        saved, origins = self.snapshots.save(state, host.iteration)
        saved = sharding.gathered(dataclasses.replace(saved, incident=None))
        self._last_good = host.logged_step
        self._last_score, self._unsaved = score, False
        if hosts.is_writer():
            self._write(state, saved, origins, score)

    def _write(self, state: TrainState, saved: Any, origins: Mapping[str, Any], score: float | None) -> None:
        """Writes a checkpoint, after the rows and the checkpoint before it."""
        host = self.host
        policy, metadata = policy_arrays(state), {**self._metadata(score), **origins}
        self.log.write_trips()
        self.log.logbook.wait()  # a run that resumes from this checkpoint has all earlier rows
        self.checkpoints.wait()
        on_disk, number = self.checkpoints.on_disk(), host.logged_iteration
        self.steps = {i: step for i, step in self.steps.items() if i in on_disk} | {number: host.logged_step}
        self.checkpoints.save(number, saved, policy, metadata, score=score)

    def _metadata(self, score: float | None) -> dict[str, Any]:
        """The JSON beside the arrays of a checkpoint."""
        programs, setup = self.programs, self.programs.setup(self.host)
        return {
            "host": dataclasses.asdict(self.host),
            "policy": policy_spec(setup.ppo.networks, setup.ppo.precision.matmul) | {"names": names_of(setup.single)},
            "config": self.settings,
            "devices": programs.mesh.size,
            "num_envs": programs.num_envs(self.host),
            "level": programs.level(self.host),
            "backend": setup.loaded.backend,
            "step": self.host.step,
            "return": score,
            "version": __version__,
            "versions": programs.versions,
        }

    def unsaved_steps(self) -> int:
        """Environment steps up to the last good state that no checkpoint has; waits until a running save ends."""
        if not self.when.enabled or not hosts.is_writer():
            return 0
        self.checkpoints.wait()
        return max(self._last_good - (self.saved_step or 0), 0)

    def final_stop_reason(self, stop_reason: StopReason, state: TrainState) -> StopReason:
        """Checks the saved states: returns the stop reason, or `not_saved` if the state that it promises is not saved.

        May be called again with the result.
        """
        if self.when.enabled and stop_reason in SAVED:
            if self._healthy and hosts.from_writer("unsaved", lambda: bool(self.unsaved_steps() and not self.gone)):
                self.save(state, self._last_score)  # the failed save once more
            name = hosts.from_writer("final_stop_reason", lambda: self._unless_not_saved(stop_reason).name)
            stop_reason = StopReason[name]
        if stop_reason.succeeded and not finite(policy_arrays(state)):
            stop_reason = StopReason.state_not_finite
        return stop_reason

    def _unless_not_saved(self, stop_reason: StopReason) -> StopReason:
        """The stop reason, or `not_saved` if no checkpoint has the state that the stop reason promises.

        If the last state was bad, so that it was not saved, a best policy in the folder is enough. If no state
        was ever good, nothing is saved.
        """
        if self.gone:
            return StopReason.not_saved
        if not self.unsaved_steps() and self._on_disk():
            return stop_reason
        # A job that is queued again after exit code 75 resumes from the newest checkpoint.
        resumes = stop_reason is StopReason.time_limit and bool(self._on_disk())
        has_policy = self.checkpoints.best() is not None or resumes
        return stop_reason if has_policy and not self.checkpoints.failing else StopReason.not_saved

    @property
    def may_hand_over(self) -> bool:
        """Whether the last states were bad, but the supervisor has a trained good one and the folder is there."""
        wanted = not self._healthy and self.snapshots.last_good.iteration > 0
        return wanted and not hosts.from_writer("gone", lambda: self.gone)

    @property
    def advice(self) -> str:
        """Advice for a run that ended without saving its last state."""
        folder = self.checkpoints.directory.parent
        if self.gone:
            return f"The run folder {folder} was deleted, moved or replaced while the run trained; train again."
        if not self.checkpoints.failing:
            return "No good state was saved; see the events guard_tripped in events.jsonl, or set checkpoint=frequent."
        again = f"resume with {command('train', folder, 'resume=')}" if self._on_disk() else "train again"
        cause = "The events checkpoint_failed have the cause."
        return f"Make room on the disk of {folder}, or check its permissions; then {again}. {cause}"

    @property
    def saved_step(self) -> int | None:
        """Environment steps of the newest checkpoint on disk; None without any. Does not wait for a running save."""
        newest = max(self._on_disk(), default=None)
        return None if newest is None else self.steps.get(newest, 0)

    def _on_disk(self) -> list[int]:
        return [] if self.gone else self.checkpoints.on_disk()


def finite(policy: Mapping[str, Any]) -> bool:
    """Whether every number of a policy is finite."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(policy)]
    return all(bool(np.isfinite(leaf).all()) for leaf in leaves if np.issubdtype(leaf.dtype, np.floating))
