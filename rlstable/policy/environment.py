"""Loads the environment of a saved policy, on the requested physics backend."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from rlstable.compilation.xla import enable_program_cache
from rlstable.config import Config, ConfigError
from rlstable.envs.interface import check
from rlstable.envs.load import load
from rlstable.io.private_folder import require_trust
from rlstable.policy import Policy
from rlstable.policy.saved_run import SavedRun


@dataclasses.dataclass(frozen=True)
class PolicyEnvironment:
    """An environment for a saved policy."""

    config: Config  # of the run, with the requested number of episodes and physics backend
    env: Any  # one environment with Brax's Env interface
    backend: str | None  # None if the environment offers no choice


def load_policy_environment(
    run: SavedRun, episodes: int, deterministic: bool = True, backend: str | None = None
) -> PolicyEnvironment:
    """Loads the environment for a run's policy; arguments as for `policy.playback.evaluate_run`.

    Raises:
        ConfigError: The environment does not support the backend, its observations or actions do not fit the policy, or
            the folder names code that the user does not trust.
    """
    require_trust(run.folder / "config.yaml", run.config, run.trust)
    evaluation = run.config.eval.model_copy(update={"num_envs": episodes, "deterministic": deterministic})
    env = run.config.env if backend is None else run.config.env.model_copy(update={"backend": backend})
    config = run.config.model_copy(update={"eval": evaluation, "env": env})
    enable_program_cache(config.compile_cache)
    loaded = load(config.env, config.eval.env_kwargs)
    _require_fit(run.policy, loaded.env, config, backend)
    return PolicyEnvironment(config, loaded.env, loaded.backend)


def _require_fit(policy: Policy, env: Any, config: Config, backend: str | None) -> None:
    """Checks that the policy can play in an environment, whose class may have changed since training."""
    if config.env.source == "import":
        check(env, config.env.name, config.network)
    observation = policy.networks.select(jax.eval_shape(env.reset, jax.random.PRNGKey(0)).obs)
    given, read = (
        {jax.tree_util.keystr(path).replace("'", '"'): math.prod(x.shape) for path, x in leaves}
        for leaves in map(jax.tree_util.tree_leaves_with_path, (observation, policy.statistics.mean))
    )
    differing = [
        f"the class gives {given.get(key, 0)} numbers in obs{key}, the policy reads {read.get(key, 0)}"
        for key in sorted(given.keys() | read.keys())
        if given.get(key) != read.get(key)
    ]
    if env.action_size != policy.networks.action_size:
        differing.append(f"the class takes {env.action_size} actions, the policy gives {policy.networks.action_size}")
    if differing:
        remedy = "choose another backend" if backend else "play the policy with the class that trained it"
        key = "backend" if backend else "env.name"
        raise ConfigError(f"{key}: {config.env.name} does not fit the policy: {'; '.join(differing)}; {remedy}")
