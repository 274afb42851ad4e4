"""Runs of a few seconds that share their programs, and the story that their events tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from saved import events
from short_runs import short_config

from rlstable.config import Config
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.seeds import Result

ITERATION = 64  # environment steps
OFF = {"enabled": False}
PATIENCE = 3  # of the storm guard
EACH = {"every": 1, "keep": 100, "asynchronous": False}  # saves every iteration

# The events of a story, after the iteration in which they happen.
_STORY = {
    "rolled_back": "{cause}: {remedy}, back to {to_iteration}",
    "remedy_applied": "{cause}: {remedy}",
    "remedy_taken_back": "{remedy} taken back",
    "last_good_handed_over": "{policy_iteration} handed over",
    "precision_changed": "{before} to {level}",
    "return_collapsed": "return collapsed",
    "return_fall_refuted": "fall of the return refuted",
    "checkpoint_failed": "checkpoint {checkpoint} failed",
    "sink_failed": "{sink} failed",
}


def config(recovery: dict[str, Any] | None = None, **sections: Any) -> Config:
    """Eight iterations without evaluations, incidents and other precisions; recovery needs settings."""
    supervise = {"recovery": OFF if recovery is None else recovery, "ladder": OFF, "incident": OFF}
    defaults = {"guards": {"storm": {"patience": PATIENCE}}, "total_steps": 8 * ITERATION, "checkpoint": EACH}
    return short_config(**defaults | {"supervise": supervise} | sections)


def train(folder: Path, callback: Any = None, more_guards: Any = None, **sections: Any) -> Result:
    return TrainingLoop(config(**sections), folder, callback, more_guards).run()


def until(row: int) -> Callable[[int, Any], bool]:
    """Callback that stops a run at its n-th row. Rows that are rolled back count."""
    return lambda step, _: step == row * ITERATION


def storm(**fields: Any) -> dict[str, Any]:
    """Every reward is NaN from the fourth iteration on."""
    return {"site": "reward", "probability": 1.0, "start": 3, **fields}


def story(folder: Path) -> list[str]:
    """The events of a run that change its course, each after the number of its row."""
    found = events(folder, *_STORY)
    return [f"{event['step'] // ITERATION}: {_STORY[event['kind']].format(**event)}" for event in found]
