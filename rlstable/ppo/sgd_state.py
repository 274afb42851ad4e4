"""What SGD hands from minibatch to minibatch."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.device.packed import PackedDict
from rlstable.guards.base import GuardState, select
from rlstable.ppo.state import Tuning


class SGDState(NamedTuple):
    """What has been learnt from a batch so far.

    Attributes:
        params: Network parameters, joined (`ParamFlattener.join`).
        opt_state: Optimizer state, its moments joined likewise.
        sums: Metrics, summed over accepted minibatches.
        accepted: int32, how many those are.
    """

    params: Any
    opt_state: Any
    sums: PackedDict
    accepted: jax.Array


class SGDCarry(NamedTuple):
    """What minibatches hand to each other.

    Attributes:
        progress: So far.
        tuning: Numbers that a rejected update does not put back.
        guard_state: By guard.
        key: Random key of the next epoch.
        passed_over: int32, minibatches since the policy moved too far; None without the KL limiter.
    """

    progress: SGDState
    tuning: Tuning
    guard_state: dict[str, GuardState]
    key: jax.Array
    passed_over: jax.Array | None


def add_where(ok: jax.Array | bool, metrics: PackedDict, sums: PackedDict) -> PackedDict:
    """Adds the metrics of an accepted minibatch; those of a rejected one may be NaN."""
    if not sums:
        return metrics
    return dataclasses.replace(sums, whole=sums.whole + select(ok, metrics.whole, jnp.zeros_like(metrics.whole)))
