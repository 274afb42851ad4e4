"""Domain randomisation of a robot by ranges: each environment draws factors for its model and keeps them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlstable.config.robot import RandomizationConfig
from rlstable.device.trees import PyTree
from rlstable.envs.randomized import RandomizationFn


def by_ranges(config: RandomizationConfig) -> RandomizationFn:
    """A function as Brax's and Playground's PPO take it: `(model, rng) -> (model with batched leaves, axes)`."""

    def randomize(model: PyTree, rng: jax.Array) -> tuple[PyTree, PyTree]:
        arrays = jax.vmap(lambda key: drawn(model, config, key))(rng)
        axes = jax.tree.map(lambda _: None, model)
        return model.tree_replace(arrays), axes.tree_replace(dict.fromkeys(arrays, 0))

    return randomize


def drawn(model: PyTree, config: RandomizationConfig, key: jax.Array) -> dict[str, jax.Array]:
    """The randomised arrays of one environment, by their path in the model of MJX."""
    keys = dict(zip(RandomizationConfig.model_fields, jax.random.split(key, 7), strict=True))

    def factors(name: str, *shape: int) -> jax.Array:
        low, high = getattr(config, name) or (1.0, 1.0)
        return jax.random.uniform(keys[name], shape, minval=low, maxval=high)

    arrays: dict[str, jax.Array] = {}
    if config.mass is not None:
        factor = factors("mass", model.nbody)
        arrays |= {"body_mass": model.body_mass * factor, "body_inertia": model.body_inertia * factor[:, None]}
    if config.center_of_mass is not None:
        reach = config.center_of_mass
        offset = jax.random.uniform(keys["center_of_mass"], model.body_ipos.shape, minval=-reach, maxval=reach)
        arrays["body_ipos"] = model.body_ipos + offset.at[0].set(0.0)
    if config.friction is not None:
        arrays["geom_friction"] = model.geom_friction.at[:, 0].multiply(factors("friction"))
    for name in ("damping", "armature"):
        if getattr(config, name) is not None:
            arrays[f"dof_{name}"] = getattr(model, f"dof_{name}") * factors(name, model.nv)
    if config.gains is not None:
        factor = factors("gains", model.nu)[:, None]
        arrays |= {name: getattr(model, name) * factor for name in ("actuator_gainprm", "actuator_biasprm")}
    if config.gravity is not None:
        arrays["opt.gravity"] = model.opt.gravity * factors("gravity")
    return {name: jnp.asarray(array) for name, array in arrays.items()}
