"""One seed of a run on the host: its training state, host state, log, checkpoints and states to roll back to."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlstable.config import Config
from rlstable.device import hosts, sharding
from rlstable.device.precision import Level
from rlstable.io.checkpoint import Checkpoints
from rlstable.io.printed_commands import command
from rlstable.io.run_folder import read_result
from rlstable.policy.evaluator import PolicySnapshot, snapshot_of
from rlstable.ppo.networks import Params
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.state import SPECS, TrainState
from rlstable.runner.decision import ReturnCheck
from rlstable.runner.host_state import Draw, HostState, Schedule, SeedKeys
from rlstable.runner.listener import Row
from rlstable.runner.log import SeedLog
from rlstable.runner.programs import Programs
from rlstable.runner.saving import Saving
from rlstable.runner.setup import TrainingSetup
from rlstable.supervise.incident import Incidents
from rlstable.supervise.memory import MemoryPlan
from rlstable.supervise.recovery import Recovery
from rlstable.supervise.snapshots import Snapshots
from rlstable.supervise.stop_reasons import StopReason, stays_ended


@dataclasses.dataclass(eq=False)
class Seed:
    """One seed of a run; the functions of `after_iteration` change it."""

    config: Config
    run_dir: Path
    programs: Programs  # of all seeds
    host: HostState
    keys: SeedKeys
    schedule: Schedule
    log: SeedLog
    state: TrainState
    snapshots: Snapshots
    recovery: Recovery
    return_check: ReturnCheck
    incidents: Incidents
    saving: Saving
    closing: contextlib.ExitStack  # releases the folder, closes log and checkpoints
    confirmed: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields `confirmed_*` of `result.json`
    step_before: int = 0  # environment steps before the latest iteration
    has_iterated: bool = False  # in this process
    cause: StopReason | None = None  # of the last failed iteration
    advice: str | None = None  # on the stop reason

    @property
    def level(self) -> Level:
        return self.programs.level(self.host)

    @property
    def setup(self) -> TrainingSetup:
        """The training setup at the present precision level and memory plan."""
        return self.programs.setup(self.host)

    @property
    def event(self) -> Callable[..., None]:
        return self.log.event

    @property
    def checkpoints(self) -> Checkpoints:
        return self.saving.checkpoints

    @property
    def policy_snapshot(self) -> PolicySnapshot:
        """The present policy, for the evaluation episodes of this iteration."""
        return snapshot_of(self.state, self.keys.evaluation)

    @property
    def parameters(self) -> tuple[Params, Statistics]:
        """The network parameters and the observation statistics."""
        return self.state.params, self.state.normalizer

    @property
    def counts(self) -> Row:
        """Metrics of the supervisor, if it is enabled."""
        if not self.config.supervise.recovery.enabled:
            return {}
        collapses = {"guards/return_watch/trips": self.host.watch.collapses} if self.config.watches_return else {}
        return {"supervise/rollbacks": self.host.attempts.count, **collapses}

    @property
    def ended_before(self) -> StopReason | None:
        """The stop reason of a resumed seed with nothing left to train; None for a seed to train."""
        if self.schedule.finished:
            return StopReason.completed
        fields = hosts.from_writer("result", lambda: read_result(self.run_dir)) or {}
        reached = fields.get("stop_reason") == StopReason.target_reached.name and fields.get("step") == self.host.step
        reached &= self.host.best_return is not None  # None: resumed with another task
        reached = reached and stays_ended(fields, self.config.total_steps, self.config.eval.target_return)
        return StopReason.target_reached if reached else None

    @property
    def may_roll_back_to_plan(self) -> bool:
        """Whether the seed may take a smaller memory plan. Other processes would still wait in the iteration."""
        return hosts.count() == 1 and not self.snapshots.last_good.empty

    def start_from(self, params: Params, statistics: Statistics) -> None:
        """Replaces the parameters and the observation statistics of a new run, before the first iteration."""
        state = dataclasses.replace(self.state, params=params, normalizer=statistics)
        self.state = sharding.place(state, self.programs.mesh, SPECS)
        self.keep_last_good()

    def keep_last_good(self) -> None:
        if self.config.supervise.recovery.enabled:
            self.snapshots.last_good.keep(self.state, self.host.iteration, self.host.step)

    def take_plan(self, plan: MemoryPlan) -> None:
        """Takes a memory plan of all seeds, with fewer environments if the plan has fewer."""
        before = self.programs.num_envs(self.host)
        self.host.plan = dataclasses.replace(plan)
        if self.programs.num_envs(self.host) != before:
            state = self.setup.reset_envs_and_pool(self.state, self.keys.between(Draw.PLAN))
            self.state = self.setup.convert_state(state)

    def needs_own_program(self, reason: str) -> StopReason:
        """The stop reason of a seed that can only continue in a separate program."""
        self.advice = f"It can continue alone, {command('train', self.run_dir, 'resume=')}: {reason}."
        return StopReason.needs_own_program

    def close(self) -> None:
        """Releases the folder. May be called again."""
        self.closing.close()
