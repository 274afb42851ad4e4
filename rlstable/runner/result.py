"""The result of a run, for the program that started it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rlstable.io.run_folder import best_seed
from rlstable.policy import Policy, load_policy
from rlstable.supervise.stop_reasons import StopReason

Row = dict[str, float | int | None]


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        ending: Why it stopped.
        run_dir: Its folder.
        step: Environment steps trained, without those that were given up.
        metrics: The last evaluation's metrics, None where a number does not exist.
        history: Logged rows, `step` among their keys; rows of long runs are thinned (docs/metrics.md).
        seeds: What each of several seeds that trained together left; metrics and history are those of all of them.
    """

    ending: StopReason
    run_dir: Path
    step: int
    metrics: Row
    history: list[Row]
    seeds: tuple[Result, ...] = ()

    @property
    def policy(self) -> Policy:
        """The best policy of the run; of several seeds the best one's."""
        folder = (best_seed(self.run_dir) or self.seeds[0].run_dir) if self.seeds else self.run_dir
        return load_policy(folder)
