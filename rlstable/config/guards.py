"""Configuration of every guard and limiter. docs/guards.md gives the origin of each number."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlstable.config.schema import Count, Finite, Flag, Positive, Section, Share, require


class LimiterConfig(Section, at="guards.limiters"):
    """Bounds in normal operation; null disables a bound."""

    reward: Positive | None
    reward_outlier: Annotated[Finite, Field(gt=0)] | None
    observation: Positive | None
    observation_outlier: Positive | None
    observation_shift: Annotated[Finite, Field(gt=1)] | None
    advantage_std_min: Positive | None
    value_range: Annotated[Finite, Field(ge=1, le=1e6)] | None
    value_target: Positive | None
    value_error: Positive | None
    log_ratio: Annotated[Positive, Field(le=80)] | None
    policy_std_min: Positive | None
    policy_std_max: Positive | None
    kl: Positive | None
    gradient_norm: Positive | None
    update_norm: Positive | None

    def _check(self) -> None:
        low, high = self.policy_std_min, self.policy_std_max
        above = f"{low} is not below guards.limiters.policy_std_max={high}; lower it"
        require(low is None or high is None or low < high, "policy_std_min", above)


class QuarantineConfig(Section, at="guards.quarantine"):
    """Guard of environments: replaces a bad environment by a clean one and masks out its sample."""

    enabled: Flag
    max_abs_state: Positive | None
    max_abs_acceleration: Positive | None
    max_abs_observation: Positive | None
    max_abs_reward: Positive | None
    max_other_norm: Positive | None


class FiniteSamplesConfig(Section, at="guards.finite_samples"):
    """Guard of samples: masks out a sample with numbers that are not finite or far too large."""

    enabled: Flag
    max_norm: Positive | None


class FiniteUpdateConfig(Section, at="guards.finite_update"):
    """Guard of updates: rejects a whole update with numbers that are not finite or far too large."""

    enabled: Flag
    max_parameter_norm: Positive | None
    thorough: Flag
    patience: Count


class SpikeConfig(Section, at="guards.spike"):
    """Guard of gradient spikes: rejects an update whose gradient norm is far above the usual norm."""

    enabled: Flag
    factor: Annotated[Finite, Field(gt=1)]


class FiniteStateConfig(Section, at="guards.finite_state"):
    """Guard of the training state: a bad state is never saved; `patience` trips in a row end the run."""

    enabled: Flag
    max_parameter_norm: Positive | None
    max_other_norm: Positive | None
    patience: Count


class StormConfig(Section, at="guards.storm"):
    """Guard of storms: trips when too many environments are bad at once."""

    enabled: Flag
    max_share: Share
    patience: Count


class ValueLossConfig(Section, at="guards.value_loss"):
    """Guard of the value function: trips when its error exceeds every return that the task can reach."""

    enabled: Flag
    factor: Annotated[Finite, Field(gt=1)]
    patience: Count


class PolicyConfig(Section, at="guards.policy"):
    """Guard of the policy: trips when its KL, standard deviation or entropy leaves the bounds."""

    enabled: Flag
    max_kl: Positive | None
    min_std: Positive | None
    max_std: Positive | None
    min_entropy: Finite | None
    patience: Count

    def _check(self) -> None:
        low, high = self.min_std, self.max_std
        above = f"{low} is not below guards.policy.max_std={high}; lower it"
        require(low is None or high is None or low < high, "min_std", above)


class ReturnWatchConfig(Section, at="guards.return_watch"):
    """Guard of the learned policy: trips when the return is significantly below the best return so far."""

    enabled: Flag
    tolerance: Annotated[Share, Field(gt=0, lt=1)]
    episodes: Count


class GuardsConfig(Section, at="guards"):
    """All guards and limiters. The groups `off`, `default` and `strict` set their keys."""

    quarantine: QuarantineConfig
    finite_samples: FiniteSamplesConfig
    finite_update: FiniteUpdateConfig
    spike: SpikeConfig
    finite_state: FiniteStateConfig
    storm: StormConfig
    value_loss: ValueLossConfig
    policy: PolicyConfig
    return_watch: ReturnWatchConfig
    limiters: LimiterConfig
