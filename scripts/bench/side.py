"""A training run that is timed one iteration at a time."""

import time
from collections.abc import Sequence
from pathlib import Path

from rlstable.cli.compose import compose
from scripts import results

QUIET = ("logging=quiet", "checkpoint=off", "eval.num_evals=0", f"total_steps={2**40}")


class Side:
    """A run of some overrides in a folder, compiled; a call trains one iteration and returns its seconds.

    Attributes:
        steps: Environment steps of an iteration.
    """

    def __init__(self, overrides: Sequence[str], folder: Path):
        from rlstable.runner.loop import TrainingLoop

        self._loop = TrainingLoop(compose([*overrides, *QUIET]), folder)
        self.steps = self._loop.config.env_steps_per_iteration
        self()

    def __call__(self) -> float:
        started = time.perf_counter()
        self._loop.advance()
        return time.perf_counter() - started

    @property
    def text(self) -> str:
        """The compiled program as HLO text."""
        return str(self._loop._slots.program(self._loop.seeds, self._loop.seeds).executable.as_text())

    @property
    def trips(self) -> dict[str, int]:
        """Trips over all calls, by guard."""
        return results.trips(self._loop.single.log.history[-1])

    def close(self) -> None:
        self._loop.close()
