"""Confirms the best policy of a run: evaluates its best checkpoints again, all of them in the same fresh episodes.

The highest of many evaluations is partly luck. A second evaluation, in episodes that training never played,
separates a lucky evaluation from a good policy.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstable.config import ConfigError
from rlstable.io.saved_policy import restore_policy
from rlstable.policy.evaluator import Abandoned, EvaluationMetrics, PolicySnapshot
from rlstable.runner.seed_run import SeedRun
from rlstable.supervise.stop_reasons import GIVEN_UP, StopReason

# Stop reasons after which the process may still work; after the other stop reasons it must exit soon.
CONFIRMED_AT = (StopReason.completed, StopReason.target_reached, StopReason.stopped, *GIVEN_UP)


class Candidate(NamedTuple):
    """A checkpoint that may hold the best policy.

    Attributes:
        run: The run that saved it.
        iteration: Iteration of the checkpoint.
        step: Environment steps trained until the checkpoint.
        score: Return of its single evaluation in training; None if it was not evaluated.
        policy: Its policy, with the random key of the fresh episodes.
    """

    run: SeedRun
    iteration: int
    step: int
    score: float | None
    policy: PolicySnapshot


def confirm(
    runs: Sequence[SeedRun],
    evaluate: Callable[[list[PolicySnapshot]], list[EvaluationMetrics]],
    batch: int,
    requested_stop: Callable[[float], StopReason | None],
) -> None:
    """Evaluates the best checkpoints and the latest one of each run again, and records the best of them.

    The record is `SeedRun.confirmed` and the event `best_confirmed`. A failure never raises: it is the event
    `best_not_confirmed`. Training states, checkpoints and random keys do not change.

    Args:
        runs: Runs that end now, with the same configuration except for the seed.
        evaluate: Evaluates policies, as `Evaluator.evaluate`.
        batch: Number of policies that `evaluate` takes.
        requested_stop: Gives the stop reason that a signal or the clock requests, from the seconds of the next
            evaluation.
    """
    due = [run for run in runs if _is_due(run)]
    candidates = (candidate for run in due for candidate in _candidates(run))
    returns: dict[SeedRun, list[tuple[float, Candidate]]] = {run: [] for run in due}
    seconds = 0.0
    try:
        while part := list(itertools.islice(candidates, batch)):
            stop_reason = requested_stop(seconds)
            if stop_reason is not None:
                return _log_not_confirmed(due, because=stop_reason.name)
            started = time.perf_counter()
            policies = [candidate.policy for candidate in part]
            evaluations = evaluate(policies + policies[-1:] * (batch - len(part)))
            seconds = time.perf_counter() - started
            for candidate, evaluation in zip(part, evaluations, strict=False):
                value = evaluation["eval/episode_reward"]
                # If every episode was aborted, there is no return to compare.
                returns[candidate.run].append((-np.inf if value is None else value, candidate))
    except Abandoned:
        return _log_not_confirmed(due, because=(requested_stop(0.0) or StopReason.interrupted).name)
    except Exception as error:  # training is complete, and its stop reason must not change
        return _log_not_confirmed(due, error=f"{type(error).__name__}: {error}")
    for run in due:
        _record(run, returns[run])


def _is_due(run: SeedRun) -> bool:
    """Whether the run has a best policy that is not confirmed yet."""
    config = run.config.checkpoint
    if not config.enabled or not config.confirm_best or not run.checkpoints.ranked():
        return False
    if run.confirmed.get("confirmed_iteration") in run.checkpoints.all():
        return False  # a finished run was resumed, and there is nothing left to train
    run.confirmed = {}
    return True


def _candidates(run: SeedRun) -> Iterator[Candidate]:
    """Reads the checkpoints to evaluate again, one by one; damaged checkpoints are logged and left out."""
    scores = dict(run.checkpoints.ranked())
    best = list(scores)[: run.config.checkpoint.confirm_best]
    template = run.in_fresh_episodes
    for iteration in dict.fromkeys([*best, *run.checkpoints.all()[-1:]]):
        try:
            arrays, host = restore_policy(run.run_dir, iteration, lambda kind, fields: run.event(kind, **fields))
        except ConfigError:
            continue
        yield Candidate(run, iteration, int(host["step"]), scores.get(iteration), _policy_of(arrays, template))


def _policy_of(arrays: dict[str, Any], template: PolicySnapshot) -> PolicySnapshot:
    """The saved arrays of a policy, with the structure, dtypes and shardings of a policy to evaluate."""
    statistics = dataclasses.replace(template.statistics, **arrays["statistics"])
    saved = template._replace(params={**template.params, "policy": arrays["params"]}, statistics=statistics)
    return jax.tree.map(
        lambda x, old: x if x is old else jax.device_put(np.asarray(x, old.dtype), old.sharding), saved, template
    )


def _record(run: SeedRun, returns: list[tuple[float, Candidate]]) -> None:
    """Records the candidate with the highest return; of equal candidates, the latest one."""
    value, best = max(returns, key=lambda pair: (pair[0], pair[1].iteration), default=(-np.inf, None))
    if best is None or not np.isfinite(value):
        return _log_not_confirmed([run], because="no candidate has a return")
    episodes, newest = run.config.eval.num_envs, run.checkpoints.all()[-1]
    latest = next((value for value, one in returns if one.iteration == newest and np.isfinite(value)), None)
    run.confirmed = {
        "confirmed_return": float(value),
        "confirmed_iteration": best.iteration,
        "confirmed_step": best.step,
        "confirmed_episodes": episodes,
        "confirmed_last_return": latest,
    }
    fields = {"iteration": best.iteration, "step": best.step, "return": float(value), "score": best.score}
    run.event("best_confirmed", **fields, candidates=len(returns), episodes=episodes)


def _log_not_confirmed(runs: Sequence[SeedRun], **reason: str) -> None:
    """Logs that no policy was confirmed, so that the best single evaluation decides."""
    for run in runs:
        run.event("best_not_confirmed", **reason)
