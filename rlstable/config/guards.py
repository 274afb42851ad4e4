"""The configuration of every guard and limiter; docs/guards.md says where each number comes from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rlstable.config.schema import Count, Finite, Flag, KeyedError, Positive, Section, Share


class LimiterConfig(Section):
    """Bounds in the ordinary course of work; null switches one off."""

    reward: Positive | None = 1000.0
    observation: Positive | None = 100.0
    observation_outlier: Positive | None = 100.0
    advantage_std_min: Positive | None = 1e-5
    value_target: Positive | None = 1e5
    value_error: Positive | None = None
    log_ratio: Annotated[Positive, Field(le=80)] | None = 20.0
    policy_std_min: Positive | None = 1e-4
    policy_std_max: Positive | None = 10.0
    kl: Positive | None = 1.0
    gradient_norm: Positive | None = 100.0
    gradient_block: Positive | None = None
    update_norm: Positive | None = 0.1

    @model_validator(mode="after")
    def _check(self) -> LimiterConfig:
        low, high = self.policy_std_min, self.policy_std_max
        if low is not None and high is not None and low >= high:
            raise KeyedError("policy_std_min", f"{low} is not below guards.limiters.policy_std_max={high}")
        return self


class QuarantineConfig(Section):
    """The env guard: a bad simulation is replaced by a clean one and its sample is left out."""

    enabled: Flag = True
    max_abs_state: Positive | None = 1e6
    max_abs_acceleration: Positive | None = 1e10
    max_abs_observation: Positive | None = 1e6
    max_abs_reward: Positive | None = 1e6
    max_other_norm: Positive | None = 1e15


class FiniteSamplesConfig(Section):
    """The batch guard: a sample whose own numbers are not finite, or absurd, is left out."""

    enabled: Flag = True
    max_norm: Positive | None = 1e9


class RewardOutlierConfig(Section):
    """The batch guard of rewards: one far beyond what the task pays is left out."""

    enabled: Flag = True
    factor: Annotated[Finite, Field(gt=1)] = 5000.0


class FiniteUpdateConfig(Section):
    """The update guard: a candidate that is not finite, or absurd, is rejected as a whole."""

    enabled: Flag = True
    max_parameter_norm: Positive | None = 1e6
    thorough: Flag = False
    patience: Count = 20


class SpikeConfig(Section):
    """The update guard of gradient spikes: one far beyond the usual norm is rejected."""

    enabled: Flag = True
    factor: Annotated[Finite, Field(gt=1)] = 1000.0


class FiniteStateConfig(Section):
    """The state guard: a bad training state is never saved, and ends the run after `patience` trips in a row."""

    enabled: Flag = True
    max_parameter_norm: Positive | None = 1e6
    max_other_norm: Positive | None = 1e15
    patience: Count = 3


class StormConfig(Section):
    """The state guard of storms: too many simulations are bad at once."""

    enabled: Flag = True
    max_share: Share = 0.5
    patience: Count = 20


class ValueLossConfig(Section):
    """The state guard of the value function: it is off by far more than the task can pay."""

    enabled: Flag = True
    factor: Annotated[Finite, Field(gt=1)] = 100.0
    patience: Count = 20


class PolicyConfig(Section):
    """The state guard of the policy: it has jumped, gone blind or gone rigid."""

    enabled: Flag = True
    max_kl: Positive | None = 5.0
    min_std: Positive | None = 2e-4
    max_std: Positive | None = 9.0
    min_entropy: Finite | None = -20.0
    patience: Count = 5

    @model_validator(mode="after")
    def _check(self) -> PolicyConfig:
        if self.min_std is not None and self.max_std is not None and self.min_std >= self.max_std:
            raise KeyedError("min_std", f"{self.min_std} is not below guards.policy.max_std={self.max_std}")
        return self


class ReturnWatchConfig(Section):
    """The guard of what was learnt: the return has fallen credibly below the best that was reached."""

    enabled: Flag = True
    tolerance: Annotated[Share, Field(gt=0, lt=1)] = 0.5
    episodes: Count = 16


class GuardsConfig(Section):
    """Every guard and limiter; the groups `off`, `default` and `strict` are three settings of it."""

    quarantine: QuarantineConfig = QuarantineConfig()
    finite_samples: FiniteSamplesConfig = FiniteSamplesConfig()
    reward_outlier: RewardOutlierConfig = RewardOutlierConfig()
    finite_update: FiniteUpdateConfig = FiniteUpdateConfig()
    spike: SpikeConfig = SpikeConfig()
    finite_state: FiniteStateConfig = FiniteStateConfig()
    storm: StormConfig = StormConfig()
    value_loss: ValueLossConfig = ValueLossConfig()
    policy: PolicyConfig = PolicyConfig()
    return_watch: ReturnWatchConfig = ReturnWatchConfig()
    limiters: LimiterConfig = LimiterConfig()
