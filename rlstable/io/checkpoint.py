"""Checkpoints: the whole truth of a run on disk, and the policy in a form that needs no configuration.

One checkpoint is one folder `<run>/checkpoints/<iteration>` with four items: `state` (the training state as
arrays by their path in the tree), `policy` (a nested dict of arrays), `host` (JSON) and `manifest` (JSON:
path, dtype and shape of every array, so that a misfit is found before an array is read). Orbax writes,
commits and retires the folders. No Python class and no pickle is in them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from rlstable.config import CheckpointConfig, ConfigError
from rlstable.io.arrays import PyTree, describe, place, require_fit
from rlstable.io.store import (
    best_of,
    finite,
    items_of,
    one_line,
    open_manager,
    read_arrays,
    read_json,
    score_of,
    set_aside,
    settle,
)


class Checkpoints:
    """The checkpoints of one run: saves, retires, finds and restores them. For one process and one thread.

    Kept are the `keep` latest, the `keep_best` best by score, and every `keep_period`-th iteration if that is
    set. A save that fails never raises: it is reported as the event `checkpoint_failed` with `iteration` and
    `error`, at once or, if it failed in the background, at the next call of any method.

    Close it, or use it as a context manager: a save still under way when the interpreter ends is lost (orbax
    needs threads that Python has ended by then), though what was on disk before stays whole.

    Args:
        run_dir: Folder of the run; its subfolder `checkpoints` is made at the first save.
        config: What is kept, and whether files are written in the background.
        on_event: Called as `on_event(kind, fields)` for each failed save.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: CheckpointConfig,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
    ):
        self.directory = Path(run_dir).absolute() / "checkpoints"
        self._config = config
        self._on_event = on_event
        self._manager: Any = None
        self._pending: int | None = None  # the iteration that is being written in the background

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
        try:
            manager = self._open(create=True)
            items = items_of(state, policy, host)
            superseded = [step for step in manager.all_steps() if step >= iteration]
            if superseded:
                score = score_of(manager, iteration) if finite(score) is None else score
                set_aside(self.directory, superseded, iteration)
                manager.reload()
            self._pending = iteration
            manager.save(iteration, args=items, metrics={"score": finite(score)}, force=True)
            if superseded or not self._config.asynchronous:
                manager.wait_until_finished()
                self._pending = None
                settle(self.directory)
        except Exception as error:
            self._fail(iteration, error)
            return False
        return True

    def latest(self) -> int | None:
        """The last iteration on disk."""
        return max(self.all(), default=None)

    def best(self) -> int | None:
        """The iteration with the highest score on disk, the later one of equals; None if none has a score."""
        steps = self.all()
        return best_of(self._open(), steps)

    def all(self) -> list[int]:
        """Every iteration on disk, ascending; waits for a save under way."""
        self.wait()
        manager = self._open()
        return sorted(manager.all_steps()) if manager is not None else []

    def restore(self, template: PyTree, iteration: int | None = None) -> tuple[PyTree, dict[str, Any]]:
        """Reads a state back in the structure, types and places of a template.

        Args:
            template: Tree like the saved state, of arrays (donated ones will do) or of `ShapeDtypeStruct`
                with a sharding. NumPy arrays come back as NumPy arrays.
            iteration: Which one; the latest if None.

        Returns:
            The state and the host data.

        Raises:
            ConfigError: There is no such checkpoint, it cannot be read, or it does not fit the template.
        """
        steps = self.all()
        manager = self._open()
        step = _choose(self.directory, steps, "latest" if iteration is None else iteration, None)
        host, manifest = read_json(manager, self.directory, step)
        paths, treedef = jax.tree_util.tree_flatten_with_path(template)
        wanted = [describe(path, leaf) for path, leaf in paths]
        require_fit(manifest["state"], wanted, self.directory / str(step))
        arrays = read_arrays(manager, self.directory, step, "state", manifest["state"])
        # Under x64 every dtype stays what it was; otherwise float64 leaves would be narrowed in silence.
        with jax.enable_x64(True):
            leaves = [place(arrays[leaf.path], like) for leaf, (_, like) in zip(wanted, paths, strict=True)]
        return jax.tree_util.tree_unflatten(treedef, leaves), host

    def host(self, iteration: int | None = None) -> dict[str, Any]:
        """The host data of a checkpoint, the latest if None, without reading an array.

        Raises:
            ConfigError: There is no such checkpoint, or it cannot be read.
        """
        step = _choose(self.directory, self.all(), "latest" if iteration is None else iteration, None)
        return read_json(self._open(), self.directory, step)[0]

    def wait(self) -> bool:
        """Waits for a save under way; False if it failed, which is reported as an event."""
        if self._pending is None:
            return True
        iteration = self._pending
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._fail(iteration, error)
            return False
        self._pending = None
        return True

    def close(self) -> None:
        """Waits for a save under way and releases the background threads; may be called again."""
        self.wait()
        manager, self._manager = self._manager, None
        if manager is not None:
            with contextlib.suppress(Exception):  # every save was waited for; only threads are left to end
                manager.close()

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
            self._manager = open_manager(self.directory, self._config)
        return self._manager

    def _fail(self, iteration: int, error: Exception) -> None:
        """Reports a failed save and drops the manager: the next one starts clean, without the torn files."""
        manager, self._manager, self._pending = self._manager, None, None
        if manager is not None:
            with contextlib.suppress(Exception):  # raises the failure being reported once more
                manager.close()
        with contextlib.suppress(OSError):  # tried again at the next opening
            settle(self.directory)
        if self._on_event is not None:
            self._on_event("checkpoint_failed", {"iteration": iteration, "error": one_line(error)})


def restore_policy(
    directory: str | Path, which: Literal["best", "latest"] | int = "best"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a policy from a run's folder alone, also while the run goes on.

    Args:
        directory: Folder of the run, or its folder `checkpoints`.
        which: An iteration, or "latest", or "best", which is the latest where nothing was scored.

    Returns:
        The policy as a nested dict of NumPy arrays, and the host data.

    Raises:
        ConfigError: There is no such checkpoint, or it cannot be read.
    """
    folder = Path(directory).absolute()
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give the folder of a run, it holds checkpoints/")
    manager = open_manager(folder, None)
    try:
        steps = sorted(manager.all_steps())
        step = _choose(folder, steps, which, best_of(manager, steps))
        host, manifest = read_json(manager, folder, step)
        arrays = read_arrays(manager, folder, step, "policy", manifest["policy"])
    finally:
        manager.close()
    policy: dict[str, Any] = {}
    for leaf in manifest["policy"]:
        inner = policy
        for key in leaf.keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[leaf.keys[-1]] = arrays[leaf.path]
    return policy, host


def _choose(folder: Path, steps: list[int], which: str | int, best: int | None) -> int:
    """The step that `which` means among those there are."""
    if not steps:
        raise ConfigError(f"{folder}: no checkpoint here; give the folder of a run that has saved one")
    if which == "latest" or (which == "best" and best is None):
        return steps[-1]
    step = best if which == "best" else which
    if step not in steps:
        listed = ", ".join(map(str, steps))
        raise ConfigError(f"{folder}: no checkpoint {which!r} here; choose best, latest or one of {listed}")
    return int(step)
