"""Resumes a run from its newest readable checkpoint, under the present configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from rlstable.config import Config, ConfigError, load
from rlstable.device import hosts
from rlstable.device.counter import WideCounter
from rlstable.device.precision import Level
from rlstable.io.checkpoint import Checkpoints
from rlstable.io.run_folder import copied_folder
from rlstable.io.versions import differences
from rlstable.ppo.state import TrainState
from rlstable.runner.configuration_changes import changes, value_at
from rlstable.runner.host_state import HostState
from rlstable.runner.seed_programs import SeedPrograms
from rlstable.runner.supervisor import Supervisor
from rlstable.supervise.memory_plan import MemoryPlan
from rlstable.supervise.snapshots import NAMES, SavedState, template

# Settings that a memory plan depends on; if one of them changed, the plan is made again.
_PLANNED_FOR = (
    "ppo.num_envs", "ppo.batch_size", "ppo.num_minibatches", "ppo.unroll_length", "ppo.gradient_accumulation",
    "env.envs_per_pass", "network", "supervise.memory",
)  # fmt: skip

# Settings of the task; if one of them changed, the saved first states are of another task.
_TASK = ("env.source", "env.name", "env.kwargs")


def resume(
    checkpoints: Checkpoints,
    config: Config,
    programs: SeedPrograms,
    supervisor: Supervisor,
    host: HostState,
    first_state: TrainState,
    key: Callable[[], jax.Array],
    event: Callable[..., None],
) -> TrainState:
    """Reads the newest readable checkpoint.

    Numbers that schedules and searches moved are kept; numbers that the user has changed start from here.

    Args:
        checkpoints: The run's checkpoints.
        config: The present configuration.
        programs: Receives the saved precision level.
        supervisor: Receives the saved snapshots.
        host: Receives the saved host state.
        first_state: A training state before its first iteration.
        key: Returns the random key for resets.
        event: Called as `event(kind, **fields)`.

    Returns:
        The training state for the present configuration.

    Raises:
        ConfigError: There is no readable checkpoint, or it does not fit the configuration.
    """
    folder, new = checkpoints.directory.parent, config.model_dump(mode="json")

    def template_of(saved: Mapping[str, Any]) -> SavedState:
        _read_host_state(saved, new, folder, programs, host)
        return _template(saved, programs, first_state)

    read: dict[str, Any] = {}

    def newest() -> int:
        read["tree"], read["saved"] = checkpoints.restore(template_of)
        return host.logged_iteration

    # The writer first, because it renames damaged checkpoints; the other processes read the same one.
    iteration = hosts.from_writer("resumed", newest)
    # All processes raise the error, before one of them writes a file.
    found = hosts.gather("found", hosts.is_writer() or (checkpoints.directory / str(iteration)).is_dir())
    if not all(found):
        raise ConfigError(
            f"resume: process {found.index(False)} does not find checkpoint {iteration} in {checkpoints.directory}, "
            "which process 0 reads; resume in a folder that all hosts share"
        )
    if not hosts.is_writer():
        read["tree"], read["saved"] = checkpoints.restore(template_of, iteration)
    tree, saved = read["tree"], read["saved"]
    old = saved["config"]
    changed = {
        "learning_rate": old["ppo"]["learning_rate"] != new["ppo"]["learning_rate"],
        "loss_scale": old["precision"] != new["precision"],
    }
    names = ("total_steps", *(name for name, is_changed in changed.items() if is_changed))
    tuning = {name: getattr(first_state.tuning, name) for name in names}
    state = supervisor.read(tree, {name: saved[name] for name in NAMES}, **tuning)
    envs_changed = (saved["num_envs"], old["env"]["restore_info"]) != (programs.num_envs, config.env.restore_info)
    envs_changed |= any(value_at(old, key) != value_at(new, key) for key in _TASK)
    if envs_changed:
        state = programs.setup.reset_envs_and_pool(state, key())
        event("environments_redrawn", num_envs=programs.num_envs)
    if envs_changed or changed["loss_scale"]:
        state = programs.to_current_level(state, key())
    if copied_folder(folder, config.resume) is not None:
        host.wandb_run_id = None  # the original run keeps its run of Weights & Biases
    state = programs.setup.with_empty_slots(state)
    event("resumed", iteration=host.iteration, version=saved["version"])
    for change in changes(old, config, folder):
        event("configuration_changed", **change._asdict())
    changed_versions = differences(saved["versions"], programs.versions)
    if changed_versions:
        event("versions_changed", **changed_versions)
    return state


def _read_host_state(
    saved: Mapping[str, Any], new: Mapping[str, Any], folder: Path, programs: SeedPrograms, host: HostState
) -> None:
    """Takes the host state of a checkpoint, without the parts that the present configuration `new` replaces.

    Raises:
        ConfigError: The run was trained on another number of devices.
    """
    if saved["devices"] != programs.mesh.size:
        remedy = f"resume it with devices={saved['devices']}"
        if hosts.count() > 1:
            remedy = f"start processes with {saved['devices']} devices in total"
        raise ConfigError(
            f"devices: the run in {folder} was trained on {saved['devices']} devices, not on {programs.mesh.size}, and "
            f"its environments and random numbers depend on the number; {remedy}"
        )
    host.copy_from(HostState.of(saved["host"]))
    if _saved_level(saved) != [new["precision"][key] for key in Level._fields]:
        host.attempts.lower_precision()  # another precision is configured
    if any(value_at(saved["config"], path) != value_at(new, path) for path in _PLANNED_FOR):
        host.plan = MemoryPlan()


def _template(saved: Mapping[str, Any], programs: SeedPrograms, first_state: TrainState) -> SavedState:
    """The shapes of the saved training state, at the level and size of its training."""
    config = load(saved["config"])
    state = template(programs.shapes(Level(*saved["level"]), saved["num_envs"], config.env.restore_info))
    total = WideCounter.zero() if config.ppo.schedules_by_progress else None
    tuning = dataclasses.replace(first_state.tuning, total_steps=total)
    snapshots: dict[str, Any] = {}
    for name in NAMES:
        is_other = saved[name] is not None and saved[name]["iteration"] != saved["host"]["iteration"]
        snapshots[name] = getattr(state, name) | {"tuning": tuning} if is_other else None
    return dataclasses.replace(state, tuning=tuning, incident=None, **snapshots)  # slots are not saved


def _saved_level(saved: Mapping[str, Any]) -> list[str]:
    """The precision level of the saved configuration."""
    return [saved["config"]["precision"][key] for key in Level._fields]
