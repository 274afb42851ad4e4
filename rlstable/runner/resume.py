"""Resumes a seed from its newest readable checkpoint, under the present configuration, and logs what has changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstable.config import ConfigError, load
from rlstable.config.schema import flat
from rlstable.device import hosts
from rlstable.device.counter import WideCounter
from rlstable.device.precision import Level
from rlstable.io.scores import TASK, scored_by, value_at
from rlstable.io.versions import differences
from rlstable.ppo.state import TrainState
from rlstable.runner.host_state import Draw, HostState
from rlstable.runner.programs import Programs
from rlstable.runner.seed import Seed
from rlstable.supervise.memory import MemoryPlan
from rlstable.supervise.return_watch import WatchState
from rlstable.supervise.snapshots import NAMES, SavedState, template
from rlstable.supervise.tally import SignState

# Settings that a memory plan depends on; if one of them changed, the plan is made again.
_PLANNED_FOR = (
    "ppo.num_envs", "ppo.batch_size", "ppo.num_minibatches", "ppo.unroll_length", "ppo.gradient_accumulation",
    "env.envs_per_pass", "network", "supervise.memory",
)  # fmt: skip

# Settings that do not change training: where the run starts, logs and caches. A resume checks `devices` itself.
_NO_TRAINING = frozenset({"resume", "seeds", "devices", "logging", "render", "compile_cache"})


def resume(seed: Seed) -> None:
    """Reads the newest readable checkpoint into a seed that has not trained: training state, host state and snapshots.

    Numbers that schedules and searches moved are kept; numbers that the user has changed start from here. Raises
    `ConfigError` without a readable checkpoint, or if the checkpoint does not fit the configuration.
    """
    config, host, programs, checkpoints = seed.config, seed.host, seed.programs, seed.checkpoints
    first_state = seed.state
    folder, new = checkpoints.directory.parent, config.model_dump(mode="json")

    def template_of(saved: Mapping[str, Any]) -> SavedState:
        _read_host_state(saved, new, folder, programs, host)
        return _template(saved, programs, host, first_state)

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
    loss_scale_changed = old["precision"] != new["precision"]
    tuning: dict[str, Any] = {"total_steps": first_state.tuning.total_steps}
    rate_changed = old["ppo"]["learning_rate"] != new["ppo"]["learning_rate"]
    adapted = old["ppo"]["learning_rate_schedule"] == "adaptive_kl" != new["ppo"]["learning_rate_schedule"]
    if rate_changed or adapted:
        tuning["learning_rate"] = first_state.tuning.learning_rate
    if loss_scale_changed:
        tuning["loss_scale"] = first_state.tuning.loss_scale
    enabled, snapshots = config.supervise.recovery.enabled, seed.snapshots
    state = snapshots.load(tree, host.iteration, {name: saved[name] for name in NAMES} if enabled else {}, **tuning)
    host.step = int(state.counters.env_steps)
    seed.saving.steps[host.logged_iteration] = host.logged_step
    if scored_by(old) != scored_by(new):
        host.best_return, host.last_return = None, None
        host.watch = WatchState(collapses=host.watch.collapses)
        host.signs = SignState(records=host.signs.records, episodes=host.signs.episodes)
        snapshots.best.clear()
        snapshots.candidate.clear()
    if enabled and snapshots.last_good.empty:
        snapshots.last_good.keep(state, host.iteration, host.step)
    setup, num_envs = programs.setup(host), programs.num_envs(host)
    envs_changed = (saved["num_envs"], old["env"]["restore_info"]) != (num_envs, config.env.restore_info)
    task_changed = any(value_at(old, key) != value_at(new, key) for key in TASK)
    envs_changed |= task_changed
    envs_changed |= old["env"].get("stagger", config.env.stagger) != config.env.stagger  # a run from before the key
    if envs_changed:
        state = setup.reset_envs_and_pool(state, seed.keys.between(Draw.CONVERSION), keep_models=not task_changed)
        seed.event("environments_redrawn", num_envs=num_envs)
    if envs_changed or loss_scale_changed:
        state = programs.converted(host, state, seed.keys.between(Draw.CONVERSION))
    if not (folder / "wandb").is_dir():
        host.wandb_run_id = None  # a copy: the original keeps its run of Weights & Biases
    seed.state = setup.with_empty_slots(state)
    seed.event("resumed", iteration=host.iteration, version=saved["version"])
    for setting, before, now in changes(old, new):
        seed.event("configuration_changed", key=setting, old=before, new=now)
    changed_versions = differences(saved["versions"], programs.versions)
    if changed_versions:
        seed.event("versions_changed", **changed_versions)


def _read_host_state(
    saved: Mapping[str, Any], new: Mapping[str, Any], folder: Path, programs: Programs, host: HostState
) -> None:
    """Takes the host state of a checkpoint, without the parts that the present configuration `new` replaces.

    Raises `ConfigError` if the run was trained on another number of devices.
    """
    if saved["devices"] != programs.mesh.size:
        remedy = f"resume it with devices={saved['devices']}"
        if hosts.count() > 1:
            remedy = f"start processes with {saved['devices']} devices in total"
        raise ConfigError(
            f"devices: the run in {folder} was trained on {saved['devices']} devices, not on {programs.mesh.size}, and "
            f"its environments and random numbers depend on the number; {remedy}"
        )
    host.read(saved["host"])
    if any(saved["config"]["precision"][key] != new["precision"][key] for key in Level._fields):
        host.attempts.lower_precision()  # another precision is configured
    if any(value_at(saved["config"], path) != value_at(new, path) for path in _PLANNED_FOR):
        host.plan = MemoryPlan()


def _template(saved: Mapping[str, Any], programs: Programs, host: HostState, first_state: TrainState) -> SavedState:
    """The shapes of the saved training state, at the level and size of its training."""
    config = load(saved["config"])
    state = template(programs.shapes(host, Level(*saved["level"]), saved["num_envs"], config.env.restore_info))
    total = WideCounter.zero() if config.ppo.schedules_by_progress else None
    tuning = dataclasses.replace(first_state.tuning, total_steps=total)
    snapshots: dict[str, Any] = {}
    for name in NAMES:
        is_other = saved[name] is not None and saved[name]["iteration"] != saved["host"]["iteration"]
        snapshots[name] = getattr(state, name) | {"tuning": tuning} if is_other else None
    return dataclasses.replace(state, tuning=tuning, incident=None, **snapshots)  # slots are not saved


def changes(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The settings that differ from the configuration of a checkpoint: dotted key, old and new value."""
    old, new = flat(saved), flat(present)
    found = [(key, old.get(key), new.get(key)) for key in {**new, **old} if key.partition(".")[0] not in _NO_TRAINING]
    return [(key, was, now) for key, was, now in found if was != now and repr(was) != repr(now)]  # NaN equals NaN
