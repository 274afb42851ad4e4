"""The configuration of a fault on purpose; `rlstable.faults` injects it."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, model_validator

from rlstable.config.defaults import defaults
from rlstable.config.schema import Count, CountOrZero, Finite, Flag, KeyedError, Section, Seed, Share

_ENV_SITES = ("physics", "warm_start", "observation", "reward", "done", "metrics", "info", "reset", "action")
_FAULT_VALUES: dict[str, float | str] = {
    "log_ratio": -200.0,
    "value_loss": 1e10,
    "loss": "inf",
    "learning_rate": 1000.0,
    "counters": 2.0**31,
    "critic": 3.0,
    "normalizer": 5.0,
}
_FAULT_CHANCES = {
    **dict.fromkeys(("gradient", "loss", "value_loss", "kl", "adam", "reset"), 0.05),
    **dict.fromkeys(("learning_rate", "counters", "disk", "sinks", "critic", "normalizer"), 1.0),
}

_POSITIVE = ("learning_rate", "counters", "critic", "normalizer")  # sites whose value is a positive number
_NEVER = 2**31 - 1  # iterations, of which there are fewer


def _spelt(value: Any) -> Any:
    """Turns YAML's .nan, .inf and -.inf into text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class FaultConfig(Section, at="fault"):
    """A fault on purpose, to see what a run does of it (`rlstable.faults`)."""

    # Checkpoints hold a site by its position: add new sites at the end.
    site: Literal[
        "physics", "warm_start", "observation", "reward", "done", "metrics", "info", "reset", "action",
        "policy_std", "log_ratio", "gradient", "loss", "value_loss", "kl", "adam", "learning_rate",
        "counters", "disk", "sinks", "critic", "normalizer",
    ] | None  # fmt: skip
    value: Annotated[Literal["nan", "inf", "-inf"] | Finite, BeforeValidator(_spelt)] | None
    probability: Share | None
    start: CountOrZero
    iterations: Count | None
    seed: Seed | None
    below: Literal["high", "highest", "x64"] | None
    eval: Flag

    @model_validator(mode="after")
    def _check(self) -> FaultConfig:
        if self.site is None:
            usual = defaults("fault")
            for key in ("value", "probability", "start", "iterations", "seed", "below"):
                if getattr(self, key) != usual[key]:
                    raise KeyedError(key, f"needs fault.site, one of {', '.join(self.sites())}")
        if self.eval and self.site not in _ENV_SITES:
            raise KeyedError("eval", f"needs a fault.site of the environment: {', '.join(_ENV_SITES)}")
        if self.seed is not None and (self.site in ("reset", "counters") or self.eval):
            shared = "fault.eval=true" if self.eval else f"fault.site={self.site}"
            raise KeyedError("seed", f"{self.seed} cannot be struck alone by {shared}; leave it out")
        if self.site in _POSITIVE and not (math.isfinite(self.number) and self.number > 0):
            raise KeyedError("value", f"{self.value!r} must be a positive number with fault.site={self.site}")
        return self

    @classmethod
    def sites(cls) -> tuple[str, ...]:
        """Every place where a fault can be put."""
        return get_args(get_args(cls.model_fields["site"].annotation)[0])

    @property
    def number(self) -> float:
        """The bad number; each site has one that is known from real runs."""
        return float(_FAULT_VALUES.get(str(self.site), "nan") if self.value is None else self.value)

    @property
    def chance(self) -> float:
        """Per environment step or sample one in a thousand, per minibatch one in twenty, else always."""
        if self.probability is not None:
            return self.probability
        return _FAULT_CHANCES.get(str(self.site), 1e-3)

    def of_seed(self, seed: int) -> FaultConfig:
        """The fault as a seed has it: where it is another's, in the same program, but it never begins."""
        spared = self.site is not None and self.seed not in (None, seed)
        return self.model_copy(update={"start": _NEVER, "iterations": None}) if spared else self

    @property
    def begins(self) -> bool:
        """Whether it is for this seed at all."""
        return self.start < _NEVER
