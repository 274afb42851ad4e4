"""A trained policy, loaded from its run folder alone: no environment and no configuration file is needed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from rlstable.config import ConfigError, LimiterConfig, NetworkConfig
from rlstable.counter import WideCounter
from rlstable.io.checkpoint import restore_policy
from rlstable.ppo.networks import Networks
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.state import TrainState


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy that maps observations to actions.

    Attributes:
        networks: What computes.
        params: Its parameters, `{"policy": ...}`.
        statistics: Observation statistics.
        matmul: The precision of matrix products it was trained with.
        host: What was saved beside it: iteration, step, return.
    """

    networks: Networks
    params: Any
    statistics: Statistics
    matmul: str
    host: dict[str, Any] = dataclasses.field(default_factory=dict)

    def act(self, obs: Any, key: jax.Array | None = None, deterministic: bool = True) -> jax.Array:
        """The action for an observation.

        Args:
            obs: An array `[..., n]`, or a dictionary of them where the environment gives one.
            key: Random key; needed where the action is sampled.
            deterministic: The mode of the distribution rather than a sample.

        Returns:
            Action `[..., A]`, float32.

        Raises:
            ValueError: A sample is asked for without a key.
        """
        if key is None:
            if not deterministic:
                raise ValueError("act: a sampled action needs a random key, e.g. key=jax.random.PRNGKey(0)")
            key = jax.random.PRNGKey(0)
        selected = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), self.networks.select(obs))
        return self._compiled(self.params, self.statistics, selected, key, deterministic)

    @functools.cached_property
    def _compiled(self) -> Any:
        return jax.jit(functools.partial(choose_action, self.networks, self.matmul), static_argnums=4)


def choose_action(
    networks: Networks,
    matmul: str,
    params: Any,
    statistics: Statistics,
    obs: Any,
    key: jax.Array,
    deterministic: bool,
) -> jax.Array:
    """The pure function behind `Policy.act`, which evaluation uses too."""
    with jax.default_matmul_precision(None if matmul == "default" else matmul):
        distribution, _ = networks.distribution(params, statistics, obs)
        if deterministic:
            return distribution.mode()
        return distribution.action(distribution.sample(jax.random.normal(key, distribution.loc.shape)))


def policy_arrays(state: TrainState) -> dict[str, Any]:
    """The arrays of a policy, as a checkpoint keeps them."""
    statistics = {"mean": state.normalizer.mean, "std": state.normalizer.std}
    return {"params": state.params["policy"], "statistics": statistics}


def policy_spec(networks: Networks, matmul: str) -> dict[str, Any]:
    """What has to be known to compute with those arrays, as JSON data."""
    return {
        "network": networks.config.model_dump(mode="json"),
        "limits": networks.limits.model_dump(mode="json"),
        "action_size": networks.action_size,
        "normalize": networks.normalize,
        "dtype": jnp.dtype(networks.dtype).name,
        "matmul": matmul,
    }


def load_policy(run_dir: str | Path, which: Literal["best", "latest"] | int = "best") -> Policy:
    """Loads the policy of a run.

    Args:
        run_dir: The run folder.
        which: `best` by evaluation (the latest where none was evaluated), `latest`, or an iteration.

    Raises:
        ConfigError: There is no such run or checkpoint.
    """
    arrays, host = restore_policy(Path(run_dir) / "checkpoints", which)
    spec: Mapping[str, Any] | None = host.get("policy")
    if spec is None:
        raise ConfigError(f"run_dir: the checkpoint in {run_dir} was not written by rlstable: it describes no policy")
    networks = Networks(
        NetworkConfig.model_validate(spec["network"]),
        LimiterConfig.model_validate(spec["limits"]),
        spec["action_size"],
        spec["normalize"],
        jnp.dtype(spec["dtype"]),
    )
    mean, std = arrays["statistics"]["mean"], arrays["statistics"]["std"]
    statistics = Statistics(WideCounter.zero(), mean, jax.tree.map(lambda s: s**2, std), std)
    return Policy(networks, {"policy": arrays["params"]}, statistics, spec["matmul"], host)
