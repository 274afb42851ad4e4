"""The teacher of a run (`ppo.teacher`): loaded, checked, and kept in the run folder, so that a resume needs no other.

The copy is a run folder that holds the policy alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from rlstable.config import ConfigError
from rlstable.config.run import CheckpointConfig
from rlstable.device.trees import Env, Observation
from rlstable.io.checkpoint import Checkpoints
from rlstable.io.files import below, one_line
from rlstable.io.run_folder import KEPT_TEACHER, has_checkpoint, resumed_folders
from rlstable.policy.policy import Policy, load_policy
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.teacher import Teacher


def load_teacher(name: str | None, resume: str | None, run_dir: Path) -> Policy | None:
    """The policy of the run folder `name`, or its copy in the folder that the run resumes; None without a teacher."""
    if name is None:
        return None
    for held in resumed_folders(resume, run_dir):
        if has_checkpoint(kept := below(held, KEPT_TEACHER)):
            policy = load_policy(kept, "latest")
            if policy.host.get("teacher") == name:
                return policy
    try:
        policy = load_policy(name)
    except ConfigError as error:
        raise ConfigError(f"ppo.teacher: {error}") from None
    return dataclasses.replace(policy, host=policy.host | {"teacher": name})


def keep_teacher(policy: Policy | None, run_dir: Path) -> None:
    """Saves the teacher, if there is one, in a run folder that does not have it."""
    if policy is None:
        return
    host = {key: policy.host[key] for key in ("policy", "teacher")}
    at_once = CheckpointConfig.model_validate({"asynchronous": False})
    with Checkpoints(below(run_dir, KEPT_TEACHER), at_once) as kept:
        number = kept.latest() or 0
        if (kept.host_data(number) or {}).get("teacher") == host["teacher"]:
            return
        statistics = {"mean": policy.statistics.mean, "std": policy.statistics.std}
        arrays = {"params": policy.params["policy"], "statistics": statistics}
        if not kept.save(number + 1, {}, arrays, host):
            error = one_line(kept.error or OSError("no reason given"))
            raise ConfigError(f"hydra.run.dir: cannot save the teacher in {kept.directory}: {error}; make room there")


def teacher_of(policy: Policy, env: Env, history: int, observation: Observation) -> Teacher:
    """The teacher for environments with these observations, `[..., n]`, which `history` observations are stacked to.

    Raises `ConfigError` if the policy is recurrent, or was trained for other observations or actions.
    """
    networks, saved, key = policy.networks, policy.statistics, policy.networks.config.policy_obs_key
    mean, variance, std = (x[key] if isinstance(x, Mapping) else x for x in (saved.mean, saved.variance, saved.std))
    if networks.config.recurrent is not None:
        raise ConfigError(f"ppo.teacher: {policy.folder} is recurrent; a teacher must act on one observation")
    if networks.action_size != env.action_size:
        acts = f"has {networks.action_size} actions, and the environment {env.action_size}"
        raise ConfigError(f"ppo.teacher: {policy.folder} {acts}; choose a teacher of the same robot")
    named, size = isinstance(observation, Mapping), mean.shape[-1]
    sizes = {name: x.shape[-1] for name, x in (observation if named else {"state": observation}).items()}
    step = sizes.get(key if named else "state", 0) // history  # numbers of one observation in a stack
    if not step or size % step or size > step * history:
        has = ", ".join(f"{n} in {name!r}" for name, n in sizes.items())
        raise ConfigError(
            f"ppo.teacher: {policy.folder} reads {size} numbers in {key!r}, and the environment has {has}; train the "
            "teacher in this environment, for example with network.policy_obs_key=privileged_state"
        )
    own, now = policy.host["policy"].get("names", {}), names_of(env)
    for part in ("actions", key):
        if part in own and part in now and own[part] != now[part]:
            other = ", ".join(sorted({*own[part]} ^ {*now[part]})) or "another order"
            raise ConfigError(f"ppo.teacher: {policy.folder} has other names of the {part} than the robot: {other}")
    return Teacher(networks, policy.params, Statistics(saved.count, mean, variance, std))


def names_of(env: Env) -> dict[str, list[str]]:
    """Names of the actions, and by key of the parts of each observation, of a robot; empty for other environments."""
    names: dict[str, list[str]] = getattr(getattr(env, "unwrapped", env), "names_of_policy", {})
    return names
