"""Going on with a run from its checkpoints: what was saved, as the present configuration takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlstable.config import Config, ConfigError
from rlstable.config.renamed import updated
from rlstable.io.checkpoint import Checkpoints
from rlstable.ppo.state import TrainState
from rlstable.runner.configuration_changes import Change, changes, value_at
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


class Resumed(NamedTuple):
    """A run as it was saved.

    Attributes:
        state: The training state, of the level and with the environments that it was saved with.
        host: What was saved beside it.
        version: The rlstable that saved it.
        versions: Of that and of the libraries it stood on.
        other_precision: Whether another precision is configured now.
        other_envs: Whether there are to be more or fewer environments from now on.
        changes: The settings that differ from those that trained the checkpoint.
    """

    state: TrainState
    host: HostState
    version: str
    versions: dict[str, str]
    other_precision: bool
    other_envs: bool
    changes: list[Change]


def resume(
    checkpoints: Checkpoints, config: Config, devices: int, supervisor: Supervisor, fresh: TrainState
) -> Resumed:
    """Reads the newest checkpoint that can be read.

    Numbers that schedules and searches moved are kept, newly typed ones count from here. The supervisor continues from
    its state in the checkpoint.

    Args:
        checkpoints: The run's.
        config: The present configuration.
        devices: How many there are.
        supervisor: Receives what was saved, and which state is the last good one.
        fresh: A training state at its beginning.

    Raises:
        ConfigError: There is no checkpoint, none can be read, or it does not go with the configuration.
    """
    new = config.model_dump(mode="json")
    host = HostState()

    def like(saved: Mapping[str, Any]) -> Saved:
        """The shapes of the saved training state, at the level and size of its training."""
        nonlocal host
        if saved["devices"] != devices:
            raise ConfigError(
                f"devices: the run in {checkpoints.directory.parent} was trained on {saved['devices']} devices, here "
                f"are {devices}; its environments and random numbers are theirs, so resume it with "
                f"devices={saved['devices']}"
            )
        host = HostState.of(saved["host"])
        num_envs = _num_envs(saved)
        configured = [saved["config"]["precision"][key] for key in Level._fields]
        if configured != [new["precision"][key] for key in Level._fields]:
            host.rungs = Rungs()  # the ladder stands elsewhere, so it begins at its foot
        if any(_differs(value_at(saved["config"], path), value_at(new, path)) for path in _PLANNED_FOR):
            host.plan = MemoryPlan()
        supervisor.recall(host)
        state = supervisor.like(Level(*saved.get("level", configured)), num_envs)
        # Numbers, not shapes: what older checkpoints lack of these is as it is at the beginning. No slot is saved.
        beside = {name: getattr(state, name) | {"tuning": fresh.tuning} for name in NAMES}
        return dataclasses.replace(state, tuning=fresh.tuning, incident=None, **beside)

    tree, saved = checkpoints.restore(like, later=_LATER)
    saved = {**saved, "config": updated(saved["config"])}
    old = saved["config"]
    retyped = {
        "learning_rate": old["ppo"]["learning_rate"] != new["ppo"]["learning_rate"],
        "epochs": old["ppo"]["num_updates_per_batch"] != new["ppo"]["num_updates_per_batch"],
        "loss_scale": old["precision"] != new["precision"],
    }
    tuning = {name: getattr(fresh.tuning, name) for name, changed in retyped.items() if changed}
    return Resumed(
        supervisor.read(tree, {name: saved.get(name) for name in NAMES}, host.iteration, **tuning),
        host,
        saved["version"],
        saved.get("versions", {"rlstable": saved["version"]}),
        retyped["loss_scale"],
        _num_envs(saved) != supervisor.num_envs,
        changes(saved.get("config"), config, checkpoints.directory.parent),
    )


def _num_envs(saved: Mapping[str, Any]) -> int:
    """How many environments a checkpoint has; an older one says it in its plan and its configuration."""
    configured: int = saved["config"]["ppo"]["num_envs"]
    return int(saved.get("num_envs", HostState.of(saved["host"]).plan.num_envs or configured))


def _differs(old: Any, new: Any) -> bool:
    """Whether a saved value is not the present one; keys that did not exist when a section was saved do not count."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**new, **old} != new
    return bool(old != new)
