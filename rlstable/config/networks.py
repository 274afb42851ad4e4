"""Configuration of the policy and value networks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlstable.config.schema import Count, Flag, Positive, Section, require

Layers = Annotated[tuple[Count, ...], Field(min_length=1)]
Activation = Literal["swish", "silu", "relu", "elu", "gelu", "tanh", "selu", "leaky_relu", "softplus", "sigmoid"]
KernelInit = Literal[
    "lecun_uniform", "lecun_normal", "glorot_uniform", "glorot_normal", "he_uniform", "he_normal", "orthogonal",
    "uniform", "normal", "variance_scaling", "zeros",
]  # fmt: skip

# Keys that need `distribution_type=normal`, each with the value that leaves it unset.
NORMAL_ONLY = {
    "noise_std_type": "scalar",
    "init_noise_std": 1.0,
    "state_dependent_std": False,
    "mean_clip_scale": None,
    "mean_kernel_init": None,
    "mean_kernel_init_kwargs": None,
}


class NetworkConfig(Section, at="network"):
    """Policy and value networks: two multilayer perceptrons with Brax's names and defaults."""

    policy_hidden_layer_sizes: Layers
    value_hidden_layer_sizes: Layers
    activation: Activation
    policy_layer_norm: Flag
    value_layer_norm: Flag
    policy_obs_key: str
    value_obs_key: str
    distribution_type: Literal["tanh_normal", "normal"]
    noise_std_type: Literal["scalar", "log"]
    init_noise_std: Positive
    state_dependent_std: Flag
    mean_clip_scale: Positive | None
    policy_network_kernel_init: KernelInit
    policy_network_kernel_init_kwargs: dict[str, Any] | None
    value_network_kernel_init: KernelInit
    value_network_kernel_init_kwargs: dict[str, Any] | None
    mean_kernel_init: KernelInit | None
    mean_kernel_init_kwargs: dict[str, Any] | None
    use_distributional_critic: Flag
    num_quantiles: Count
    recurrent: Literal["gru"] | None
    recurrent_size: Count

    def _check(self) -> None:
        for key, value in NORMAL_ONLY.items() if self.distribution_type == "tanh_normal" else ():
            require(getattr(self, key) == value, key, "needs network.distribution_type=normal")
        both = self.mean_kernel_init is not None or self.mean_kernel_init_kwargs is None
        require(both, "mean_kernel_init_kwargs", "needs network.mean_kernel_init")
