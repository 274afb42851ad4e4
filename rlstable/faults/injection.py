"""A fault as data, and where and when it strikes."""

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
        site: int32, index in SITES.
        value: float32, the bad number, a factor, or a distance in standard deviations.
        probability: float32, per chance: an environment's step, a sample, a minibatch.
        start: uint32, the first iteration, counted from 0.
        end: uint32, the first one without it.
    """

    site: jax.Array
    value: jax.Array
    probability: jax.Array
    start: jax.Array
    end: jax.Array


def as_data(config: FaultConfig) -> Fault:
    """The fault of a configuration that has one."""
    end = FOREVER if config.iterations is None else config.start + config.iterations
    return Fault(
        jnp.int32(SITES.index(str(config.site))),
        jnp.float32(config.number),
        jnp.float32(config.chance),
        jnp.uint32(config.start),
        jnp.uint32(end),
    )


class Injection(NamedTuple):
    """A fault at work in one iteration.

    Attributes:
        fault: Which.
        active: Whether this iteration has it, bool scalar.
    """

    fault: Fault
    active: jax.Array

    def hits(self, site: str, key: jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
        """Mask of the elements that the fault strikes at a site, bool of `shape`."""
        mine = (self.fault.site == SITES.index(site)) & self.active
        return mine & (jax.random.uniform(key, shape) < self.fault.probability)

    def put(self, site: str, key: jax.Array, x: Any) -> jax.Array:
        """The number `x` with the bad one in its place, or untouched."""
        return jnp.where(self.hits(site, key), self.fault.value, jnp.asarray(x, jnp.float32))
