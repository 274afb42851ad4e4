"""Advice after a failed run: the remedies tried, the most active guards and limiters, and settings to try next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rlstable.config.supervise import Remedy
from rlstable.supervise.recovery import Attempts
from rlstable.supervise.signs import recovered_text
from rlstable.supervise.stop_reasons import StopReason
from rlstable.supervise.tally import SAMPLES, Tally

_NEXT = {
    StopReason.state_not_finite: "Keep guards.finite_update on, which keeps bad numbers out of the parameters; the "
    "first guard_tripped event shows where the bad number comes from.",
    StopReason.no_update_accepted: "Divide ppo.learning_rate by 10; with float16 networks set precision=bfloat16 or "
    "the default; a loss that is not finite from the first iteration comes from the environment's rewards or "
    "observations.",
    StopReason.physics_unstable: "The simulation becomes unstable: try a smaller timestep, more solver iterations, "
    "softer contacts or smaller actuator gains in the model, precision=highest on a GPU, and a tighter "
    "guards.quarantine.max_abs_state to detect it earlier.",
    StopReason.value_loss_exploded: "Scale rewards down with ppo.reward_scaling so that a good step earns about 1, or "
    "set ppo.normalize_rewards=true or ppo.normalize_values=true; lower ppo.learning_rate.",
    StopReason.policy_diverged: "Lower ppo.learning_rate, set guards.limiters.kl=0.3 or "
    "ppo.learning_rate_schedule=adaptive_kl, and use fewer epochs (ppo.num_updates_per_batch).",
    StopReason.policy_collapsed: "Lower ppo.learning_rate, set ppo.normalize_values=true and "
    "ppo.normalize_advantage=true, or use larger batches; the signs in the report say which network was at fault. "
    "If returns fluctuate without a cause, raise guards.return_watch.tolerance.",
    StopReason.guard_exhausted: "One of your own guards lost its patience; see its trips in events.jsonl.",
}


# Remedy by the guard or limiter that rejects updates, instead of the remedy of `no_update_accepted`.
_UPDATES = {
    "limiters/kl": "Every update moved the policy further than guards.limiters.kl allows: divide ppo.learning_rate by "
    "100 or more.",
    "spike": "Gradients were far larger than before: divide ppo.learning_rate by 10, or lower ppo.reward_scaling if "
    "rewards have grown.",
}
_UNITS = (
    "The environment's {0} was not finite, or beyond guards.quarantine.max_abs_{0}; the event incident names the "
    "number. Correct the {0}, or set that key to null if it is a matter of units."
)
# Remedy by guard and cause (None for any cause), for rejected samples that the simulation did not cause.
_SAMPLES = {
    ("quarantine", "observation"): _UNITS.format("observation"),
    ("quarantine", "reward"): _UNITS.format("reward"),
    (
        "finite_samples",
        "reward",
    ): "Rewards are too large once they are scaled: lower ppo.reward_scaling so that a good step earns about 1.",
    (
        "finite_samples",
        None,
    ): "Outputs of the networks are not finite or too large: lower ppo.learning_rate; with float16 "
    "networks set precision=bfloat16 or the default.",
    (
        "reward_outlier",
        None,
    ): "Rewards are far larger than before: correct the environment's reward, or raise guards.reward_outlier.factor.",
}
# Remedy by the quantity of the policy that left its bounds, instead of the remedy of `policy_diverged`.
_POLICY = {
    "std_exploded": "The policy's standard deviation grew beyond guards.policy.max_std: lower ppo.entropy_cost, "
    "guards.limiters.policy_std_max or ppo.learning_rate.",
    **dict.fromkeys(
        ("std_collapsed", "entropy_collapsed"),
        "The policy's noise fell below guards.policy.min_std or min_entropy: raise ppo.entropy_cost or "
        "guards.limiters.policy_std_min, or lower ppo.learning_rate.",
    ),
}
# Guard that ends a run with a stop reason; the advice names it first, however often other guards tripped.
_ENDING = {
    StopReason.policy_diverged: "policy",
    StopReason.value_loss_exploded: "value_loss",
    StopReason.state_not_finite: "finite_state",
}
_SAMPLE_GUARDS = ("quarantine", "finite_samples", "reward_outlier")
_MANY = 0.2  # share of activity from which a limiter is named
_NAMED = 2  # guards, and limiters, that are named

# Stop reasons caused by learning; the advice names the signs of trouble.
_WITH_SIGNS = (StopReason.policy_diverged, StopReason.policy_collapsed)


def paragraph(
    cause: StopReason,
    attempts: Attempts,
    signs: Mapping[str, Mapping[str, Any]] | None = None,
    tally: Tally | None = None,
) -> str:
    """Advice after a cause: remedies that failed, the most active limiters, and settings that might help.

    Args:
        cause: The cause of the last failure.
        attempts: Memory of recovery.
        signs: Logged signs, `SignMemory.logged`.
        tally: Counts of the run; None for no counts.
    """
    tried = Counter(str(Remedy.model_validate(attempt["remedy"])) for attempt in attempts.recent)
    listed = ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in tried.items())
    count = len(attempts.recent)
    rollbacks = (
        f"Rolled back to the last good state {count} {'time' if count == 1 else 'times'}, with {listed}; "
        if count
        else ""
    )
    named = ", ".join(
        f"{name} (step {sign['first_step']:,}{recovered_text(sign, ', ')})" for name, sign in (signs or {}).items()
    )
    sign_text = f" Signs before it: {named}." if named and cause in _WITH_SIGNS else ""
    counts = Tally() if tally is None else tally
    parts = (f"{rollbacks}{cause.meaning.split(';')[0]}.", _most_active(cause, counts), _next(cause, counts))
    return " ".join(part for part in parts if part) + sign_text


def _most_active(cause: StopReason, tally: Tally) -> str:
    """The most active guards and limiters; if all updates were rejected, the guards and limiters that rejected them."""
    if cause is StopReason.no_update_accepted and tally.lost:
        total, lost = sum(tally.lost.values()), sorted(tally.lost.items(), key=lambda pair: -pair[1])[:_NAMED]
        listed = [f"{_rejecting(name, tally)} ({count / total:.0%})" for name, count in lost]
        return f"Updates were rejected by {' and '.join(listed)}."
    tripped = sorted(tally.tripped.items(), key=lambda pair: pair[0] != _ENDING.get(cause))
    guards = [
        f"guards/{name} ({count:,} {'trip' if count == 1 else 'trips'}, most for {tally.main_cause(name)})"
        for name, count in tripped[:_NAMED]
    ]
    active = sorted(((total / count, name) for name, (total, count) in tally.limiters.items()), reverse=True)
    limiters = [f"{name} ({share:.0%} of the time)" for share, name in active[:_NAMED] if share >= _MANY]
    return f"Most active were {', '.join(guards + limiters)}." if guards or limiters else ""


def _next(cause: StopReason, tally: Tally) -> str:
    """The remedy for the guard or limiter that rejected most; without one, the remedy of the stop reason."""
    samples = cause is StopReason.physics_unstable
    if cause is StopReason.no_update_accepted and tally.lost:
        rejecting = max(tally.lost, key=lambda name: tally.lost[name])
        if rejecting in _UPDATES:
            return _UPDATES[rejecting]
        samples = rejecting == SAMPLES
        cause = StopReason.physics_unstable if samples else cause
    if cause is StopReason.policy_diverged and "policy" in tally.trips:
        return _POLICY.get(tally.main_cause("policy"), _NEXT[cause])
    guard = _sample_guard(tally)
    if not samples or guard is None:
        return _NEXT[cause]
    return _SAMPLES.get((guard, tally.main_cause(guard))) or _SAMPLES.get((guard, None)) or _NEXT[cause]


def _rejecting(name: str, tally: Tally) -> str:
    """The metric that counts a key of `Tally.lost`."""
    if name != SAMPLES:
        return name if "/" in name else "guards/" + name
    guard = _sample_guard(tally)
    return SAMPLES if guard is None else f"guards/{guard}, which left {SAMPLES}"


def _sample_guard(tally: Tally) -> str | None:
    """The guard that rejected most samples."""
    return next((name for name in tally.tripped if name in _SAMPLE_GUARDS), None)
