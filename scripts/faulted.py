"""Trains seeds with an injected fault, by the plain command or with Brax's PPO; evaluations have no fault."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlstable.config.faults import FaultConfig
from scripts import results, study
from scripts.results import Row
from scripts.rivals import brax_rival
from scripts.study import Run

SIDES = {"off": "guards=off", "default": "guards=default", "brax": "Brax PPO"}  # and their titles on the page
QUIET = ("logging=quiet", "devices=1", "eval.target_return=null")


def train(overrides: Sequence[str], side: str, fault: Mapping[str, Any], seeds: range) -> Iterator[Row]:
    """Yields a row of each seed, whose return is that of the last policy; `fault` has keys of its section."""
    if side == "brax":
        given = FaultConfig(**fault) if fault else None
        for end in brax_rival.train([*overrides, *QUIET], seeds, fault=given):
            yield {"seed": end["seed"], "return": end["return"], "ending": end["stop_reason"], "trips": {}}
        return
    words = [f"fault.{key}={value}" for key, value in fault.items()]
    with study.trained([*overrides, *QUIET, f"guards={side}", *words], seeds) as (runs, _):
        for run in runs:
            trips = {**results.trips(run.metrics[-1]), "rollback": run.events("rolled_back")}
            about = {"return": run.result["last_return"], "ending": run.result["stop_reason"]}
            yield {"acted": acted(run), "seed": run.seed, **about, "trips": {k: n for k, n in trips.items() if n}}


def acted(run: Run) -> list[str]:
    """The guards that tripped and the limiters that bounded a value, but for gradients, which all recipes here clip."""
    counts = {name for row in run.metrics for name, value in row.items() if value}
    return sorted({name.split("/")[1] for name in counts if name.endswith(("/active", "/trips"))} - {"gradient_norm"})
