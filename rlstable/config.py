"""Typed, frozen, validated configuration: what a run is, before anything compiles.

Hydra composes YAML, this module turns the result into immutable objects and refuses what cannot work. Numbers must be
finite, integers are never booleans, unknown keys are errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rlstable.fault_config import FaultConfig
from rlstable.guard_config import GuardsConfig
from rlstable.schema import (
    ConfigError,
    Count,
    CountOrZero,
    Finite,
    Flag,
    Integer,
    KeyedError,
    NonNegative,
    Positive,
    Section,
    Share,
    Total,
    validate,
)
from rlstable.supervise_config import SuperviseConfig

Layers = Annotated[tuple[Count, ...], Field(min_length=1)]
Activation = Literal["swish", "silu", "relu", "elu", "gelu", "tanh", "selu", "leaky_relu", "softplus", "sigmoid"]
KernelInit = Literal[
    "lecun_uniform", "lecun_normal", "glorot_uniform", "glorot_normal", "he_uniform", "he_normal", "orthogonal",
    "uniform", "normal", "variance_scaling", "zeros",
]  # fmt: skip


class EnvConfig(Section):
    """The environment a policy is trained in."""

    source: Literal["brax", "import"] = "brax"
    name: str
    backend: Literal["mjx", "spring", "generalized", "positional"] | None = None
    episode_length: Count = 1000
    action_repeat: Count = 1
    reset: Literal["cached", "pool"] = "cached"
    reset_pool_size: Count = 64
    reset_pool_refresh: CountOrZero = 10
    envs_per_pass: Count | None = None
    kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> EnvConfig:
        module, _, attribute = self.name.partition(":")
        if self.source == "import" and not all(part.isidentifier() for part in (*module.split("."), attribute)):
            raise KeyedError("name", f"{self.name!r} must read 'package.module:Class' when env.source=import")
        if self.episode_length % self.action_repeat:
            raise KeyedError(
                "episode_length",
                f"{self.episode_length} is not a multiple of env.action_repeat={self.action_repeat}; "
                f"{self.episode_length - self.episode_length % self.action_repeat or self.action_repeat} would fit",
            )
        return self


class EvalConfig(Section):
    """How often and on what the policy is judged."""

    num_evals: CountOrZero = 10
    num_envs: Count = 128
    deterministic: Flag = True
    env_kwargs: dict[str, Any] | None = None
    target_return: Finite | None = None


class OptimizerConfig(Section):
    """The gradient transformation behind `ppo.learning_rate`."""

    name: Literal["adam", "adamw", "amsgrad"] = "adam"
    b1: Annotated[Finite, Field(ge=0, lt=1)] = 0.9
    b2: Annotated[Finite, Field(ge=0, lt=1)] = 0.999
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if self.weight_decay and self.name != "adamw":
            raise KeyedError("weight_decay", "needs ppo.optimizer.name=adamw; set it to 0 or choose adamw")
        return self


class PPOConfig(Section):
    """Hyperparameters under Brax's own names, with Brax's meaning (`brax.training.agents.ppo.train`)."""

    num_envs: Count = 2048
    batch_size: Count = 1024
    num_minibatches: Count = 32
    num_updates_per_batch: Count = 8
    unroll_length: Count = 10
    num_resets_per_eval: CountOrZero = 0
    discounting: Share = 0.97
    gae_lambda: Share = 0.95
    gae: Literal["per_update", "per_iteration"] = "per_update"
    bootstrap_on_timeout: Flag = False
    reward_scaling: Positive = 1.0
    normalize_advantage: Flag = True
    normalize_observations: Flag = True
    normalize_observations_mode: Literal["welford", "ema"] = "welford"
    normalize_observations_std_eps: NonNegative = 0.0
    normalize_until_count: Total | None = None
    normalizer_update: Literal["auto", "before", "after"] = "auto"
    entropy_cost: NonNegative = 1e-4
    clipping_epsilon: Positive = 0.3
    clipping_epsilon_value: Positive | None = None
    normalize_values: Flag = False
    normalize_rewards: Flag = False
    vf_loss_coefficient: NonNegative = 0.5
    max_grad_norm: Positive | None = None
    learning_rate: Positive = 3e-4
    learning_rate_schedule: Literal["constant", "linear", "cosine", "adaptive_kl"] = "constant"
    learning_rate_warmup: Annotated[Finite, Field(ge=0, lt=1)] = 0.0
    learning_rate_schedule_min_lr: Positive = 1e-5
    learning_rate_schedule_max_lr: Positive = 1e-2
    desired_kl: Positive = 0.01
    gradient_accumulation: Count = 1
    optimizer: OptimizerConfig = OptimizerConfig()

    @field_validator("learning_rate_schedule", mode="before")
    @classmethod
    def _brax_spelling(cls, value: Any) -> Any:
        """Brax writes NONE (or null) for a constant rate and ADAPTIVE_KL for the adaptive one."""
        if value is None or value == "NONE":
            return "constant"
        return "adaptive_kl" if value == "ADAPTIVE_KL" else value

    @model_validator(mode="after")
    def _check(self) -> PPOConfig:
        rows = self.batch_size * self.num_minibatches
        if rows % self.num_envs:
            raise KeyedError(
                "num_envs",
                f"{self.num_envs} does not divide batch_size * num_minibatches = {rows}; "
                f"{_nearest(self.num_envs, _divisors(rows))} would fit",
            )
        if self.batch_size % self.gradient_accumulation:
            raise KeyedError(
                "gradient_accumulation",
                f"{self.gradient_accumulation} does not divide ppo.batch_size={self.batch_size}; "
                f"{_nearest(self.gradient_accumulation, _divisors(self.batch_size))} would fit",
            )
        if self.normalize_until_count is not None and self.normalize_observations_mode != "ema":
            raise KeyedError("normalize_until_count", "needs ppo.normalize_observations_mode=ema (as in Brax)")
        if self.learning_rate_schedule != "adaptive_kl":
            for key, unset in (("desired_kl", 0.01), ("learning_rate_schedule_max_lr", 1e-2)):
                if getattr(self, key) != unset:
                    raise KeyedError(key, "needs ppo.learning_rate_schedule=adaptive_kl; leave it out or choose that")
        if self.learning_rate_schedule == "adaptive_kl":
            low, high = self.learning_rate_schedule_min_lr, self.learning_rate_schedule_max_lr
            if low > high:
                raise KeyedError(
                    "learning_rate_schedule_min_lr", f"{low} must not exceed learning_rate_schedule_max_lr={high}"
                )
            if not low <= self.learning_rate <= high:
                raise KeyedError(
                    "learning_rate",
                    f"{self.learning_rate} lies outside learning_rate_schedule_min_lr={low} and _max_lr={high}",
                )
            if self.learning_rate_warmup:
                raise KeyedError(
                    "learning_rate_warmup", "does not go with learning_rate_schedule=adaptive_kl; set it to 0"
                )
        return self

    @property
    def rows(self) -> int:
        """Unrolls in one iteration, `batch_size * num_minibatches`."""
        return self.batch_size * self.num_minibatches

    @property
    def updates_normalizer_first(self) -> bool:
        """Brax updates before SGD, and after it with the adaptive-KL rate, whose KL needs the collecting normaliser."""
        if self.normalizer_update == "auto":
            return self.learning_rate_schedule != "adaptive_kl"
        return self.normalizer_update == "before"

    def env_steps_per_iteration(self, action_repeat: int) -> int:
        """Environment steps of one iteration over all devices, as Brax counts them."""
        return self.rows * self.unroll_length * action_repeat


class NetworkConfig(Section):
    """Policy and value networks: two multilayer perceptrons, Brax's names and defaults."""

    policy_hidden_layer_sizes: Layers = (32, 32, 32, 32)
    value_hidden_layer_sizes: Layers = (256, 256, 256, 256, 256)
    activation: Activation = "swish"
    policy_obs_key: str = "state"
    value_obs_key: str = "state"
    distribution_type: Literal["tanh_normal", "normal"] = "tanh_normal"
    noise_std_type: Literal["scalar", "log"] = "scalar"
    init_noise_std: Positive = 1.0
    state_dependent_std: Flag = False
    mean_clip_scale: Positive | None = None
    policy_network_kernel_init: KernelInit = "lecun_uniform"
    policy_network_kernel_init_kwargs: dict[str, Any] | None = None
    value_network_kernel_init: KernelInit = "lecun_uniform"
    value_network_kernel_init_kwargs: dict[str, Any] | None = None
    mean_kernel_init: KernelInit | None = None
    mean_kernel_init_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> NetworkConfig:
        if self.distribution_type == "tanh_normal":
            for key, unset in (
                ("noise_std_type", "scalar"),
                ("init_noise_std", 1.0),
                ("state_dependent_std", False),
                ("mean_clip_scale", None),
                ("mean_kernel_init", None),
            ):
                if getattr(self, key) != unset:
                    raise KeyedError(key, "needs network.distribution_type=normal; tanh_normal has no such part")
        if self.mean_kernel_init is None and self.mean_kernel_init_kwargs is not None:
            raise KeyedError("mean_kernel_init_kwargs", "needs network.mean_kernel_init")
        return self


class LossScaleConfig(Section):
    """Dynamic loss scaling for float16 networks, with a floor and a cap."""

    initial: Positive = 2.0**15
    floor: Positive = 1.0
    cap: Positive = 2.0**24
    growth_interval: Count = 1000

    @model_validator(mode="after")
    def _check(self) -> LossScaleConfig:
        if not self.floor <= self.initial <= self.cap:
            raise KeyedError("initial", f"{self.initial} lies outside floor={self.floor} and cap={self.cap}")
        return self


class PrecisionConfig(Section):
    """What is computed in which precision. Parameters and optimizer state are float32 always."""

    matmul: Literal["default", "high", "highest", "x64"] = "default"
    network: Literal["float32", "bfloat16", "float16"] = "float32"
    loss_scale: LossScaleConfig = LossScaleConfig()


class WandbConfig(Section):
    """Weights & Biases."""

    mode: Literal["online", "offline", "disabled"] = "disabled"
    project: str = "rlstable"
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()


class SinksConfig(Section):
    """Where metrics go. `metrics.jsonl` and `events.jsonl` are always written."""

    console: Literal["auto", "rich", "plain", "off"] = "auto"
    tensorboard: Flag = False
    wandb: WandbConfig = WandbConfig()
    log_every: Count = 1


class CheckpointConfig(Section):
    """What is saved, besides the last state of the run."""

    enabled: Flag = True
    every: Count = 100
    keep: Count = 2
    keep_best: CountOrZero = 1
    keep_period: Count | None = None
    asynchronous: Flag = True


class Config(Section):
    """One run, whole."""

    env: EnvConfig
    ppo: PPOConfig = PPOConfig()
    network: NetworkConfig = NetworkConfig()
    guards: GuardsConfig = GuardsConfig()
    precision: PrecisionConfig = PrecisionConfig()
    eval: EvalConfig = EvalConfig()
    sinks: SinksConfig = SinksConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    fault: FaultConfig = FaultConfig()
    supervise: SuperviseConfig = SuperviseConfig()
    total_steps: Total = 30_000_000
    seed: Annotated[Integer, Field(ge=0, lt=2**32)] = 0
    devices: Count | None = None
    deterministic: Flag = False
    compile_cache: Annotated[str, Field(min_length=1)] | None = "auto"
    resume: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.total_steps >= 2**64:
            raise KeyedError("total_steps", f"{self.total_steps} does not fit the 64-bit step counter")
        return self

    @property
    def env_steps_per_iteration(self) -> int:
        """Environment steps of one iteration, action repeat included."""
        return self.ppo.env_steps_per_iteration(self.env.action_repeat)

    @property
    def tightens(self) -> bool:
        """Whether clipping may be tightened while training; without a guard that can ask for it, it is not."""
        guards = self.guards
        hand_over = (guards.update, guards.state, guards.storm, guards.value_loss, guards.policy)
        return self.supervise.recovery.tightens and any(guard.enabled for guard in hand_over)

    def require_devices(self, count: int) -> None:
        """Checks that the work divides among `count` devices.

        Raises:
            ConfigError: Names the number that does not divide, and one that would and goes with the others.
        """
        ppo = self.ppo
        # The batch first: without it no number of environments may fit.
        step = math.lcm(count * ppo.gradient_accumulation, ppo.num_envs // math.gcd(ppo.num_envs, ppo.num_minibatches))
        down = ppo.batch_size - ppo.batch_size % step
        envs = [n for n in _divisors(ppo.rows) if n % count == 0]
        for key, choices in (("batch_size", [down or step, down + step]), ("num_envs", envs)):
            value = getattr(ppo, key)
            if value % count:
                raise ConfigError(
                    f"ppo.{key}: {value} does not divide among {count} devices; "
                    f"{_nearest(value, choices)} would fit, or set devices=1"
                )
        share = ppo.batch_size // count
        if share % ppo.gradient_accumulation:
            raise ConfigError(
                f"ppo.gradient_accumulation: {ppo.gradient_accumulation} does not divide the {share} unrolls "
                f"that each of {count} devices has of a minibatch; 1 would fit"
            )


def load(data: Mapping[str, Any]) -> Config:
    """Builds the configuration from plain nested data, as Hydra composed it.

    Args:
        data: Nested mappings, e.g. `OmegaConf.to_container(cfg, resolve=True)`.

    Raises:
        ConfigError: The first mistake, in one line.
    """
    return validate(Config, data)


def _divisors(value: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return [*small, *(value // n for n in small)]


def _nearest(value: int, choices: list[int]) -> int:
    return min(choices, key=lambda choice: (abs(choice - value), choice))
