"""Restores the policy of a run folder, without a configuration and without writing to the folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

from rlstable.config import ConfigError
from rlstable.io.checkpoint import OnEvent
from rlstable.io.manifest import Manifest
from rlstable.io.run_folder import confirmed_of, require_usable_name, steps_in
from rlstable.io.store import (
    first_readable,
    open_manager,
    ranked,
    read_arrays,
    read_manifest,
    read_scores,
    require_no_links,
    require_step,
)


def restore_policy(
    directory: str | Path, which: Literal["best", "latest"] | int = "best", on_event: OnEvent | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Restores a policy from a run folder, also during the run.

    If the best or latest checkpoint is damaged, the next best or the previous checkpoint is used, with the event
    `checkpoint_damaged`.

    Args:
        directory: Folder of the run, or its folder `checkpoints`.
        which: A number, "latest" or "best". "best" is the confirmed best, else the best by a single evaluation,
            else the latest.
        on_event: Called as `on_event(kind, fields)`; None to emit warnings instead.

    Returns:
        The policy as a nested dict of NumPy arrays, and the host data. The host data contain `confirmed_return` if the
        checkpoint is the confirmed best.

    Raises:
        ConfigError: The checkpoint does not exist, or cannot be read.
    """
    folder = Path(directory).absolute()
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    require_usable_name(folder)
    require_no_links(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give a run folder, which contains checkpoints/")
    notify = on_event or (lambda kind, fields: _warn(folder, kind, fields))
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
            return list(dict.fromkeys([*best, *unknown, *ranked(scores, steps), *reversed(steps)]))
        return steps[::-1] if which == "latest" else [step for step in steps if step == which]

    def read(step: int) -> tuple[int, dict[str, Any], Manifest]:
        manifest = read_manifest(manager, folder, step)
        return step, read_arrays(manager, step, "policy", manifest.policy), manifest

    try:
        (step, arrays, manifest), _ = first_readable(
            folder,
            candidates,
            read,
            lambda step, error: notify("checkpoint_damaged", {"checkpoint": step, "error": error}),
        )
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


def _warn(folder: Path, kind: str, fields: dict[str, Any]) -> None:
    del kind
    text = f"{folder / str(fields['checkpoint'])} is damaged ({fields['error']}); using another checkpoint"
    warnings.warn(f"rlstable: {text}", RuntimeWarning, stacklevel=2)
