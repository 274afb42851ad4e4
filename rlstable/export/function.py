"""A policy as one pure function from observations to actions, with the metadata for its users."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.config.robot import PhysicsConfig
from rlstable.io.private_folder import require_trust
from rlstable.io.versions import versions
from rlstable.policy.policy import choose_action
from rlstable.policy.saved_run import SavedRun
from rlstable.ppo.networks import joined
from rlstable.robot.contract import contract
from rlstable.robot.environment import RobotEnv

OBSERVATION, ACTION = "observation", "action"
MEMORY, NEW_MEMORY = "memory", "new_memory"  # the state of a recurrent policy, before and after a step
_FORMAT = 1  # of the metadata


@dataclasses.dataclass(frozen=True)
class PolicyFunction:
    """The deterministic action of a policy: normaliser, network and squashing in one function.

    For a recurrent policy the last elements of the argument are its state, and those of the result its new state.
    """

    apply: Callable[[jax.Array], jax.Array]  # from float32 [B, observation_size] to [B, A]; JAX can trace it
    observation_size: int  # number of observation elements that the policy reads
    action_size: int
    memory: int  # size of the state of a recurrent policy, or 0
    samples: np.ndarray  # observations to compare with, [1000, observation_size], spread over 0.1 to 10 deviations
    metadata: dict[str, object]  # of inputs, outputs and training for a user of the file, as JSON data
    robot: RobotEnv | None  # the robot of env=robot; None for other sources

    def actions(self, observations: np.ndarray) -> np.ndarray:
        """Actions `[B, action_size]` for observations `[B, observation_size]`."""
        return np.asarray(jax.jit(self.apply)(observations))

    @property
    def inputs(self) -> dict[str, int]:
        """Sizes of the parts of the argument, by the name of an input."""
        return {OBSERVATION: self.observation_size} | ({MEMORY: self.memory} if self.memory else {})

    @property
    def outputs(self) -> dict[str, int]:
        """Sizes of the parts of the result, by the name of an output."""
        return {ACTION: self.action_size} | ({NEW_MEMORY: self.memory} if self.memory else {})

    @property
    def texts(self) -> dict[str, str]:
        """The metadata with all values as strings, for file formats that allow only strings.

        A list of names or numbers is separated by commas, as mjlab writes it; everything else is JSON.
        """
        return {key: _text(value) for key, value in self.metadata.items()}


def policy_function(run: SavedRun) -> PolicyFunction:
    """The function of a run's policy, always in float32; for a robot with the contract in its metadata.

    Raises `ConfigError` without the robot's model, or if a folder of another user names terms outside rlstable.
    """
    policy = run.policy
    networks = dataclasses.replace(policy.networks, dtype=jnp.float32)
    key = networks.config.policy_obs_key
    named = isinstance(policy.statistics.mean, Mapping)
    mean, std = (np.asarray(part[key] if named else part) for part in (policy.statistics.mean, policy.statistics.std))
    # The parameters become constants of the program. Host arrays are not tied to a device.
    params, statistics = jax.tree.map(np.asarray, (policy.params, policy.statistics))

    size = networks.output_size - networks.action_size

    def apply(observation: jax.Array) -> jax.Array:
        memory = None
        if size:
            observation, memory = jnp.split(observation, [mean.size], axis=-1)
        obs = {key: observation} if named else observation
        unused = jnp.zeros(2, jnp.uint32)
        chosen = choose_action(networks, "highest", params, statistics, obs, unused, True, memory)
        return joined(chosen.action, chosen.memory)

    spread = std if networks.normalize else np.ones_like(std)
    noise = np.random.default_rng(0).normal(size=(1000, *mean.shape)) * np.geomspace(0.1, 10.0, 1000)[:, None]
    samples = (mean + spread * noise).astype(np.float32)
    if size:
        samples = np.concatenate([samples, np.tanh(np.random.default_rng(1).normal(size=(1000, size)))], axis=1)
        samples = samples.astype(np.float32)
    squashed = networks.config.distribution_type == "tanh_normal"
    robot = _robot(run)
    metadata = {
        "format": _FORMAT,
        "env": run.config.env.name,
        "iteration": run.iteration,
        "step": run.step,
        "observation": {"input": OBSERVATION, "size": int(mean.size), "key": key if named else None}
        | {"history": run.config.env.history, "history_order": "oldest first", "history_at_reset": "first observation"}
        | {"normalised": "inside", "mean": mean.tolist(), "std": std.tolist()},
        "action": {"output": ACTION, "size": networks.action_size, "range": [-1.0, 1.0] if squashed else None},
        "action_repeat": run.config.env.action_repeat,
        "precision": {"computes_in": "float32", "trained_in": jnp.dtype(policy.networks.dtype).name},
        "config": _without_paths(run.config.model_dump(mode="json")),
        "versions": versions(),
    }
    if size:
        metadata["memory"] = {"input": MEMORY, "output": NEW_MEMORY, "size": size, "at_reset": 0.0}
    metadata |= {} if robot is None else contract(robot, key)
    return PolicyFunction(apply, int(mean.size), networks.action_size, size, samples, metadata, robot)


def _robot(run: SavedRun) -> RobotEnv | None:
    """The environment of a robot's run, without physics; None for other sources."""
    env = run.config.env
    if env.xml is None or env.task is None:
        return None
    if env.own_terms:
        require_trust(run.folder / "config.yaml", run.config.env, run.trust)
    return RobotEnv(env.model_file, env.task.model_copy(update={"physics": PhysicsConfig()}))


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration, with the name of the robot's file in the place of its path."""
    path = config["env"]["xml"]
    return config if path is None else {**config, "env": {**config["env"], "xml": Path(path).name}}


def _text(value: object) -> str:
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
