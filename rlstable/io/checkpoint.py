"""Checkpoints: the whole truth of a run on disk.

One checkpoint is one folder `<run>/checkpoints/<iteration>` with four items: `state` (the training state as
arrays by their path in the tree), `policy` (a nested dict of arrays), `host` (JSON) and `manifest` (JSON: the format,
the score, checksums, and path, dtype and shape of every array, so that a misfit is found before an array is read).
Orbax writes, commits and retires the folders. No Python class and no pickle is in them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from rlstable.config import ConfigError
from rlstable.config.run import CheckpointConfig
from rlstable.io.arrays import PyTree, describe, place, require_fit
from rlstable.io.checkpoint_folder import (
    keep_damaged,
    make_room_to_retire,
    remove_unfinished,
    require_step,
    set_aside,
    settle,
    thin,
    unfinished_size,
)
from rlstable.io.manifest import Damaged
from rlstable.io.retry import Retry
from rlstable.io.run_folder import steps_in
from rlstable.io.space import free_bytes, is_full, over_quota
from rlstable.io.store import (
    finite,
    first_readable,
    items_of,
    one_line,
    open_manager,
    ranked,
    read_arrays,
    read_json,
    read_scores,
    verify,
)

OnEvent = Callable[[str, dict[str, Any]], None]


@dataclasses.dataclass
class _Save:
    """A save under way.

    Attributes:
        iteration: Number of the checkpoint.
        score: Its score, None where it has none.
        make: Gives what orbax is to write, from a score.
        items: What `make` gave, kept for a second attempt; None before the first.
    """

    iteration: int
    score: float | None
    make: Callable[..., Any]
    items: Any = None


class Checkpoints:
    """The checkpoints of one run: saves, retires, finds and restores them. For one process and one thread.

    Kept are the `keep` latest, the `keep_best` best by score, and every `keep_period`-th iteration if that is
    set. A save that fails is tried once more, after its temporary files and, on a full disk, older checkpoints were
    deleted; these are the event `checkpoints_thinned`. A save that fails again never raises: it is reported as the
    event `checkpoint_failed` with `iteration` and `error`, at once or, if it failed in the background, at the next call
    of any method. `due` then asks for another one soon, and the first that succeeds is the event
    `checkpoint_saved_again` with `iteration` and the `failures` before.

    Close it, or use it as a context manager: a save still under way when the interpreter ends is lost (orbax
    needs threads that Python has ended by then), though what was on disk before stays whole.

    Args:
        run_dir: Folder of the run; its subfolder `checkpoints` is made at the first save.
        config: What is kept, and whether files are written in the background.
        on_event: Called as `on_event(kind, fields)` with what happens to checkpoints: the events above, and those of
            `restore`.

    Attributes:
        directory: The folder of all checkpoints.
        committed: Iteration of the last checkpoint that this object wrote whole; None before the first.
        failing: Whether the last save failed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: CheckpointConfig,
        on_event: OnEvent | None = None,
    ):
        self.directory = Path(run_dir).absolute() / "checkpoints"
        self._config = config
        self._on_event = on_event
        self._retry = Retry(config.every)
        self._manager: Any = None
        self._scores: dict[int, float | None] = {}  # of what is on disk; without those that cannot be read
        self._pending: _Save | None = None  # what is being written in the background
        self.committed: int | None = None
        self.failing = False
        self._abandoned = False

    def due(self, iteration: int) -> bool:
        """Whether to save after this iteration: every `every`-th, and sooner after a save that failed."""
        if self._pending is not None and not self._manager.is_saving_in_progress():
            self.wait()  # only to hear how it ended
        return self._retry.due(iteration)

    def save(
        self,
        iteration: int,
        state: PyTree,
        policy: Mapping[str, Any],
        host: Mapping[str, Any],
        *,
        score: float | None = None,
    ) -> bool:
        """Saves one checkpoint; the arrays may be donated and `host` changed as soon as this returns.

        Checkpoints of this iteration and later ones are superseded and go, even the best: after a rollback
        they belong to an attempt given up. Saved once more without a score, an iteration keeps its score.

        Args:
            iteration: Number of the checkpoint, not negative.
            state: Any tree of arrays, typed random keys included.
            policy: Nested dict of arrays with text keys.
            host: JSON data.
            score: What the policy is worth; None and numbers that are not finite are never best.

        Returns:
            Whether it was saved, or for asynchronous saves, begun. False was reported as an event.
        """
        self.wait()
        make = functools.partial(items_of, state, policy, host)
        return self._write(_Save(iteration, finite(score), make), self._config.asynchronous)

    def refuse(self, iteration: int, error: Exception) -> None:
        """Reports that there is no folder to save in; `due` asks for another save soon."""
        self.wait()
        self._give_up(iteration, error)

    def abandon(self) -> None:
        """Leaves the folder as it is from now on: it is another run's."""
        self._abandoned = True

    def reopen(self) -> None:
        """Forgets what was on disk; to be called where the folder was written again."""
        self.wait()
        self._drop()

    def latest(self) -> int | None:
        """The last iteration on disk."""
        return max(self.all(), default=None)

    def best(self) -> int | None:
        """The iteration with the highest score on disk, the later one of equals; None if none has a score."""
        return next((iteration for iteration, _ in self.ranked()), None)

    def ranked(self) -> list[tuple[int, float]]:
        """Iterations on disk that have a score, each with its score; the best first, of equals the later one."""
        steps = self.all()
        self._open()
        scores = {step: score for step in steps if (score := self._scores.get(step)) is not None}
        return [(step, scores[step]) for step in ranked(scores, steps)]

    def all(self) -> list[int]:
        """Every iteration on disk, ascending; waits for a save under way."""
        self.wait()
        if self._manager is None:
            with contextlib.suppress(OSError):  # a disk that cannot be written can be read
                settle(self.directory)
        return steps_in(self.directory)

    def on_disk(self) -> list[int]:
        """Every iteration on disk, ascending, without one that is being saved."""
        return steps_in(self.directory)

    def restore(
        self,
        template: PyTree | Callable[[dict[str, Any]], PyTree],
        iteration: int | None = None,
        later: Collection[str] = (),
    ) -> tuple[PyTree, dict[str, Any]]:
        """Reads a state back in the structure, types and places of a template.

        A checkpoint that is not what was saved is reported as the event `checkpoint_damaged` with `iteration` and
        `error`; where no iteration is given the one before it is taken, and the damaged one is renamed out of the way.
        One that was saved without checksums is reported as `checkpoint_unverified` with `iteration`.

        Args:
            template: Tree like the saved state, of arrays (donated ones will do) or of `ShapeDtypeStruct`
                with a sharding. NumPy arrays come back as NumPy arrays. Or a function of the host data that gives
                it, and may raise `ConfigError`.
            iteration: Which one; the latest that can be read if None.
            later: Paths of arrays, or of trees of them, that not every checkpoint has; those are the template's then.

        Returns:
            The state and the host data.

        Raises:
            ConfigError: There is no such checkpoint, none can be read, or it does not fit the template.
        """

        def read(step: int) -> tuple[int, dict[str, Any], dict[str, Any], Any, int]:
            manager = self._open()
            host, manifest = read_json(manager, self.directory, step)
            like = template(host) if callable(template) else template
            wanted = [describe(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(like)[0]]
            saved = {leaf.path for leaf in manifest.state}
            asked = [leaf for leaf in wanted if leaf.path in saved or not _within(leaf.path, later)]
            require_fit(manifest.state, asked, self.directory / str(step))
            return step, host, read_arrays(manager, step, "state", manifest.state), like, manifest.format

        if iteration is not None:
            require_step(self.directory, self.all(), iteration)
        (step, host, arrays, like, written), damaged = first_readable(
            self.directory,
            lambda: self.all()[::-1] if iteration is None else [iteration],
            read,
            lambda step, error: self._event("checkpoint_damaged", iteration=step, error=error),
        )
        if written == 0:
            self._event("checkpoint_unverified", iteration=step)
        self._keep_damaged(damaged)
        # Under x64 every dtype stays what it was; otherwise float64 leaves would be narrowed in silence.
        with jax.enable_x64(True):

            def restored(path: Any, leaf: Any) -> Any:
                name = describe(path, leaf).path
                return place(arrays[name], leaf) if name in arrays else leaf

            return jax.tree_util.tree_map_with_path(restored, like), host

    def wait(self) -> bool:
        """Waits for a save under way; False if it failed, which is reported as an event."""
        save = self._pending
        if save is None:
            return True
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            return self._write_again(save, error)
        self._committed(save)
        return True

    def close(self) -> None:
        """Waits for a save under way and releases the background threads; may be called again."""
        self.wait()
        if self.failing or self._manager is not None:
            self._drop()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, create: bool = False) -> Any:
        """The orbax manager, opened at first use; None if there is no folder and none is to be created."""
        if self._manager is None:
            if create:
                self.directory.mkdir(parents=True, exist_ok=True)
            elif not self.directory.is_dir():
                return None
            settle(self.directory)
            self._scores = {}
            self._manager = open_manager(self.directory, self._config, self._scores)
            self._scores.update(read_scores(self._manager, self.directory, steps_in(self.directory)))
        return self._manager

    def _write(self, save: _Save, in_background: bool) -> bool:
        """Writes a checkpoint, or begins to; whether that succeeded."""
        try:
            self._begin(save, in_background)
        except Exception as error:
            return self._write_again(save, error)
        return True

    def _write_again(self, save: _Save, error: Exception) -> bool:
        """Tries a save that failed once more, with all the room that can be made; whether it succeeded."""
        begun = unfinished_size(self.directory)
        self._drop()
        try:
            if is_full(error):
                free = 0 if over_quota(error) else free_bytes(self.directory) or 0
                best = [step for step, _ in self.ranked()]
                deleted = thin(self.directory, best, self._config, begun, free)
                if deleted:
                    self._drop()
                    self._event("checkpoints_thinned", iterations=sorted(deleted), because="the disk is full")
            self._begin(save, in_background=False)
            # What the first attempt still had to write may have fallen into the files of the second.
            verify(self._manager, self.directory, save.iteration)
        except Exception as again:
            self._drop()
            if isinstance(again, Damaged):
                self._keep_damaged([save.iteration])
            self._give_up(save.iteration, again)
            return False
        return True

    def _begin(self, save: _Save, in_background: bool) -> None:
        """Has orbax write a checkpoint; waits for it if it supersedes others, or is not for the background."""
        manager = self._open(create=True)
        superseded = [step for step in steps_in(self.directory) if step >= save.iteration]
        if save.score is None and save.iteration in superseded:
            save.score = finite(self._scores.get(save.iteration))
        if save.items is None:
            save.items = save.make(save.score)
        if superseded:
            set_aside(self.directory, superseded, save.iteration)
            manager.reload()
        make_room_to_retire(self.directory)
        self._scores[save.iteration] = save.score
        self._pending = save
        manager.save(save.iteration, args=save.items, force=True)
        if superseded or not in_background:
            manager.wait_until_finished()
            self._committed(save)

    def _committed(self, save: _Save) -> None:
        """The save under way is on disk, and what it makes superfluous is not needed any longer."""
        self._pending, self.committed, self.failing = None, save.iteration, False
        with contextlib.suppress(OSError):  # tried again at the next save
            settle(self.directory)
        failures = self._retry.saved()
        if failures:
            self._event("checkpoint_saved_again", iteration=save.iteration, failures=failures)

    def _keep_damaged(self, steps: list[int]) -> None:
        for step in steps:
            try:
                keep_damaged(self.directory, step)
            except OSError as error:
                raise ConfigError(
                    f"{self.directory / str(step)}: is damaged and cannot be renamed ({one_line(error)}); "
                    "move it out of the folder"
                ) from error
            self._scores.pop(step, None)
        if steps and self._manager is not None:
            self._manager.reload()

    def _drop(self) -> None:
        """Closes the manager and deletes what it left unfinished: the next one starts clean."""
        manager, self._manager, self._pending = self._manager, None, None
        if manager is not None:
            with contextlib.suppress(Exception):  # raises the failure that is handled already once more
                manager.close()
        if self._abandoned:
            return
        with contextlib.suppress(OSError):  # tried again at the next opening
            remove_unfinished(self.directory)
            settle(self.directory)

    def _give_up(self, iteration: int, error: Exception) -> None:
        """Reports a save that failed for good."""
        self.failing = True
        self._retry.failed(iteration)
        self._event("checkpoint_failed", iteration=iteration, error=one_line(error))

    def _event(self, kind: str, **fields: Any) -> None:
        if self._on_event is not None:
            self._on_event(kind, fields)


def _within(path: str, trees: Collection[str]) -> bool:
    return any(path == tree or path.startswith(f"{tree}/") for tree in trees)
