"""State of a run on the host, which a checkpoint holds beside the training state."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlstable.supervise.incident import Caught
from rlstable.supervise.ladder import Rungs
from rlstable.supervise.memory_plan import MemoryPlan
from rlstable.supervise.recovery import Attempts
from rlstable.supervise.return_watch import WatchMemory
from rlstable.supervise.signs import SignMemory
from rlstable.supervise.tally import Tally


@dataclasses.dataclass
class HostState:
    """The little that lives on the host; saved with the training state.

    Attributes:
        iteration: Iterations done, without those that were given up.
        last_return: Of the last evaluation; None where every episode was aborted.
        best_return: Best evaluation so far.
        idle: Iterations in a row of which no update was accepted.
        drawn: Whether anything was drawn from the pool of clean first states since it was filled.
        elapsed: Seconds of training so far, over all processes.
        evaluated: Seconds of evaluation likewise.
        wandb_run_id: For resuming the same wandb run.
        attempts: What recovery has tried.
        rungs: Where on the ladder of precision it stands.
        plan: How it makes do with the memory there is.
        incidents: What was written of bad simulations.
        watch: What the return watch remembers.
        signs: What the signs of trouble remember.
        tally: Counts over the whole run.
    """

    iteration: int = 0
    last_return: float | None = None
    best_return: float | None = None
    idle: int = 0
    drawn: bool = False
    elapsed: float = 0.0
    evaluated: float = 0.0
    wandb_run_id: str | None = None
    attempts: Attempts = dataclasses.field(default_factory=Attempts)
    rungs: Rungs = dataclasses.field(default_factory=Rungs)
    plan: MemoryPlan = dataclasses.field(default_factory=MemoryPlan)
    incidents: Caught = dataclasses.field(default_factory=Caught)
    watch: WatchMemory = dataclasses.field(default_factory=WatchMemory)
    signs: SignMemory = dataclasses.field(default_factory=SignMemory)
    tally: Tally = dataclasses.field(default_factory=Tally)

    @classmethod
    def of(cls, saved: dict[str, Any]) -> HostState:
        """The state in a checkpoint of any version: missing fields have their defaults, unknown ones are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        saved = {name: value for name, value in saved.items() if name in known}
        kinds = {"attempts": Attempts, "rungs": Rungs, "plan": MemoryPlan, "incidents": Caught}
        kinds["tally"] = Tally
        if "watch" not in saved and saved.get("best_return") is not None:
            # Saved before there was a watch: what was gained since the start is not known, so all of it counts.
            start = min(0.0, 2.0 * saved["best_return"])
            watch = {"training": {"start": start}, "evaluation": {"start": start}}
            saved = {**saved, "watch": {**watch, "best_evaluation": saved["best_return"]}}
        elif "best_evaluation" not in saved.get("watch", {}):
            saved = {**saved, "watch": {**saved.get("watch", {}), "best_evaluation": saved.get("best_return")}}
        parts: dict[str, Any] = {name: kind(**saved.get(name, {})) for name, kind in kinds.items()}
        memories = {"watch": WatchMemory.of(saved.get("watch", {})), "signs": SignMemory.of(saved.get("signs", {}))}
        return cls(**saved | parts | memories)
