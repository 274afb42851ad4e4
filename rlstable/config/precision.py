"""Section `precision` of the configuration."""

from __future__ import annotations

from typing import Literal

from rlstable.config.schema import Count, Positive, Section, require


class LossScaleConfig(Section, at="precision.loss_scale"):
    """Dynamic loss scaling for float16 networks."""

    initial: Positive
    floor: Positive
    cap: Positive
    growth_interval: Count

    def _check(self) -> None:
        between = f"{self.initial} must lie between floor={self.floor} and cap={self.cap}"
        require(self.floor <= self.initial <= self.cap, "initial", between)


class PrecisionConfig(Section, at="precision"):
    """Precision of matrix products and networks. Parameters and optimizer state are always float32."""

    matmul: Literal["default", "high", "highest", "x64"]
    network: Literal["float32", "bfloat16", "float16"]
    loss_scale: LossScaleConfig
