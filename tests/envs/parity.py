"""Differences between one step in C MuJoCo and one in MJX, from the same state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from brax import envs

from rlstable.config.run import EnvConfig
from rlstable.envs.load import load_env
from rlstable.envs.mujoco_batch import INPUT_ARRAYS, STATE_ARRAYS
from rlstable.guards.env import physics

STEPS, ENVS = 125, 8
ATTRIBUTES = ("q", "qd", "x", "xd")
TASK_ATTRIBUTES = ("qpos", "qvel")  # of tasks of MuJoCo Playground

# Allowed differences in a thousand steps, relative to the greatest number of the quantity: the maximum, and the 99th
# percentile. MJX computes in float32 (1e-7 per operation); stiff contacts magnify the error.
PRECISE = {"obs": 2e-4, "reward": 1e-4, "done": 0.0, "q": 5e-5, "qd": 2e-4, "x": 5e-5, "xd": 5e-4}
# Brax stops the solver before it converges, and the two engines stop at different points: rarely in some environments,
# often in those with one solver iteration and 4 line search steps. See `tireless_ant`.
NOW_AND_THEN = {"obs": 0.03, "reward": 1e-3, "done": 0.0, "q": 3e-3, "qd": 0.03, "x": 2e-3, "xd": 0.03}
MOSTLY = {"obs": 0.2, "reward": 0.1, "done": 0.0, "q": 0.02, "qd": 0.3, "x": 0.03, "xd": 0.4}
MOSTLY_99 = {"obs": 2e-3, "reward": 5e-3, "done": 0.0, "q": 1e-3, "qd": 0.01, "x": 1e-3, "xd": 0.01}


class Difference(NamedTuple):
    """Relative to the greatest number of the kind."""

    most: float
    of_99: float


def bounds(config: EnvConfig) -> dict[str, Difference]:
    """Allowed differences by quantity."""
    most, of_99 = {
        "pusher": (NOW_AND_THEN, PRECISE),
        "humanoidstandup": (NOW_AND_THEN, PRECISE),
        "ant": (MOSTLY, MOSTLY_99),
        "humanoid": (MOSTLY, MOSTLY_99),
    }.get(config.name, (NOW_AND_THEN if config.is_randomized else PRECISE, PRECISE))
    steps = {quantity: Difference(most[quantity], of_99[quantity]) for quantity in PRECISE}
    return steps | {f"reset/{quantity}": Difference(1e-6, 1e-6) for quantity in PRECISE}


def tireless_ant(backend: str) -> Any:
    """The ant of Brax with enough solver iterations to converge."""
    env = envs.get_environment("ant", backend=backend)
    env.sys = env.sys.tree_replace({"opt.iterations": 50, "opt.ls_iterations": 50})
    return env


def native(config: EnvConfig) -> Any:
    return load_env(config.model_copy(update={"backend": "native"}))


def in_mjx(config: EnvConfig) -> Any:
    """The environment in MJX, including the swimmer, for which Brax rejects MJX."""
    if config.name != "swimmer":
        return load_env(config.model_copy(update={"backend": "mjx"}))
    from brax.mjx import pipeline

    env = load_env(config)
    env._pipeline, env._backend = pipeline, "mjx"
    return env


def differences(config: EnvConfig, resets: bool) -> dict[str, Difference]:
    """Differences by quantity, in a thousand random steps from C MuJoCo's states.

    Args:
        config: The environment.
        resets: Whether first states are compared too, which takes MJX long to compile.
    """
    ours, theirs = native(config), in_mjx(config)
    keys = jax.random.split(jax.random.PRNGKey(0), ENVS)
    first, states, actions, stepped = jax.jit(lambda: _rollout(ours, keys))()
    template = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(theirs.reset, keys[0]))
    field = "pipeline_state" if hasattr(template, "pipeline_state") else "data"
    inputs = {name: getattr(physics(states), name) for name in (*STATE_ARRAYS, *INPUT_ARRAYS, *ATTRIBUTES)}
    inputs = {name: value for name, value in inputs.items() if hasattr(physics(template), name)}

    def step(state: Any, inputs: dict[str, Any], action: jax.Array) -> Any:
        return theirs.step(state.replace(**{field: physics(template).replace(**inputs)}), action)

    # One program at a time: jaxlib 0.10.2 can deadlock if two factorise matrices at once (docs/decisions.md).
    reference = jax.block_until_ready(jax.jit(jax.vmap(step))(states, inputs, actions))
    found = _compared(stepped, reference)
    if resets:
        compared = _compared(first, jax.jit(jax.vmap(theirs.reset))(keys))
        found |= {f"reset/{quantity}": value for quantity, value in compared.items()}
    return found


def _rollout(env: Any, keys: jax.Array) -> Any:
    """First states `[ENVS]`; states, actions and states after the step, `[STEPS * ENVS]` each."""
    first = jax.vmap(env.reset)(keys)

    def step(state: Any, key: jax.Array) -> Any:
        action = jax.random.uniform(key, (ENVS, env.action_size), minval=-1.0, maxval=1.0)
        after = jax.vmap(env.step)(state, action)
        over = after.done > 0

        def renew(new: jax.Array, old: jax.Array) -> jax.Array:
            chosen = jnp.where(over.reshape(over.shape + (1,) * (old.ndim - 1)), old, new)
            return chosen.astype(old.dtype)

        return jax.tree.map(renew, after, first), (state, action, after)

    visited = jax.lax.scan(step, first, jax.random.split(keys[0], STEPS))[1]
    return first, *jax.tree.map(lambda x: x.reshape(STEPS * ENVS, *x.shape[2:]), visited)


def _compared(ours: Any, theirs: Any) -> dict[str, Difference]:
    parts = {name: (getattr(ours, name), getattr(theirs, name)) for name in ("obs", "reward", "done")}
    mine, other = physics(ours), physics(theirs)
    attributes = ATTRIBUTES if hasattr(other, "xd") else TASK_ATTRIBUTES
    parts |= {name: (getattr(mine, name), getattr(other, name)) for name in attributes}
    found = {}
    for name, (one, another) in parts.items():
        pairs = zip(jax.tree.leaves(one), jax.tree.leaves(another), strict=True)
        found[name] = Difference(*np.max([_relative(*pair) for pair in pairs], axis=0))
    return found


def _relative(one: Any, other: Any) -> Difference:
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    assert np.isfinite(one).all() and np.isfinite(other).all()
    apart = np.abs(one - other) / max(np.abs(other).max(), 1e-30)
    return Difference(float(apart.max()), float(np.quantile(apart, 0.99)))
