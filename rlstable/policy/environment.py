"""The environment in which a saved policy plays, on the requested physics."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from rlstable.compilation.xla import keep_programs
from rlstable.config import Config, ConfigError
from rlstable.envs.load import load
from rlstable.io.trusted_folders import require_trust
from rlstable.policy import Policy
from rlstable.policy.saved_run import SavedRun


@dataclasses.dataclass(frozen=True)
class PolicyEnvironment:
    """An environment for a saved policy.

    Attributes:
        config: Of the run, with the episodes and the physics that are asked for.
        env: One environment.
        backend: What simulates it, None where the environment has no choice.
    """

    config: Config
    env: Any
    backend: str | None


def load_policy_environment(
    run: SavedRun, episodes: int, deterministic: bool = True, backend: str | None = None
) -> PolicyEnvironment:
    """Loads the environment for a run's policy.

    Args:
        run: Whose policy.
        episodes: How many are to be played at once.
        deterministic: The mean action, or a sample.
        backend: Physics as `env.backend` names it; None for that of the training.

    Raises:
        ConfigError: The environment cannot be made on that physics, the policy was trained for another, or the folder
            names code that this user has not agreed to run.
    """
    require_trust(run.folder / "config.yaml", run.config, run.trust)
    looks = run.config.eval.model_copy(update={"num_envs": episodes, "deterministic": deterministic})
    config = run.config_on(backend).model_copy(update={"eval": looks})
    keep_programs(config.compile_cache)
    loaded = load(config.env, config.eval.env_kwargs)
    _require_fit(run.policy, loaded.env, config)
    return PolicyEnvironment(config, loaded.env, loaded.backend)


def _require_fit(policy: Policy, env: Any, config: Config) -> None:
    observation = policy.networks.select(jax.eval_shape(env.reset, jax.random.PRNGKey(0)).obs)
    sizes = jax.tree.map(lambda x: x.shape, (observation, policy.statistics.mean))
    if sizes[0] != sizes[1] or env.action_size != policy.networks.action_size:
        raise ConfigError(
            f"backend: {config.env.backend or config.env.name} has observations {sizes[0]} and {env.action_size} "
            f"actions, the policy was trained for {sizes[1]} and {policy.networks.action_size}; choose another"
        )
