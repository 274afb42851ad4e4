"""Diagnosis: tables of signs of trouble, of warnings about a whole run, and of advice on stop reasons.

A sign only reports; for `critic_behind` the supervisor has a remedy. A sign tests the metrics of every healthy
iteration or of every evaluation; the metrics of one iteration or evaluation are a row. A row that passes the test is a
hit. Enough hits in the window of latest rows start an episode of trouble, which is logged as the event `sign`. The
episode ends when the window has no hit, which is logged as the event `sign_recovered`; only then can the sign be logged
again. A row without a finite value is skipped. Signs depend on rows only, so a resumed run logs the same signs.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlstable.config import Config
from rlstable.config.ppo import PPOConfig
from rlstable.config.run import EnvConfig
from rlstable.config.supervise import Remedy
from rlstable.supervise.recovery import Attempts
from rlstable.supervise.stop_reasons import StopReason
from rlstable.supervise.tally import SAMPLES, SignRecord, SignState, Tally

Row = Mapping[str, Any]  # metrics of one iteration or evaluation, and the numbers of `_of_iteration`

_ERRORS = 3.0  # standard errors of an evaluation; a smaller fall is noise
_FIRST = 10  # first iterations, whose returns are not compared with evaluations
_LONGER = 1.2  # ratio of episode lengths; returns of evaluations with longer episodes are not comparable
_LEAST_TARGET, _GREATEST_TARGET = 0.01, 100.0  # size of value targets
_GREATEST_NORMALIZED = 1e4  # with normalised advantages the scale only affects the critic
_GOOD_TARGET = 10.0  # size of value targets that the remedy aims at
CRITIC_BEHIND = "critic_behind"  # the sign for which the supervisor has a remedy


class Sign(NamedTuple):
    """A row of the table of signs, whose conditions are in docs/nan.md; `mean` in a text is that of the hits."""

    name: str  # in events and in `result.json`
    value: str  # key of the tested number in a row; a row without a finite number is skipped
    is_hit: Callable[[float, Row], bool]
    hits: int  # in the window, that start an episode
    rows: int  # length of the window
    sentence: str
    remedy: str
    of_evaluations: bool = False  # else of iterations


# First remedy by limiter.
_LIMITERS = {
    "reward": "raise guards.limiters.reward or lower ppo.reward_scaling",
    "observation": "raise guards.limiters.observation",
    "observation_outlier": "raise guards.limiters.observation_outlier",
    "observation_shift": "raise guards.limiters.observation_shift",
    "advantage_std": "raise ppo.reward_scaling or lower guards.limiters.advantage_std_min",
    "value_target": "lower ppo.reward_scaling or raise guards.limiters.value_target",
    "value_error": "raise guards.limiters.value_error or set ppo.normalize_values=true",
    "log_ratio": "lower ppo.learning_rate",
    "policy_std": "raise ppo.entropy_cost where the policy's deviation is too small, else lower it",
    "kl": "lower ppo.learning_rate",
    "gradient_norm": "raise guards.limiters.gradient_norm or lower ppo.reward_scaling",
    "update_norm": "lower ppo.learning_rate or raise guards.limiters.update_norm",
}


def _limiter(name: str) -> Sign:
    bound = 0.5 if name == "gradient_norm" else 0.2
    return Sign(
        f"limiter_saturated/{name}", f"limiters/{name}/active", lambda value, row: value > bound, 50, 50,
        f"the limiter {name} was active {{mean:.0%}} of the time for 50 iterations: it takes part in learning",
        _LIMITERS[name],
    )  # fmt: skip


# fmt: off
SIGNS = (
    *map(_limiter, _LIMITERS),
    Sign(
        CRITIC_BEHIND, "training/explained_variance",
        lambda value, row: value < 0.0 and row["training/iteration"] > 20 and row["value_error"] > 0.1, 30, 50,
        "the explained variance was below 0 in 30 of the last 50 iterations (mean {mean:.2g}), with value errors of "
        "{value_error:.0%} of the targets: the value network lags behind",
        "set ppo.normalize_values=true ppo.normalize_advantage=true; if they are on, lower ppo.learning_rate or "
        "enlarge network.value_hidden_layer_sizes",
    ),
    Sign(
        "return_below_best", "last", lambda value, row: _fallen(value, row) and not _rises(value, row), 2, 2,
        "the last two evaluations returned {last_two:,.1f} on average, where two in a row had reached {best:,.1f}",
        "lower ppo.learning_rate, or set ppo.normalize_values=true ppo.normalize_advantage=true", True,
    ),
    Sign(
        "evaluation_below_training", "comparable",
        lambda value, row: row["training"] - value > max(0.5 * row["range"], _ERRORS * row["training_error"]), 2, 2,
        "evaluations of the mean action returned {mean:,.1f}, where training with sampled actions returned "
        "{training:,.1f}: the mean action does not do what the samples do",
        "set eval.deterministic=false to evaluate and choose the policy that was trained", True,
    ),
    Sign(
        "episodes_shorten", "shortened", lambda value, row: value < 0.5 and row["last"] < 0.0, 2, 2,
        "episodes end after {plain_length} steps with a return of {last:,.1f}; training episodes had {longest:,.0f}: "
        "unless their end is the goal, the policy ends episodes to escape a cost",
        "reward each step before the end of an episode, or make the end cost more than the steps that it saves", True,
    ),
    Sign(
        "rewards_outlying", "limiters/reward_outlier/active", lambda value, row: value > 0.0, 25, 50,
        "{mean:.2g} of the rewards in 25 of the last 50 iterations were far larger than usual, and were clipped",
        "correct the reward if these are glitches; if they are rare prizes of the task and are not learned, set "
        "guards.limiters.reward_outlier=null",
    ),
    Sign(
        "actions_unbounded", "training/action_size", lambda value, row: value > 10.0, 25, 50,
        "actions were {mean:.2g} on average in 25 of the last 50 iterations, far beyond [-1, 1]: the policy may gain "
        "from actions that no motor can do",
        "clip the action in the environment, or set network.distribution_type=tanh_normal",
    ),
    Sign(
        "samples_masked", "masked", lambda value, row: value > 1e-6, 25, 50,  # a mean of ones may be 1 - 6e-8
        "guards masked {mean:.2g} of the samples in 25 of the last 50 iterations: the policy may gain from what comes "
        "before, such as physics that explodes",
        "replay the incident; if its physics explodes, set a smaller time step (Playground: env.kwargs.sim_dt)",
    ),
    Sign(
        "reward_scale", "target_size",
        lambda value, row: value > row["greatest_target"] or 0.0 < row["max_target"] < _LEAST_TARGET, 20, 50,
        "value targets were of about {plain_mean} in 20 of the last 50 iterations, far from 1",
        "set ppo.normalize_values=true ppo.normalize_advantage=true, or ppo.reward_scaling={better_scaling:.1g}",
    ),
    Sign(
        "observation_began_to_vary", "training/element_that_began_to_vary", lambda value, row: value > 0.0, 1, 50,
        "element {element} of the observation had been constant and began to vary: the policy has no experience with "
        "it",
        "if the task does not do so on purpose, correct the observation",
    ),
    Sign(
        "observation_drifts", "training/drifting_element", lambda value, row: value > 0.0, 25, 50,
        "element {element} of the observation drifted in 25 of the last 50 iterations, so that the policy "
        "always observes numbers that it has no experience with",
        "observe a difference instead of a counter, a time or a total; if a sensor drifts, subtract its bias",
    ),
    Sign(
        "training_episodes_short", "steps_per_episode",
        lambda value, row: value <= max(0.1 * row["length"], row["first_step"]) < row["length"], 1, 1,
        "training episodes have a mean length of {plain_mean}, evaluation episodes of {plain_length}: a reset does not "
        "restore info",
        "set env.restore_info=true if step counts or keeps time in info", True,
    ),
)
# fmt: on
FAILURE_REPEATS = "failure_repeats"  # reported by the supervisor, not from metrics


def signs_of(config: Config) -> list[Sign]:
    """The signs of a configuration, or only the one with a remedy; a sign whose metric is missing is never logged."""
    limit, recipe = config.guards.limiters.gradient_norm, config.ppo.max_grad_norm
    exists = {
        # Recipes that clip the gradient in nearly every minibatch do so on purpose.
        "limiter_saturated/gradient_norm": limit is not None and (recipe is None or limit < recipe),
        "evaluation_below_training": config.eval.deterministic and not config.eval.env_kwargs,
        "training_episodes_short": config.env.may_keep_counters,
    }
    if not config.logging.signs:
        exists = {sign.name: sign.name == CRITIC_BEHIND and config.speeds_up_critic for sign in SIGNS}
    return [sign for sign in SIGNS if exists.get(sign.name, True)]


def _of_iteration(metrics: Row, iteration: int, ppo: PPOConfig, episode_length: int) -> Row:
    """A row: the metrics of an iteration, and the numbers that signs derive from them."""
    steps = float(episode_length)
    horizon = min(steps, 1.0 / (1.0 - ppo.discounting)) if ppo.discounting < 1.0 else steps
    reward, greatest = _number(metrics, "training/reward_mean"), _number(metrics, "training/reward_greatest")
    target = 0.0 if reward is None else abs(reward) * ppo.reward_scaling * horizon
    size = 1.0 if ppo.normalize_values else target
    max_target = (greatest or 0.0) * horizon
    # 0 without any reward, since a sparse task does not show its scale.
    scale = max_target if 0.0 < max_target < _LEAST_TARGET else size
    loss, coefficient = _number(metrics, "training/v_loss"), ppo.vf_loss_coefficient
    error = math.sqrt(max(loss or 0.0, 0.0) / (0.5 * coefficient)) / size if size > 0.0 and coefficient > 0.0 else 0.0
    return {
        **metrics,
        "training/iteration": iteration,
        "masked": 1.0 - metrics.get("training/valid_share", math.nan),
        "value_error": error,
        "target_size": None if reward is None or ppo.normalize_values or greatest is None else scale,
        "max_target": max_target,
        "greatest_target": _GREATEST_NORMALIZED if ppo.normalize_advantage else _GREATEST_TARGET,
        "better_scaling": ppo.reward_scaling * (_GOOD_TARGET / scale if scale > 0.0 else 1.0),
    }


def _of_evaluation(metrics: Row, state: SignState, before: float, episodes: int, steps: int, repeat: int) -> Row:
    """A row: the metrics of an evaluation, and the numbers that signs derive from them and from earlier rows."""
    value = state.last_return or 0.0
    deviation = _number(metrics, "eval/episode_reward_std") or 0.0
    length = _number(metrics, "eval/avg_episode_length") or 0.0
    is_comparable = state.training_return is not None and length <= _LONGER * state.training_length
    # Variance of one training episode, from the episodes of an iteration.
    variance = state.training_variance * steps / max(state.training_length, 1.0)
    return {
        **metrics,
        "last": value,
        "before": before,
        "last_two": (before + value) / 2.0,
        "first": state.first_return,
        "best": state.best_return if state.best_return is not None else value,
        "error": deviation / math.sqrt(episodes),
        "length": length,
        "plain_length": _plain(length),
        "longest": state.longest,
        "shortened": length / state.longest if state.longest else None,
        "first_step": 1.01 * repeat,
        "steps_per_episode": state.steps_per_episode,
        "comparable": value if is_comparable else None,
        "training": state.training_return,
        "training_error": math.sqrt((deviation**2 + variance) / episodes),
        "range": (state.greatest_return or 0.0) - (state.lowest_return or 0.0),
    }


def _fallen(value: float, row: Row) -> bool:
    first, best = row["first"], row["best"]
    return bool(value < first + 0.8 * (best - first) and best - value > _ERRORS * row["error"])


def _rises(value: float, row: Row) -> bool:
    return bool(value - row["before"] > max(row["error"], 0.1 * (row["best"] - row["before"])))


def _number(row: Row, key: str) -> float | None:
    """A metric; None if it is missing or not finite."""
    value = row.get(key)
    return None if value is None or not math.isfinite(value) else float(value)


def _plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100.0 else f"{value:.2g}"


@dataclasses.dataclass(frozen=True)
class Signs:
    """Detects signs of trouble, and calls `event("sign", sign, text, value)` and `event("sign_recovered", sign)`."""

    signs: Sequence[Sign]
    ppo: PPOConfig
    env: EnvConfig
    episodes: int  # of an evaluation
    event: Callable[..., None]

    @property
    def _steps(self) -> int:
        return self.ppo.env_steps_per_iteration(self.env.action_repeat)

    def record_iteration(self, state: SignState, iteration: int, step: int, metrics: Row) -> None:
        """Tests the metrics of a healthy iteration; `iteration` counts from 1."""
        if not self.signs:
            return
        episodes = metrics.get("training/episodes", state.episodes)
        ended, state.episodes = episodes - state.episodes, episodes
        state.steps_per_episode = self._steps / ended if ended > 0 else None
        mean_return, length = _number(metrics, "episode/sum_reward"), _number(metrics, "episode/length")
        state.longest = max(state.longest, length or 0.0)
        if mean_return is not None and length is not None and iteration > _FIRST:
            state.add_training(mean_return, length)
        row = _of_iteration(metrics, iteration, self.ppo, self.env.episode_length)
        self._record(state, step, row, of_evaluations=False)

    def record_evaluation(self, state: SignState, step: int, metrics: Row) -> None:
        value = _number(metrics, "eval/episode_reward")
        if value is None or not self.signs:
            return
        before = value if state.last_return is None else state.last_return
        state.add_evaluation(value)
        about = self.episodes, self._steps, self.env.action_repeat
        self._record(state, step, _of_evaluation(metrics, state, before, *about), of_evaluations=True)

    def _record(self, state: SignState, step: int, row: Row, of_evaluations: bool) -> None:
        for sign in self.signs:
            value = _number(row, sign.value) if sign.of_evaluations is of_evaluations else None
            if value is None:
                continue
            hit = sign.is_hit(value, row)
            if hit or sign.name in state.records:
                record = state.records.setdefault(sign.name, SignRecord())
                self._update(sign, record, step, row, value if hit else None)

    def _update(self, sign: Sign, record: SignRecord, step: int, row: Row, hit: float | None) -> None:
        record.recent = [*record.recent, hit][-sign.rows :]
        while record.recent and record.recent[0] is None:
            record.recent.pop(0)
        if not record.recent and record.lasts:
            record.recovered_step = step
            self.event("sign_recovered", sign=sign.name)
        hits = [number for number in record.recent if number is not None]
        mean = sum(hits) / max(len(hits), 1)
        starts = hit is not None and not record.lasts and len(hits) >= sign.hits
        if starts:
            shown = {**row, "mean": mean, "plain_mean": _plain(mean), "element": f"{mean - 1.0:.0f}"}
            record.log(step, f"{sign.sentence.format(**shown)}; {sign.remedy.format(**shown)}")
            self.event("sign", sign=sign.name, text=record.text, value=mean)
        if hit is not None and record.lasts:
            record.last_step = step


def recovered_text(sign: Mapping[str, Any], before: str) -> str:
    """The words `recovered at step N` about a logged sign that is over, after the text `before`; else empty."""
    step = sign.get("recovered_step")
    return f"{before}recovered at step {step:,}" if step else ""


LOSS_NOT_FINITE = "loss_not_finite"  # the warning of a run whose policy is ruined
_MOST = 0.5  # share of transitions


def warnings_of(tally: Tally) -> dict[str, str]:
    """Trouble that the stop reason does not name: a sentence with numbers and a remedy, by its name for scripts."""
    latest = sum(tally.latest) / max(len(tally.latest), 1)
    mostly_rejected = tally.rejected > _MOST * tally.transitions
    guards = [f"guards/{name} ({n:,}, most for {tally.main_cause(name)})" for name, n in [*tally.tripped.items()][:2]]
    # A run that is too short for an episode to end has no return either.
    expects_return = tally.ended > 0 or tally.evaluations > 0 or mostly_rejected
    never_finite = tally.finite == 0 and tally.void == tally.evaluations and tally.loss_is_finite
    table = (
        (
            not tally.loss_is_finite, LOSS_NOT_FINITE,
            f"no finite loss since step {tally.finite_loss_step:,}, so the networks are ruined and this policy is of "
            "no use; train again with guards=default, and find the cause with python -m rlstable.doctor",
        ),
        (
            mostly_rejected or latest > _MOST, "transitions_rejected",
            f"guards rejected {tally.rejected:,} of {tally.transitions:,} transitions, and {100.0 * latest:.0f} % of "
            f"them in the last {len(tally.latest)} iterations; most trips: {', '.join(guards)}",
        ),
        (
            0 < tally.void == tally.evaluations, "evaluations_void",
            f"all {tally.evaluations:,} evaluations were void: every episode was aborted or had no finite return, so "
            "checkpoints could not be compared; look at eval/aborted_share and run python -m rlstable.doctor",
        ),
        (
            expects_return and never_finite, "no_finite_return",
            "no episode had a finite return, neither in training nor in an evaluation, so it is unknown whether the "
            "policy learned anything; check rewards and observations with python -m rlstable.doctor",
        ),
    )  # fmt: skip
    return {name: text for applies, name, text in table if applies}


_BAD_UNITS = (
    "The environment's {0} was not finite, or beyond guards.quarantine.max_abs_{0}; the event incident names the "
    "number. Correct the {0}, or set that key to null if it is a matter of units."
)
# Advice by stop reason, and by the guard or limiter behind it with its main cause. The first key of `_next` counts.
# fmt: off
_ADVICE = {
    "state_not_finite": "Keep guards.finite_update on, which keeps bad numbers out of the parameters; the first "
    "guard_tripped event shows where the bad number comes from.",
    "no_update_accepted": "Divide ppo.learning_rate by 10; with float16 networks set precision=bfloat16 or the "
    "default; a loss that is not finite from the first iteration comes from the environment's rewards or observations.",
    "no_update_accepted limiters/kl": "Every update moved the policy further than guards.limiters.kl allows: divide "
    "ppo.learning_rate by 100 or more.",
    "no_update_accepted spike": "Gradients were far larger than before: divide ppo.learning_rate by 10, or lower "
    "ppo.reward_scaling if rewards have grown.",
    "physics_unstable": "The simulation becomes unstable: try a smaller timestep, more solver iterations, softer "
    "contacts or smaller actuator gains in the model, precision=highest on a GPU, and a tighter "
    "guards.quarantine.max_abs_state to detect it earlier.",
    "physics_unstable quarantine observation": _BAD_UNITS.format("observation"),
    "physics_unstable quarantine reward": _BAD_UNITS.format("reward"),
    "physics_unstable finite_samples": "Outputs of the networks are not finite or too large: lower ppo.learning_rate; "
    "with float16 networks set precision=bfloat16 or the default.",
    "physics_unstable finite_samples reward": "Rewards are too large once they are scaled: lower ppo.reward_scaling so "
    "that a good step earns about 1.",
    "value_loss_exploded": "Scale rewards down with ppo.reward_scaling so that a good step earns about 1, or set "
    "ppo.normalize_values=true; lower ppo.learning_rate.",
    "policy_diverged": "Lower ppo.learning_rate, set guards.limiters.kl=0.3 or "
    "ppo.learning_rate_schedule=adaptive_kl, and use fewer epochs (ppo.num_updates_per_batch).",
    "policy_diverged policy std_exploded": "The policy's standard deviation grew beyond guards.policy.max_std: lower "
    "ppo.entropy_cost, guards.limiters.policy_std_max or ppo.learning_rate.",
    "policy_diverged policy std_collapsed": "The policy's noise fell below guards.policy.min_std or min_entropy: raise "
    "ppo.entropy_cost or guards.limiters.policy_std_min, or lower ppo.learning_rate.",
    "policy_diverged policy saturated": "The policy's actions stayed at their bounds, so that the entropy fell below "
    "guards.policy.min_entropy: lower ppo.learning_rate, and guards.limiters.policy_std_max if "
    "training/policy_dist_mean_std is above 1.",
    "policy_collapsed": "Lower ppo.learning_rate, set ppo.normalize_values=true and ppo.normalize_advantage=true, or "
    "use larger batches; the signs in the report say which network was at fault. If returns fluctuate without a "
    "cause, raise guards.return_watch.tolerance.",
    "guard_exhausted": "One of your own guards lost its patience; see its trips in events.jsonl.",
}
# fmt: on
# Guard that ends a run with a stop reason; the advice names it first, however often other guards tripped.
_ENDING = {
    StopReason.policy_diverged: "policy",
    StopReason.value_loss_exploded: "value_loss",
    StopReason.state_not_finite: "finite_state",
}
_SAMPLE_GUARDS = ("quarantine", "finite_samples")
_MANY = 0.2  # share of activity from which a limiter is named
_NAMED = 2  # guards, and limiters, that are named


def advice(cause: StopReason, attempts: Attempts, signs: Mapping[str, Mapping[str, Any]], tally: Tally) -> str:
    """Advice after a failed run: remedies that failed, the most active limiters, and settings that might help.

    `signs` are the logged signs, `SignState.logged`.
    """
    tried = Counter(str(Remedy.model_validate(attempt["remedy"])) for attempt in attempts.recent)
    listed = ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in tried.items())
    count = len(attempts.recent)
    times = "time" if count == 1 else "times"
    rollbacks = f"Rolled back to the last good state {count} {times}, with {listed}; " if count else ""
    parts = [f"{rollbacks}{cause.meaning.split(';')[0]}.", _most_active(cause, tally), _next(cause, tally)]
    if signs and cause in (StopReason.policy_diverged, StopReason.policy_collapsed):
        named = (f"{name} (step {sign['first_step']:,}{recovered_text(sign, ', ')})" for name, sign in signs.items())
        parts.append(f"Signs before it: {', '.join(named)}.")
    return " ".join(part for part in parts if part)


def _most_active(cause: StopReason, tally: Tally) -> str:
    """The most active guards and limiters; if all updates were rejected, the guards and limiters that rejected them."""
    if cause is StopReason.no_update_accepted and tally.lost:
        total, lost = sum(tally.lost.values()), sorted(tally.lost.items(), key=lambda pair: -pair[1])[:_NAMED]
        listed = [f"{_shown(name, tally)} ({count / total:.0%})" for name, count in lost]
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
    guard = _ENDING.get(cause)
    if cause is StopReason.no_update_accepted and tally.lost:
        guard = max(tally.lost, key=lambda name: tally.lost[name])
        cause = StopReason.physics_unstable if guard == SAMPLES else cause
    if cause is StopReason.physics_unstable:
        guard = _sample_guard(tally)
    main = tally.main_cause(guard) if guard in tally.trips else None
    keys = (f"{cause.name} {guard} {main}", f"{cause.name} {guard}", cause.name)
    return next(_ADVICE[key] for key in keys if key in _ADVICE)


def _shown(name: str, tally: Tally) -> str:
    """The metric that counts a key of `Tally.lost`."""
    if name != SAMPLES:
        return name if "/" in name else "guards/" + name
    guard = _sample_guard(tally)
    return SAMPLES if guard is None else f"guards/{guard}, which left {SAMPLES}"


def _sample_guard(tally: Tally) -> str | None:
    return next((name for name in tally.tripped if name in _SAMPLE_GUARDS), None)
