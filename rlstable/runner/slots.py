"""Slots of a program for several seeds: each slot holds a state, whether its seed trains or not."""

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
        self._inactive: dict[int, TrainState] = {}  # states of slots without a training seed
        self._programs: dict[ProgramKey, Program] = {}

    def program(self, training: Mapping[int, SeedRun], unfinished: Mapping[int, SeedRun]) -> Program:
        """The program of the next iteration, with a memory plan that fits and a state in every slot.

        Args:
            training: The seeds that train.
            unfinished: All seeds that have not ended.

        Raises:
            OutOfMemory: No memory plan fits.
        """
        self.fill(training)
        programs = next(iter(training.values())).programs
        while programs.key not in self._programs:
            compile_program = functools.partial(programs.setup.compiled, *self.states(training))
            needed, program = programs.fitting(compile_program)
            if program is not None:
                self._programs[programs.key] = program
            else:
                for run in training.values():
                    run.shrink(needed)
                self.take_plan_of(training, unfinished)
        return self._programs[programs.key]

    def take_plan_of(self, training: Mapping[int, SeedRun], unfinished: Mapping[int, SeedRun]) -> None:
        """Gives the waiting seeds the memory plan of the training ones, and inactive slots states of its shapes."""
        plan = next(iter(training.values())).host.plan
        for run in unfinished.values():
            run.take_plan(plan)
        self.fill(training, replace=True)

    def keep_last_state(self, seed: int, state: TrainState) -> None:
        """Keeps the last state of a finished seed in its slot."""
        self._inactive[seed] = state

    def fill(self, training: Mapping[int, SeedRun], replace: bool = False) -> None:
        """Fills every slot without a training seed with a state.

        Args:
            training: The seeds that train.
            replace: Whether to replace the states of inactive slots, because shapes have changed.
        """
        state = next(iter(training.values())).state
        for seed in self._seeds:
            if seed in training:
                self._inactive.pop(seed, None)
            elif replace or seed not in self._inactive:
                self._inactive[seed] = sharding.copy_arrays(state)

    def states(self, training: Mapping[int, SeedRun]) -> tuple[TrainState, ...]:
        """The states of all slots, as the program takes them."""
        return tuple(training[seed].state if seed in training else self._inactive[seed] for seed in self._seeds)

    def policies(self, training: Mapping[int, SeedRun]) -> dict[int, PolicySnapshot]:
        """The policies of all slots by seed, in the order of the slots."""
        key = next(iter(training.values())).policy_snapshot.key
        return {
            seed: training[seed].policy_snapshot if seed in training else snapshot_of(self._inactive[seed], key)
            for seed in self._seeds
        }

    def store(
        self, results: Iterable[tuple[TrainState, Metrics]], training: Mapping[int, SeedRun]
    ) -> dict[int, Metrics]:
        """Stores the states that the program returned; returns the metrics of the seeds that train."""
        metrics = {}
        for seed, (state, seed_metrics) in zip(self._seeds, results, strict=True):
            if seed in training:
                training[seed].state = state
                metrics[seed] = seed_metrics
            else:
                self._inactive[seed] = state
        return metrics
