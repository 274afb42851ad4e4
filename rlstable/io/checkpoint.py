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
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from rlstable.config import ConfigError
from rlstable.config.run import CheckpointConfig
from rlstable.io.arrays import Damaged, Manifest, PyTree, describe, place, require_fit
from rlstable.io.files import one_line, subfolder
from rlstable.io.run_folder import confirmed_of, require_usable_name, steps_in
from rlstable.io.scores import Score, best_of_each_kind, ranked, scored_by
from rlstable.io.store import (
    RETIRED,
    delete_leftovers,
    finite,
    first_readable,
    items_of,
    open_manager,
    read_arrays,
    read_manifest,
    read_scores,
    require_no_links,
    require_step,
    verify,
)

OnEvent = Callable[[str, dict[str, Any]], None]


@dataclasses.dataclass(eq=False)
class Checkpoints:
    """Saves, lists and restores the checkpoints of one run. Use it from one process and one thread.

    The folder keeps the `keep` latest checkpoints, the `keep_best` best by score, and numbers divisible by
    `keep_period`. A save never raises: a failure is the event `checkpoint_failed`, at the latest at the next call of
    any method. Then `due` requests another save 1, 2, 4 ... iterations later, which is read back (event
    `checkpoint_saved_again`).

    Call `close`, or use the object as a context manager. Otherwise a save that is still running at the end of the
    process is lost, because Python ends orbax's threads first. Complete checkpoints stay intact.

    `in_place` returns whether the run folder is still this run's. If not, nothing in it is changed, and saves fail.
    `settings` is the configuration, which says with which saved scores new ones can be compared.
    """

    run_dir: str | Path
    config: CheckpointConfig
    on_event: OnEvent = lambda kind, fields: None
    in_place: Callable[[], bool] = lambda: True
    settings: Mapping[str, Any] | None = None
    error: Exception | None = None  # of the last save that failed
    _failures: int = 0  # in a row
    _retry_at: int | None = None  # number
    _manager: Any = None
    _confirmed: int | None = None  # number that was confirmed before this process resumed the run; kept
    _pending: int | None = None  # number of the save that runs in the background

    def __post_init__(self) -> None:
        self.directory = Path(self.run_dir).absolute() / "checkpoints"
        self._scored_by = scored_by(self.settings or {})
        self._scores: dict[int, Score] = {}  # of the checkpoints on disk whose manifest can be read

    def due(self, number: int) -> bool:
        """Whether to save a checkpoint of this number: every `every`-th, and earlier after a failed save."""
        if self._pending is not None and not self._manager.is_saving_in_progress():
            self.wait()  # reports a failure
        return number % self.config.every == 0 or (self._retry_at is not None and number >= self._retry_at)

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
        """Saves one checkpoint; its number is greater than all before. Then arrays may be donated and `host` changed.

        `state` is any tree of arrays, `policy` a nested dict of arrays, and `host` JSON data for the manifest. A policy
        whose score is None or not finite is never best. Returns whether the save succeeded, or started in the
        background.
        """
        self.wait()
        score = finite(score)
        try:
            items = functools.partial(items_of, number, state, policy, host, score)
            self._begin(number, Score(score, self._scored_by), items)
            if self.failing:  # TensorStore keeps writing for a moment after its first error, so this save is read back
                verify(self._manager, self.directory, number)
                failures, self._failures, self._retry_at = self._failures, 0, None
                self._event("checkpoint_saved_again", checkpoint=number, failures=failures)
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
        return ranked(self._scores, steps, self._scored_by)

    def candidates(self, n: int) -> list[int]:
        """Numbers on disk: the `n` best of each kind of score, that of the earlier confirmation, and the latest."""
        steps = self.all()
        self._open()
        before = [step for step in steps if step == self._confirmed]
        return list(dict.fromkeys([*best_of_each_kind(self._scores, steps, n), *before, *steps[-1:]]))

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
        self, template: PyTree | Callable[[dict[str, Any]], PyTree], number: int | None = None
    ) -> tuple[PyTree, dict[str, Any]]:
        """Restores a state with the structure, dtypes and shardings of a template; returns it with the host data.

        `template` is a tree of arrays (also donated ones) or of `ShapeDtypeStruct` with a sharding, or a function from
        the host data to that tree. A damaged checkpoint is the event `checkpoint_damaged`. Without a number, the
        damaged checkpoint is renamed and the previous one is restored. Raises `ConfigError` if the checkpoint does not
        exist or does not fit the template, or none can be read.
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
            self._confirmed = confirmed_of(self.directory.parent).get("confirmed_checkpoint", self._confirmed)
            self._manager = open_manager(self.directory, self.config, self._scores, self._confirmed)
            self._scores.update(read_scores(self._manager, self.directory, steps_in(self.directory)))
        return self._manager

    def _begin(self, number: int, score: Score, make_items: Callable[[], Any]) -> None:
        """Starts orbax's write, and waits for it unless it runs in the background."""
        if not self.in_place():
            raise FileNotFoundError("the run folder was deleted, moved or replaced")
        manager = self._open(create=True)
        items = make_items()
        (self.directory / RETIRED).mkdir(exist_ok=True)  # before the save, which may fill the disk
        self._scores[number], self._pending = score, number
        manager.save(number, args=items, force=True)
        if self.failing or not self.config.asynchronous:
            self._finish_saving()

    def _finish_saving(self) -> None:
        self._manager.wait_until_finished()
        self._pending = None
        with contextlib.suppress(OSError):  # deleted at the next save
            delete_leftovers(self.directory)

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
        if self.in_place():
            with contextlib.suppress(OSError, ConfigError):  # deleted at the next opening
                delete_leftovers(self.directory)

    def _give_up(self, number: int, error: Exception) -> bool:
        """Reports a failed save and deletes its files. Returns False."""
        self._drop()
        self.error = error
        self._retry_at = number + min(2 ** min(self._failures, 32), self.config.every)
        self._failures += 1
        self._event("checkpoint_failed", checkpoint=number, error=one_line(error))
        return False

    def _event(self, kind: str, **fields: Any) -> None:
        self.on_event(kind, fields)


def restore_policy(
    run_dir: str | Path, which: Literal["best", "latest"] | int = "best", on_event: OnEvent | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Restores a policy from a run folder without changing the folder, also during the run.

    `which` is a number, "latest" or "best": the confirmed best, else the best by a single evaluation, else the latest.
    If the best or latest checkpoint is damaged, the next best or the previous checkpoint is used, with the event
    `checkpoint_damaged`, or a warning without `on_event`.

    Returns the policy as a nested dict of NumPy arrays, and the host data, which contain `confirmed_return` if the
    checkpoint is the confirmed best. Raises `ConfigError` if the checkpoint does not exist or cannot be read.
    """
    folder = Path(run_dir).absolute() / "checkpoints"
    require_usable_name(folder)
    require_no_links(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no checkpoint here; the run has saved none, had checkpoint=off, or is no run")
    if isinstance(which, int):
        require_step(folder, steps_in(folder), which)
    confirmed = confirmed_of(folder.parent)
    manager = open_manager(folder, None)

    def candidates() -> list[int]:
        manager.reload()
        steps = steps_in(folder)
        if which == "best":
            scores = read_scores(manager, folder, steps)
            # Checkpoints with an unreadable score come first: they may be the best, so their damage must be reported.
            unknown = [step for step in reversed(steps) if step not in scores]
            best = [step for step in steps if step == confirmed.get("confirmed_checkpoint")]
            newest = scores[max(scores)].scored_by if scores else ""
            return list(dict.fromkeys([*best, *unknown, *dict(ranked(scores, steps, newest)), *reversed(steps)]))
        return steps[::-1] if which == "latest" else [step for step in steps if step == which]

    def read(step: int) -> tuple[int, dict[str, Any], Manifest]:
        manifest = read_manifest(manager, folder, step)
        return step, read_arrays(manager, step, "policy", manifest.policy), manifest

    def report(step: int, error: str) -> None:
        if on_event is not None:
            return on_event("checkpoint_damaged", {"checkpoint": step, "error": error})
        text = f"rlstable: {folder / str(step)} is damaged ({error}); using another checkpoint"
        warnings.warn(text, RuntimeWarning, stacklevel=2)

    try:
        (step, arrays, manifest), _ = first_readable(folder, candidates, read, report)
    finally:
        manager.close()
    policy: dict[str, Any] = {}
    for leaf in manifest.policy:
        inner = policy
        for key in leaf.keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[leaf.keys[-1]] = arrays[leaf.path]
    if step == confirmed.get("confirmed_checkpoint"):
        return policy, {**manifest.host, "confirmed_return": confirmed.get("confirmed_return")}
    return policy, manifest.host
