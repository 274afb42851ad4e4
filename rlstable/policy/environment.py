"""Loads the environment of a saved policy, on the requested physics backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from rlstable.compilation.xla import enable_program_cache
from rlstable.config import Config, ConfigError
from rlstable.envs.load import load
from rlstable.io.trusted_folders import require_trust
from rlstable.policy import Policy
from rlstable.policy.saved_run import SavedRun


@dataclasses.dataclass(frozen=True)
class PolicyEnvironment:
    """An environment for a saved policy.

    Attributes:
        config: Configuration of the run, with the requested number of episodes and physics backend.
        env: One environment with Brax's Env interface.
        backend: Physics backend; None if the environment offers no choice.
    """

    config: Config
    env: Any
    backend: str | None


def load_policy_environment(
    run: SavedRun, episodes: int, deterministic: bool = True, backend: str | None = None
) -> PolicyEnvironment:
    """Loads the environment for a run's policy.

    Args:
        run: Run with the policy.
        episodes: Number of episodes to play at once.
        deterministic: Whether the policy plays the mean action instead of a sample.
        backend: Physics backend, a value of `env.backend`; None for the backend of training.

    Raises:
        ConfigError: The environment does not support the backend, its observations or actions do not fit the policy, or
            the folder names code that the user does not trust.
    """
    require_trust(run.folder / "config.yaml", run.config, run.trust)
    evaluation = run.config.eval.model_copy(update={"num_envs": episodes, "deterministic": deterministic})
    config = run.config_on(backend).model_copy(update={"eval": evaluation})
    enable_program_cache(config.compile_cache)
    loaded = load(config.env, config.eval.env_kwargs)
    _require_fit(run.policy, loaded.env, config)
    return PolicyEnvironment(config, loaded.env, loaded.backend)


def _require_fit(policy: Policy, env: Any, config: Config) -> None:
    observation = policy.networks.select(jax.eval_shape(env.reset, jax.random.PRNGKey(0)).obs)
    sizes = jax.tree.map(lambda x: x.shape, (observation, policy.statistics.mean))
    if sizes[0] != sizes[1] or env.action_size != policy.networks.action_size:
        raise ConfigError(
            f"backend: {config.env.backend or config.env.name} has observations {sizes[0]} and {env.action_size} "
            f"actions, the policy was trained for {sizes[1]} and {policy.networks.action_size}; "
            "choose another backend"
        )
