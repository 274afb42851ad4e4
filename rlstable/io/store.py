"""How checkpoints lie on disk: orbax's manager, what it keeps, reading, and folders that supersede others."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlstable.config import CheckpointConfig, ConfigError
from rlstable.io.arrays import Leaf, PyTree, copy_out

_ASIDE = ".superseded-by-"


def open_manager(directory: Path, config: CheckpointConfig | None) -> Any:
    """Opens orbax's manager on a folder that exists; without a configuration it only reads."""
    import orbax.checkpoint as ocp

    policies: list[Any] = []
    if config is not None:
        policies = [ocp.checkpoint_managers.LatestN(config.keep), _KeepBest(config.keep_best)]
        if config.keep_period is not None:
            policies.append(ocp.checkpoint_managers.EveryNSteps(config.keep_period))
    options = ocp.CheckpointManagerOptions(
        create=False,
        # A reader must leave alone what a running trainer is about to commit.
        cleanup_tmp_directories=config is not None,
        best_fn=lambda metrics: metrics["score"],  # makes orbax store the metrics; ranking is _KeepBest's
        preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies) if policies else None,
        enable_async_checkpointing=config is not None and config.asynchronous,
    )
    return ocp.CheckpointManager(directory, options=options)


class _KeepBest:
    """Orbax preservation policy: the `n` best by finite score.

    Orbax's own BestN keeps every checkpoint while there are no more than `n`, scored or not.
    """

    def __init__(self, n: int):
        self._n = n

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """One answer for each checkpoint."""
        del context
        ranked = _rank({info.step: (info.metrics or {}).get("score") for info in checkpoints})
        best = ranked[-self._n :] if self._n else []
        return [info.step in best for info in checkpoints]


def best_of(manager: Any, steps: Sequence[int]) -> int | None:
    """The step with the highest score, the later one of equals; None if none has a score."""
    ranked = _rank({step: score_of(manager, step) for step in steps})
    return ranked[-1] if ranked else None


def score_of(manager: Any, step: int) -> float | None:
    """The score that a step was saved with, None for none and where there is no such step."""
    return (manager.metrics(step) or {}).get("score") if step in manager.all_steps() else None


def _rank(scores: Mapping[int, float | None]) -> list[int]:
    """Steps that have a finite score, the best last, the later one of equals being better."""
    finite_scores = [(score, step) for step, score in scores.items() if finite(score) is not None]
    return [step for _, step in sorted(finite_scores)]


def items_of(state: PyTree, policy: Mapping[str, Any], host: Mapping[str, Any]) -> Any:
    """Everything orbax is to write of one checkpoint, as copies of our own in host memory."""
    import orbax.checkpoint as ocp

    manifest, items = {}, {}
    for name, tree in (("state", state), ("policy", policy)):
        leaves, arrays = copy_out(tree)
        manifest[name] = [[list(leaf.keys), leaf.dtype, list(leaf.shape)] for leaf in leaves]
        filled = {leaf.path: array for leaf, array in zip(leaves, arrays, strict=True) if array.size}
        if filled:  # orbax refuses arrays without elements (MJX has many) and trees without arrays
            items[name] = ocp.args.StandardSave(filled)
    # Orbax serialises JSON in the background, from the caller's own dict.
    own = json.loads(json.dumps(host, default=_to_number))
    return ocp.args.Composite(host=ocp.args.JsonSave(own), manifest=ocp.args.JsonSave(manifest), **items)


def _to_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"host data must be JSON, got {type(value).__name__}")


def read_json(manager: Any, folder: Path, step: int) -> tuple[dict[str, Any], dict[str, list[Leaf]]]:
    """Reads the host data and the manifest of one checkpoint.

    Raises:
        ConfigError: It cannot be read.
    """
    import orbax.checkpoint as ocp

    def read() -> tuple[dict[str, Any], dict[str, list[Leaf]]]:
        items = ocp.args.Composite(host=ocp.args.JsonRestore(), manifest=ocp.args.JsonRestore())
        found = manager.restore(step, args=items)
        manifest = {
            name: [Leaf(tuple(keys), dtype, tuple(shape)) for keys, dtype, shape in found["manifest"][name]]
            for name in ("state", "policy")
        }
        return found["host"], manifest

    return _guarded(read, folder, step)


def read_arrays(manager: Any, folder: Path, step: int, item: str, leaves: Sequence[Leaf]) -> dict[str, np.ndarray]:
    """Reads the arrays of one item, by path.

    Raises:
        ConfigError: They cannot be read.
    """
    import orbax.checkpoint as ocp

    def read() -> dict[str, np.ndarray]:
        arrays = {leaf.path: np.empty(leaf.shape, jax.numpy.dtype(leaf.dtype)) for leaf in leaves}
        filled = {path: array for path, array in arrays.items() if array.size}
        if filled:
            found = manager.restore(step, args=ocp.args.Composite(**{item: ocp.args.StandardRestore(filled)}))
            arrays.update(found[item])
        return arrays

    return _guarded(read, folder, step)


def _guarded(read: Callable[[], Any], folder: Path, step: int) -> Any:
    try:
        return read()
    except Exception as error:
        raise ConfigError(
            f"{folder / str(step)}: cannot be read ({one_line(error)}); choose another iteration"
        ) from error


def set_aside(directory: Path, steps: Sequence[int], by: int) -> None:
    """Renames steps that a new one supersedes, so that a crash before it is complete loses neither."""
    for step in steps:
        (directory / str(step)).rename(directory / f"{step}{_ASIDE}{by}")


def settle(directory: Path) -> None:
    """Deletes what a complete checkpoint superseded and brings back what an incomplete one was to."""
    for aside in directory.glob(f"*{_ASIDE}*"):
        step, by = aside.name.split(_ASIDE)
        if (directory / by).is_dir():
            shutil.rmtree(aside)
        else:
            aside.rename(directory / step)


def finite(score: Any) -> float | None:
    """The score as a float, None where it is missing or not finite."""
    return float(score) if score is not None and math.isfinite(score) else None


def one_line(error: Exception) -> str:
    """An error as one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
