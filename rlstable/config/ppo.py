"""Configuration of PPO: Brax's hyperparameters, and which combinations are valid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator

from rlstable.config.schema import (
    INT32_MAX,
    ConfigError,
    Count,
    CountOrZero,
    Finite,
    Flag,
    FolderName,
    KeyedError,
    NonNegative,
    Positive,
    Section,
    Share,
    Total,
    divisors,
    nearest,
    require,
)


class OptimizerConfig(Section, at="ppo.optimizer"):
    """The gradient transformation behind `ppo.learning_rate`."""

    name: Literal["adam", "adamw", "amsgrad"]
    b1: Annotated[Finite, Field(ge=0, lt=1)]
    b2: Annotated[Finite, Field(ge=0, lt=1)]
    eps: Positive
    weight_decay: NonNegative

    def _check(self) -> None:
        adamw = self.name == "adamw"
        require(adamw or not self.weight_decay, "weight_decay", "needs ppo.optimizer.name=adamw; set it to 0")


class PPOConfig(Section, at="ppo"):
    """Hyperparameters with the names and the meaning of Brax (`brax.training.agents.ppo.train`)."""

    num_envs: Count
    batch_size: Count
    num_minibatches: Count
    num_updates_per_batch: Annotated[Count, Field(le=10_000)]  # no signal interrupts an iteration
    unroll_length: Count
    num_resets_per_eval: CountOrZero
    discounting: Share
    gae_lambda: Share
    gae: Literal["per_update", "per_iteration"]
    bootstrap_on_timeout: Flag
    reward_scaling: Positive
    normalize_advantage: Flag
    normalize_observations: Flag
    normalize_observations_mode: Literal["welford", "ema"]
    normalize_observations_std_eps: NonNegative
    normalize_until_count: Total | None
    normalizer_update: Literal["auto", "before", "after"]
    entropy_cost: NonNegative
    clipping_epsilon: Positive
    clipping_epsilon_value: Positive | None
    normalize_values: Flag
    vf_loss_coefficient: NonNegative
    max_grad_norm: Positive | None
    learning_rate: Positive
    learning_rate_schedule: Literal["constant", "linear", "cosine", "adaptive_kl"]
    learning_rate_warmup: Annotated[Finite, Field(ge=0, lt=1)]
    learning_rate_schedule_min_lr: Positive
    learning_rate_schedule_max_lr: Positive
    desired_kl: Positive
    gradient_accumulation: Count
    symmetry: Literal["auto", "if_symmetric"] | None
    teacher: FolderName | None
    imitation_weight: Positive
    imitation_only: Share
    imitation_end: Share
    optimizer: OptimizerConfig

    @field_validator("learning_rate_schedule", mode="before")
    @classmethod
    def _brax_spelling(cls, value: object) -> object:
        """Accepts the values of Brax: NONE or null for a constant rate, and ADAPTIVE_KL."""
        if value is None or value == "NONE":
            return "constant"
        return "adaptive_kl" if value == "ADAPTIVE_KL" else value

    def _check(self) -> None:
        rows, product = self.rows, "batch_size * num_minibatches ="
        most = f"{product} {rows:,} must not exceed {INT32_MAX:,}; lower one of them"
        require(rows <= INT32_MAX, "batch_size", most)
        for key, whole, name in (
            ("num_envs", rows, f"{product} {rows}"),
            ("gradient_accumulation", self.batch_size, f"ppo.batch_size={self.batch_size}"),
        ):
            value = getattr(self, key)
            if whole % value:
                fits = nearest(value, divisors(whole))
                raise KeyedError(key, f"{value} does not divide {name}; {fits} would fit")
        ema = self.normalize_until_count is None or self.normalize_observations_mode == "ema"
        require(ema, "normalize_until_count", "needs ppo.normalize_observations_mode=ema, as in Brax")
        only, end = self.imitation_only, self.imitation_end
        require(only <= end, "imitation_only", f"{only} must not exceed ppo.imitation_end={end}; lower it")
        low, high, rate = self.learning_rate_schedule_min_lr, self.learning_rate_schedule_max_lr, self.learning_rate
        if self.learning_rate_schedule != "adaptive_kl":
            for key, unset in (("desired_kl", 0.01), ("learning_rate_schedule_max_lr", 1e-2)):
                require(getattr(self, key) == unset, key, "needs ppo.learning_rate_schedule=adaptive_kl")
            return
        require(low <= high, "learning_rate_schedule_min_lr", f"{low} must not exceed _max_lr={high}; lower it")
        between = f"{rate} must lie between learning_rate_schedule_min_lr={low} and _max_lr={high}"
        require(low <= rate <= high, "learning_rate", between)
        warmup = self.learning_rate_warmup
        require(not warmup, "learning_rate_warmup", "must be 0 with ppo.learning_rate_schedule=adaptive_kl")

    @property
    def rows(self) -> int:
        """Unrolls in one iteration, `batch_size * num_minibatches`."""
        return self.batch_size * self.num_minibatches

    @property
    def schedules_by_progress(self) -> bool:
        """Whether the learning rate or the imitation depends on the completed share of `total_steps`."""
        by_rate = self.learning_rate_schedule in ("linear", "cosine") or self.learning_rate_warmup > 0
        return by_rate or self.teacher is not None

    @property
    def updates_normalizer_first(self) -> bool:
        """Whether the normaliser is updated before SGD.

        `auto` follows Brax: after SGD with the adaptive-KL rate, else before. The KL of the adaptive rate needs the
        normaliser that collected the batch.
        """
        if self.normalizer_update == "auto":
            return self.learning_rate_schedule != "adaptive_kl"
        return self.normalizer_update == "before"

    def env_steps_per_iteration(self, action_repeat: int) -> int:
        """Environment steps of one iteration on all devices, as Brax counts them."""
        return self.rows * self.unroll_length * action_repeat

    def require_devices(self, count: int) -> None:
        """Raises ConfigError, with a size that fits, unless `count` devices divide the batch and the environments."""
        accumulated = self.gradient_accumulation
        # The batch first: with a wrong batch size, no number of environments may fit.
        step = math.lcm(count * accumulated, self.num_envs // math.gcd(self.num_envs, self.num_minibatches))
        down = self.batch_size - self.batch_size % step
        envs = [n for n in divisors(self.rows) if n % count == 0]
        for key, choices in (("batch_size", [down or step, down + step]), ("num_envs", envs)):
            value = getattr(self, key)
            if value % count:
                fits = f"{nearest(value, choices)} would fit, or set devices=1"
                raise ConfigError(f"ppo.{key}: {value} does not divide evenly among {count} devices; {fits}")
        if (share := self.batch_size // count) % accumulated:
            raise ConfigError(
                f"ppo.gradient_accumulation: {accumulated} does not divide the {share} unrolls of a minibatch on each "
                f"of {count} devices; 1 would fit"
            )


class BraxEpochs(NamedTuple):
    """How Brax divides a training."""

    parts: int  # after each of which Brax evaluates
    steps: int  # environment steps of a part, rounded up to whole iterations
    iteration_steps: int  # environment steps of an iteration, action repeat included


def brax_epochs(arguments: Mapping[str, Any]) -> BraxEpochs:
    """The parts of a training with these arguments of `brax.training.agents.ppo.train`, by name."""
    names = ("batch_size", "unroll_length", "num_minibatches", "action_repeat")
    iteration_steps = math.prod(int(arguments[name]) for name in names)
    parts, resets = max(arguments["num_evals"] - 1, 1), max(arguments["num_resets_per_eval"], 1)
    iterations = math.ceil(arguments["num_timesteps"] / (parts * resets * iteration_steps))
    return BraxEpochs(parts, iterations * resets * iteration_steps, iteration_steps)
