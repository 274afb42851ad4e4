"""Saves and restores the checkpoints of a run.

A checkpoint is a folder `<run>/checkpoints/<number>` with three items:

- `state`: the arrays of the training state, by path in the tree
- `policy`: a nested dict of arrays
- `manifest`: JSON with the host data, the score, checksums, and path, dtype and shape of every array, so that a wrong
  array is found before it is read

Numbers only grow: a run that has rolled back does not use a number again. Orbax writes, commits and deletes the
folders. They contain no Python class and no pickle.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from rlstable.config import ConfigError
from rlstable.config.run import CheckpointConfig
from rlstable.io.arrays import PyTree, describe, place, require_fit
from rlstable.io.files import one_line, subfolder
from rlstable.io.manifest import Damaged
from rlstable.io.run_folder import steps_in
from rlstable.io.store import (
    RETIRED,
    delete_leftovers,
    finite,
    first_readable,
    items_of,
    open_manager,
    ranked,
    read_arrays,
    read_manifest,
    read_scores,
    require_step,
    verify,
)

OnEvent = Callable[[str, dict[str, Any]], None]


class Checkpoints:
    """Saves, lists and restores the checkpoints of one run. Use it from one process and one thread.

    The folder keeps the `keep` latest checkpoints, the `keep_best` best by score, and numbers divisible by
    `keep_period`. A save never raises: a failure is the event `checkpoint_failed`, at the latest at the next call of
    any method. Then `due` requests another save 1, 2, 4 ... iterations later, which is read back (event
    `checkpoint_saved_again`).

    Call `close`, or use the object as a context manager. Otherwise a save that is still running at the end of the
    process is lost, because Python ends orbax's threads first. Complete checkpoints stay intact.

    Args:
        run_dir: Folder of the run; the first save creates its subfolder `checkpoints`.
        on_event: Called as `on_event(kind, fields)`.
        in_place: Returns whether the run folder is still this run's. If not, nothing in it is changed, and saves fail.

    Attributes:
        error: The exception of the last save that failed; None before one.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: CheckpointConfig,
        on_event: OnEvent | None = None,
        in_place: Callable[[], bool] = lambda: True,
    ):
        self._in_place = in_place
        self.directory = Path(run_dir).absolute() / "checkpoints"
        self._config = config
        self._on_event = on_event
        self._failures = 0  # in a row
        self._retry_at: int | None = None  # number
        self._manager: Any = None
        self._scores: dict[int, float | None] = {}  # of the checkpoints on disk whose manifest can be read
        self._pending: int | None = None  # number of the save that runs in the background
        self.error: Exception | None = None

    def due(self, number: int) -> bool:
        """Whether to save a checkpoint of this number: every `every`-th, and earlier after a failed save."""
        if self._pending is not None and not self._manager.is_saving_in_progress():
            self.wait()  # reports a failure
        return number % self._config.every == 0 or (self._retry_at is not None and number >= self._retry_at)

    @property
    def failing(self) -> bool:
        return self._failures > 0

    def save(
        self,
        number: int,
        state: PyTree,
        policy: Mapping[str, Any],
        host: Mapping[str, Any],
        *,
        score: float | None = None,
    ) -> bool:
        """Saves one checkpoint. After the call, arrays may be donated and `host` may be changed.

        Args:
            number: Greater than all before.
            state: Any tree of arrays, typed random keys included.
            policy: Nested dict of arrays with text keys.
            host: JSON data, saved in the manifest.
            score: A policy whose score is None or not finite is never best.

        Returns:
            Whether the checkpoint was saved or, for an asynchronous save, whether the save started.
        """
        self.wait()
        score = finite(score)
        try:
            self._begin(number, score, functools.partial(items_of, number, state, policy, host, score))
            if self.failing:  # TensorStore keeps writing for a moment after its first error, so this save is read back
                verify(self._manager, self.directory, number)
                self._report_success(number)
        except Exception as error:
            if isinstance(error, Damaged):
                with contextlib.suppress(ConfigError):
                    self._keep_damaged([number])
            return self._give_up(number, error)
        return True

    def latest(self) -> int | None:
        return max(self.all(), default=None)

    def best(self) -> int | None:
        """The number with the highest score on disk, the later one of equal scores; None without scores."""
        return next((number for number, _ in self.ranked()), None)

    def ranked(self) -> list[tuple[int, float]]:
        """Numbers on disk with their scores, the best first; the later one first if scores are equal."""
        steps = self.all()
        self._open()
        scores = {step: score for step in steps if (score := self._scores.get(step)) is not None}
        return [(step, scores[step]) for step in ranked(scores, steps)]

    def host_data(self, number: int) -> dict[str, Any] | None:
        """The JSON data of one checkpoint; None if it is missing or damaged."""
        if number in self.all():
            with contextlib.suppress(Damaged, ConfigError):
                return read_manifest(self._open(), self.directory, number).host
        return None

    def all(self) -> list[int]:
        """Every number on disk, ascending; waits for a running save."""
        self.wait()
        return steps_in(self.directory)

    def on_disk(self) -> list[int]:
        """Every complete number on disk, ascending; does not wait for a running save."""
        return steps_in(self.directory)

    def restore(
        self,
        template: PyTree | Callable[[dict[str, Any]], PyTree],
        number: int | None = None,
    ) -> tuple[PyTree, dict[str, Any]]:
        """Restores a state with the structure, dtypes and shardings of a template; returns it with the host data.

        A damaged checkpoint is the event `checkpoint_damaged`. If `number` is None, the damaged checkpoint is renamed
        and the previous one is restored.

        Args:
            template: Tree of arrays (also donated ones) or of `ShapeDtypeStruct` with a sharding, or a function from
                the host data to that tree. NumPy arrays are restored as NumPy arrays.
            number: None for the latest that can be read.

        Raises:
            ConfigError: The checkpoint does not exist or does not fit the template, or none can be read.
        """

        def read(step: int) -> tuple[dict[str, Any], dict[str, Any], Any]:
            manager = self._open()
            manifest = read_manifest(manager, self.directory, step)
            like = template(manifest.host) if callable(template) else template
            leaves = [describe(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(like)[0]]
            require_fit(manifest.state, leaves, self.directory / str(step))
            return manifest.host, read_arrays(manager, step, "state", manifest.state), like

        if number is not None:
            require_step(self.directory, self.all(), number)
        (host, arrays, like), damaged = first_readable(
            self.directory,
            lambda: self.all()[::-1] if number is None else [number],
            read,
            lambda step, error: self._event("checkpoint_damaged", checkpoint=step, error=error),
        )
        self._keep_damaged(damaged)
        # With x64, every dtype is preserved; otherwise float64 leaves would silently become float32.
        with jax.enable_x64(True):
            return jax.tree_util.tree_map_with_path(
                lambda path, leaf: place(arrays[describe(path, leaf).path], leaf), like
            ), host

    def wait(self) -> bool:
        """Waits for a running save. Returns False if it failed; the failure is also reported as an event."""
        number = self._pending
        if number is None:
            return True
        try:
            self._finish_saving()
        except Exception as error:
            return self._give_up(number, error)
        return True

    def close(self) -> None:
        """Waits for a running save and ends the background threads; may be called again."""
        self.wait()
        if self.failing or self._manager is not None:
            self._drop()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, create: bool = False) -> Any:
        """The orbax manager, opened at first use; None if the folder does not exist and `create` is False."""
        if self._manager is None:
            if create:
                subfolder(self.directory.parent, self.directory.name)
            elif not self.directory.is_dir():
                return None
            delete_leftovers(self.directory)
            self._scores = {}
            self._manager = open_manager(self.directory, self._config, self._scores)
            self._scores.update(read_scores(self._manager, self.directory, steps_in(self.directory)))
        return self._manager

    def _begin(self, number: int, score: float | None, make_items: Callable[[], Any]) -> None:
        """Starts orbax's write, and waits for it unless it runs in the background."""
        if not self._in_place():
            raise FileNotFoundError("the run folder was deleted, moved or replaced")
        manager = self._open(create=True)
        items = make_items()
        (self.directory / RETIRED).mkdir(exist_ok=True)  # before the save, which may fill the disk
        self._scores[number], self._pending = score, number
        manager.save(number, args=items, force=True)
        if self.failing or not self._config.asynchronous:
            self._finish_saving()

    def _finish_saving(self) -> None:
        self._manager.wait_until_finished()
        self._pending = None
        with contextlib.suppress(OSError):  # deleted at the next save
            delete_leftovers(self.directory)

    def _report_success(self, number: int) -> None:
        failures, self._failures, self._retry_at = self._failures, 0, None
        self._event("checkpoint_saved_again", checkpoint=number, failures=failures)

    def _keep_damaged(self, steps: list[int]) -> None:
        """Renames damaged checkpoints, so that they are not restored but can still be examined."""
        for step in steps:
            try:
                names = itertools.chain([f"{step}.damaged"], (f"{step}.damaged-{n}" for n in itertools.count(2)))
                free = next(name for name in names if not (self.directory / name).exists())
                (self.directory / str(step)).rename(self.directory / free)
            except OSError as error:
                raise ConfigError(
                    f"{self.directory / str(step)}: is damaged and cannot be renamed ({one_line(error)}); "
                    "move it to another folder"
                ) from error
            self._scores.pop(step, None)
        if steps and self._manager is not None:
            self._manager.reload()

    def _drop(self) -> None:
        """Closes the manager and deletes its unfinished files, so that the next one starts clean."""
        manager, self._manager, self._pending = self._manager, None, None
        if manager is not None:
            with contextlib.suppress(Exception):  # raises the failure again that is already handled
                manager.close()
        if self._in_place():
            with contextlib.suppress(OSError, ConfigError):  # deleted at the next opening
                delete_leftovers(self.directory)

    def _give_up(self, number: int, error: Exception) -> bool:
        """Reports a failed save and deletes its files. Returns False."""
        self._drop()
        self.error = error
        self._retry_at = number + min(2 ** min(self._failures, 32), self._config.every)
        self._failures += 1
        self._event("checkpoint_failed", checkpoint=number, error=one_line(error))
        return False

    def _event(self, kind: str, **fields: Any) -> None:
        if self._on_event is not None:
            self._on_event(kind, fields)
