"""The result of a run, for the program that started it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from rlstable.io.run_folder import best_seed
from rlstable.policy import Policy, load_policy
from rlstable.supervise.stop_reasons import StopReason

Row = dict[str, float | int | None]


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        stop_reason: Why the run stopped.
        run_dir: The run folder.
        step: Environment steps trained, rolled back steps not included.
        metrics: Metrics of the last evaluation; a missing number is None.
        history: Logged rows with the key `step`.
        seeds: Result of each seed if several seeds trained together; metrics and history are then empty here.
        policy_return: Return of `policy`, as in `result.json`, confirmed if possible; with several seeds the
            interquartile mean; None without a return.
    """

    stop_reason: StopReason
    run_dir: Path
    step: int
    metrics: Row
    history: list[Row]
    seeds: tuple[Result, ...] = ()
    policy_return: float | None = None

    def __repr__(self) -> str:
        value = self.policy_return
        parts = (
            *([f"{len(self.seeds)} seeds"] if self.seeds else []),
            self.stop_reason.name,
            f"step {self.step:,}",
            "no return" if value is None else f"return {value:,.1f}",
            f"folder {self.run_dir}",
        )
        return f"Result({', '.join(parts)})"

    @functools.cached_property
    def policy(self) -> Policy:
        """The best policy of the run; with several seeds, the policy of the best seed. Loaded at the first access."""
        folder = (best_seed(self.run_dir) or self.seeds[0].run_dir) if self.seeds else self.run_dir
        return load_policy(folder)
