"""All seeds of a run: their folders, the batch in which one program trains them, and their results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlstable.device import sharding
from rlstable.device.precision import Level
from rlstable.io.console import Console
from rlstable.io.run_folder import best_seed
from rlstable.policy.evaluator import PolicySnapshot, snapshot_of
from rlstable.policy.policy import Policy, load_policy
from rlstable.ppo.state import Metrics, TrainState
from rlstable.runner.listener import Listeners, Row
from rlstable.runner.log import Callback
from rlstable.runner.seed import Seed
from rlstable.runner.summary import fields_of, finish_files, finish_seed
from rlstable.supervise.memory import MemoryPlan, smallest
from rlstable.supervise.stop_reasons import StopReason


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run, for the program that started it.

    Attributes:
        stop_reason: Why the run stopped.
        run_dir: The run folder.
        step: Environment steps trained, rolled back steps not included.
        metrics: Metrics of the last evaluation; a missing number is None.
        history: Logged rows with the key `step`.
        seeds: Result of each seed if several seeds trained together; metrics and history are then empty here.
        policy_return: Return of `policy`, as in `result.json`, confirmed if possible; with several seeds the
            interquartile mean; None without a return.
    """

    stop_reason: StopReason
    run_dir: Path
    step: int
    metrics: Row = dataclasses.field(repr=False)
    history: list[Row] = dataclasses.field(repr=False)
    seeds: tuple[Result, ...] = ()
    policy_return: float | None = None

    @functools.cached_property
    def policy(self) -> Policy:
        """The best policy of the run; with several seeds, the policy of the best seed. Loaded at the first access."""
        folder = (best_seed(self.run_dir) or self.seeds[0].run_dir) if self.seeds else self.run_dir
        return load_policy(folder)


@dataclasses.dataclass(eq=False)
class Seeds:
    """The seeds of a run. With several seeds, each has a folder `seed-<seed>` in the run folder.

    The shape of the program is fixed, so every seed has a slot in its batch, and a state. A finished seed keeps its
    last state, a seed that waits or was not opened has a copy of another one; their results are ignored.
    """

    numbers: range  # of all seeds, in the order of the slots
    iteration_steps: int
    by_name: bool  # whether the environment's name selects it again
    run_dir: Path
    callback: Callback | None
    console: Console
    listeners: Listeners

    def __post_init__(self) -> None:
        self.opened: dict[int, Seed] = {}  # that this process trains
        self.results: dict[int, Result] = {}  # of the seeds that have ended
        self.fields: dict[int, dict[str, Any]] = {}  # of `result.json`, of the seeds that have ended
        self._rows: list[Row] = []
        self._inactive: dict[int, TrainState] = {}  # states of the slots that do not train

    @property
    def gone(self) -> bool:
        """Whether the run folder was deleted, moved or replaced."""
        return not self.run_dir.is_dir() or any(seed.saving.gone for seed in self.opened.values())

    @property
    def unfinished(self) -> dict[int, Seed]:
        """The seeds that have not ended."""
        return {number: seed for number, seed in self.opened.items() if number not in self.results}

    @property
    def training(self) -> dict[int, Seed]:
        """The seeds of the next iteration; after a crash, the seeds with the oldest checkpoints catch up first."""
        unfinished = self.unfinished
        behind = min(seed.host.logged_step for seed in unfinished.values()) + self.iteration_steps
        return {number: seed for number, seed in unfinished.items() if seed.host.logged_step < behind}

    def states(self, training: dict[int, Seed]) -> tuple[TrainState, ...]:
        """The states of all slots."""
        self._fill(training)
        return tuple(training[n].state if n in training else self._inactive[n] for n in self.numbers)

    def policies(self, training: dict[int, Seed]) -> dict[int, PolicySnapshot]:
        """The policies of all slots by seed, in the order of the slots."""
        self._fill(training)
        key = next(iter(training.values())).policy_snapshot.key
        return {
            slot: training[slot].policy_snapshot if slot in training else snapshot_of(self._inactive[slot], key)
            for slot in self.numbers
        }

    def store(self, results: Iterable[tuple[TrainState, Metrics]], training: dict[int, Seed]) -> dict[int, Metrics]:
        """Stores the states that the program returned; returns the metrics of the seeds that train."""
        metrics = {}
        for slot, (state, seed_metrics) in zip(self.numbers, results, strict=True):
            if slot in training:
                training[slot].state = state
                metrics[slot] = seed_metrics
            else:
                self._inactive[slot] = state
        return metrics

    def take_plan(self, plan: MemoryPlan) -> None:
        """Gives all seeds a memory plan."""
        for seed in self.unfinished.values():
            seed.take_plan(plan)
        self._inactive = {}  # of other shapes

    def agree_on_program(self, level: Level) -> None:
        """Ends resumed seeds of another precision level; the other seeds take the smallest memory plan of any seed."""
        for number, seed in self.unfinished.items():
            if seed.level != level:
                self.end(number, seed.needs_own_program(f"its precision is now {seed.level}"), None)
        plan = smallest([seed.host.plan for seed in self.unfinished.values()])
        for seed in self.unfinished.values():
            if plan != seed.host.plan:
                seed.event("memory_planned", plan=str(plan))
        self.take_plan(plan)

    def show_rows(self) -> None:
        """Shows the new rows of several seeds as one line."""
        rows, self._rows = self._rows, []
        if rows:
            self.console.log(max(seed.host.logged_step for seed in self.opened.values()), over_seeds(rows))

    def end(self, number: int, stop_reason: StopReason, advice: str | None) -> None:
        """Ends one seed; the other seeds continue."""
        seed = self.opened[number]
        seed.advice = seed.advice or advice
        self.fields[number] = fields = finish_seed(seed, stop_reason)
        about = (seed.run_dir, seed.host.step, seed.log.last_evaluation, seed.log.history)
        self.results[number] = Result(StopReason[fields["stop_reason"]], *about, policy_return=fields["return"])
        self._inactive[number] = seed.state

    def finish(self, stop_reason: StopReason | None, advice: str | None) -> Result:
        """Ends the unfinished seeds and the run; without a stop reason each seed has its own."""
        with contextlib.closing(self):
            for number in self.unfinished:
                self.end(number, stop_reason or StopReason.error, advice)
            if len(self.numbers) == 1:
                return self.results[self.numbers[0]]
            fields = fields_of(self.fields, stop_reason) | ({} if advice is None else {"advice": advice})
            finish_files(fields, self.run_dir, self.console, self.listeners, self.by_name, self.gone)
            results, reason = tuple(self.results[n] for n in sorted(self.results)), StopReason[fields["stop_reason"]]
            return Result(reason, self.run_dir, fields["step"], {}, [], results, fields["return"])

    def close(self) -> None:
        """Releases the folders; may be called again."""
        for seed in self.opened.values():
            seed.close()

    def take_row(self, number: int, step: int, row: Row) -> Any:
        """Passes a row of one of several seeds to the callback, and keeps it for the line of all seeds."""
        self._rows.append(row)
        return self.callback is not None and self.callback(step, {"seed": number, **row})

    def _fill(self, training: dict[int, Seed]) -> None:
        """Fills every slot that does not train and has no state."""
        for slot in self.numbers:
            if slot in training:
                self._inactive.pop(slot, None)
            elif slot not in self._inactive:
                self._inactive[slot] = sharding.copy_arrays(next(iter(training.values())).state)


def over_seeds(rows: list[Row]) -> Row:
    """One row for the console: sums of trips and rates, means of all other numbers."""
    numbers: dict[str, list[float]] = {}
    for key, value in (item for row in rows for item in row.items()):
        if value is not None and math.isfinite(value):
            numbers.setdefault(key, []).append(value)
    summed = ("guards/", "training/sps")
    return {key: sum(found) / (1 if key.startswith(summed) else len(found)) for key, found in numbers.items()}
