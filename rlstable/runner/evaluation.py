"""Evaluates and compares the present policies, and confirms the best policy at the end of a run.

The evaluation program is compiled for the number of seeds. Of several processes only the writer plays; all of them get
its numbers, so that they decide alike.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstable.config import ConfigError
from rlstable.device import hosts
from rlstable.io.checkpoint import restore_policy
from rlstable.policy.evaluator import EvaluationMetrics, Evaluator, PolicySnapshot, returns_of, snapshot_of
from rlstable.runner.seed import Seed
from rlstable.supervise.memory import OutOfMemory
from rlstable.supervise.stop_reasons import GIVEN_UP, StopReason

# Stop reasons after which the process may still work; after the other stop reasons it must exit soon.
CONFIRMED_AT = (StopReason.completed, StopReason.target_reached, StopReason.stopped, *GIVEN_UP)


def evaluate(evaluator: Evaluator, policies: Mapping[int, PolicySnapshot]) -> dict[int, EvaluationMetrics]:
    """Metrics of the policies of all slots by seed; raises `OutOfMemory` as `Evaluator.evaluate`."""
    metrics = _played("evaluation", lambda: evaluator.evaluate(list(policies.values())))
    return dict(zip(policies, metrics, strict=True))


def compare_with_best(evaluator: Evaluator, policies: Mapping[int, PolicySnapshot], suspects: Sequence[Seed]) -> None:
    """Plays the best and the present policies of some seeds in the same episodes, for their return checks.

    Raises `OutOfMemory` as `Evaluator.evaluate`.
    """
    pairs = {seed.config.seed: (seed, *seed.return_check.policy_pair(seed.state)) for seed in suspects}

    def returns(policies: Mapping[int, PolicySnapshot]) -> list[list[float]]:
        return [returns_of(episodes).tolist() for episodes in evaluator.play(list(policies.values()))]

    played = []
    for side in (1, 2):
        together = {**policies, **{number: pair[side] for number, pair in pairs.items()}}
        played.append(_played("comparison", lambda together=together: returns(together)))  # type: ignore[misc]
    for number, best, present in zip(policies, *played, strict=True):
        if number in pairs:
            pairs[number][0].return_check.compare(np.array(best), np.array(present))


def _played(name: str, play: Callable[[], Any]) -> Any:
    """The numbers that the writer has played."""

    def played_or_refused() -> tuple[Any, str | None]:
        try:
            return play(), None
        except OutOfMemory as error:
            return None, str(error)

    played, refused = hosts.from_writer(name, played_or_refused)
    if refused is not None:
        raise OutOfMemory(refused)
    return played


class Candidate(NamedTuple):
    """A checkpoint that may hold the best policy."""

    seed: Seed
    number: int
    policy: PolicySnapshot  # with the random key of the fresh episodes


def confirm(
    seeds: Sequence[Seed],
    evaluate: Callable[[list[PolicySnapshot]], list[EvaluationMetrics]],
    batch: int,
    requested_stop: Callable[[float], StopReason | None],
) -> None:
    """Evaluates the best checkpoints and the latest one of each seed again, all of them in the same fresh episodes.

    The highest of many evaluations is partly luck. A second evaluation, in episodes that training never played,
    separates a lucky evaluation from a good policy. The record is `Seed.confirmed` and the event `best_confirmed`. A
    failure never raises: it is the event `best_not_confirmed`. States, checkpoints and random keys do not change.

    `evaluate` takes `batch` policies. `requested_stop` returns the stop reason that a signal or the clock requests
    before an evaluation of so many seconds.
    """
    due = [seed for seed in seeds if _is_due(seed)]
    candidates = (candidate for seed in due for candidate in _candidates(seed))
    returns: dict[Seed, list[tuple[float, Candidate]]] = {seed: [] for seed in due}
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
                returns[candidate.seed].append((-np.inf if value is None else value, candidate))
    except Exception as error:  # training is complete, and its stop reason must not change
        return _log_not_confirmed(due, error=f"{type(error).__name__}: {error}")
    for seed in due:
        _record(seed, returns[seed])


def _is_due(seed: Seed) -> bool:
    """Whether the seed has a best policy that is not confirmed yet, and this process plays."""
    config = seed.config.checkpoint
    if not hosts.is_writer() or not config.enabled or not config.confirm_best or not seed.checkpoints.ranked():
        return False
    if seed.confirmed.get("confirmed_checkpoint") in seed.checkpoints.all():
        return False  # a finished run was resumed, and there is nothing left to train
    seed.confirmed = {}
    return True


def _candidates(seed: Seed) -> Iterator[Candidate]:
    """Reads the checkpoints to evaluate again, one by one; damaged checkpoints are logged and left out."""
    template = snapshot_of(seed.state, seed.keys.fresh_evaluation)
    for number in seed.checkpoints.candidates(seed.config.checkpoint.confirm_best):
        try:
            arrays, _ = restore_policy(seed.run_dir, number, lambda kind, fields: seed.event(kind, **fields))
        except ConfigError:
            continue
        yield Candidate(seed, number, _policy_of(arrays, template))


def _policy_of(arrays: dict[str, Any], template: PolicySnapshot) -> PolicySnapshot:
    """The saved arrays of a policy, with the structure, dtypes and shardings of a policy to evaluate."""
    statistics = dataclasses.replace(template.statistics, **arrays["statistics"])
    saved = template._replace(params={"policy": arrays["params"]}, statistics=statistics)
    return jax.tree.map(
        lambda x, old: x if x is old else jax.device_put(np.asarray(x, old.dtype), old.sharding), saved, template
    )


def _record(seed: Seed, returns: list[tuple[float, Candidate]]) -> None:
    """Records the candidate with the highest return; of equal candidates, the latest one."""
    value, best = max(returns, key=lambda pair: (pair[0], pair[1].number), default=(-np.inf, None))
    if best is None or not np.isfinite(value):
        return _log_not_confirmed([seed], because="no candidate has a return")
    episodes, newest = seed.config.eval.num_envs, seed.checkpoints.all()[-1]
    latest = next((value for value, one in returns if one.number == newest and np.isfinite(value)), None)
    seed.confirmed = {
        "confirmed_return": float(value),
        "confirmed_checkpoint": best.number,
        "confirmed_episodes": episodes,
        "confirmed_last_return": latest,
    }
    fields = {"checkpoint": best.number, "return": float(value), "candidates": len(returns), "episodes": episodes}
    seed.event("best_confirmed", **fields)


def _log_not_confirmed(seeds: Sequence[Seed], **reason: str) -> None:
    """Logs that no policy was confirmed, so that the best single evaluation decides."""
    for seed in seeds:
        seed.event("best_not_confirmed", **reason)
