"""A fault as data of the training state, and its application at a site."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config.faults import FaultConfig

SITES = FaultConfig.sites()
FOREVER = 2**32 - 1


class Fault(NamedTuple):
    """A fault as data, scalars."""

    site: jax.Array  # index in SITES, int32
    value: jax.Array  # bad number, factor, or distance in standard deviations, float32
    probability: jax.Array  # per environment step, sample or minibatch, float32
    start: jax.Array  # first iteration with the fault, counted from 0, uint32
    end: jax.Array  # first iteration after the fault, uint32


def as_data(config: FaultConfig) -> Fault:
    end = FOREVER if config.iterations is None else config.start + config.iterations
    site, numbers = jnp.int32(SITES.index(str(config.site))), (jnp.float32(config.number), jnp.float32(config.chance))
    return Fault(site, *numbers, jnp.uint32(config.start), jnp.uint32(end))


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
