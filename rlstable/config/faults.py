"""Configuration of an injected fault. `rlstable.faults` injects it."""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator

from rlstable.config.defaults import defaults
from rlstable.config.schema import Count, CountOrZero, Finite, Flag, Section, Seed, Share, require

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

_POSITIVE = ("learning_rate", "counters", "critic", "normalizer")  # sites whose value must be positive
_NEVER = 2**31 - 1  # more iterations than any run has


def _nonfinite_as_text(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class FaultConfig(Section, at="fault"):
    """A fault that is injected on purpose, to test how a run reacts (`rlstable.faults`)."""

    # Checkpoints store a site by its position: add new sites at the end.
    site: Literal[
        "physics", "warm_start", "observation", "reward", "done", "metrics", "info", "reset", "action",
        "policy_std", "log_ratio", "gradient", "loss", "value_loss", "kl", "adam", "learning_rate",
        "counters", "disk", "sinks", "critic", "normalizer",
    ] | None  # fmt: skip
    value: Annotated[Literal["nan", "inf", "-inf"] | Finite, BeforeValidator(_nonfinite_as_text)] | None
    probability: Share | None
    start: CountOrZero
    iterations: Count | None
    seed: Seed | None
    below: Literal["high", "highest", "x64"] | None
    eval: Flag

    def _check(self) -> None:
        default = defaults("fault")
        for key in ("value", "probability", "start", "iterations", "seed", "below"):
            needs = f"needs fault.site; choose one of {', '.join(self.sites())}"
            require(self.site is not None or getattr(self, key) == default[key], key, needs)
        of_env = f"needs a fault.site in the environment; choose one of {', '.join(_ENV_SITES)}"
        require(not self.eval or self.site in _ENV_SITES, "eval", of_env)
        of_all = self.eval or self.site in ("reset", "counters")
        require(
            self.seed is None or not of_all, "seed", "must be null: a fault at this site or with eval is of all seeds"
        )
        positive = self.site not in _POSITIVE or (math.isfinite(self.number) and self.number > 0)
        require(positive, "value", f"{self.value!r} must be a positive number with fault.site={self.site}")

    @classmethod
    def sites(cls) -> tuple[str, ...]:
        return get_args(get_args(cls.model_fields["site"].annotation)[0])

    @property
    def number(self) -> float:
        """The bad number. The default of each site is known from real runs."""
        return float(_FAULT_VALUES.get(str(self.site), "nan") if self.value is None else self.value)

    @property
    def chance(self) -> float:
        """Probability per step, sample, minibatch or reset; the default depends on the site."""
        if self.probability is not None:
            return self.probability
        return _FAULT_CHANCES.get(str(self.site), 1e-3)

    def of_seed(self, seed: int) -> FaultConfig:
        """The fault of one seed. If another seed has the fault, this one never starts, in the same program."""
        excluded = self.site is not None and self.seed not in (None, seed)
        return self.model_copy(update={"start": _NEVER, "iterations": None}) if excluded else self

    @property
    def can_occur(self) -> bool:
        return self.start < _NEVER
