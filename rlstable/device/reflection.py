"""Reflections: the mirror image of a vector, as an order of its elements and their signs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from rlstable.device.trees import Observation

Array = TypeVar("Array", jax.Array, np.ndarray)


class Reflection(NamedTuple):
    """A signed permutation: element i of the image is `sign[i] * x[order[i]]`, `[n]` each."""

    order: np.ndarray
    sign: np.ndarray

    @classmethod
    def of_signs(cls, *signs: float) -> Reflection:
        return cls(np.arange(len(signs)), np.array(signs, np.float32))

    def __call__(self, x: Array) -> Array:
        """The mirror image of vectors `[..., n]`."""
        return x[..., self.order] * self.sign.astype(x.dtype)

    def repeated(self, times: int) -> Reflection:
        """The reflection of several such vectors, one after the other."""
        return joined([self] * times)


def joined(parts: list[Reflection]) -> Reflection:
    """The reflection of the vectors of several reflections, one after the other."""
    starts = np.cumsum([0, *(len(part.order) for part in parts)])
    order = [part.order + start for part, start in zip(parts, starts[:-1], strict=True)]
    return Reflection(np.concatenate(order), np.concatenate([part.sign for part in parts]))


class Mirror(NamedTuple):
    """The left-right mirror images of observations, by their key, and of actions."""

    observations: dict[str, Reflection]
    action: Reflection

    def observation(self, x: Observation) -> Observation:
        """The mirror image of an observation, or of those of its parts that the networks read."""
        if isinstance(x, Mapping):
            return {key: self.observations[key](part) for key, part in x.items()}
        (reflection,) = self.observations.values()
        return reflection(x)
