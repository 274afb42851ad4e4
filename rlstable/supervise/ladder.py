"""Adaptive precision: climb while there is trouble, come down after a long healthy stretch, and do not flap.

Two ladders: one of matrix products, whose last level has physics in float64 too, and one of the networks' type. A level
is compiled at most once, and all of the training state is carried over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlstable.config.supervise import X64, LadderConfig

# Trouble of the networks, in whose float32 physics in float64 changes nothing.
_OF_NETWORKS = ("rejected", "loss_scale")
_KINDS = {"matmul": "matrix products", "network": "networks"}


class NeedsOwnProgram(Exception):
    """A seed needs a program that the other seeds do not share. The text names the program."""


class Level(NamedTuple):
    """A level of precision, in the words of `precision.matmul` and `precision.network`."""

    matmul: str
    network: str

    def __str__(self) -> str:
        return f"{self.matmul}/{self.network}"


class PrecisionSigns(NamedTuple):
    """PrecisionSigns of trouble in an iteration.

    Attributes:
        bad_state: A state guard found parameters, optimizer or statistics not finite.
        invalid: Share of samples that were left out.
        rejected: Share of updates that guards rejected.
        scale_collapsed: The loss scale is at its floor, and gradients still overflow.
    """

    bad_state: bool
    invalid: float
    rejected: float
    scale_collapsed: bool


class LevelChange(NamedTuple):
    """A change of level.

    Attributes:
        to: The new level.
        cause: Why.
    """

    to: Level
    cause: str


@dataclasses.dataclass
class LadderMemory:
    """Memory of the ladder as plain JSON, saved with the run.

    Attributes:
        matmul: Steps above the configured level of matrix products.
        network: Steps above the configured level of networks.
        troubled: Iterations in trouble minus healthy iterations since the last change; never below 0.
        healthy: Healthy iterations in a row.
        stretch: Healthy iterations after which the ladder steps down; doubles if that was too early.
        came_down: The ladder of the last step down, until the next climb.
        futile: Whether the highest level did not help, so that precision is not the cause.
    """

    matmul: int = 0
    network: int = 0
    troubled: int = 0
    healthy: int = 0
    stretch: int = 0
    came_down: str | None = None
    futile: bool = False


@dataclasses.dataclass
class Ladder:
    """Decides on the level.

    Attributes:
        config: Levels and thresholds.
        start: The configured level.
        memory: Memory of the ladder.
        distinct: Returns the levels of matrix products that this device distinguishes; called before the first climb.
        shared: Whether other seeds share the program, so that a climb raises `NeedsOwnProgram`.
    """

    config: LadderConfig
    start: Level
    memory: LadderMemory
    distinct: Callable[[tuple[str, ...]], tuple[str, ...]]
    shared: bool = False

    def __post_init__(self) -> None:
        self.memory.stretch = self.memory.stretch or self.config.down_after
        self._matmul: tuple[str, ...] | None = None

    @property
    def level(self) -> Level:
        """The present level."""
        own = self.memory
        matmul = self.start.matmul if own.matmul == 0 else self._matmul_levels[own.matmul]
        return Level(matmul, self._network_levels[own.network])

    def watch(self, signs: PrecisionSigns) -> LevelChange | None:
        """Takes in an iteration; the change that it asks for, if any, is made by this."""
        own, config = self.memory, self.config
        cause = self._cause(signs)
        if not config.enabled:
            return None
        own.healthy = 0 if cause else own.healthy + 1
        own.troubled = own.troubled + 1 if cause else max(own.troubled - 1, 0)
        if cause and own.troubled >= config.patience:
            return self.climb(cause)
        return self._come_down() if own.healthy >= own.stretch else None

    def climb(self, cause: str) -> LevelChange | None:
        """One step up for a cause, or None where that is not possible or has not helped before.

        Raises:
            NeedsOwnProgram: A step is possible, but other seeds share the program.
        """
        own = self.memory
        own.troubled = 0
        if not self.config.enabled or own.futile:
            return None
        kinds = ("network", "matmul") if cause in (*_OF_NETWORKS, "not_finite") else ("matmul", "network")
        kind = next((kind for kind in kinds if self._room(kind)), None)
        if kind is None:
            return self._give_up()
        if cause in _OF_NETWORKS and kind == "matmul" and self._matmul_levels[own.matmul + 1] == X64:
            return None
        if self.shared:
            raise NeedsOwnProgram(f"a higher precision of the {_KINDS[kind]}, for the cause {cause}")
        if own.came_down == kind:
            own.stretch *= 2
        own.came_down = None
        setattr(own, kind, getattr(own, kind) + 1)
        return LevelChange(self.level, cause)

    def can_climb(self) -> bool:
        """Whether there is a level above this one that may help."""
        return self.config.enabled and not self.memory.futile and (self._room("matmul") or self._room("network"))

    def _give_up(self) -> LevelChange | None:
        """Trouble at the top of both ladders: precision is not its cause, and the cheap level does as well."""
        own = self.memory
        own.futile = True
        moved = own.matmul or own.network
        if self.shared:
            return None
        own.matmul = own.network = 0
        return LevelChange(self.level, "no_relief") if moved else None

    def _come_down(self) -> LevelChange | None:
        own = self.memory
        own.healthy = 0
        own.futile = False
        kind = "matmul" if own.matmul else "network" if own.network else None
        if kind is None or self.shared:
            return None
        own.came_down = kind
        setattr(own, kind, getattr(own, kind) - 1)
        return LevelChange(self.level, "healthy")

    def _cause(self, signs: PrecisionSigns) -> str | None:
        config = self.config
        if signs.scale_collapsed:
            return "loss_scale"
        if signs.bad_state:
            return "not_finite"
        if not signs.rejected <= config.max_rejected:
            return "rejected"
        return None if signs.invalid <= config.max_invalid else "quarantine"

    def _room(self, kind: str) -> bool:
        levels: Mapping[str, Any] = {"matmul": self._matmul_levels, "network": self._network_levels}
        return getattr(self.memory, kind) + 1 < len(levels[kind])

    @property
    def _matmul_levels(self) -> tuple[str, ...]:
        """The configured level and the levels above it that this device distinguishes."""
        if self._matmul is None:
            listed = self.config.matmul
            above = listed[listed.index(self.start.matmul) :] if self.start.matmul in listed else (self.start.matmul,)
            self._matmul = self.distinct(above)
        return self._matmul

    @property
    def _network_levels(self) -> tuple[str, ...]:
        start = self.start.network
        return (start, *(level for level in self.config.network if level != start and start != "float32"))
