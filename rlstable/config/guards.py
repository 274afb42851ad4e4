"""The configuration of every guard and limiter; docs/guards.md says where each number comes from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rlstable.config.schema import Count, Finite, Flag, KeyedError, Positive, Section, Share


class LimiterConfig(Section, at="guards.limiters"):
    """Bounds in normal operation; null switches a bound off."""

    reward: Positive | None
    observation: Positive | None
    observation_outlier: Positive | None
    advantage_std_min: Positive | None
    value_target: Positive | None
    value_error: Positive | None
    log_ratio: Annotated[Positive, Field(le=80)] | None
    policy_std_min: Positive | None
    policy_std_max: Positive | None
    kl: Positive | None
    gradient_norm: Positive | None
    gradient_block: Positive | None
    update_norm: Positive | None

    @model_validator(mode="after")
    def _check(self) -> LimiterConfig:
        low, high = self.policy_std_min, self.policy_std_max
        if low is not None and high is not None and low >= high:
            raise KeyedError("policy_std_min", f"{low} is not below guards.limiters.policy_std_max={high}")
        return self


class QuarantineConfig(Section, at="guards.quarantine"):
    """The env guard: a bad simulation is replaced by a clean one and its sample is left out."""

    enabled: Flag
    max_abs_state: Positive | None
    max_abs_acceleration: Positive | None
    max_abs_observation: Positive | None
    max_abs_reward: Positive | None
    max_other_norm: Positive | None


class FiniteSamplesConfig(Section, at="guards.finite_samples"):
    """The batch guard: a sample whose own numbers are not finite, or absurd, is left out."""

    enabled: Flag
    max_norm: Positive | None


class RewardOutlierConfig(Section, at="guards.reward_outlier"):
    """The batch guard of rewards: one far beyond what the task pays is left out."""

    enabled: Flag
    factor: Annotated[Finite, Field(gt=1)]


class FiniteUpdateConfig(Section, at="guards.finite_update"):
    """The update guard: a candidate that is not finite, or absurd, is rejected as a whole."""

    enabled: Flag
    max_parameter_norm: Positive | None
    thorough: Flag
    patience: Count


class SpikeConfig(Section, at="guards.spike"):
    """The update guard of gradient spikes: one far beyond the usual norm is rejected."""

    enabled: Flag
    factor: Annotated[Finite, Field(gt=1)]


class FiniteStateConfig(Section, at="guards.finite_state"):
    """The state guard: a bad training state is never saved, and ends the run after `patience` trips in a row."""

    enabled: Flag
    max_parameter_norm: Positive | None
    max_other_norm: Positive | None
    patience: Count


class StormConfig(Section, at="guards.storm"):
    """The state guard of storms: too many simulations are bad at once."""

    enabled: Flag
    max_share: Share
    patience: Count


class ValueLossConfig(Section, at="guards.value_loss"):
    """The state guard of the value function: it is off by far more than the task can pay."""

    enabled: Flag
    factor: Annotated[Finite, Field(gt=1)]
    patience: Count


class PolicyConfig(Section, at="guards.policy"):
    """The state guard of the policy: it has jumped, gone blind or gone rigid."""

    enabled: Flag
    max_kl: Positive | None
    min_std: Positive | None
    max_std: Positive | None
    min_entropy: Finite | None
    patience: Count

    @model_validator(mode="after")
    def _check(self) -> PolicyConfig:
        if self.min_std is not None and self.max_std is not None and self.min_std >= self.max_std:
            raise KeyedError("min_std", f"{self.min_std} is not below guards.policy.max_std={self.max_std}")
        return self


class ReturnWatchConfig(Section, at="guards.return_watch"):
    """The guard of what was learnt: the return has fallen credibly below the best that was reached."""

    enabled: Flag
    tolerance: Annotated[Share, Field(gt=0, lt=1)]
    episodes: Count


class GuardsConfig(Section, at="guards"):
    """Every guard and limiter; the groups `off`, `default` and `strict` are three settings of it."""

    quarantine: QuarantineConfig
    finite_samples: FiniteSamplesConfig
    reward_outlier: RewardOutlierConfig
    finite_update: FiniteUpdateConfig
    spike: SpikeConfig
    finite_state: FiniteStateConfig
    storm: StormConfig
    value_loss: ValueLossConfig
    policy: PolicyConfig
    return_watch: ReturnWatchConfig
    limiters: LimiterConfig
