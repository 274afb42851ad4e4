"""Incidents: a folder per captured bad environment, whose step `python -m rlstable.replay` repeats.

The bad numbers of the step are listed in the order in which a bad number spreads from array to array. Names of arrays
are as in `io.arrays`: `pipeline_state/qpos`, `obs/state`, `reward`, `info/steps`, and `action`.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstable.config import Config, ConfigError, load
from rlstable.config.guards import GuardsConfig, QuarantineConfig
from rlstable.config.supervise import IncidentConfig
from rlstable.guards.base import GREATEST_NORM
from rlstable.guards.env import ACCELERATIONS, COORDINATES
from rlstable.io.arrays import copy_out
from rlstable.io.files import one_line, read_json, subfolder, write_atomically
from rlstable.io.files import read as read_file
from rlstable.io.jsonl import to_json
from rlstable.io.kept_model import with_kept_model
from rlstable.io.printed_commands import command
from rlstable.ppo.state import Slot

FACTS, _ARRAYS = "incident.json", "arrays.npz"
_MOST_BAD = 20  # bad numbers in the JSON
_NO_LIMITS = dict.fromkeys(name for name in QuarantineConfig.model_fields if name != "enabled")

Arrays = Mapping[str, np.ndarray]
_PHYSICS = ("pipeline_state", "data")
_GROUPS = ("action", "physics", "obs", "reward", "done", "metrics", "info")
# Physics in the order of causes: forces, then motion, then derived values.
_IN_ORDER = ("ctrl", "act", "qacc", "qdd", "qacc_warmstart", "qvel", "qd", "qpos", "q")


@dataclasses.dataclass
class IncidentState:
    """Count of the written incidents as plain JSON, saved with the run."""

    count: int = 0
    last: int | None = None  # iteration of the last incident, rolled back iterations included


class Incident(NamedTuple):
    """A written incident: contents of `incident.json`, and arrays `before/...`, `after/...`, `action`, `key`."""

    folder: Path
    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]
    config: Config

    def part(self, name: str) -> dict[str, np.ndarray]:
        """The arrays with the prefix `before` or `after`, by their names without the prefix."""
        return {path.split("/", 1)[1]: array for path, array in self.arrays.items() if path.startswith(f"{name}/")}


def limits_of(guards: GuardsConfig) -> QuarantineConfig:
    """Limits beyond which a number is bad; without the quarantine guard only non-finite numbers are bad."""
    limits = guards.quarantine
    return limits if limits.enabled else limits.model_copy(update=_NO_LIMITS)


@dataclasses.dataclass(frozen=True)
class Incidents:
    """Writes captured environments: at most one per device and window of iterations, and `keep` in the whole run."""

    run_dir: Path
    config: IncidentConfig
    limits: QuarantineConfig
    causes: list[str]  # names of the flags of a slot, `guard/cause` each
    about: Mapping[str, Any]  # the facts that all incidents of the run share, `config` among them
    event: Callable[..., None]

    def wanted(self, state: IncidentState, at: int) -> bool:
        """Whether to write the environments captured in an iteration; `at` includes rolled back iterations."""
        config, last = self.config, state.last
        return state.count < config.keep and (last is None or at >= last + config.window)

    def opens_after(self, state: IncidentState, at: int) -> bool:
        """Whether to empty the slots after an iteration, so that the next bad environment is captured."""
        last = state.last
        return last is not None and self.wanted(state, at + 1) and at + 1 == last + self.config.window

    def write(
        self, state: IncidentState, slot: Slot, iteration: int, at: int, level: Mapping[str, str], num_envs: int
    ) -> None:
        """Writes the environments that the slots captured, in the order of their steps. An error never ends the run.

        `state` is changed in place. `slot` has the slots of all devices, on the host. `at` counts iterations with
        rolled back ones, `iteration` without. `level` has the keys of the section `precision`, and `num_envs` counts
        all devices.
        """
        records = slot.record.take(np.arange(len(slot.record)))
        captured = sorted((int(records["clock"][device]), device) for device in np.flatnonzero(slot.taken))
        for _, device in captured[: self.config.keep - state.count]:
            record = jax.tree.map(lambda x, device=device: x[device], records)
            try:
                facts, arrays = self._describe(record)
                facts["environment"] += int(device) * (num_envs // len(slot.record))
                facts |= {"iteration": iteration, "precision": dict(level)}
                facts |= {"device": int(device), "devices": len(slot.record), "num_envs": num_envs}
                path = write(self.run_dir / "incidents" / f"{iteration}-{state.count + 1}", facts, arrays)
            except Exception as error:
                self.event("incident_failed", iteration=iteration, error=str(error))
                break
            state.count += 1
            first = facts["bad"][0]["text"] if facts["bad"] else "none of the saved numbers"
            self.event("incident", causes=facts["causes"], first=first, path=str(path))
        state.last = at

    def _describe(self, record: Any) -> tuple[dict[str, Any], Any]:
        """The facts about one environment, and its arrays by name."""
        settings = self.about["config"]
        leaves, values = copy_out(record)
        arrays = {leaf.path: value for leaf, value in zip(leaves, values, strict=True)}
        flags, index, clock = (arrays.pop(name) for name in ("causes", "environment", "clock"))
        after = {name.removeprefix("after/"): x for name, x in arrays.items() if name.startswith("after/")}
        step, repeat = divmod(int(clock), settings["env"]["action_repeat"])
        unroll, step = divmod(step, settings["ppo"]["unroll_length"])
        bad_numbers = find_bad_numbers(after | {"action": arrays["action"]}, self.limits)
        facts = {
            "causes": [cause for cause, flag in zip(self.causes, flags, strict=True) if flag],
            "bad": [{**bad._asdict(), "text": str(bad)} for bad in bad_numbers[:_MOST_BAD]],
            "unroll": unroll,
            "step": step,
            "repeat": repeat,
            "environment": int(index),
            **self.about,
        }
        return facts, arrays


def write(folder: Path, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Path:
    """Writes an incident; a run that was killed and resumed keeps the existing one.

    The facts are written last: without them a folder is no incident.
    """
    if (folder / FACTS).exists():
        return folder
    npz = io.BytesIO()
    np.savez_compressed(npz, **arrays)  # type: ignore[arg-type]
    text = json.dumps(to_json({"replay": command("replay", folder), **facts}), indent=2, allow_nan=False)
    subfolder(subfolder(folder.parent.parent, folder.parent.name), folder.name)
    write_atomically(folder / _ARRAYS, npz.getvalue())
    write_atomically(folder / FACTS, text)
    return folder


def read(folder: Path) -> Incident:
    """Reads an incident; a `ConfigError` if it is missing or damaged, or another version of rlstable wrote it."""
    try:
        facts = read_json(folder / FACTS)
        # The checksums of the npz are checked. Without pickle, reading it runs no code.
        with np.load(io.BytesIO(read_file(folder / _ARRAYS)), allow_pickle=False) as arrays:
            config = load(facts["config"])
            config = config.model_copy(update={"env": with_kept_model(config.env, folder.parent.parent)})
            return Incident(folder, facts, dict(arrays), config)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder}: is no incident, it has no {Path(error.filename).name}; use a folder runs/.../incidents/<name>"
        ) from error
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{folder}: is damaged ({one_line(error)}); use another copy") from error


class BadNumber(NamedTuple):
    """A bad number."""

    array: str  # name of the array
    place: tuple[int, ...]  # index in the array
    value: float
    why: str  # `not finite`, or the limit that is exceeded

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.place))}]" if self.place else ""
        return f"{self.array}{place} = {self.value:g} ({self.why})"


def group(name: str) -> str:
    """Kind of an array, as the quarantine guard names it: action, physics, obs, reward, ...; else info."""
    head = name.split("/")[0]
    return "physics" if head in _PHYSICS else head if head in _GROUPS else "info"


def in_causal_order(names: Iterable[str]) -> list[str]:
    """Sorts names in the order in which a bad number spreads: action, accelerations, positions, observation, reward."""

    def rank(name: str) -> tuple[int, int, str]:
        kind, last = group(name), name.split("/", 1)[-1]
        is_ordered = kind == "physics" and last in _IN_ORDER
        return (_GROUPS.index(kind), _IN_ORDER.index(last) if is_ordered else len(_IN_ORDER), name)

    return sorted(names, key=rank)


def find_bad_numbers(arrays: Arrays, limits: QuarantineConfig) -> list[BadNumber]:
    """The first bad number of each array of one environment after its step, in the order in which it spreads."""
    floats = {name: array for name, array in arrays.items() if np.issubdtype(array.dtype, np.floating)}
    found = {name: bad for name, array in floats.items() if (bad := _first_bad(name, array, *_limit(name, limits)))}
    for kind in ("action", "physics", "metrics", "info"):
        of_kind = {name: array for name, array in floats.items() if group(name) == kind}
        if limits.max_other_norm is None or found.keys() & of_kind.keys():
            continue
        limit = min(limits.max_other_norm, GREATEST_NORM)
        # Float64 does not overflow here: all values are finite.
        if math.sqrt(sum(float(np.sum(np.square(array.astype(np.float64)))) for array in of_kind.values())) > limit:
            name = max(of_kind, key=lambda name: magnitude(of_kind[name]))
            index, value = _greatest(of_kind[name])
            found[name] = BadNumber(name, index, value, f"the norm of all {kind} is beyond {limit:g}")
    return [found[name] for name in in_causal_order(found)]


def magnitude(array: np.ndarray) -> float:
    """The largest finite absolute value; 0 if no number is finite."""
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def _limit(name: str, limits: QuarantineConfig) -> tuple[float | None, str]:
    """The limit of an array's elements, and the start of the text that names it."""
    kind, last = group(name), name.split("/", 1)[-1]
    if kind == "done":
        return 1.0, ""
    key = {"obs": "max_abs_observation", "reward": "max_abs_reward"}.get(kind)
    if kind == "physics":
        key = "max_abs_state" if last in COORDINATES else "max_abs_acceleration" if last in ACCELERATIONS else None
    return (None, "") if key is None else (getattr(limits, key), f"guards.quarantine.{key}=")


def _first_bad(name: str, array: np.ndarray, limit: float | None, key: str) -> BadNumber | None:
    wrong = ~np.isfinite(array)
    why = "not finite"
    if not wrong.any() and limit is not None:
        wrong, why = ~(np.abs(array) <= limit), f"beyond {key}{limit:g}"
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    return BadNumber(name, index, float(array[index]), why)


def _greatest(array: np.ndarray) -> tuple[tuple[int, ...], float]:
    index = tuple(int(i) for i in np.unravel_index(np.argmax(np.abs(array)), array.shape))
    return index, float(array[index])
