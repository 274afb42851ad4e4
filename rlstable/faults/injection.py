"""A fault as data of the training state, and its application at a site."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config.faults import FaultConfig

SITES = FaultConfig.sites()
FOREVER = 2**32 - 1


class Fault(NamedTuple):
    """A fault as data, scalars.

    Attributes:
        site: Index in SITES, int32.
        value: Bad number, factor, or distance in standard deviations, float32.
        probability: Probability per environment step, sample or minibatch, float32.
        start: First iteration with the fault, counted from 0, uint32.
        end: First iteration after the fault, uint32.
    """

    site: jax.Array
    value: jax.Array
    probability: jax.Array
    start: jax.Array
    end: jax.Array


def as_data(config: FaultConfig) -> Fault:
    end = FOREVER if config.iterations is None else config.start + config.iterations
    return Fault(
        jnp.int32(SITES.index(str(config.site))),
        jnp.float32(config.number),
        jnp.float32(config.chance),
        jnp.uint32(config.start),
        jnp.uint32(end),
    )


class Injection(NamedTuple):
    """A fault in one iteration, in which it is `active` or not (bool scalar)."""

    fault: Fault
    active: jax.Array

    def hits(self, site: str, key: jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
        """Mask of the elements at a site that the fault hits, bool of `shape`."""
        active_here = (self.fault.site == SITES.index(site)) & self.active
        return active_here & (jax.random.uniform(key, shape) < self.fault.probability)

    def put(self, site: str, key: jax.Array, x: Any) -> jax.Array:
        """The fault's value if the fault hits, else the number `x`."""
        return jnp.where(self.hits(site, key), self.fault.value, jnp.asarray(x, jnp.float32))
