"""Saves the states of a run into a folder that is in place, and counts the steps that are not saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from rlstable.config import ConfigError
from rlstable.io.checkpoint import Checkpoints
from rlstable.io.presence import Presence
from rlstable.io.space import free_bytes, size_of
from rlstable.supervise.signs import SignMemory
from rlstable.supervise.stop_reasons import SAVED, StopReason, command

_ROOM = 2  # checkpoints that must still fit on the disk
_LEAST_SIZE = 128 * 1024  # bytes of the smallest checkpoint, most of it JSON and the ends of blocks
_MEGABYTE = 1024 * 1024
NOTHING_SAVED = "nothing_saved"


class Saving:
    """Saves the states of a run, and keeps count of steps that are not saved.

    Attributes:
        presence: Of the run folder.

    Args:
        checkpoints: On disk.
        presence: Of the run folder.
        step: Environment steps that were trained and saved before; of a new run 0.
        signs: Gives the memory of what was said.
        event: Called as `event(kind, **fields)`.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        presence: Presence,
        step: int,
        signs: Callable[[], SignMemory],
        event: Callable[..., None],
    ):
        self.presence = presence
        self._checkpoints = checkpoints
        self._signs = signs
        self._event = event
        self._failures = 0
        self._tight = False
        self._good: tuple[int, int] | None = None
        self._steps: dict[int, int] = {}  # environment steps by iteration, of what this process has saved
        self._begun_at = step

    def good(self, iteration: int, step: int) -> None:
        """Takes note of a good state, which is to be saved sooner or later."""
        self._good = iteration, step

    def save(
        self,
        iteration: int,
        step: int,
        state: Any,
        policy: Mapping[str, Any],
        host: Mapping[str, Any],
        score: float | None,
    ) -> None:
        """Saves a state, in a run folder that is written again first if it is gone; arguments as for `Checkpoints`."""
        self.good(iteration, step)
        self._checkpoints.wait()
        on_disk = self._checkpoints.on_disk()
        self._steps = {i: at for i, at in self._steps.items() if i in on_disk} | {iteration: step}
        try:
            if self.presence.ensure():
                self._checkpoints.reopen()
        except (OSError, ConfigError) as error:
            if self.presence.taken:
                self._checkpoints.abandon()
            self._checkpoints.refuse(iteration, error)
        else:
            self.look_at_room(state)
            self._checkpoints.save(iteration, state, policy, host, score=score)

    def look_at_room(self, state: Any) -> None:
        """Says when the disk has room for fewer than two more checkpoints; again only after there was room for more.

        Args:
            state: The training state, by whose size the first checkpoint is estimated.
        """
        steps = self._checkpoints.on_disk()
        sizes = [size_of(self._checkpoints.directory / str(step)) for step in steps[-1:]]
        needed = max(sizes or [sum(leaf.nbytes for leaf in jax.tree.leaves(state)), _LEAST_SIZE])
        free = free_bytes(self._checkpoints.directory)
        tight = free is not None and free < _ROOM * needed
        if tight and not self._tight and free is not None:
            megabytes = {"free_mb": round(free / _MEGABYTE, 1), "checkpoint_mb": round(needed / _MEGABYTE, 1)}
            self._event("disk_nearly_full", **megabytes)
        self._tight = tight or (self._tight and free is not None and free < (_ROOM + 1) * needed)

    def hear(self, kind: str, step: int) -> None:
        """Takes in an event of checkpoints; while saves fail it says, ever more rarely, how much is not saved.

        Args:
            kind: Of the event.
            step: Environment steps trained, those given up included.
        """
        if kind == "checkpoint_saved_again":
            self._failures = 0
        if kind != "checkpoint_failed":
            return
        self._failures += 1
        if self._failures >= 2 and self._failures & (self._failures - 1) == 0:
            steps, folder = self._since_saved(), self._checkpoints.directory.parent
            text = (
                f"no good state was saved in the last {steps:,} steps, {self._failures:,} saves in a row have failed; "
                f"make room on the disk of {folder}, or see that it can be written"
            )
            self._signs().say(NOTHING_SAVED, step, text)
            self._event("sign", sign=NOTHING_SAVED, text=text, value=steps)

    @property
    def vanished(self) -> bool:
        """Whether files that were written are no longer in the run folder; waits for a save under way."""
        self._checkpoints.wait()
        return not self._checkpoints.failing and (bool(self._since_saved()) or not self.presence.whole)

    def unsaved_steps(self) -> int:
        """Environment steps of the last good state that no checkpoint has; waits for a save under way."""
        self._checkpoints.wait()
        return self._since_saved()

    def ending(self, asked: StopReason) -> StopReason:
        """The ending of a run by what is saved; one that says that the last state is saved may not be true.

        If the last state was bad, so that nothing tried to save it, a best policy in the folder is enough. If no state
        was ever good, nothing is saved.
        """
        if asked not in SAVED or not (self.unsaved_steps() or self._nothing_on_disk):
            return asked
        # A job that is queued again after exit code 75 resumes from the newest checkpoint.
        known = self._checkpoints.best() is not None or (asked is StopReason.time_limit and not self._nothing_on_disk)
        enough = not self._checkpoints.failing and known
        return asked if enough else StopReason.not_saved

    @property
    def advice(self) -> str:
        """Advice for a run that ended without saving its last state."""
        folder = self._checkpoints.directory.parent
        if not self._checkpoints.failing and self._nothing_on_disk:
            return "No state of this run was good, so none was saved; look at the guards that tripped."
        if not self._checkpoints.failing:
            return "The last states were bad, and no good one before them was saved; use checkpoint=frequent."
        room = f"Make room on the disk of {folder}, or see that it can be written"
        if self._nothing_on_disk:
            return f"{room}; nothing of this run is saved, so train again."
        return f"{room}; then {command('train', folder, 'resume=')} trains the steps again that are not saved."

    @property
    def _nothing_on_disk(self) -> bool:
        return not self._on_disk()

    def _on_disk(self) -> list[int]:
        return [] if self.presence.taken else [*self._checkpoints.on_disk()]

    def _since_saved(self) -> int:
        """Environment steps from the newest checkpoint on disk to the last good state."""
        if self._good is None:
            return 0
        saved = [self._steps.get(iteration, self._begun_at) for iteration in self._on_disk()]
        return max(self._good[1] - max(saved, default=0), 0)


def finite(policy: Mapping[str, Any]) -> bool:
    """Whether every number of a policy is finite."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(policy)]
    return all(bool(np.isfinite(leaf).all()) for leaf in leaves if np.issubdtype(leaf.dtype, np.floating))
