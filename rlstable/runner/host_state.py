"""State of a run on the host, which a checkpoint holds beside the training state."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlstable.config import ConfigError
from rlstable.supervise.incident import IncidentMemory
from rlstable.supervise.memory_plan import MemoryPlan
from rlstable.supervise.recovery import Attempts
from rlstable.supervise.return_watch import WatchMemory
from rlstable.supervise.tally import SignMemory, Tally


@dataclasses.dataclass
class HostState:
    """Counts and memories of a run on the host; saved with the training state.

    Attributes:
        iteration: Iterations done, rolled back iterations not included.
        step: Environment steps trained, rolled back steps not included; valid after the training state is donated.
        episodes: Training episodes that ended.
        last_return: Return of the present policy: of the last evaluation, or of the comparison that replaced it; None
            if every episode was aborted.
        best_return: Return of the best evaluation so far.
        replaced: If the state has the policy of an earlier state, because the return had collapsed: `iteration` and
            `step` of that policy, and `fallen_return` of the collapsed policy; else None.
        iterations_without_update: Iterations in a row without an accepted update.
        healthy_needed: Healthy iterations still needed before a state counts as good, after unhealthy ones.
        pool_used: Whether the pool of clean first states was used since its last refill.
        elapsed: Seconds of training so far, over all processes.
        evaluated: Seconds of evaluation so far, over all processes.
        wandb_run_id: Run ID of Weights & Biases, for a resume; None without it.
        attempts: Memory of recovery.
        plan: The memory plan.
        incidents: Memory of the incidents written.
        watch: Memory of the return watch.
        signs: Memory of the signs of trouble.
        tally: Counts over the whole run.
    """

    iteration: int = 0
    step: int = 0
    episodes: int = 0
    last_return: float | None = None
    best_return: float | None = None
    replaced: dict[str, Any] | None = None
    iterations_without_update: int = 0
    healthy_needed: int = 0
    pool_used: bool = False
    elapsed: float = 0.0
    evaluated: float = 0.0
    wandb_run_id: str | None = None
    attempts: Attempts = dataclasses.field(default_factory=Attempts)
    plan: MemoryPlan = dataclasses.field(default_factory=MemoryPlan)
    incidents: IncidentMemory = dataclasses.field(default_factory=IncidentMemory)
    watch: WatchMemory = dataclasses.field(default_factory=WatchMemory)
    signs: SignMemory = dataclasses.field(default_factory=SignMemory)
    tally: Tally = dataclasses.field(default_factory=Tally)

    @property
    def logged_step(self) -> int:
        """Environment steps trained, rolled back steps included; never decreases."""
        return self.step + self.attempts.lost_steps

    @property
    def logged_iteration(self) -> int:
        """Iterations done, rolled back iterations included; never decreases. Number of the checkpoint of a state."""
        return self.iteration + self.attempts.lost_iterations

    def copy_from(self, other: HostState) -> None:
        """Copies every field of another host state."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(other, field.name))

    @classmethod
    def of(cls, saved: dict[str, Any]) -> HostState:
        """Reads the host state of a checkpoint, which must have exactly these fields.

        Raises:
            ConfigError: Another version of rlstable, with other fields, saved it.
        """
        kinds: dict[str, Any] = {
            "attempts": Attempts,
            "plan": MemoryPlan,
            "incidents": IncidentMemory,
            "tally": Tally,
        }
        try:
            _require_fields(cls, saved)
            for name, kind in kinds.items():
                _require_fields(kind, saved[name])
            parts = {name: kind(**saved[name]) for name, kind in kinds.items()}
            parts |= {"watch": WatchMemory.of(saved["watch"]), "signs": SignMemory.of(saved["signs"])}
            return cls(**saved | parts)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"resume: another version of rlstable saved the host state ({error}); resume with that version"
            ) from error


def _require_fields(kind: type, saved: dict[str, Any]) -> None:
    different = sorted({field.name for field in dataclasses.fields(kind)} ^ saved.keys())
    if different:
        raise ValueError(f"{kind.__name__} differs in {', '.join(different)}")
