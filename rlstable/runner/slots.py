"""The places of a program for several seeds: each has a training state in it, whether its seed trains or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlstable.device import sharding
from rlstable.policy.evaluator import Judged, policy_of
from rlstable.ppo.state import Metrics, TrainState
from rlstable.runner.seed_run import SeedRun


class FleetSlots:
    """Slots of a batch of seeds: finished seeds keep their last states, waiting seeds have copies.

    Nobody looks at what becomes of them.

    Args:
        seeds: All there are, in the order of their places.
    """

    def __init__(self, seeds: Iterable[int]):
        self._seeds = tuple(seeds)
        self._idle: dict[int, TrainState] = {}

    def leave(self, seed: int, state: TrainState) -> None:
        """Leaves the last state of a seed in its place."""
        self._idle[seed] = state

    def fill(self, training: Mapping[int, SeedRun], afresh: bool = False) -> None:
        """Sees to it that there is a state wherever none trains.

        Args:
            training: The seeds that do.
            afresh: Whether what is there already is of no use any longer.
        """
        some = next(iter(training.values())).state
        for seed in self._seeds:
            if seed in training:
                self._idle.pop(seed, None)
            elif afresh or seed not in self._idle:
                self._idle[seed] = sharding.copied(some)

    def states(self, training: Mapping[int, SeedRun]) -> tuple[TrainState, ...]:
        """The states of all places, as the program takes them."""
        return tuple(training[seed].state if seed in training else self._idle[seed] for seed in self._seeds)

    def judged(self, training: Mapping[int, SeedRun]) -> list[Judged]:
        """The policies of all places, as the evaluator takes them."""
        some = next(iter(training.values())).judged.key
        return [
            training[seed].judged if seed in training else policy_of(self._idle[seed], some) for seed in self._seeds
        ]

    def put(self, found: Iterable[tuple[TrainState, Metrics]], training: Mapping[int, SeedRun]) -> dict[int, Metrics]:
        """Puts what the program gave where it belongs; the reports of those that train."""
        reports = {}
        for seed, (state, report) in zip(self._seeds, found, strict=True):
            if seed in training:
                training[seed].state = state
                reports[seed] = report
            else:
                self._idle[seed] = state
        return reports
