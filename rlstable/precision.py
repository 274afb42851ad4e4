"""What is computed in which precision, as a value. Parameters and optimizer state are float32 always."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlstable.config import LossScaleConfig, PrecisionConfig


@dataclasses.dataclass(frozen=True)
class Precision:
    """One level: how matrix products are computed, in which type networks compute, and how losses are scaled.

    Attributes:
        matmul: A name that `jax.default_matmul_precision` takes; `default` is the device's own choice.
        network: The type activations are computed in.
        loss_scale: Bounds of the dynamic loss scale; None where the type has float32's range of exponents.
    """

    matmul: str
    network: Any
    loss_scale: LossScaleConfig | None

    def traced(self) -> Any:
        """A context in which programs are traced with this level's matrix products."""
        return jax.default_matmul_precision(None if self.matmul == "default" else self.matmul)


def level(config: PrecisionConfig) -> Precision:
    """The level that a configuration asks for."""
    needs_scaling = config.network == "float16"
    return Precision(config.matmul, jnp.dtype(config.network), config.loss_scale if needs_scaling else None)
