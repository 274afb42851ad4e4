"""Flax modules of the networks: a multilayer perceptron, and policies with a Gaussian at its end.

Layers have the same names as in Brax. Hidden layers compute in the configured type; parameters and outputs are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import DTypeLike

from rlstable.config.networks import NetworkConfig
from rlstable.config.schema import ConfigError

_MIN_STD = 0.001  # Brax's tanh-normal: softplus + 0.001


class MLP(linen.Module):
    """Dense layers with activations, and with `layer_norm` a layer normalisation before each activation.

    Layer normalisation has Brax's parameter names. Brax normalises after the activation, this class before.
    """

    layer_sizes: Sequence[int]
    activation: Callable[[jax.Array], jax.Array]
    kernel_init: Callable[..., jax.Array]
    dtype: DTypeLike = jnp.float32
    activate_final: bool = False
    layer_norm: bool = False

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = jnp.promote_types(self.dtype, jnp.float32)
        for index, size in enumerate(self.layer_sizes):
            x = linen.Dense(size, name=f"hidden_{index}", kernel_init=self.kernel_init, dtype=self.dtype)(x)
            if index < len(self.layer_sizes) - 1 or self.activate_final:
                if self.layer_norm:
                    # Flax's fast variance is a difference of two squares: NaN if both overflow.
                    norm = linen.LayerNorm(name=f"LayerNorm_{index}", dtype=wide, use_fast_variance=False)
                    x = norm(x).astype(self.dtype)
                x = self.activation(x)
        return x


class NoiseStd(linen.Module):
    """A learnable standard deviation per action element, independent of the observation."""

    initial: float
    size: int
    log: bool

    @linen.compact
    def __call__(self) -> jax.Array:
        if self.log:
            return jnp.exp(self.param("log_value", lambda _: jnp.full((self.size,), jnp.log(self.initial))))
        return self.param("value", lambda _: jnp.full((self.size,), jnp.float32(self.initial)))


class GaussianHead(linen.Module):
    """The `normal` policy: means from the network, standard deviations from the network or a parameter."""

    action_size: int
    config: NetworkConfig
    dtype: DTypeLike

    @linen.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Means and standard deviations, each `[..., A]`."""
        config, init = self.config, initializer("policy_network_kernel_init", self.config)
        sizes, norm = config.policy_hidden_layer_sizes, config.policy_layer_norm
        mlp = MLP(sizes, activation(config), init, self.dtype, activate_final=True, layer_norm=norm, name="MLP_0")
        hidden = mlp(x)
        mean_init = initializer("mean_kernel_init", config) if config.mean_kernel_init else init
        loc = linen.Dense(self.action_size, kernel_init=mean_init, dtype=self.dtype, name="Dense_0")(hidden)
        loc = loc.astype(jnp.float32)
        if config.mean_clip_scale is not None:
            loc = config.mean_clip_scale * (loc / (1.0 + jnp.abs(loc)))
        log = config.noise_std_type == "log"
        if config.state_dependent_std:
            raw = linen.Dense(self.action_size, kernel_init=init, dtype=self.dtype, name="Dense_1")(hidden)
            scale = jnp.exp(raw.astype(jnp.float32)) if log else raw.astype(jnp.float32)
        else:
            name = "std_logparam" if log else "std_param"
            scale = NoiseStd(config.init_noise_std, self.action_size, log, name=name)()
        return loc, jnp.broadcast_to(scale, loc.shape)


class TanhGaussianHead(linen.Module):
    """The `tanh_normal` policy: means and softplus standard deviations from one network."""

    action_size: int
    config: NetworkConfig
    dtype: DTypeLike

    @linen.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Means and standard deviations before squashing, each `[..., A]`."""
        config, init = self.config, initializer("policy_network_kernel_init", self.config)
        sizes, norm = (*config.policy_hidden_layer_sizes, 2 * self.action_size), config.policy_layer_norm
        mlp = MLP(sizes, activation(config), init, self.dtype, layer_norm=norm, name="mlp")
        loc, raw = jnp.split(mlp(x).astype(jnp.float32), 2, axis=-1)
        return loc, jax.nn.softplus(raw) + _MIN_STD


def activation(config: NetworkConfig) -> Callable[[jax.Array], jax.Array]:
    return getattr(jax.nn, config.activation)


def initializer(field: str, config: NetworkConfig) -> Callable[..., jax.Array]:
    """The kernel initializer named by a configuration field; a `ConfigError` if it does not accept the arguments."""
    name = getattr(config, field)
    kwargs = getattr(config, f"{field}_kwargs") or {}
    if name == "zeros":
        return jax.nn.initializers.zeros
    try:
        return getattr(jax.nn.initializers, name)(**kwargs)
    except TypeError as error:
        raise ConfigError(f"network.{field}_kwargs: {error}; see jax.nn.initializers.{name}") from None
