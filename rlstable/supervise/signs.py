"""Signs of trouble in learning: one sentence with the number and the first remedy, once per episode of trouble.

A sign changes nothing. It reads the metrics of every healthy iteration and of every evaluation. A row in which the test
of a sign holds is a hit. Enough hits among the latest rows are an episode of trouble, and its sentence is the event
`sign`. The episode is over once the sign's whole window holds no hit; only then is the sign said
again. A metric that is missing or not finite is no row for the sign.

Everything depends on rows alone, never on the clock, and the memory is saved with the run, so a resumed run says what
the run would have said.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from rlstable.config import Config

Row = Mapping[str, Any]
Tell = Callable[..., None]

_ROWS = 50  # iterations that most signs look at
_LAGGING = 30  # iterations among them that make the critic a lagging one
_MISSCALED = 20  # likewise for the scale of rewards
_EARLY = 20  # iterations in which no critic can know anything
_VALUE_ERROR = 0.1  # of the size of value targets: a smaller error harms no advantage
_SHORT_STEPS = 0.5
_SATURATED, _GRADIENTS_SATURATED = 0.2, 0.5
_FALLEN = 0.8  # of the way from the first evaluation to the best one
_ERRORS = 3.0  # standard errors of an evaluation: a smaller fall is noise
_LEAST_FALL = 0.2  # of the best return's size: a smaller fall is nothing
_DISTANCE = 1.0  # nats, where no limiter bounds the distance
_ROUNDING = 1.01
_LEAST_TARGET, _GREATEST_TARGET = 0.01, 100.0
_GREATEST_NORMALIZED = 1e4  # where advantages are normalised, the scale is the critic's problem alone
_GOOD_TARGET = 10.0

# By limiter: the unit of its activity, and the first remedy.
_LIMITERS = {
    "reward": ("samples", "raise guards.limiters.reward or lower ppo.reward_scaling"),
    "observation": ("samples", "raise guards.limiters.observation"),
    "observation_outlier": ("samples", "raise guards.limiters.observation_outlier"),
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
        name: Its name in events and in `result.json`.
        value: The number that the sign is about, None where a row has nothing to look at.
        holds: The test of a row, from that number and the row.
        hits: Rows among the latest ones that make it a sign.
        rows: Latest rows that it looks at, and rows without a hit that end an episode.
        sentence: From the mean number of the hits and the present row.
        remedy: The first thing to try, from the same.
        of_evaluations: Whether rows are evaluations, not iterations.
    """

    name: str
    value: Callable[[Row], float | None]
    holds: Callable[[float, Row], bool]
    hits: int
    rows: int
    sentence: Callable[[float, Row], str]
    remedy: Callable[[float, Row], str]
    of_evaluations: bool = False


@dataclasses.dataclass
class Spell:
    """Memory of one sign, as plain JSON.

    Attributes:
        recent: Numbers of the latest rows that were hits, the newest last, None for a row that was none.
        said: Whether the present episode of trouble was said.
        count: Episodes that were said.
        first_step: Step at which the first one was said.
        last_step: Last step of trouble in an episode that was said.
        text: What was said last.
    """

    recent: list[float | None] = dataclasses.field(default_factory=list)
    said: bool = False
    count: int = 0
    first_step: int = 0
    last_step: int = 0
    text: str = ""


@dataclasses.dataclass
class SignMemory:
    """Memory of all signs, as plain JSON; saved with the run.

    Attributes:
        spells: By the name of the sign; only signs that had a hit.
        first_return: First evaluation.
        last_return: Latest one.
        best_return: Greatest return that two evaluations in a row reached: one evaluation may be lucky.
    """

    spells: dict[str, Spell] = dataclasses.field(default_factory=dict)
    first_return: float | None = None
    last_return: float | None = None
    best_return: float | None = None

    @classmethod
    def of(cls, saved: dict[str, Any]) -> SignMemory:
        """The memory that a checkpoint holds."""
        spells = {name: Spell(**spell) for name, spell in saved.get("spells", {}).items()}
        return cls(**saved | {"spells": spells})

    def add(self, name: str, step: int, text: str) -> None:
        """Keeps a sign of something that no metric shows."""
        spell = self.spells.setdefault(name, Spell())
        spell.count += 1
        spell.first_step = spell.first_step if spell.count > 1 else step
        spell.last_step, spell.text = step, text

    @property
    def said(self) -> dict[str, dict[str, Any]]:
        """Count, first step, last step, text and `lasts` of every sign that was said, ordered by first step.

        `lasts` says whether the episode of trouble is still going on.
        """
        found = [(name, spell) for name, spell in self.spells.items() if spell.count]
        return {
            name: {key: getattr(spell, key) for key in ("count", "first_step", "last_step", "text")}
            | {"lasts": spell.said}
            for name, spell in sorted(found, key=lambda pair: pair[1].first_step)
        }


class Signs:
    """Looks for signs of trouble and says them.

    Args:
        config: The whole configuration.
        tell: Called as `tell("sign", sign=..., text=..., value=...)`.
    """

    def __init__(self, config: Config, tell: Tell):
        self._tell = tell
        signs = signs_of(config) if config.logging.signs else ()
        self._of_iterations = [sign for sign in signs if not sign.of_evaluations]
        self._of_evaluations = [sign for sign in signs if sign.of_evaluations]
        self._episodes = config.eval.num_envs

    def look(self, memory: SignMemory, iteration: int, step: int, values: Row) -> None:
        """Takes in the metrics of a healthy iteration.

        Args:
            memory: Of the run.
            iteration: Number of the iteration, from 1.
            step: Environment steps trained.
            values: Its metrics by name.
        """
        if not self._of_iterations:
            return
        row = {**values, "training/iteration": iteration}
        for sign in self._of_iterations:
            self._take(sign, memory, step, row)

    def evaluate(self, memory: SignMemory, step: int, worth: Row) -> None:
        """Takes in the metrics of an evaluation; arguments as for `look`."""
        value = _number(worth, "eval/episode_reward")
        if value is None or not self._of_evaluations:
            return
        if memory.first_return is None:
            memory.first_return = value
        if memory.last_return is not None:
            level = min(memory.last_return, value)
            memory.best_return = level if memory.best_return is None else max(memory.best_return, level)
        memory.last_return = value
        deviation = _number(worth, "eval/episode_reward_std") or 0.0
        row = {
            "last": value,
            "first": memory.first_return,
            "best": memory.best_return if memory.best_return is not None else value,
            "error": deviation / math.sqrt(self._episodes),
        }
        for sign in self._of_evaluations:
            self._take(sign, memory, step, row)

    def _take(self, sign: Sign, memory: SignMemory, step: int, row: Row) -> None:
        value = sign.value(row)
        if value is None:
            return
        hit = sign.holds(value, row)
        spell = memory.spells.get(sign.name)
        if spell is None:
            if not hit:
                return
            spell = memory.spells[sign.name] = Spell()
        recent = [*spell.recent, value if hit else None][-sign.rows :]
        while recent and recent[0] is None:
            recent.pop(0)
        spell.recent = recent
        if not recent:
            spell.said = False
        hits = [number for number in recent if number is not None]
        if hit and not spell.said and len(hits) >= sign.hits:
            mean = sum(hits) / len(hits)
            spell.said = True
            spell.count += 1
            spell.first_step = spell.first_step if spell.count > 1 else step
            spell.text = f"{sign.sentence(mean, row)}; {sign.remedy(mean, row)}"
            self._tell("sign", sign=sign.name, text=spell.text, value=mean)
        if hit and spell.said:
            spell.last_step = step


def signs_of(config: Config) -> tuple[Sign, ...]:
    """All signs of a configuration; a sign whose metric a run does not have stays silent."""
    limits, most = config.guards.limiters, config.ppo.max_grad_norm
    # Recipes that clip in nearly every minibatch do so on purpose.
    clips = limits.gradient_norm is not None and (most is None or limits.gradient_norm < most)
    limiters = [_limiter(name) for name in _LIMITERS if name != "gradient_norm" or clips]
    return (*limiters, _steps(config), _critic(config), _return(config), _distance(config), reward_scale(config))


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


def _critic(config: Config) -> Sign:
    def error(row: Row) -> float:
        """Root mean square of the value error over the size of value targets; 0 where it is not known."""
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
        least = max(_ERRORS * row["error"], _LEAST_FALL * abs(best))
        return value < first + _FALLEN * (best - first) and best - value > least

    return Sign(
        "return_below_best",
        lambda row: row["last"],
        fallen,
        2,
        2,
        lambda value, row: (
            f"the last two evaluations returned {value:,.1f} on average, "
            f"where two in a row had reached {row['best']:,.1f}"
        ),
        lambda value, row: "lower ppo.learning_rate" + (f", or {_normalize(config)}" if _normalize(config) else ""),
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


def reward_scale(config: Config) -> Sign:
    """The sign that rewards make value targets far larger or smaller than 1."""
    ppo = config.ppo
    greatest = _GREATEST_NORMALIZED if ppo.normalize_advantage else _GREATEST_TARGET

    def size(row: Row) -> float | None:
        """Size of value targets; 0 where no reward was paid, since a sparse task says nothing of its scale."""
        mean, most = _target_size(config, row), _number(row, "training/reward_greatest")
        if ppo.normalize_values or ppo.normalize_rewards or mean is None or most is None:
            return None
        largest = most * _horizon(config)
        return largest if 0.0 < largest < _LEAST_TARGET else mean

    def remedy(value: float, row: Row) -> str:
        scaled = f", or ppo.reward_scaling={_smaller(config, value):.1g}"
        return _normalize(config) + scaled

    return Sign(
        "reward_scale",
        size,
        lambda value, row: value > greatest or 0.0 < _most(config, row) < _LEAST_TARGET,
        _MISSCALED,
        _ROWS,
        lambda value, row: (
            f"value targets were of about {_plain(value)} in {_MISSCALED} of the last {_ROWS} iterations, far from 1"
        ),
        remedy,
    )


def _most(config: Config, row: Row) -> float:
    """The greatest value target that the rewards of an iteration allow."""
    return (_number(row, "training/reward_greatest") or 0.0) * _horizon(config)


def _horizon(config: Config) -> float:
    """Steps whose rewards a value target adds up, about."""
    steps = float(config.env.episode_length)
    return min(steps, 1.0 / (1.0 - config.ppo.discounting)) if config.ppo.discounting < 1.0 else steps


def _target_size(config: Config, row: Row) -> float | None:
    """Size of value targets, by the mean reward; 1 where values are normalised, None where it is not known."""
    if config.ppo.normalize_values:
        return 1.0
    reward = _number(row, "training/reward_mean")
    if reward is None or config.ppo.normalize_rewards:
        return None
    return abs(reward) * config.ppo.reward_scaling * _horizon(config)


def _smaller(config: Config, size: float) -> float:
    """The reward scaling that would bring value targets of a size to `_GOOD_TARGET`."""
    return config.ppo.reward_scaling * _GOOD_TARGET / size


def _normalize(config: Config) -> str:
    """The remedy that makes learning independent of the rewards' scale; empty where it is on."""
    keys = [key for key in ("normalize_values", "normalize_advantage") if not getattr(config.ppo, key)]
    return "set " + " ".join(f"ppo.{key}=true" for key in keys) if keys else ""


def _number(row: Row, key: str) -> float | None:
    """A metric, None where it is missing or not finite."""
    value = row.get(key)
    if value is None or not math.isfinite(value):
        return None
    return float(value)


def _percent(share: float) -> str:
    return f"{100.0 * share:.0f} %"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100.0 else f"{value:.2g}"
