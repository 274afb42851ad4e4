"""Precision levels. Parameters and optimizer state are always float32."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config.precision import LossScaleConfig, PrecisionConfig
from rlstable.config.supervise import X64

_EXPLICIT = "jax_explicit_x64_dtypes"


class Level(NamedTuple):
    """A precision level: values of `precision.matmul` and `precision.network`."""

    matmul: str
    network: str

    def __str__(self) -> str:
        return f"{self.matmul}/{self.network}"


@dataclasses.dataclass(frozen=True)
class Precision:
    """One level: precision of matrix products, dtype of the networks, and loss scaling."""

    matmul: str  # an argument of `jax.default_matmul_precision`, or `default` for the device's default
    network: jnp.dtype  # dtype of activations
    loss_scale: LossScaleConfig | None  # None for dtypes with float32's range of exponents
    x64: bool = False  # whether physics uses float64

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Context manager for tracing training: sets this level's precision of matrix products."""
        with jax.default_matmul_precision(None if self.matmul == "default" else self.matmul), self.narrow():
            yield

    @contextlib.contextmanager
    def narrow(self) -> Iterator[None]:
        """Context manager in which new arrays are float32. Only `envs.float64` converts physics to float64.

        Existing float64 arrays are compared, selected and copied in float64.
        """
        if not self.x64:
            yield
            return
        before = getattr(jax.config, _EXPLICIT)
        jax.config.update(_EXPLICIT, "allow")
        try:
            with jax.enable_x64(False):
                yield
        finally:
            jax.config.update(_EXPLICIT, before)

    def compiled(self) -> contextlib.AbstractContextManager[None]:
        """Context manager for lowering and calling a program of this level, and for placing its arguments."""
        return jax.enable_x64(True) if self.x64 else contextlib.nullcontext()


SINGLE = Precision("default", jnp.dtype(jnp.float32), None)


def level(config: PrecisionConfig) -> Precision:
    """The precision level of a configuration."""
    needs_scaling = config.network == "float16"
    x64 = config.matmul == X64
    return Precision(
        "highest" if x64 else config.matmul,
        jnp.dtype(config.network),
        config.loss_scale if needs_scaling else None,
        x64,
    )
