"""Adaptive precision: step up during trouble, step down after a long healthy stretch, and do not alternate.

There are two ladders: the precision of matrix products, whose last level also has physics in float64, and the dtype of
the networks. Each level is compiled at most once, and a change of level keeps the whole training state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlstable.config.supervise import X64, LadderConfig

# Causes in the networks; physics in float64 does not help against them.
_NETWORK_CAUSES = ("rejected", "loss_scale")
_KINDS = {"matmul": "matrix products", "network": "networks"}


class NeedsOwnProgram(Exception):
    """A seed needs a program that the other seeds do not share. The message names the program."""


class Level(NamedTuple):
    """A precision level: values of `precision.matmul` and `precision.network`."""

    matmul: str
    network: str

    def __str__(self) -> str:
        return f"{self.matmul}/{self.network}"


class PrecisionSigns(NamedTuple):
    """Signs of precision trouble in one iteration.

    Attributes:
        bad_state: A state guard found parameters, optimizer or statistics not finite.
        not_finite: Share of samples that guards rejected because a number was not finite.
        rejected: Share of updates that guards rejected.
        scale_collapsed: The loss scale is at its floor, and gradients still overflow.
    """

    bad_state: bool
    not_finite: float
    rejected: float
    scale_collapsed: bool


class LevelChange(NamedTuple):
    """A change of level.

    Attributes:
        to: The new level.
        cause: Cause of the change.
    """

    to: Level
    cause: str


@dataclasses.dataclass
class LadderMemory:
    """Memory of the precision ladder as plain JSON, saved with the run.

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
        memory = self.memory
        matmul = self.start.matmul if memory.matmul == 0 else self._matmul_levels[memory.matmul]
        return Level(matmul, self._network_levels[memory.network])

    def watch(self, signs: PrecisionSigns) -> LevelChange | None:
        """Records an iteration; makes and returns the change of level that is due, None if there is none.

        Raises:
            NeedsOwnProgram: A step up is due, but other seeds share the program.
        """
        memory, config = self.memory, self.config
        cause = self._cause(signs)
        if not config.enabled:
            return None
        memory.healthy = 0 if cause else memory.healthy + 1
        memory.troubled = memory.troubled + 1 if cause else max(memory.troubled - 1, 0)
        if cause and memory.troubled >= config.patience:
            return self.climb(cause)
        return self._step_down() if memory.healthy >= memory.stretch else None

    def climb(self, cause: str) -> LevelChange | None:
        """Steps up for a cause; None if a step is not possible or has not helped before.

        Raises:
            NeedsOwnProgram: A step is possible, but other seeds share the program.
        """
        memory = self.memory
        memory.troubled = 0
        if not self.config.enabled or memory.futile:
            return None
        kinds = ("network", "matmul") if cause in (*_NETWORK_CAUSES, "not_finite") else ("matmul", "network")
        kind = next((kind for kind in kinds if self._can_step_up(kind)), None)
        if kind is None:
            return self._give_up()
        if cause in _NETWORK_CAUSES and kind == "matmul" and self._matmul_levels[memory.matmul + 1] == X64:
            return None
        if self.shared:
            raise NeedsOwnProgram(f"a higher precision of the {_KINDS[kind]}, for the cause {cause}")
        if memory.came_down == kind:
            memory.stretch *= 2
        memory.came_down = None
        setattr(memory, kind, getattr(memory, kind) + 1)
        return LevelChange(self.level, cause)

    def can_climb(self) -> bool:
        """Whether there is a level above this one that may help."""
        return (
            self.config.enabled
            and not self.memory.futile
            and (self._can_step_up("matmul") or self._can_step_up("network"))
        )

    def _give_up(self) -> LevelChange | None:
        """Returns to the configured level: trouble at the highest precision is not caused by precision."""
        memory = self.memory
        memory.futile = True
        climbed = memory.matmul or memory.network
        if self.shared:
            return None
        memory.matmul = memory.network = 0
        return LevelChange(self.level, "no_relief") if climbed else None

    def _step_down(self) -> LevelChange | None:
        memory = self.memory
        memory.healthy = 0
        memory.futile = False
        kind = "matmul" if memory.matmul else "network" if memory.network else None
        if kind is None or self.shared:
            return None
        memory.came_down = kind
        setattr(memory, kind, getattr(memory, kind) - 1)
        return LevelChange(self.level, "healthy")

    def _cause(self, signs: PrecisionSigns) -> str | None:
        config = self.config
        if signs.scale_collapsed:
            return "loss_scale"
        if signs.bad_state:
            return "not_finite"
        if not signs.rejected <= config.max_rejected:
            return "rejected"
        return None if signs.not_finite <= config.max_invalid else "quarantine"

    def _can_step_up(self, kind: str) -> bool:
        levels: Mapping[str, Any] = {"matmul": self._matmul_levels, "network": self._network_levels}
        return getattr(self.memory, kind) + 1 < len(levels[kind])

    @property
    def _matmul_levels(self) -> tuple[str, ...]:
        """The configured level and the higher levels that this device distinguishes."""
        if self._matmul is None:
            levels = self.config.matmul
            start = self.start.matmul
            self._matmul = self.distinct(levels[levels.index(start) :] if start in levels else (start,))
        return self._matmul

    @property
    def _network_levels(self) -> tuple[str, ...]:
        start = self.start.network
        return (start, *(level for level in self.config.network if level != start and start != "float32"))
