"""Advice of a run that gives up: what was tried, which guards and limiters were most active, what to try next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rlstable.config.supervise import Remedy
from rlstable.supervise.recovery import Attempts
from rlstable.supervise.stop_reasons import StopReason
from rlstable.supervise.tally import SAMPLES, Tally

_NEXT = {
    StopReason.state_not_finite: "Leave guards.finite_update on, which keeps a bad number out of the parameters; see "
    "the first guard_tripped event for where it was born.",
    StopReason.no_update_accepted: "Lower ppo.learning_rate by ten; with float16 networks take precision=bfloat16 or "
    "the default; a loss that is not finite from the first iteration comes from the environment's rewards or "
    "observations.",
    StopReason.physics_unstable: "The simulation itself breaks down: try a smaller timestep, more solver iterations, "
    "softer contacts or smaller actuator gains in the model, precision=highest on a GPU, and a tighter "
    "guards.quarantine.max_abs_state to hear of it earlier.",
    StopReason.value_loss_exploded: "Scale rewards down with ppo.reward_scaling so that a good step earns about 1, or "
    "set ppo.normalize_rewards=true or ppo.normalize_values=true; lower ppo.learning_rate.",
    StopReason.policy_diverged: "Lower ppo.learning_rate, set guards.limiters.kl=0.05 or "
    "ppo.learning_rate_schedule=adaptive_kl, and take fewer epochs (ppo.num_updates_per_batch).",
    StopReason.policy_collapsed: "Lower ppo.learning_rate, set ppo.normalize_values=true and "
    "ppo.normalize_advantage=true, or take larger batches; the signs in the report say which network was at fault. "
    "Where returns swing by themselves, raise guards.return_watch.tolerance.",
    StopReason.guard_exhausted: "A guard of your own gave up; its trips are in events.jsonl with their causes.",
}


# Remedy by the part that rejects updates, in place of the remedy of `no_update_accepted`.
_UPDATES = {
    "limiters/kl": "Every update moved the policy further than guards.limiters.kl allows: lower ppo.learning_rate by a "
    "hundred or more.",
    "spike": "Gradients were far larger than before: lower ppo.learning_rate by ten, or ppo.reward_scaling if "
    "rewards have grown.",
}
# By guard and cause, None for any cause: the remedy for samples that were rejected for no fault of the simulation.
_SAMPLES = {
    (
        "finite_samples",
        "reward",
    ): "Rewards are too large once they are scaled: lower ppo.reward_scaling so that a good step earns about 1.",
    (
        "finite_samples",
        None,
    ): "Outputs of the networks are not finite or too large: lower ppo.learning_rate; with float16 "
    "networks take precision=bfloat16 or the default.",
    ("reward_outlier", None): "Rewards are far beyond what the task has paid before: mend the environment's reward, or "
    "raise guards.reward_outlier.factor.",
}
_SAMPLE_GUARDS = ("quarantine", "finite_samples", "reward_outlier")
_MANY = 0.2  # share of activity from which a limiter is named
_NAMED = 2  # guards and limiters each

_WITH_SIGNS = (StopReason.policy_diverged, StopReason.policy_collapsed)  # whose causes are in learning


def paragraph(
    cause: StopReason,
    attempts: Attempts,
    signs: Mapping[str, Mapping[str, Any]] | None = None,
    tally: Tally | None = None,
) -> str:
    """Advice after a cause: remedies that failed, the most active limiters, and settings that might help.

    Args:
        cause: The stop reason without any attempt.
        attempts: Memory of recovery.
        signs: Signs that were said, `SignMemory.said`.
        tally: Counts of the run; None for none.
    """
    tried = Counter(str(Remedy.model_validate(attempt["remedy"])) for attempt in attempts.recent)
    listed = ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in tried.items())
    count = len(attempts.recent)
    went_back = (
        f"Went back to the last good state {count} {'time' if count == 1 else 'times'}, with {listed}; "
        if count
        else ""
    )
    named = ", ".join(f"{name} (step {sign['first_step']:,})" for name, sign in (signs or {}).items())
    said = f" Signs before it: {named}." if named and cause in _WITH_SIGNS else ""
    counts = Tally() if tally is None else tally
    parts = (f"{went_back}{cause.meaning.split(';')[0]}.", _most_active(cause, counts), _next(cause, counts))
    return " ".join(part for part in parts if part) + said


def _most_active(cause: StopReason, tally: Tally) -> str:
    """The guards and limiters with the most activity; of updates that were all rejected, what rejected them."""
    if cause is StopReason.no_update_accepted and tally.lost:
        total, lost = sum(tally.lost.values()), sorted(tally.lost.items(), key=lambda pair: -pair[1])[:_NAMED]
        listed = [f"{_rejecting(name, tally)} ({count / total:.0%})" for name, count in lost]
        return f"Updates were rejected by {' and '.join(listed)}."
    guards = [
        f"guards/{name} ({count:,} {'trip' if count == 1 else 'trips'}, most for {tally.main_cause(name)})"
        for name, count in list(tally.tripped.items())[:_NAMED]
    ]
    active = sorted(((total / count, name) for name, (total, count) in tally.limiters.items()), reverse=True)
    limiters = [f"{name} ({share:.0%} of the time)" for share, name in active[:_NAMED] if share >= _MANY]
    return f"Most active were {', '.join(guards + limiters)}." if guards or limiters else ""


def _next(cause: StopReason, tally: Tally) -> str:
    """The remedy for the part that rejected most; without one, the remedy of the stop reason."""
    samples = cause is StopReason.physics_unstable
    if cause is StopReason.no_update_accepted and tally.lost:
        rejecting = max(tally.lost, key=lambda name: tally.lost[name])
        if rejecting in _UPDATES:
            return _UPDATES[rejecting]
        samples = rejecting == SAMPLES
        cause = StopReason.physics_unstable if samples else cause
    guard = _sample_guard(tally)
    if not samples or guard is None:
        return _NEXT[cause]
    return _SAMPLES.get((guard, tally.main_cause(guard))) or _SAMPLES.get((guard, None)) or _NEXT[cause]


def _rejecting(name: str, tally: Tally) -> str:
    """A key of `Tally.lost` as the metric that counts it."""
    if name != SAMPLES:
        return name if "/" in name else "guards/" + name
    guard = _sample_guard(tally)
    return SAMPLES if guard is None else f"guards/{guard}, which left {SAMPLES}"


def _sample_guard(tally: Tally) -> str | None:
    """The guard that rejected most samples."""
    return next((name for name in tally.tripped if name in _SAMPLE_GUARDS), None)
