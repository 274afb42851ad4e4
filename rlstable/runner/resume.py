"""Resumes a run from its newest readable checkpoint, under the present configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from rlstable.config import Config, ConfigError
from rlstable.config.renamed import updated
from rlstable.io.checkpoint import Checkpoints
from rlstable.io.versions import differences
from rlstable.ppo.state import TrainState
from rlstable.runner import renamed_guards
from rlstable.runner.configuration_changes import changes, value_at
from rlstable.runner.host_state import HostState
from rlstable.runner.supervisor import Supervisor
from rlstable.supervise.ladder import Level, Rungs
from rlstable.supervise.memory_plan import MemoryPlan
from rlstable.supervise.snapshots import NAMES, Saved

# Parts that older checkpoints lack: numbers of `Tuning`, and the states to go back to.
_LATER = (
    "tuning/clip_scale", "tuning/policy_rate_scale", "tuning/critic_rate_scale", "tuning/policy_hold", *NAMES,
)  # fmt: skip
# Settings that a memory plan depends on; if one of them changed, the plan is made again.
_PLANNED_FOR = (
    "ppo.num_envs", "ppo.batch_size", "ppo.num_minibatches", "ppo.unroll_length", "ppo.gradient_accumulation",
    "env.envs_per_pass", "network", "supervise.memory",
)  # fmt: skip


def resume(
    checkpoints: Checkpoints,
    config: Config,
    devices: int,
    supervisor: Supervisor,
    host: HostState,
    fresh: TrainState,
    key: Callable[[], jax.Array],
    event: Callable[..., None],
) -> TrainState:
    """Reads the newest readable checkpoint.

    Numbers that schedules and searches moved are kept; newly typed numbers start from here.

    Args:
        checkpoints: The run's checkpoints.
        config: The present configuration.
        devices: Number of devices.
        supervisor: Receives the saved level and snapshots.
        host: Receives the saved host state.
        fresh: A training state before its first iteration.
        key: Returns the random key for resets.
        event: Called as `event(kind, **fields)`.

    Returns:
        The training state for the present configuration.

    Raises:
        ConfigError: There is no readable checkpoint, or it does not fit the configuration.
    """
    new = config.model_dump(mode="json")

    def like(saved: Mapping[str, Any]) -> Saved:
        """The shapes of the saved training state, at the level and size of its training."""
        if saved["devices"] != devices:
            raise ConfigError(
                f"devices: the run in {checkpoints.directory.parent} was trained on {saved['devices']} devices, here "
                f"are {devices}; its environments and random numbers are theirs, so resume it with "
                f"devices={saved['devices']}"
            )
        host.become(HostState.of(saved["host"]))
        num_envs = _num_envs(saved)
        configured = [saved["config"]["precision"][key] for key in Level._fields]
        if configured != [new["precision"][key] for key in Level._fields]:
            host.rungs = Rungs()  # another precision is configured, so the ladder starts at its lowest level
        if any(_differs(value_at(saved["config"], path), value_at(new, path)) for path in _PLANNED_FOR):
            host.plan = MemoryPlan()
        supervisor.recall()
        state = supervisor.like(Level(*saved.get("level", configured)), num_envs)
        # Values, not shapes: numbers that an old checkpoint lacks have their first value. Slots are not saved.
        beside = {name: getattr(state, name) | {"tuning": fresh.tuning} for name in NAMES}
        state = dataclasses.replace(state, tuning=fresh.tuning, incident=None, **beside)
        return renamed_guards.under_old_names(state) if renamed_guards.has_old_names(saved["config"]) else state

    tree, saved = checkpoints.restore(like, later=_LATER)
    if renamed_guards.has_old_names(saved["config"]):
        tree = renamed_guards.under_new_names(tree)
    saved = {**saved, "config": updated(saved["config"])}
    old = saved["config"]
    retyped = {
        "learning_rate": old["ppo"]["learning_rate"] != new["ppo"]["learning_rate"],
        "epochs": old["ppo"]["num_updates_per_batch"] != new["ppo"]["num_updates_per_batch"],
        "loss_scale": old["precision"] != new["precision"],
    }
    tuning = {name: getattr(fresh.tuning, name) for name, changed in retyped.items() if changed}
    state = supervisor.read(tree, {name: saved.get(name) for name in NAMES}, **tuning)
    other_envs = _num_envs(saved) != supervisor.num_envs
    if other_envs:
        state = supervisor.setup.reset_envs_and_pool(state, key())
        event("environments_redrawn", num_envs=supervisor.num_envs)
    if other_envs or retyped["loss_scale"]:
        state = supervisor.to_current_level(state, key())
    state = supervisor.setup.with_empty_slots(state)
    event("resumed", iteration=host.iteration, version=saved["version"])
    for change in changes(saved.get("config"), config, checkpoints.directory.parent):
        event("configuration_changed", **change._asdict())
    different = differences(saved.get("versions", {"rlstable": saved["version"]}), supervisor.versions)
    if different:
        event("versions_changed", **different)
    return state


def _num_envs(saved: Mapping[str, Any]) -> int:
    """How many environments a checkpoint has; an older one says it in its plan and its configuration."""
    configured: int = saved["config"]["ppo"]["num_envs"]
    return int(saved.get("num_envs", HostState.of(saved["host"]).plan.num_envs or configured))


def _differs(old: Any, new: Any) -> bool:
    """Whether a saved value is not the present one; keys that did not exist when a section was saved do not count."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**new, **old} != new
    return bool(old != new)
