"""Action distributions: a diagonal Gaussian over raw actions, and the same Gaussian squashed by tanh.

Losses use raw (unsquashed) actions. The entropy includes the tanh's Jacobian; in a probability ratio the Jacobian
cancels, so log-probabilities leave it out. Everything else follows Brax's formulas, so numbers agree with Brax.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

_HALF_LOG_2PI = 0.9189385332046727


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Normal:
    """A diagonal Gaussian; the action equals the raw action.

    Attributes:
        loc: Means, `[..., A]`.
        scale: Positive standard deviations, `[..., A]`.
    """

    loc: jax.Array
    scale: jax.Array

    def sample(self, noise: jax.Array) -> jax.Array:
        """A raw action from standard normal `noise`, which has the shape of `loc`."""
        return noise * self.scale + self.loc

    def action(self, raw: jax.Array) -> jax.Array:
        """The action that is passed to the environment for a raw action."""
        return raw

    def applied_action(self, raw: jax.Array) -> jax.Array:
        """The action that takes effect in the environment: Brax environments clip actions to [-1, 1]."""
        return jnp.clip(raw, -1.0, 1.0)

    def log_prob(self, raw: jax.Array) -> jax.Array:
        """Log-density of `raw` under the Gaussian, `[...]`, without the Jacobian of the squashing."""
        unnormalized = -0.5 * jnp.square(raw / self.scale - self.loc / self.scale)
        return jnp.sum(unnormalized - _HALF_LOG_2PI - jnp.log(self.scale), axis=-1)

    def entropy(self, noise: jax.Array) -> jax.Array:
        """Entropy, `[...]`; for a squashed distribution an estimate from the sample that `noise` gives."""
        gaussian = 0.5 + _HALF_LOG_2PI + jnp.log(self.scale) + jnp.zeros_like(self.loc)
        return jnp.sum(gaussian + self._log_det(self.sample(noise)), axis=-1)

    def kl_from(self, old: Normal) -> jax.Array:
        """KL(old || self) of the raw Gaussians, `[...]`, with 1e-5 added inside the logarithm as in Brax."""
        log_ratio = jnp.log(self.scale / old.scale + 1e-5)
        spread = (jnp.square(old.scale) + jnp.square(old.loc - self.loc)) / (2.0 * jnp.square(self.scale))
        return jnp.sum(log_ratio + spread - 0.5, axis=-1)

    def _log_det(self, raw: jax.Array) -> jax.Array:
        return jnp.zeros_like(raw)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TanhNormal(Normal):
    """A diagonal Gaussian squashed by tanh into (-1, 1)."""

    def action(self, raw: jax.Array) -> jax.Array:
        return jnp.tanh(raw)

    applied_action = action

    def _log_det(self, raw: jax.Array) -> jax.Array:
        return 2.0 * (jnp.log(2.0) - raw - jax.nn.softplus(-2.0 * raw))
