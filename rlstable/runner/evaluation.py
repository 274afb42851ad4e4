"""Evaluates the policies of all slots: the evaluation program is compiled for the number of seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping

from rlstable.io.console import Console
from rlstable.policy.evaluator import EvaluationMetrics, Evaluator
from rlstable.runner.seed_run import SeedRun
from rlstable.runner.slots import Slots
from rlstable.supervise.memory_plan import OutOfMemory


def evaluate(
    evaluator: Evaluator, slots: Slots, training: Mapping[int, SeedRun], seeds: Collection[int], console: Console
) -> dict[int, EvaluationMetrics]:
    """Evaluates the present policies of all slots.

    Args:
        evaluator: The evaluator of all seeds.
        slots: The slots.
        training: The seeds that the last iteration trained.
        seeds: The seeds whose metrics are returned.
        console: Shows that the evaluation runs.

    Raises:
        OutOfMemory: The evaluation does not fit; every good state is saved first.
    """
    policies = slots.policies(training)
    try:
        with console.busy("evaluating the policy"):
            metrics = evaluator.evaluate(list(policies.values()))
    except OutOfMemory:
        for run in training.values():
            run.saving.save_if_good(run.state)  # the run ends with everything that it has learned
        raise
    return {seed: values for seed, values in zip(policies, metrics, strict=True) if seed in seeds}


def compare_with_best(
    evaluator: Evaluator, slots: Slots, training: Mapping[int, SeedRun], seeds: Collection[int], console: Console
) -> None:
    """Plays the best and the present policies of some seeds in the same episodes, for their return checks.

    Without memory for these episodes, nothing is compared.

    Args:
        evaluator: The evaluator of all seeds.
        slots: The slots.
        training: The seeds that the last iteration trained.
        seeds: The seeds whose return may have collapsed.
        console: Shows that the episodes are played.
    """
    policies = slots.policies(training)
    pairs = {seed: training[seed].return_check.policy_pair(training[seed].state) for seed in seeds}
    with contextlib.suppress(OutOfMemory), console.busy("comparing the policy with the best one"):
        best, present = (
            evaluator.play(list((policies | {seed: pair[side] for seed, pair in pairs.items()}).values()))
            for side in (0, 1)
        )
        for seed, best_episodes, present_episodes in zip(policies, best, present, strict=True):
            if seed in seeds:
                training[seed].return_check.compare(best_episodes, present_episodes)
