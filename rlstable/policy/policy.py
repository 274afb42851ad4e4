"""A trained policy, loaded from its run folder without an environment or a configuration file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.config import ConfigError
from rlstable.config.guards import LimiterConfig
from rlstable.config.networks import NetworkConfig
from rlstable.config.schema import first_line, validate
from rlstable.device.counter import WideCounter
from rlstable.device.trees import Observation, Params, PyTree
from rlstable.guards.base import all_finite, select
from rlstable.io.checkpoint import restore_policy
from rlstable.io.run_folder import located, require_one_seed
from rlstable.ppo.networks import Networks
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.state import TrainState


class Carry(NamedTuple):
    """State of `Policy.step` between calls."""

    last_action: jax.Array  # the last good action, [..., A]; at first the safe action
    fallbacks: WideCounter  # number of replaced actions, over all batch elements
    memory: jax.Array | None = None  # state of a recurrent policy, [..., recurrent_size]; None without one


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy that maps observations to actions, and never returns NaN or infinity.

    An action is bad if the observation, the raw action or the squashed action is not finite. Checking only the squashed
    action is not enough, because tanh and clip hide infinities. Each batch element is checked alone.
    """

    networks: Networks
    params: Params  # {"policy": ...}
    statistics: Statistics
    matmul: str  # precision of matrix products during training
    host: dict[str, Any] = dataclasses.field(default_factory=dict)  # saved data: iteration, step, return
    safe_action: tuple[float, ...] | None = None  # replaces a bad action of `act`; None for zeros
    folder: Path | None = None  # run folder; None for a policy that was not loaded

    def __post_init__(self) -> None:
        safe, size = self.safe_action, self.networks.action_size
        if safe is not None and not (isinstance(safe, tuple) and len(safe) == size and all(map(_is_number, safe))):
            raise ValueError(
                f"safe_action: {safe!r} is not an action; use None for zeros, or a tuple of {size} finite numbers, one "
                "per action element"
            )

    def __repr__(self) -> str:
        name, step = self.host.get("config", {}).get("env", {}).get("name", ""), self.host.get("step")
        sizes = f"observation size {self._obs_size}", f"action size {self.networks.action_size}"
        saved = "" if step is None else f"step {step:,}", "" if self.folder is None else f"folder {self.folder}"
        return f"Policy({', '.join(filter(None, (name, *sizes, *saved)))})"

    def __getstate__(self) -> dict[str, Any]:
        """Without compiled functions, so that a policy that has acted can be pickled."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def act(self, obs: Observation, key: jax.Array | None = None, deterministic: bool = True) -> jax.Array:
        """The action for an observation, float32 `[..., A]`; the safe action if the action is bad.

        Args:
            obs: An array or nested list `[..., n]`, or a dictionary of them as the environment returns it.
            key: Random key; needed for a sampled action.
            deterministic: Whether to return the mode of the distribution instead of a sample.

        Raises:
            ValueError: The observation is not an array of the policy's size, a sampled action has no key, or the policy
                is recurrent, so that an action depends on earlier observations.
        """
        if self.networks.config.recurrent is not None:
            raise ValueError("act: this policy is recurrent; call start at each reset, and step for each action")
        return self._decide("act", None, obs, key, deterministic)[0]

    def start(self, batch_shape: tuple[int, ...] = ()) -> Carry:
        """The carry of `step` before the first action, for observations `[*batch_shape, n]` inside any vmap."""
        config = self.networks.config
        safe = jnp.asarray(self.safe_action or (0.0,) * self.networks.action_size, jnp.float32)
        memory = None if config.recurrent is None else jnp.zeros((*batch_shape, config.recurrent_size))
        return Carry(jnp.broadcast_to(safe, (*batch_shape, *safe.shape)), WideCounter.zero(), memory)

    def step(
        self, carry: Carry, obs: Observation, key: jax.Array | None = None, deterministic: bool = True
    ) -> tuple[jax.Array, Carry]:
        """Like `act`, but replaces a bad action by the last good action, and counts replacements in the carry.

        The first carry is `start`'s, in each episode for a recurrent policy. Raises `ValueError` as `act`, or if the
        carry has another batch shape.
        """
        return self._decide("step", carry, obs, key, deterministic)

    def _decide(
        self, caller: str, carry: Carry | None, obs: Observation, key: jax.Array | None, deterministic: bool
    ) -> tuple[jax.Array, Carry]:
        if key is None:
            if not deterministic:
                raise ValueError(f"{caller}: a sampled action needs a random key, e.g. key=jax.random.PRNGKey(0)")
            key = jax.random.PRNGKey(0)
        selected = self._selected(caller, obs)
        action, carry = self._compiled(self.params, self.statistics, carry, selected, key, deterministic)
        return action, carry

    def _selected(self, caller: str, obs: Observation) -> Observation:
        """The policy's part of an observation, float32; raises `ValueError` if it has not the size the policy reads."""
        key, selected = self.networks.config.policy_obs_key, self.networks.select(obs, acting=True)
        named = isinstance(selected, Mapping)
        name = f"the observation {key!r}" if named else "the observation"
        try:
            array = jnp.asarray(selected[key] if named else selected, jnp.float32)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{caller}: {name} is not an array of numbers: {first_line(error)}") from error
        if array.shape[-1:] != (self._obs_size,):
            numbers = array.shape[-1] if array.shape else "no axis of"
            raise ValueError(
                f"{caller}: {name} has {numbers} numbers (shape {array.shape}), this policy reads {self._obs_size}"
            )
        return {key: array} if named else array

    @property
    def _obs_size(self) -> int:
        mean = self.statistics.mean
        return int((mean[self.networks.config.policy_obs_key] if isinstance(mean, Mapping) else mean).shape[-1])

    @functools.cached_property
    def _compiled(self) -> jax.stages.Wrapped:
        networks = self.networks

        def guarded_action(
            params: Params,
            statistics: Statistics,
            carry: Carry | None,
            obs: Observation,
            key: jax.Array,
            deterministic: bool,
        ) -> tuple[jax.Array, Carry]:
            before = None if carry is None else carry.memory
            chosen = choose_action(networks, self.matmul, params, statistics, obs, key, deterministic, before)
            action, raw, memory = chosen
            carry = self.start(raw.shape[:-1]) if carry is None else carry
            if carry.last_action.shape != raw.shape:
                raise ValueError(
                    f"step: the carry holds actions {carry.last_action.shape}, the observation gives actions "
                    f"{raw.shape}; start with policy.start(batch_shape={raw.shape[:-1]})"
                )
            # The critic's observations do not matter for the action.
            policy_obs = obs[networks.config.policy_obs_key] if isinstance(obs, Mapping) else obs
            ok = all_finite((policy_obs, raw, action), raw.ndim - 1)
            action = select(ok, action, carry.last_action)
            if memory is not None:  # a bad observation must not stay in the state
                memory = select(jnp.isfinite(memory).all(axis=-1), memory, before)
            return action, Carry(action, carry.fallbacks + jnp.sum(~ok, dtype=jnp.int32), memory)

        return jax.jit(guarded_action, static_argnums=5)


class Chosen(NamedTuple):
    """An action `[..., A]` after and before squashing, and the new state of a recurrent policy, else None."""

    action: jax.Array
    raw: jax.Array
    memory: jax.Array | None


def choose_action(
    networks: Networks,
    matmul: str,
    params: Params,
    statistics: Statistics,
    obs: Observation,
    key: jax.Array,
    deterministic: bool,
    memory: jax.Array | None = None,
) -> Chosen:
    """The networks' action without a guard: evaluation must see bad actions. `memory` is a recurrent policy's state."""
    with jax.default_matmul_precision(None if matmul == "default" else matmul):
        distribution, memory = networks.act(params, statistics, obs, memory)
    raw = distribution.loc if deterministic else distribution.sample(jax.random.normal(key, distribution.loc.shape))
    return Chosen(distribution.action(raw), raw, memory)


def _is_number(x: object) -> bool:
    """Whether a number is finite in float32."""
    largest = float(np.finfo(np.float32).max)
    return isinstance(x, int | float | np.floating) and bool(-largest <= x <= largest)


def policy_arrays(state: TrainState) -> dict[str, PyTree]:
    statistics = {"mean": state.normalizer.mean, "std": state.normalizer.std}
    return {"params": state.params["policy"], "statistics": statistics}


def policy_spec(networks: Networks, matmul: str) -> dict[str, object]:
    """The specification of a policy's networks in a checkpoint, as JSON data."""
    return {
        "network": networks.config.model_dump(mode="json"),
        "limits": networks.limits.model_dump(mode="json"),
        "action_size": networks.action_size,
        "normalize": networks.normalize,
        "dtype": jnp.dtype(networks.dtype).name,
        "matmul": matmul,
    }


def load_policy(
    run_dir: str | Path,
    which: Literal["best", "latest"] | int = "best",
    *,
    safe_action: tuple[float, ...] | None = None,
) -> Policy:
    """Loads the policy of a run.

    Args:
        run_dir: The run folder, or `demo:<name>` for a policy of the package, such as `demo:humanoid`.
        which: `best`, `latest`, or the number of a checkpoint. `best` is the policy confirmed at the end of the run,
            else the best policy by a single evaluation, else the latest. If the best or latest checkpoint is damaged,
            the next best or the previous one is loaded, with a warning.
        safe_action: Replacement for a bad action, one finite number per action element; None for zeros.

    Raises:
        ConfigError: The run or checkpoint does not exist, or was written by another version.
        ValueError: `safe_action` does not fit the action.
    """
    run_dir = located(run_dir)
    require_one_seed(run_dir)
    arrays, host = restore_policy(run_dir, which)
    spec: Mapping[str, Any] | None = host.get("policy")
    if spec is None:
        raise ConfigError(f"run_dir: the checkpoint in {run_dir} holds no policy; choose a run folder of rlstable")
    networks = Networks(
        validate(NetworkConfig, spec["network"]),
        validate(LimiterConfig, spec["limits"]),
        spec["action_size"],
        spec["normalize"],
        jnp.dtype(spec["dtype"]),
    )
    mean, std = arrays["statistics"]["mean"], arrays["statistics"]["std"]
    statistics = Statistics(WideCounter.zero(), mean, jax.tree.map(lambda s: s**2, std), std)
    params = {"policy": arrays["params"]}
    return Policy(networks, params, statistics, spec["matmul"], host, safe_action, run_dir)
