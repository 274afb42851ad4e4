"""Check that plays an environment: the reach of its actuators."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from rlstable.doctor.lints import Finding, names, short
from rlstable.guards.env import physics

_STEPS = 100
_SMALL_REACH = 0.1  # share of ctrlrange


def actuator_reach(env: Any, model: mujoco.MjModel) -> list[Finding]:
    """Finds actuators that the policy's actions can hardly command, by playing the least and the greatest action.

    Actions are in ±1. An environment that passes them to motors of ±40 uses 2.5 % of the motors' strength. A motor that
    no action moves may be locked on purpose, so it is no finding.
    """
    controls = jax.jit(_played, static_argnums=0)(env, jax.random.PRNGKey(0))
    if controls is None or controls.shape[-1] != model.nu:
        return []
    known = np.asarray(controls, np.float64).reshape(-1, model.nu)
    known = known[np.isfinite(known).all(axis=1)]
    if not len(known):
        return []
    low, high = model.actuator_ctrlrange.T
    share = np.ptp(np.clip(known, low, high), axis=0) / np.maximum(high - low, 1e-12)
    weak = [i for i in range(model.nu) if model.actuator_ctrllimited[i] and 0.0 < share[i] < _SMALL_REACH]
    if not weak:
        return []
    least = float(share[weak].min())
    what = f"actions of -1 to 1 reach {short(100.0 * least)} % of ctrlrange: the policy cannot use the actuator"
    advice = "scale the action in step: low + (action + 1) / 2 * (high - low), from actuator_ctrlrange"
    return [Finding("warning", "actuator reach", names(model, "actuator", weak), what, advice)]


def _played(env: Any, key: jax.Array) -> jax.Array | None:
    """Controls of the actuators under the least and the greatest action, `[T, 2, nu]`; None without them."""
    actions = jnp.broadcast_to(jnp.array([[-1.0], [1.0]]), (2, env.action_size))

    def step(state: Any, _: None) -> tuple[Any, Any]:
        state = jax.vmap(env.step)(state, actions)
        return state, getattr(physics(state), "ctrl", None)

    return jax.lax.scan(step, jax.vmap(env.reset)(jax.random.split(key)), length=_STEPS)[1]
