"""Slots of a program for several seeds, and the program: each slot holds a state, whether its seed trains or not."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from rlstable.device import sharding
from rlstable.policy.evaluator import PolicySnapshot, snapshot_of
from rlstable.ppo.state import Metrics, TrainState
from rlstable.runner.seed_run import SeedRun
from rlstable.runner.setup import Program
from rlstable.runner.setup_cache import ProgramKey


class Slots:
    """Slots of a batch of seeds: finished seeds keep their last states, waiting seeds have copies.

    Results of slots without a training seed are ignored.

    Args:
        seeds: All seeds, in the order of their slots.
    """

    def __init__(self, seeds: Iterable[int]):
        self._seeds = tuple(seeds)
        self._idle: dict[int, TrainState] = {}
        self._programs: dict[ProgramKey, Program] = {}

    def program(self, training: Mapping[int, SeedRun], unfinished: Mapping[int, SeedRun]) -> Program:
        """The program of the next iteration, in the memory that there is, with a state in every slot.

        Args:
            training: The seeds that train.
            unfinished: All seeds that have not ended.

        Raises:
            OutOfMemory: No memory plan fits.
        """
        self.fill(training)
        supervisor = next(iter(training.values())).supervisor
        while supervisor.program_key not in self._programs:
            compiled = functools.partial(supervisor.setup.compiled, *self.states(training))
            needed, program = supervisor.fitting(compiled)
            if program is not None:
                self._programs[supervisor.program_key] = program
            else:
                for run in training.values():
                    run.shrink(needed)
                self.take_plan_of(training, unfinished)
        return self._programs[supervisor.program_key]

    def take_plan_of(self, training: Mapping[int, SeedRun], unfinished: Mapping[int, SeedRun]) -> None:
        """Gives the waiting seeds the memory plan of the training ones, and idle slots states of its shapes."""
        plan = next(iter(training.values())).host.plan
        for run in unfinished.values():
            run.take_plan(plan)
        self.fill(training, renew=True)

    def leave(self, seed: int, state: TrainState) -> None:
        """Keeps the last state of a finished seed in its slot."""
        self._idle[seed] = state

    def fill(self, training: Mapping[int, SeedRun], renew: bool = False) -> None:
        """Fills every slot without a training seed with a state.

        Args:
            training: The seeds that train.
            renew: Whether to replace the states of idle slots, because shapes have changed.
        """
        some = next(iter(training.values())).state
        for seed in self._seeds:
            if seed in training:
                self._idle.pop(seed, None)
            elif renew or seed not in self._idle:
                self._idle[seed] = sharding.copy_arrays(some)

    def states(self, training: Mapping[int, SeedRun]) -> tuple[TrainState, ...]:
        """The states of all slots, as the program takes them."""
        return tuple(training[seed].state if seed in training else self._idle[seed] for seed in self._seeds)

    def policies(self, training: Mapping[int, SeedRun]) -> list[PolicySnapshot]:
        """The policies of all slots, as the evaluator takes them."""
        some = next(iter(training.values())).policy_snapshot.key
        return [
            training[seed].policy_snapshot if seed in training else snapshot_of(self._idle[seed], some)
            for seed in self._seeds
        ]

    def put(self, found: Iterable[tuple[TrainState, Metrics]], training: Mapping[int, SeedRun]) -> dict[int, Metrics]:
        """Takes the program's results; returns the metrics of the seeds that train."""
        reports = {}
        for seed, (state, report) in zip(self._seeds, found, strict=True):
            if seed in training:
                training[seed].state = state
                reports[seed] = report
            else:
                self._idle[seed] = state
        return reports
