"""Saves the steps of an environment before its bad step in the incident's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstable.config import ConfigError
from rlstable.io.archive import pack, unpack
from rlstable.io.run_folder import write_atomically
from rlstable.io.versions import differences, versions
from rlstable.replay.report import SAME, compared
from rlstable.replay.rerun import Notify, Rerun, run_again
from rlstable.supervise.incident import FORMAT, Incident
from rlstable.supervise.stop_reasons import command

_FACTS, _ARRAYS = "history.json", "history.npz"


class History(NamedTuple):
    """Steps before an incident.

    Attributes:
        incident: The incident.
        facts: Content of `history.json`: the number of `steps`, the number `asked` for, where the history `begins`,
            whether it is `exact`, and in `as_in_the_run` the comparison of the bad step with the run's.
        arrays: Arrays by name, `[steps, ...]`, without the bad step: `before/...` is the state before a step,
            `action` its action, `reward` and `done` its results.
    """

    incident: Incident
    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


def make(incident: Incident, asked: int, notify: Notify) -> History:
    """Retrains up to the incident, and writes the steps before the bad step into the incident's folder.

    Args:
        incident: The incident.
        asked: Number of steps; a shorter episode has fewer.
        notify: Called with messages about long operations and about problems that do not stop the rerun.

    Raises:
        ConfigError: The rerun does not reach the incident, or the history cannot be written.
    """
    if not os.access(incident.folder, os.W_OK):
        raise ConfigError(f"{incident.folder}: the history cannot be saved there; make the folder writable")
    age = _age(incident)
    wanted = asked if age is None else min(asked, age)
    rerun = run_again(incident, wanted, notify)
    arrays = {name: x[:-1] for name, x in rerun.steps.items()}
    room = incident.config.supervise.incident.max_mb * 1e6
    left = min(len(arrays["action"]), int(room // sum(x[-1].nbytes for x in rerun.steps.values())))
    arrays = {name: x[len(x) - left :] for name, x in arrays.items()}
    same = compared(_started_from(incident.arrays), _started_from({name: x[-1] for name, x in rerun.steps.items()}))
    now = {**versions(), "device": str(jax.devices()[0].device_kind)}
    facts = {
        "format": FORMAT,
        "steps": left,
        "asked": asked,
        "begins": _beginning(left, asked, age, rerun),
        "from_iteration": rerun.start.iteration,
        "exact": same == SAME,
        "as_in_the_run": same,
        "other_versions": differences(incident.facts["versions"], now),
        "versions": now,
    }
    try:
        described, packed = pack(facts, arrays)
        write_atomically(incident.folder / _ARRAYS, packed)
        write_atomically(incident.folder / _FACTS, described)
    except OSError as error:
        raise ConfigError(f"{incident.folder}: the history cannot be written ({error.strerror or error})") from error
    return History(incident, facts, arrays)


def read(incident: Incident) -> History:
    """Reads the history of an incident.

    Raises:
        ConfigError: The history is missing or damaged.
    """
    try:
        return History(incident, *unpack(incident.folder / _FACTS, incident.folder / _ARRAYS, FORMAT))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{incident.folder}: there is no history yet; run {command('replay', incident.folder)} --history"
        ) from error


def _age(incident: Incident) -> int | None:
    """Returns the steps of the episode before the bad step; None if the incident lacks the count."""
    steps = incident.arrays.get("before/info/steps")
    return None if steps is None else int(steps) + int(incident.facts["repeat"])


def _started_from(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix("before/"): x for name, x in arrays.items() if name.startswith(("before/", "action"))}


def _beginning(left: int, asked: int, age: int | None, rerun: Rerun) -> str:
    if left < len(rerun.steps["action"]) - 1:
        return "where supervise.incident.max_mb has no more room"
    if left == age:
        return "where its episode begins"
    if left == asked:
        return f"{asked} steps before"
    if rerun.restarted:
        return "where the precision of training changed"
    return f"at checkpoint {rerun.start.iteration}, the oldest before the incident"
