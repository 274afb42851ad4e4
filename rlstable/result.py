"""What a run gives back to the program that started it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rlstable.endings import Ending
from rlstable.policy import Policy, load_policy

Row = dict[str, float | int | None]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves.

    Attributes:
        ending: Why it stopped.
        run_dir: Its folder.
        step: Environment steps trained, without those that were given up.
        metrics: The last evaluation's metrics, None where a number does not exist.
        history: Every logged row, `step` among its keys.
    """

    ending: Ending
    run_dir: Path
    step: int
    metrics: Row
    history: list[Row]

    @property
    def policy(self) -> Policy:
        """The best policy of the run."""
        return load_policy(self.run_dir)
