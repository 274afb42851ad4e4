"""Signs of trouble in learning: one sentence with a number and a remedy, logged once per episode of trouble.

A sign only reports; it never changes training. It tests the metrics of every healthy iteration or of every evaluation;
the metrics of one iteration or evaluation are a row. A row that passes the test is a hit. Enough hits in the window of
latest rows start an episode of trouble, which is logged as the event `sign`. The episode ends when the window has no
hit, which is logged as the event `sign_recovered`; only then can the sign be logged again. A row without a finite value
of the metric is skipped.

Signs depend on rows only, never on the clock, and the memory is saved, so a resumed run logs the same signs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from rlstable.config import Config

Row = Mapping[str, Any]  # metrics of one iteration or evaluation

_ROWS = 50  # iterations in the window of most signs
_LAGGING = 30  # hits in the window that make the sign of a lagging critic
_MISSCALED = 20  # hits in the window that make the sign of badly scaled rewards
_EARLY = 20  # first iterations, in which the critic has learned nothing yet
_VALUE_ERROR = 0.1  # share of the size of value targets; a smaller value error does not matter
_SHORT_STEPS = 0.5  # share of the step length
_SATURATED, _GRADIENTS_SATURATED = 0.2, 0.5  # share of activity
_FALLEN = 0.8  # share of the gain from the first evaluation to the best one
_ERRORS = 3.0  # standard errors of an evaluation; a smaller fall is noise
_LEAST_RISE = 0.1  # share of the fall; a smaller rise between two evaluations does not count
_SHORT_EPISODE = 0.1  # share of the evaluation's episode length
_FIRST = 10  # first iterations, whose returns are not compared with evaluations
_RATE = 0.1  # weight of an iteration in the mean return of training
_BELOW_TRAINING = 0.5  # share of the range of returns
_LONGER = 1.2  # ratio of episode lengths; returns of evaluations with longer episodes are not comparable
_DISTANCE = 1.0  # nats; bound of the policy distance without a KL limiter
_ROUNDING = 1.01
_LEAST_TARGET, _GREATEST_TARGET = 0.01, 100.0  # size of value targets
_GREATEST_NORMALIZED = 1e4  # with normalised advantages the scale only affects the critic
_GOOD_TARGET = 10.0  # size of value targets that the remedy aims at

_LOGGED = ("count", "first_step", "last_step", "recovered_step", "text")  # fields of a logged sign

# By limiter: the unit of its activity, and the first remedy.
_LIMITERS = {
    "reward": ("samples", "raise guards.limiters.reward or lower ppo.reward_scaling"),
    "observation": ("samples", "raise guards.limiters.observation"),
    "observation_outlier": ("samples", "raise guards.limiters.observation_outlier"),
    "observation_shift": ("observation elements", "raise guards.limiters.observation_shift"),
    "advantage_std": ("minibatches", "raise ppo.reward_scaling or lower guards.limiters.advantage_std_min"),
    "value_target": ("samples", "lower ppo.reward_scaling or raise guards.limiters.value_target"),
    "value_error": ("samples", "raise guards.limiters.value_error or set ppo.normalize_values=true"),
    "log_ratio": ("samples", "lower ppo.learning_rate"),
    "policy_std": ("samples", "raise ppo.entropy_cost where the policy's deviation is too small, else lower it"),
    "kl": ("minibatches", "lower ppo.learning_rate"),
    "gradient_norm": ("updates", "raise guards.limiters.gradient_norm or lower ppo.reward_scaling"),
    "gradient_block": ("gradient blocks", "raise guards.limiters.gradient_block or lower ppo.learning_rate"),
    "update_norm": ("updates", "lower ppo.learning_rate or raise guards.limiters.update_norm"),
}


@dataclasses.dataclass(frozen=True)
class Sign:
    """A sign of trouble.

    Attributes:
        name: Name in events and in `result.json`.
        value: Returns the tested number of a row; None to skip the row.
        is_hit: Test of a row, from the tested number and the row.
        hits: Hits in the window that start an episode.
        rows: Length of the window.
        sentence: Returns the sentence, from the mean number of the hits and the present row.
        remedy: Returns the first remedy, from the same arguments.
        of_evaluations: Whether rows are evaluations instead of iterations. The text of a logged sign then follows the
            evaluations until the episode ends.
        improves: Whether the trouble already recedes, so that no episode starts.
    """

    name: str
    value: Callable[[Row], float | None]
    is_hit: Callable[[float, Row], bool]
    hits: int
    rows: int
    sentence: Callable[[float, Row], str]
    remedy: Callable[[float, Row], str]
    of_evaluations: bool = False
    improves: Callable[[Row], bool] = lambda row: False


@dataclasses.dataclass
class SignHistory:
    """Memory of one sign, as plain JSON.

    Attributes:
        recent: Window of the latest rows, the newest last: the number of a hit, None for a row without a hit.
        said: Whether the present episode was logged.
        count: Number of logged episodes.
        first_step: Step of the first logged episode.
        last_step: Step of the last hit in a logged episode.
        text: Latest sentence.
        recovered_step: Step at which the latest logged episode ended; 0 before the end.
    """

    recent: list[float | None] = dataclasses.field(default_factory=list)
    said: bool = False
    count: int = 0
    first_step: int = 0
    last_step: int = 0
    text: str = ""
    recovered_step: int = 0


@dataclasses.dataclass
class SignMemory:
    """Memory of all signs, as plain JSON; saved with the run.

    Attributes:
        spells: History by name of the sign; only signs with a hit.
        first_return: Lowest evaluation until the best one; at first the first evaluation.
        last_return: Return of the latest evaluation.
        best_return: Greatest return that two consecutive evaluations reached; a single evaluation may be lucky.
        episodes: Training episodes that had ended by the latest iteration.
        steps_per_episode: Steps of the latest iteration by its ended episodes; None if no episode ended.
        training_return: Mean return of the episodes of recent iterations; None before any episode.
        training_variance: Variance of the mean return of an iteration.
        training_length: Length of the episodes of the latest iteration.
        lowest_return: Least mean return seen, of an iteration or an evaluation; None before any.
        greatest_return: Greatest return seen, as `lowest_return`.
    """

    spells: dict[str, SignHistory] = dataclasses.field(default_factory=dict)
    first_return: float | None = None
    last_return: float | None = None
    best_return: float | None = None
    episodes: int = 0
    steps_per_episode: float | None = None
    training_return: float | None = None
    training_variance: float = 0.0
    training_length: float = 0.0
    lowest_return: float | None = None
    greatest_return: float | None = None

    @classmethod
    def of(cls, saved: dict[str, Any]) -> SignMemory:
        """Reads the memory in a checkpoint."""
        spells = {name: SignHistory(**history) for name, history in saved.get("spells", {}).items()}
        return cls(**saved | {"spells": spells})

    def add(self, name: str, step: int, text: str) -> None:
        """Records a sign that does not come from metrics."""
        history = self.spells.setdefault(name, SignHistory())
        history.count += 1
        history.first_step = history.first_step if history.count > 1 else step
        history.last_step, history.text, history.recovered_step = step, text, 0

    def add_episodes(self, mean_return: float, length: float) -> None:
        """Records the mean return and length of the episodes that ended in an iteration."""
        difference = mean_return - (mean_return if self.training_return is None else self.training_return)
        self.training_return = mean_return - (1.0 - _RATE) * difference
        self.training_variance = (1.0 - _RATE) * (self.training_variance + _RATE * difference**2)
        self.training_length = length
        self.see(self.training_return)

    def see(self, value: float) -> None:
        """Extends the range of returns."""
        self.lowest_return = value if self.lowest_return is None else min(value, self.lowest_return)
        self.greatest_return = value if self.greatest_return is None else max(value, self.greatest_return)

    def end(self, name: str, step: int) -> bool:
        """Records that the trouble of a logged sign is over; returns False if there was none."""
        history = self.spells.get(name)
        if history is None or not history.count or history.recovered_step:
            return False
        history.said, history.recovered_step = False, step
        return True

    @property
    def logged(self) -> dict[str, dict[str, Any]]:
        """Count, steps, text and `lasts` of every logged sign, ordered by first step.

        `lasts` is whether the episode of trouble has not ended; `recovered_step` is 0 until then.
        """
        logged = [(name, history) for name, history in self.spells.items() if history.count]
        return {
            name: {key: getattr(history, key) for key in _LOGGED} | {"lasts": history.said}
            for name, history in sorted(logged, key=lambda pair: pair[1].first_step)
        }


class Signs:
    """Detects signs of trouble and logs them.

    Args:
        config: The whole configuration.
        event: Called as `event("sign", sign=..., text=..., value=...)`, and as `event("sign_recovered", sign=...)`.
    """

    def __init__(self, config: Config, event: Callable[..., None]):
        self._event = event
        signs = signs_of(config) if config.logging.signs else ()
        self._of_iterations = [sign for sign in signs if not sign.of_evaluations]
        self._of_evaluations = [sign for sign in signs if sign.of_evaluations]
        self._episodes = config.eval.num_envs
        self._steps = config.env_steps_per_iteration

    def record_iteration(self, memory: SignMemory, iteration: int, step: int, metrics: Row) -> None:
        """Tests the metrics of a healthy iteration.

        Args:
            memory: Memory of the run's signs.
            iteration: Number of the iteration, from 1.
            step: Environment steps trained.
            metrics: Metrics by name.
        """
        if not self._of_iterations:
            return
        episodes = metrics.get("training/episodes", memory.episodes)
        ended, memory.episodes = episodes - memory.episodes, episodes
        memory.steps_per_episode = self._steps / ended if ended > 0 else None
        mean_return, length = _number(metrics, "episode/sum_reward"), _number(metrics, "episode/length")
        if mean_return is not None and length is not None and iteration > _FIRST:
            memory.add_episodes(mean_return, length)
        row = {**metrics, "training/iteration": iteration}
        for sign in self._of_iterations:
            self._record(sign, memory, step, row)

    def record_evaluation(self, memory: SignMemory, step: int, metrics: Row) -> None:
        """Tests the metrics of an evaluation; arguments as for `record_iteration`."""
        value = _number(metrics, "eval/episode_reward")
        if value is None or not self._of_evaluations:
            return
        if memory.first_return is None:
            memory.first_return = value
        if memory.best_return is None or memory.first_return >= memory.best_return:
            memory.first_return = min(memory.first_return, value)
        before = value if memory.last_return is None else memory.last_return
        if memory.last_return is not None:
            level = min(memory.last_return, value)
            memory.best_return = level if memory.best_return is None else max(memory.best_return, level)
        memory.last_return = value
        memory.see(value)
        deviation = _number(metrics, "eval/episode_reward_std") or 0.0
        length = _number(metrics, "eval/avg_episode_length") or 0.0
        is_comparable = memory.training_return is not None and length <= _LONGER * memory.training_length
        # Variance of one training episode, from the episodes of an iteration.
        variance = memory.training_variance * self._steps / max(memory.training_length, 1.0)
        row = {
            "last": value,
            "before": before,
            "first": memory.first_return,
            "best": memory.best_return if memory.best_return is not None else value,
            "error": deviation / math.sqrt(self._episodes),
            "length": _number(metrics, "eval/avg_episode_length"),
            "unseen": _number(metrics, "eval/unseen_element"),
            "steps_per_episode": memory.steps_per_episode,
            "training": memory.training_return if is_comparable else None,
            "training_error": math.sqrt((deviation**2 + variance) / self._episodes),
            "range": (memory.greatest_return or 0.0) - (memory.lowest_return or 0.0),
        }
        for sign in self._of_evaluations:
            self._record(sign, memory, step, row)

    def _record(self, sign: Sign, memory: SignMemory, step: int, row: Row) -> None:
        value = sign.value(row)
        if value is None:
            return
        hit = sign.is_hit(value, row)
        history = memory.spells.get(sign.name)
        if history is None:
            if not hit:
                return
            history = memory.spells[sign.name] = SignHistory()
        recent = [*history.recent, value if hit else None][-sign.rows :]
        while recent and recent[0] is None:
            recent.pop(0)
        history.recent = recent
        if not recent and history.said and memory.end(sign.name, step):
            self._event("sign_recovered", sign=sign.name)
        hits = [number for number in recent if number is not None]
        starts = hit and not history.said and len(hits) >= sign.hits and not sign.improves(row)
        mean = sum(hits) / max(len(hits), 1)
        if starts or (history.said and sign.of_evaluations):
            history.text = f"{sign.sentence(mean, row)}; {sign.remedy(mean, row)}"
        if starts:
            history.said, history.recovered_step = True, 0
            history.count += 1
            history.first_step = history.first_step if history.count > 1 else step
            self._event("sign", sign=sign.name, text=history.text, value=mean)
        if hit and history.said:
            history.last_step = step


def recovered_text(sign: Mapping[str, Any], before: str) -> str:
    """The words `recovered at step N` about a logged sign that is over, after the text `before`; else empty."""
    step = sign.get("recovered_step")  # results of older versions have none
    return f"{before}recovered at step {step:,}" if isinstance(step, int) and step else ""


def signs_of(config: Config) -> tuple[Sign, ...]:
    """All signs of a configuration; a sign whose metric is missing is never logged."""
    limits, max_norm = config.guards.limiters, config.ppo.max_grad_norm
    # Recipes that clip the gradient in nearly every minibatch do so on purpose.
    clips = limits.gradient_norm is not None and (max_norm is None or limits.gradient_norm < max_norm)
    limiters = [_limiter(name) for name in _LIMITERS if name != "gradient_norm" or clips]
    own = (_steps(config), _critic(config), _return(config), _distance(config), reward_scale(config), _BEGAN_TO_VARY)
    unseen = (_UNSEEN,) if config.ppo.normalize_observations else ()
    compared = (_MEAN_ACTION,) if config.eval.deterministic and not config.eval.env_kwargs else ()
    restarts = (_restarts(config),) if config.env.may_keep_counters else ()
    return (*limiters, *own, *unseen, *compared, *restarts)


def _limiter(name: str) -> Sign:
    bound = _GRADIENTS_SATURATED if name == "gradient_norm" else _SATURATED
    unit, remedy = _LIMITERS[name]
    return Sign(
        f"limiter_saturated/{name}",
        lambda row: _number(row, f"limiters/{name}/active"),
        lambda value, row: value > bound,
        _ROWS,
        _ROWS,
        lambda value, row: (
            f"the limiter {name} was active in {_percent(value)} of the {unit} for {_ROWS} iterations: "
            "it takes part in learning"
        ),
        lambda value, row: remedy,
    )


def _steps(config: Config) -> Sign:
    def remedy(value: float, row: Row) -> str:
        if config.ppo.learning_rate_schedule == "adaptive_kl":
            return "lower ppo.desired_kl"
        return f"lower ppo.learning_rate, the policy's has been about {config.ppo.learning_rate * value:.1g}"

    return Sign(
        "policy_steps_shortened",
        lambda row: _number(row, "training/step_scale"),
        lambda value, row: value < _SHORT_STEPS,
        _ROWS,
        _ROWS,
        lambda value, row: (
            f"the KL limiter has shortened the policy's steps to {value:.2g} of their length for {_ROWS} iterations"
        ),
        remedy,
    )


def _restarts(config: Config) -> Sign:
    def is_hit(value: float, row: Row) -> bool:
        length = row["length"] or 0.0
        return value <= max(_SHORT_EPISODE * length, _ROUNDING * config.env.action_repeat) < length

    return Sign(
        "training_episodes_short",
        lambda row: _number(row, "steps_per_episode"),
        is_hit,
        1,
        1,
        lambda value, row: (
            f"training episodes have a mean length of {_plain(value)}, evaluation episodes of {_plain(row['length'])}: "
            "a reset does not restore info"
        ),
        lambda value, row: "set env.restore_info=true if step counts or keeps time in info",
        of_evaluations=True,
    )


def _critic(config: Config) -> Sign:
    def error(row: Row) -> float:
        """Root mean square of the value error, as a share of the size of value targets; 0 if unknown."""
        loss, size = _number(row, "training/v_loss"), _target_size(config, row)
        if loss is None or size is None or size <= 0.0 or config.ppo.vf_loss_coefficient <= 0.0:
            return 0.0
        return math.sqrt(max(loss, 0.0) / (0.5 * config.ppo.vf_loss_coefficient)) / size

    def remedy(value: float, row: Row) -> str:
        if config.ppo.normalize_values:
            return "lower ppo.learning_rate or enlarge network.value_hidden_layer_sizes"
        size = _target_size(config, row) or 0.0
        smaller = f", or ppo.reward_scaling={_smaller(config, size):.1g}" if size > 3.0 * _GOOD_TARGET else ""
        return _normalize(config) + smaller

    return Sign(
        "critic_behind",
        lambda row: _number(row, "training/explained_variance") if row["training/iteration"] > _EARLY else None,
        lambda value, row: value < 0.0 and error(row) > _VALUE_ERROR,
        _LAGGING,
        _ROWS,
        lambda value, row: (
            f"the explained variance was below 0 in {_LAGGING} of the last {_ROWS} iterations (mean {value:.2g}), "
            f"with value errors of {_percent(error(row))} of the targets: the value network lags behind"
        ),
        remedy,
    )


def _return(config: Config) -> Sign:
    def fallen(value: float, row: Row) -> bool:
        first, best = row["first"], row["best"]
        return value < first + _FALLEN * (best - first) and best - value > _ERRORS * row["error"]

    def rises(row: Row) -> bool:
        """Whether the return rises again, or has reached the best level again."""
        rise = row["last"] - row["before"]
        return rise > max(row["error"], _LEAST_RISE * (row["best"] - row["before"])) or not fallen(row["last"], row)

    def remedy(value: float, row: Row) -> str:
        if rises(row):
            return "the return rises again, so keep the settings"
        return "lower ppo.learning_rate" + (f", or {_normalize(config)}" if _normalize(config) else "")

    return Sign(
        "return_below_best",
        lambda row: row["last"],
        fallen,
        2,
        2,
        lambda value, row: (
            f"the last two evaluations returned {(row['before'] + row['last']) / 2.0:,.1f} on average, "
            f"where two in a row had reached {row['best']:,.1f}"
        ),
        remedy,
        of_evaluations=True,
        improves=rises,
    )


_MEAN_ACTION = Sign(
    "evaluation_below_training",
    lambda row: None if row["training"] is None else row["last"],
    lambda value, row: row["training"] - value > max(_BELOW_TRAINING * row["range"], _ERRORS * row["training_error"]),
    2,
    2,
    lambda value, row: (
        f"evaluations of the mean action returned {value:,.1f}, where training with sampled actions returned "
        f"{row['training']:,.1f}: the mean action does not do what the samples do"
    ),
    lambda value, row: "set eval.deterministic=false to evaluate and choose the policy that was trained",
    of_evaluations=True,
)


def _distance(config: Config) -> Sign:
    limit = config.guards.limiters.kl
    bound = _DISTANCE if limit is None else limit
    return Sign(
        "distance_beyond_bound",
        lambda row: _number(row, "training/policy_distance"),
        lambda value, row: value > bound * _ROUNDING,
        1,
        _ROWS,
        lambda value, row: f"an iteration moved the policy by {value:.3g} nats, more than {bound:g}",
        lambda value, row: "set guards.limiters.kl=1.0" if limit is None else "lower ppo.learning_rate",
    )


_BEGAN_TO_VARY = Sign(
    "observation_began_to_vary",
    lambda row: _number(row, "training/element_that_began_to_vary"),
    lambda value, row: value > 0.0,
    1,
    _ROWS,
    lambda value, row: (
        f"element {value - 1.0:.0f} of the observation had been constant and began to vary: the policy has no "
        "experience with it"
    ),
    lambda value, row: "if the task does not do so on purpose, correct the observation",
)


_UNSEEN = Sign(
    "evaluation_observes_more",
    lambda row: row["unseen"],
    lambda value, row: value > 0.0,
    2,
    2,
    lambda value, row: (
        f"element {value - 1.0:.0f} of the observation has been constant in training and is another number in "
        "evaluations: the policy has no experience with it"
    ),
    lambda value, row: "let training see the same numbers, or correct the observation (eval.env_kwargs)",
    of_evaluations=True,
)


def reward_scale(config: Config) -> Sign:
    """The sign that rewards make value targets far larger or far smaller than 1."""
    ppo = config.ppo
    greatest = _GREATEST_NORMALIZED if ppo.normalize_advantage else _GREATEST_TARGET

    def size(row: Row) -> float | None:
        """Size of value targets; 0 without any reward, since a sparse task does not show its scale."""
        mean, max_reward = _target_size(config, row), _number(row, "training/reward_greatest")
        if ppo.normalize_values or ppo.normalize_rewards or mean is None or max_reward is None:
            return None
        largest = max_reward * _horizon(config)
        return largest if 0.0 < largest < _LEAST_TARGET else mean

    def remedy(value: float, row: Row) -> str:
        scaled = f", or ppo.reward_scaling={_smaller(config, value):.1g}"
        return _normalize(config) + scaled

    return Sign(
        "reward_scale",
        size,
        lambda value, row: value > greatest or 0.0 < _max_target(config, row) < _LEAST_TARGET,
        _MISSCALED,
        _ROWS,
        lambda value, row: (
            f"value targets were of about {_plain(value)} in {_MISSCALED} of the last {_ROWS} iterations, far from 1"
        ),
        remedy,
    )


def _max_target(config: Config, row: Row) -> float:
    """The greatest value target that the rewards of an iteration allow."""
    return (_number(row, "training/reward_greatest") or 0.0) * _horizon(config)


def _horizon(config: Config) -> float:
    """Approximate number of steps whose rewards a value target sums."""
    steps = float(config.env.episode_length)
    return min(steps, 1.0 / (1.0 - config.ppo.discounting)) if config.ppo.discounting < 1.0 else steps


def _target_size(config: Config, row: Row) -> float | None:
    """Size of value targets, estimated from the mean reward; 1 with normalised values, None if unknown."""
    if config.ppo.normalize_values:
        return 1.0
    reward = _number(row, "training/reward_mean")
    if reward is None or config.ppo.normalize_rewards:
        return None
    return abs(reward) * config.ppo.reward_scaling * _horizon(config)


def _smaller(config: Config, size: float) -> float:
    """The reward scaling that changes value targets of this size to `_GOOD_TARGET`."""
    return config.ppo.reward_scaling * _GOOD_TARGET / size


def _normalize(config: Config) -> str:
    """The remedy that makes learning independent of the scale of rewards; empty if it is on already."""
    keys = [key for key in ("normalize_values", "normalize_advantage") if not getattr(config.ppo, key)]
    return "set " + " ".join(f"ppo.{key}=true" for key in keys) if keys else ""


def _number(row: Row, key: str) -> float | None:
    """A metric; None if it is missing or not finite."""
    value = row.get(key)
    if value is None or not math.isfinite(value):
        return None
    return float(value)


def _percent(share: float) -> str:
    return f"{100.0 * share:.0f} %"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100.0 else f"{value:.2g}"
