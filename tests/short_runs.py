"""Short runs of toy environments, whose folders the tests read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toys import tiny_config

from rlstable.config import Config
from rlstable.listeners import listeners_of
from rlstable.runner.loop import TrainingLoop


def short_config(**sections: Any) -> Config:
    """A run of two iterations on one device, by default without evaluations and console."""
    defaults: dict[str, Any] = {"guards": {}, "devices": 1, "total_steps": 128}
    return tiny_config(**defaults | {"eval": {"num_evals": 0}, "logging": {"console": "off"}} | sections)


def trained(folder: Path, **sections: Any) -> TrainingLoop:
    config = short_config(**sections)
    loop = TrainingLoop(config, folder, listeners=listeners_of(config.render, config.logging))
    loop.run()
    return loop
