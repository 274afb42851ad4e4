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

from rlstable.compilation import compatibility
from rlstable.config import ConfigError

MODEL = "model"  # the entry of `info`

# `(model, rng=[B]) -> (model with batched leaves, tree of 0 for batched leaves and None for the others)`
RandomizationFn = Callable[..., tuple[Any, Any]]


class RandomizedEnv:
    """An environment whose model is randomised at every reset.

    Everything but `reset` and `step` is the wrapped environment's.

    Args:
        env: One environment of Brax (model `env.sys`) or of MuJoCo Playground (model `env.mjx_model`).
        randomization_fn: `(model, rng) -> (model_v, in_axes)`, as for Brax's and Playground's PPO. JAX traces it with
            one random key, `[1]`, and maps it over the environments.

    Raises:
        ConfigError: The environment has no model, or the function does not return what it must.
    """

    def __init__(self, env: Any, randomization_fn: RandomizationFn):
        self.env = env
        self._randomization_fn = randomization_fn
        inner = _inner(env)
        fields = [name for name in compatibility.RANDOMIZED_FIELDS if hasattr(inner, name)]
        if not fields:
            raise ConfigError(
                f"env.randomization_fn: {type(inner).__name__} has neither sys (Brax) nor mjx_model (Playground) to "
                "randomise"
            )
        self._field = fields[0]
        self._model = getattr(inner, self._field)
        self._randomized = self._find_randomized()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def randomized(self) -> tuple[str, ...]:
        """Names of the randomised arrays of the model, such as `body_mass` or `opt.gravity`."""
        return tuple(path.removeprefix(".") for path in self._randomized)

    @property
    def unwrapped(self) -> Any:
        """The innermost environment, with the model that is not randomised."""
        return _inner(self.env)

    def reset(self, rng: jax.Array) -> Any:
        """A first state under a newly randomised model."""
        key_model, key_reset = jax.random.split(rng)
        model = self._draw(key_model)
        state = self._with(model).reset(key_reset)
        return state.replace(info={**state.info, MODEL: model})

    def step(self, state: Any, action: jax.Array) -> Any:
        """One step under the model of this environment."""
        model = state.info[MODEL]
        bare = state.replace(info={name: value for name, value in state.info.items() if name != MODEL})
        stepped = self._with(model).step(self._with_own_mass(bare, model), action)
        return stepped.replace(info={**stepped.info, MODEL: model})

    def _with_own_mass(self, state: Any, model: dict[str, jax.Array]) -> Any:
        """The state with the masses of the model, for engines that carry them: first states are of other models."""
        physics: Any = getattr(state, "pipeline_state", None)
        if getattr(physics, "mass", None) is None:
            return state
        system = self._replaced(model)
        mass = system.link.inertia.mass ** (1 - system.spring_mass_scale)  # as in Brax's spring and positional engines
        return state.replace(pipeline_state=physics.replace(mass=mass))

    def _draw(self, key: jax.Array) -> dict[str, jax.Array]:
        """The randomised arrays of one environment, by their path in the model."""
        batched, _ = self._randomization_fn(self._model, rng=key[None])
        leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(batched)}
        return {name: jnp.asarray(leaves[name])[0] for name in self._randomized}

    def _with(self, model: dict[str, jax.Array]) -> Any:
        """A copy of the environment with a randomised model."""
        return _with_field(self.env, self._field, self._replaced(model))

    def _replaced(self, model: dict[str, jax.Array]) -> Any:
        """The whole model, with randomised arrays in their places."""
        return jax.tree_util.tree_map_with_path(lambda path, x: model.get(jax.tree_util.keystr(path), x), self._model)

    def _find_randomized(self) -> tuple[str, ...]:
        """Paths of the randomised arrays: the leaves whose axis is 0.

        Raises:
            ConfigError: The function raises, or returns something else than `(model_v, in_axes)`.
        """
        axes: list[Any] = []

        def shapes(key: jax.Array) -> Any:
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


def _broadcast(in_axes: Any, tree: Any) -> list[Any]:
    """The axis of every leaf, as `jax.vmap` reads a tree prefix of axes."""
    axes: list[Any] = []

    def spread(axis: Any, part: Any) -> None:
        axes.extend([axis] * len(jax.tree.leaves(part)))

    jax.tree.map(spread, in_axes, tree, is_leaf=lambda x: x is None)
    return axes


def _inner(env: Any) -> Any:
    """The innermost environment of a chain of wrappers."""
    while hasattr(env, "env"):
        env = env.env
    return env


def _with_field(env: Any, field: str, value: Any) -> Any:
    """A shallow copy of a chain of wrappers whose innermost environment has another value of a field.

    A copy, because several threads may trace programs of one environment at once.
    """
    copied = copy.copy(env)
    if hasattr(env, "env"):
        copied.env = _with_field(env.env, field, value)
    else:
        setattr(copied, field, value)
    return copied
