"""Evaluates the policies of all slots: the evaluation program is compiled for the number of seeds.

Of several processes only the writer plays; all of them get its numbers, so that they decide alike.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from rlstable.device import hosts
from rlstable.io.console import Console
from rlstable.policy.evaluator import Abandoned, EvaluationMetrics, Evaluator, PolicySnapshot, returns_of
from rlstable.runner.seed_run import SeedRun
from rlstable.runner.slots import Slots
from rlstable.supervise.memory_plan import OutOfMemory


def evaluate(
    evaluator: Evaluator,
    slots: Slots,
    training: Mapping[int, SeedRun],
    seeds: Collection[int],
    console: Console,
    stops: Callable[[], bool],
) -> dict[int, EvaluationMetrics]:
    """Evaluates the present policies of all slots.

    Args:
        evaluator: The evaluator of all seeds.
        slots: The slots.
        training: The seeds that the last iteration trained.
        seeds: The seeds whose metrics are returned.
        console: Shows that the evaluation runs.
        stops: Whether a stop request abandons the evaluation, whose metrics are then missing.

    Raises:
        OutOfMemory: The evaluation does not fit; every good state is saved first.
    """
    policies = slots.policies(training)
    try:
        with console.busy("evaluating the policy"):
            metrics = _played("evaluation", lambda: evaluator.evaluate(list(policies.values()), stops))
    except Abandoned:
        return {}
    except OutOfMemory:
        for run in training.values():
            run.saving.save_if_good(run.state)  # the run ends with everything that it has learned
        raise
    return {seed: values for seed, values in zip(policies, metrics, strict=True) if seed in seeds}


def compare_with_best(
    evaluator: Evaluator,
    slots: Slots,
    training: Mapping[int, SeedRun],
    seeds: Collection[int],
    console: Console,
    stops: Callable[[], bool],
) -> None:
    """Plays the best and the present policies of some seeds in the same episodes, for their return checks.

    Without memory for these episodes, or after a stop request, nothing is compared.

    Args:
        evaluator: The evaluator of all seeds.
        slots: The slots.
        training: The seeds that the last iteration trained.
        seeds: The seeds whose return may have collapsed.
        console: Shows that the episodes are played.
        stops: Whether a stop request abandons the comparison.
    """
    policies = slots.policies(training)
    pairs = {seed: training[seed].return_check.policy_pair(training[seed].state) for seed in seeds}
    with contextlib.suppress(OutOfMemory, Abandoned), console.busy("comparing the policy with the best one"):
        best, present = (
            _played("comparison", functools.partial(_returns, evaluator, policies | _side(pairs, side), stops))
            for side in (0, 1)
        )
        for seed, best_returns, present_returns in zip(policies, best, present, strict=True):
            if seed in seeds:
                training[seed].return_check.compare(np.array(best_returns), np.array(present_returns))


def _side(pairs: Mapping[int, tuple[PolicySnapshot, PolicySnapshot]], side: int) -> dict[int, PolicySnapshot]:
    return {seed: pair[side] for seed, pair in pairs.items()}


def _returns(
    evaluator: Evaluator, policies: Mapping[int, PolicySnapshot], stops: Callable[[], bool]
) -> list[list[float]]:
    """The returns of the episodes of each policy, NaN where an episode does not count."""
    return [returns_of(episodes).tolist() for episodes in evaluator.play(list(policies.values()), stops)]


def _played(name: str, play: Callable[[], Any]) -> Any:
    """The numbers that the writer has played.

    Raises:
        Abandoned: A stop request abandoned the episodes.
        OutOfMemory: The writer has not enough memory for one episode.
    """

    def played_or_refused() -> tuple[Any, str | None]:
        try:
            return play(), None
        except Abandoned:
            return None, None
        except OutOfMemory as error:
            return None, str(error)

    played, refused = hosts.from_writer(name, played_or_refused)
    if refused is not None:
        raise OutOfMemory(refused)
    if played is None:
        raise Abandoned
    return played
