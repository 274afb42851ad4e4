"""Writes, reads and deletes the folders of checkpoints with orbax."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstable.config import ConfigError
from rlstable.config.run import CheckpointConfig
from rlstable.io.arrays import Damaged, Leaf, Manifest, PyTree, checksum, copy_out, manifest_from_json, manifest_to_json
from rlstable.io.files import below, one_line
from rlstable.io.scores import Score, best_of_each_kind, scored_by

RETIRED = ".retired"
_TEMPORARY = ".orbax-checkpoint-tmp"


def open_manager(
    directory: Path,
    config: CheckpointConfig | None,
    scores: Mapping[int, Score] | None = None,
    confirmed: int | None = None,
) -> Any:
    """Opens orbax's manager for an existing folder; without `config` it only reads.

    The manager reads the scores of all checkpoints at every save. It never deletes the `confirmed` checkpoint.
    """
    import orbax.checkpoint as ocp

    _drop_lines_of_orbax()
    policies: list[Any] = []
    if config is not None:
        policies = [
            ocp.checkpoint_managers.LatestN(config.keep),
            _KeepBest(config.keep_best, {} if scores is None else scores, confirmed),
        ]
        if config.keep_period is not None:
            policies.append(ocp.checkpoint_managers.EveryNSteps(config.keep_period))
    options = ocp.CheckpointManagerOptions(
        create=False,
        preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies) if policies else None,
        # Renames before deleting, so that a crash leaves no incomplete checkpoint under its number.
        todelete_subdir=None if config is None else RETIRED,
        enable_async_checkpointing=config is not None and config.asynchronous,
        # Each process uses the manager alone; orbax would wait for the other processes.
        multiprocessing_options=_alone() if jax.process_count() > 1 else ocp.options.MultiprocessingOptions(),
    )
    return ocp.CheckpointManager(directory, options=options)


@functools.cache
def _drop_lines_of_orbax() -> None:
    """Drops log lines of orbax and tracebacks of its threads after a failure; the run reports its failures itself."""
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(lambda record: "orbax" not in f"{record.pathname} {record.getMessage()}")
    show = sys.unraisablehook
    sys.unraisablehook = lambda raised: None if "Event loop is closed" in str(raised.exc_value) else show(raised)


def _alone() -> Any:
    import orbax.checkpoint as ocp

    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(own, {own}, f"process-{own}")


class _KeepBest(NamedTuple):
    """Orbax preservation policy: keeps the `n` best of comparable scores, the confirmed, and those of unknown score.

    Orbax's own BestN keeps checkpoints without a score, and reads scores that have no checksum.
    """

    n: int
    scores: Mapping[int, Score]
    confirmed: int | None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [info.step for info in checkpoints]
        kept = {self.confirmed, *best_of_each_kind(self.scores, steps, self.n)}
        return [step in kept or step not in self.scores for step in steps]


def items_of(
    number: int, state: PyTree, policy: Mapping[str, Any], host: Mapping[str, Any], score: float | None
) -> Any:
    import orbax.checkpoint as ocp

    leaves, items = {}, {}
    for name, tree in (("state", state), ("policy", policy)):
        leaves[name], arrays = copy_out(tree)
        filled = {leaf.path: array for leaf, array in zip(leaves[name], arrays, strict=True) if array.size}
        if filled:  # orbax rejects arrays without elements (MJX has many) and trees without arrays
            items[name] = ocp.args.StandardSave(filled)
    # A copy, because orbax serialises the dict in the background.
    host_copy = json.loads(json.dumps(host, default=_to_number))
    manifest = manifest_to_json(number, **leaves, host=host_copy, score=score)
    return ocp.args.Composite(manifest=ocp.args.JsonSave(manifest), **items)


def _to_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"host data must be JSON, got {type(value).__name__}")


def read_manifest(manager: Any, folder: Path, step: int) -> Manifest:
    """Reads the manifest of one checkpoint; raises like `manifest_from_json`."""
    import orbax.checkpoint as ocp

    with _reading():
        require_regular_files(folder / str(step))
        data = manager.restore(step, args=ocp.args.Composite(manifest=ocp.args.JsonRestore()))["manifest"]
        return manifest_from_json(data, folder / str(step))


def read_arrays(manager: Any, step: int, item: str, leaves: Sequence[Leaf]) -> dict[str, np.ndarray]:
    """Reads the arrays of one item, by path; raises `Damaged`."""
    import orbax.checkpoint as ocp

    with _reading():
        arrays = {leaf.path: np.empty(leaf.shape, jax.numpy.dtype(leaf.dtype)) for leaf in leaves}
        filled = {path: array for path, array in arrays.items() if array.size}
        if filled:
            restored = manager.restore(step, args=ocp.args.Composite(**{item: ocp.args.StandardRestore(filled)}))
            arrays.update(restored[item])
        for leaf in leaves:
            if leaf.checksum is not None and checksum(arrays[leaf.path]) != leaf.checksum:
                raise Damaged(f"the checksum of the array {leaf.path} of {item} is wrong")
        return arrays


def read_scores(manager: Any, folder: Path, steps: Iterable[int]) -> dict[int, Score]:
    """The scores of all checkpoints whose manifest can be read."""
    scores = {}
    for step in steps:
        with contextlib.suppress(Damaged, ConfigError):
            manifest = read_manifest(manager, folder, step)
            scores[step] = Score(manifest.score, scored_by(manifest.host.get("config", {})))
    return scores


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Context manager that converts the errors of reading a damaged checkpoint to `Damaged`."""
    try:
        yield
    except (ConfigError, Damaged):
        raise
    except Exception as error:
        raise Damaged(one_line(error)) from error


def first_readable(
    directory: Path,
    candidates: Callable[[], Iterable[int]],
    read: Callable[[int], Any],
    on_damage: Callable[[int, str], None],
) -> tuple[Any, list[int]]:
    """Reads the first readable checkpoint; returns the result of `read`, and the damaged steps.

    `candidates` returns the steps in order of preference. It is called again after every failure, because a running
    training may delete checkpoints; a deleted checkpoint is not damaged. Raises a `ConfigError` that lists the damaged
    checkpoints with their errors if none can be read.
    """
    tried: dict[int, str] = {}
    while remaining := [step for step in candidates() if step not in tried and (directory / str(step)).is_dir()]:
        step = remaining[0]
        try:
            return read(step), list(tried)
        except Damaged as error:
            if (directory / str(step)).is_dir():
                tried[step] = str(error)
                on_damage(step, str(error))
    if len(tried) == 1:
        [(step, why)] = tried.items()
        raise ConfigError(f"{directory / str(step)}: cannot be read ({why}); choose another checkpoint or run folder")
    if tried:
        listed = "; ".join(f"{step}: {why}" for step, why in tried.items())
        raise ConfigError(
            f"{directory}: none of {len(tried)} checkpoints can be read ({listed}); choose another run folder"
        )
    raise ConfigError(f"{directory}: no checkpoint here; give the folder of a run that has saved a checkpoint")


def verify(manager: Any, folder: Path, step: int) -> None:
    """Checks a checkpoint by reading all of it; raises `Damaged`."""
    manifest = read_manifest(manager, folder, step)
    read_arrays(manager, step, "state", manifest.state)
    read_arrays(manager, step, "policy", manifest.policy)


def finite(score: Any) -> float | None:
    """The score as a float; None if it is missing or not finite."""
    return float(score) if score is not None and math.isfinite(score) else None


def require_step(folder: Path, steps: list[int], iteration: int) -> None:
    """Raises a `ConfigError` that lists the checkpoints if the iteration is none of them."""
    if steps and iteration not in steps:
        listed = ", ".join(map(str, steps))
        raise ConfigError(f"{folder}: no checkpoint {iteration} here; choose best, latest or one of {listed}")


def require_no_links(directory: Path) -> None:
    """Raises a `ConfigError` if the folder of all checkpoints or an entry of it is a symbolic link."""
    below(directory.parent, directory.name)
    if directory.is_dir():
        for entry in directory.iterdir():
            below(directory, entry.name)


def require_regular_files(checkpoint: Path) -> None:
    """Raises `Damaged` if a checkpoint has other files: a link leads out of it, and a pipe has no end."""
    for parent, folders, files in os.walk(checkpoint):
        for name in (*folders, *files):
            mode = os.lstat(os.path.join(parent, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise Damaged(f"{name} is not a regular file")


def delete_leftovers(directory: Path) -> None:
    """Deletes retired checkpoints and the files of failed saves. Must not run during a save.

    A file that cannot be deleted is harmless; the next call tries again.
    """
    require_no_links(directory)
    for folder in (directory / RETIRED, *directory.glob(f"*{_TEMPORARY}*")):
        shutil.rmtree(folder, ignore_errors=True)
