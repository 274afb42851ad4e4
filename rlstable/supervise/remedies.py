"""Applies remedies to a training state and takes them back, for example to lower the learning rate after a divergence.

A remedy changes arrays of the state, so no remedy of this module compiles a program.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from rlstable.config.supervise import Remedy
from rlstable.ppo.optimizer import Optimizer
from rlstable.ppo.state import TrainState

# Remedy with a factor to the number of `Tuning` that the factor multiplies; `Optimizer.rates` reads the rate scales.
_FACTORS = {
    "scale_learning_rate": "learning_rate_scale",
    "scale_policy_rate": "policy_rate_scale",
    "scale_critic_rate": "critic_rate_scale",
    "tighten_clipping": "clip_scale",
}
SCALES = tuple(_FACTORS.values())


def apply(remedy: Remedy, state: TrainState, optimizer: Optimizer) -> TrainState:
    """Applies a remedy.

    `fresh_resets` and `raise_precision` change nothing here: every rollback resets the environments and
    changes the precision.
    """
    if remedy.name == "reset_optimizer":
        return dataclasses.replace(state, opt_state=optimizer.init(state.params))
    if remedy.name == "refit_critic" and remedy.factor is not None:
        hold = jnp.full_like(state.tuning.policy_hold, int(remedy.factor))
        return dataclasses.replace(state, tuning=dataclasses.replace(state.tuning, policy_hold=hold))
    return state if remedy.factor is None else _scaled(remedy, state, remedy.factor)


def take_back(remedy: Remedy, state: TrainState) -> TrainState:
    """Undoes the factor of a remedy; remedies without a factor cannot be taken back."""
    return state if remedy.factor is None else _scaled(remedy, state, 1.0 / remedy.factor)


def _scaled(remedy: Remedy, state: TrainState, factor: float) -> TrainState:
    field = _FACTORS[remedy.name]
    scaled = getattr(state.tuning, field) * factor
    return dataclasses.replace(state, tuning=dataclasses.replace(state.tuning, **{field: scaled}))
