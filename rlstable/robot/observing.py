"""Builds an observation from its terms: scale, noise, clip, delay and history of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config import ConfigError
from rlstable.config.robot import ObservationConfig
from rlstable.device.trees import PyTree
from rlstable.robot import terms
from rlstable.robot.model import Robot
from rlstable.robot.past import Past


class Part(NamedTuple):
    """A term in the observation vector.

    Attributes:
        size: Numbers of one step.
        config: Scale, noise, clip, history and delay.
    """

    name: str
    size: int
    config: ObservationConfig


class Observer:
    """One observation vector, for the policy or for the critic.

    `parts` are in the order of the vector. A term with history stands there as one block, the newest step first.
    """

    def __init__(
        self,
        robot: Robot,
        key: str,
        functions: Mapping[str, Callable[..., Any]],
        configs: Mapping[str, ObservationConfig],
    ):
        self._robot, self.key, self.functions = robot, key, functions
        self._configs = configs
        self.parts: list[Part] = []

    def observe(
        self, data: PyTree, past: Past, action: jax.Array, key: jax.Array, first: bool
    ) -> tuple[jax.Array, Past]:
        """The vector, and the past with the newest values; `first` fills the history with the value at the reset."""
        values, history, lags = [], dict(past.history), dict(past.lags)
        for i, (name, function) in enumerate(self.functions.items()):
            config, at = self._configs[name], f"{self.key}.{name}"
            key_noise, key_lag = jax.random.split(jax.random.fold_in(key, i))
            value = self._measured(function(self._robot, data, past, action), config, past.trained, key_noise)
            steps = config.history + config.delay[1]
            if steps == 1:
                values.append(value)
                continue
            if first:
                history[at] = jnp.broadcast_to(value, (steps, *value.shape))
                lags[at] = jax.random.randint(key_lag, (), config.delay[0], config.delay[1] + 1)
            else:
                history[at] = jnp.concatenate([value[None], past.history[at][:-1]])
            shown = jax.lax.dynamic_slice_in_dim(history[at], lags[at], config.history)
            values.append(jnp.ravel(shown))
        return jnp.concatenate(values), past.replace(history=history, lags=lags)

    def measure(self, data: PyTree, past: Past, action: jax.Array) -> None:
        """Finds the sizes of all terms; raises ConfigError for a term that fails or returns no vector."""
        self.parts = []
        for name, function in self.functions.items():
            key = f"{self.key}.{name}"
            shape = jax.eval_shape(lambda m, f=function, k=key: terms.called(k, f, self._robot, data, m, action), past)
            if len(getattr(shape, "shape", ())) != 1:
                raise ConfigError(f"{key}: returns shape {getattr(shape, 'shape', None)}; it must return a vector")
            self.parts.append(Part(name, int(shape.shape[0]), self._configs[name]))
        if not sum(part.size for part in self.parts):
            raise ConfigError(f"{self.key}: has no number on this model; name more terms")

    def _measured(
        self, value: jax.Array, config: ObservationConfig, trained: jax.Array | int, key: jax.Array
    ) -> jax.Array:
        """The value with noise, in units of the sensor, then scaled and clipped."""
        if config.noise:
            noise = terms.grown(config.noise, trained)
            value = value + jax.random.uniform(key, value.shape, minval=-noise, maxval=noise)
        value = config.scale * value
        return value if config.clip is None else jnp.clip(value, -config.clip, config.clip)
