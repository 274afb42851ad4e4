"""The configuration of the supervisor: what a run does when guards alone do not help, and when it has to stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_serializer, model_validator

from rlstable.config.schema import Count, CountOrZero, Flag, KeyedError, Positive, Section, Share

X64 = "x64"
# From the cheapest to the most exact one.
MATMUL_LEVELS = ("default", "high", "highest", X64)
_ORDERS = {"matmul": MATMUL_LEVELS, "network": ("bfloat16", "float32")}
_FACTORS = {"scale_learning_rate": 0.5, "scale_policy_rate": 0.5, "scale_critic_rate": 3.0, "tighten_clipping": 0.5}
_REFIT = "refit_critic"
_REFIT_ITERATIONS = 10.0


class Remedy(Section):
    """One change before a new attempt: a name, with a factor or a number of iterations where it takes one."""

    name: Literal[
        "fresh_resets", "scale_learning_rate", "scale_policy_rate", "scale_critic_rate", "tighten_clipping",
        "refit_critic", "reset_optimizer", "raise_precision",
    ]  # fmt: skip
    factor: Positive | None = None

    @model_validator(mode="before")
    @classmethod
    def _spelt(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value, "factor": _REFIT_ITERATIONS if value == _REFIT else _FACTORS.get(value)}
        if isinstance(value, Mapping) and len(value) == 1 and "name" not in value:
            ((name, factor),) = value.items()
            return {"name": name, "factor": factor}
        return value

    @model_validator(mode="after")
    def _check(self) -> Remedy:
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
        return self

    @model_serializer
    def _as_written(self) -> Any:
        return self.name if self.factor is None else {self.name: self.factor}

    @property
    def lasts(self) -> bool:
        """Whether it stays in effect until it is taken back."""
        return self.name in _FACTORS

    def __str__(self) -> str:
        return self.name if self.factor is None else f"{self.name} {self.factor:g}"


class RecoveryConfig(Section, at="supervise.recovery"):
    """Going back to the last good state and trying again, more carefully each time."""

    enabled: Flag
    every: Count
    attempts: CountOrZero
    window: Count
    relax_after: Count
    remedies: tuple[Remedy, ...]
    collapse_remedies: tuple[Remedy, ...]

    @model_validator(mode="after")
    def _check(self) -> RecoveryConfig:
        for key in ("remedies", "collapse_remedies"):
            if self.enabled and not getattr(self, key):
                raise KeyedError(key, "is empty; name at least one, or set supervise.recovery.enabled=false")
        return self

    @property
    def tightens(self) -> bool:
        """Whether clipping may have to be tightened, so that its bounds have to be traced."""
        return self.enabled and any(remedy.name == "tighten_clipping" for remedy in self.remedies)

    @property
    def tightens_after_collapse(self) -> bool:
        """The same for a collapse of the return."""
        return self.enabled and any(remedy.name == "tighten_clipping" for remedy in self.collapse_remedies)


class IncidentConfig(Section, at="supervise.incident"):
    """Folders from which a bad simulation can be replayed."""

    enabled: Flag
    window: Count
    keep: Count
    max_mb: Positive


class LadderConfig(Section, at="supervise.ladder"):
    """Adaptive precision: the levels, and how much trouble leads to the next one."""

    enabled: Flag
    matmul: tuple[Literal["default", "high", "highest", "x64"], ...]
    network: tuple[Literal["bfloat16", "float32"], ...]
    max_invalid: Share
    max_rejected: Share
    patience: Count
    down_after: Count

    @model_validator(mode="after")
    def _check(self) -> LadderConfig:
        for key in ("matmul", "network"):
            levels, ordered = getattr(self, key), _ORDERS[key]
            if list(levels) != sorted(set(levels), key=ordered.index):
                raise KeyedError(key, f"[{', '.join(levels)}] must rise, each once: {', '.join(ordered)}")
        return self


class MemoryConfig(Section, at="supervise.memory"):
    """Memory: what there is, and whether to make do with less."""

    adapt: Flag
    limit_gib: Positive | None


class SuperviseConfig(Section, at="supervise"):
    """The supervisor."""

    recovery: RecoveryConfig
    ladder: LadderConfig
    memory: MemoryConfig
    incident: IncidentConfig
    max_wall_time: Positive | None
