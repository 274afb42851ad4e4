"""Domain randomisation: each environment gets its own physics model when it is first reset, and keeps it.

The randomised arrays of the model are in `info["model"]`. They are batched, sharded, saved and restored with the state,
and an incident carries the model it happened with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlstable.config import ConfigError
from rlstable.device import compatibility
from rlstable.device.trees import Env, EnvState, PyTree
from rlstable.envs.vector import MODEL
from rlstable.envs.wrapper import EnvWrapper

# `(model, rng=[B]) -> (model with batched leaves, tree of 0 for batched leaves and None for the others)`
RandomizationFn = Callable[..., tuple[PyTree, PyTree]]


class RandomizedEnv(EnvWrapper):
    """An environment of Brax (`env.sys`) or Playground (`env.mjx_model`) whose model is randomised at every reset.

    `randomization_fn` is as for Brax's and Playground's PPO. JAX traces it with one random key, `[1]`, and maps it over
    the environments. Raises `ConfigError` without a model, or if the function does not return what it must.
    """

    def __init__(self, env: Env, randomization_fn: RandomizationFn):
        super().__init__(env)
        self._randomization_fn = randomization_fn
        inner = self.unwrapped
        self._field = next((name for name in compatibility.RANDOMIZED_FIELDS if hasattr(inner, name)), "")
        if not self._field:
            raise ConfigError(
                f"env.randomization_fn: {type(inner).__name__} has neither sys (Brax) nor mjx_model (Playground) to "
                "randomise"
            )
        self._model = getattr(inner, self._field)
        self._randomized = self._find_randomized()

    @property
    def randomized(self) -> tuple[str, ...]:
        """Names of the randomised arrays of the model, such as `body_mass` or `opt.gravity`."""
        return tuple(path.removeprefix(".") for path in self._randomized)

    def reset(self, rng: jax.Array) -> EnvState:
        key_model, key_reset = jax.random.split(rng)
        model = self._draw(key_model)
        state = _with_field(self.env, self._field, self._replaced(model)).reset(key_reset)
        return state.replace(info={**state.info, MODEL: model})

    def step(self, state: EnvState, action: jax.Array) -> EnvState:
        model = state.info[MODEL]
        bare = state.replace(info={name: value for name, value in state.info.items() if name != MODEL})
        system = self._replaced(model)
        physics: PyTree = getattr(bare, "pipeline_state", None)
        if getattr(physics, "mass", None) is not None:
            # Brax's spring and positional engines carry masses, and a first state from the pool is of another model.
            mass = system.link.inertia.mass ** (1 - system.spring_mass_scale)
            bare = bare.replace(pipeline_state=physics.replace(mass=mass))
        stepped = _with_field(self.env, self._field, system).step(bare, action)
        return stepped.replace(info={**stepped.info, MODEL: model})

    def _draw(self, key: jax.Array) -> dict[str, jax.Array]:
        """The randomised arrays of one environment, by their path in the model."""
        batched, _ = self._randomization_fn(self._model, rng=key[None])
        leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(batched)}
        return {name: jnp.asarray(leaves[name])[0] for name in self._randomized}

    def _replaced(self, model: dict[str, jax.Array]) -> PyTree:
        return jax.tree_util.tree_map_with_path(lambda path, x: model.get(jax.tree_util.keystr(path), x), self._model)

    def _find_randomized(self) -> tuple[str, ...]:
        """Paths of the randomised arrays: the leaves whose axis is 0."""
        axes: list[PyTree] = []

        def shapes(key: jax.Array) -> PyTree:
            batched, in_axes = self._randomization_fn(self._model, rng=key[None])
            axes.append(in_axes)
            return batched

        try:
            batched = jax.eval_shape(shapes, jax.random.PRNGKey(0))
            by_leaf = _broadcast(axes[0], batched)
        except Exception as error:
            text = next(iter(str(error).splitlines()), "")
            raise ConfigError(
                f"env.randomization_fn: cannot be used: {type(error).__name__}: {text}; it must be a function of JAX, "
                "(model, rng) -> (model with a leading axis in the randomised leaves, in_axes)"
            ) from error
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(batched)]
        randomized = tuple(path for path, axis in zip(paths, by_leaf, strict=True) if axis is not None)
        wrong = [axis for axis in by_leaf if axis not in (None, 0)]
        if wrong or not randomized:
            raise ConfigError(
                f"env.randomization_fn: in_axes holds {wrong[0] if wrong else 'no 0'}; it must be 0 for randomised "
                "leaves and None for the others"
            )
        return randomized


def _broadcast(in_axes: PyTree, tree: PyTree) -> list[int | None]:
    """The axis of every leaf, as `jax.vmap` reads a tree prefix of axes. Empty fields of the model have no axis."""
    axes: list[int | None] = []
    jax.tree.map(
        lambda axis, part: axes.extend([axis] * len(jax.tree.leaves(part))), in_axes, tree, is_leaf=lambda x: x is None
    )
    return axes


def _with_field(env: Any, field: str, value: PyTree) -> Any:
    """A shallow copy of a chain of wrappers whose innermost environment has another value of a field.

    A copy, because several threads may trace programs of one environment at once.
    """
    copied = copy.copy(env)
    if hasattr(env, "env"):
        copied.env = _with_field(env.env, field, value)
    else:
        setattr(copied, field, value)
    return copied
