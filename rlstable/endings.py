"""How a run ends: one named reason, one exit code."""

from __future__ import annotations

from enum import Enum


class Ending(Enum):
    """A stop reason with its exit code and what it means."""

    completed = (0, "all steps were trained")
    target_reached = (0, "the evaluation return reached eval.target_return")
    config_error = (2, "the configuration cannot work; nothing was trained")
    state_not_finite = (
        3,
        "parameters, optimizer or observation statistics stayed non-finite; the last good checkpoint is kept",
    )
    error = (1, "the program failed; the traceback is in events.jsonl")
    interrupted = (130, "stopped by Ctrl-C after a whole iteration, and saved")
    preempted = (143, "stopped by SIGTERM after a whole iteration, and saved")

    def __init__(self, exit_code: int, meaning: str):
        self.exit_code = exit_code
        self.meaning = meaning

    @property
    def succeeded(self) -> bool:
        """Whether the run did what it was asked to."""
        return self.exit_code == 0
