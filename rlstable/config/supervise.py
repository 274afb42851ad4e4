"""Configuration of the supervisor: recovery, precision ladder, memory, incidents and time limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from rlstable.config.schema import Count, CountOrZero, Finite, Flag, Positive, Section, require

X64 = "x64"
# From the fastest to the most exact.
MATMUL_LEVELS = ("default", "high", "highest", X64)
_FACTORS = {"scale_learning_rate": 0.5, "scale_policy_rate": 0.5, "scale_critic_rate": 3.0, "tighten_clipping": 0.5}
_REFIT = "refit_critic"
RAISE_PRECISION = "raise_precision"
_REFIT_ITERATIONS = 10.0
CriticFactor = Annotated[Finite, Field(gt=1, le=100)]


class Remedy(Section):
    """One change before a retry: a name, and for some names a factor or a number of iterations."""

    name: Literal[
        "fresh_resets", "scale_learning_rate", "scale_policy_rate", "scale_critic_rate", "tighten_clipping",
        "refit_critic", "reset_optimizer", "raise_precision",
    ]  # fmt: skip
    factor: Positive | None = None

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        if isinstance(value, str):
            return {"name": value, "factor": _REFIT_ITERATIONS if value == _REFIT else _FACTORS.get(value)}
        if isinstance(value, Mapping) and len(value) == 1 and "name" not in value:
            ((name, factor),) = value.items()
            return {"name": name, "factor": factor}
        return value

    def _check(self) -> None:
        if self.name == "scale_critic_rate":
            if self.factor is None or not 1 < self.factor <= 100:
                raise ValueError(f"{self.name} needs a factor above 1, at most 100, e.g. {self.name}: 3")
        elif self.name in _FACTORS and (self.factor is None or self.factor >= 1):
            raise ValueError(f"{self.name} needs a factor between 0 and 1, e.g. {self.name}: {_FACTORS[self.name]}")
        if self.name == _REFIT:
            if self.factor is None or self.factor != int(self.factor) or self.factor < 1:
                raise ValueError(f"{_REFIT} needs a number of iterations, e.g. {_REFIT}: {_REFIT_ITERATIONS:g}")
        elif self.name not in _FACTORS and self.factor is not None:
            raise ValueError(f"{self.name} takes no number; write the name alone")

    @model_serializer
    def _as_written(self) -> Any:
        return self.name if self.factor is None else {self.name: self.factor}

    @property
    def lasts(self) -> bool:
        """Whether the change stays in effect until the supervisor reverts it."""
        return self.name in _FACTORS or self.name == RAISE_PRECISION

    def __str__(self) -> str:
        return self.name if self.factor is None else f"{self.name} {self.factor:g}"


class RecoveryConfig(Section, at="supervise.recovery"):
    """Rollback to the last good state and retry with a remedy."""

    enabled: Flag
    every: Count
    attempts: CountOrZero
    window: Count
    relax_after: Count
    remedies: tuple[Remedy, ...]
    collapse_remedies: tuple[Remedy, ...]
    lagging_critic_rate: CriticFactor | None

    def _check(self) -> None:
        for key in ("remedies", "collapse_remedies"):
            empty = "is empty and needs at least one remedy; add one, or set supervise.recovery.enabled=false"
            require(not self.enabled or getattr(self, key), key, empty)


class IncidentConfig(Section, at="supervise.incident"):
    """Incidents: folders from which `rlstable.replay` reproduces a bad simulation."""

    enabled: Flag
    window: Count
    keep: Count


class LadderConfig(Section, at="supervise.ladder"):
    """Adaptive precision: the levels of the remedy `raise_precision`."""

    enabled: Flag
    matmul: tuple[Literal["default", "high", "highest", "x64"], ...]

    def _check(self) -> None:
        wrong = f"[{', '.join(self.matmul)}] must be in rising order without repeats: {', '.join(MATMUL_LEVELS)}"
        require(list(self.matmul) == sorted(set(self.matmul), key=MATMUL_LEVELS.index), "matmul", wrong)


class MemoryConfig(Section, at="supervise.memory"):
    """Memory limit, and whether to divide the work to stay below it."""

    adapt: Flag
    limit_gib: Positive | None


class SuperviseConfig(Section, at="supervise"):
    """The supervisor."""

    recovery: RecoveryConfig
    ladder: LadderConfig
    memory: MemoryConfig
    incident: IncidentConfig
    max_wall_time: Positive | None
