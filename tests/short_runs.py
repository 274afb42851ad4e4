"""Short runs of toy environments, whose folders the tests read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toys import tiny_config

from rlstable.runner.loop import TrainingLoop


def trained(folder: Path, **sections: Any) -> TrainingLoop:
    """A run of two iterations, by default without evaluations and console."""
    defaults: dict[str, Any] = {"guards": {}, "devices": 1, "total_steps": 128}
    defaults |= {"eval": {"num_evals": 0}, "logging": {"console": "off"}}
    loop = TrainingLoop(tiny_config(**defaults | sections), folder)
    loop.run()
    return loop
