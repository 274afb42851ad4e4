"""A trained policy, loaded from its run folder alone: no environment and no configuration file is needed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.config import ConfigError
from rlstable.config.guards import LimiterConfig
from rlstable.config.networks import NetworkConfig
from rlstable.config.schema import validate
from rlstable.device.counter import WideCounter
from rlstable.guards.inference import ActionContext, InferenceGuard
from rlstable.io.run_folder import require_one_seed
from rlstable.io.saved_policy import restore_policy
from rlstable.ppo.distributions import Normal
from rlstable.ppo.networks import Networks
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.state import TrainState

OnBad = Literal["fallback", "raise"]


class NonFiniteAction(FloatingPointError):
    """A policy that raises has no finite action for an observation."""


class Carry(NamedTuple):
    """Memory of `Policy.step`.

    Attributes:
        last_action: The last good action, `[..., A]`; the safe action before there was one.
        fallbacks: Actions replaced so far, over all batch elements.
    """

    last_action: jax.Array
    fallbacks: WideCounter


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy that maps observations to actions, none of which is NaN or infinite.

    An action is bad where it is not finite, was not before it was squashed, or where the observation that the policy
    network reads is not: a tanh or a clip would hide that. Each batch element is judged for itself.

    Attributes:
        networks: What computes.
        params: Its parameters, `{"policy": ...}`.
        statistics: Observation statistics.
        matmul: The precision of matrix products it was trained with.
        host: What was saved beside it: iteration, step, return; and `confirmed_return` if it is the confirmed best.
        safe_action: What `act` returns for a bad action, one finite number per action element; None for zeros.
        on_bad: `raise` raises instead. It waits for every action, and cannot be used inside jit, scan and vmap.

    Raises:
        ValueError: `safe_action` does not fit the action, or `on_bad` is neither.
    """

    networks: Networks
    params: Any
    statistics: Statistics
    matmul: str
    host: dict[str, Any] = dataclasses.field(default_factory=dict)
    safe_action: tuple[float, ...] | None = None
    on_bad: OnBad = "fallback"

    def __post_init__(self) -> None:
        if self.on_bad not in get_args(OnBad):
            raise ValueError(f"on_bad: {self.on_bad!r} is neither of {', '.join(get_args(OnBad))}")
        if self.safe_action is not None and not _is_action(self.safe_action, self.networks.action_size):
            raise ValueError(
                f"safe_action: {self.safe_action!r} is no action; allowed are None for zeros, or a tuple of "
                f"{self.networks.action_size} finite numbers, one per action element"
            )

    def act(self, obs: Any, key: jax.Array | None = None, deterministic: bool = True) -> jax.Array:
        """The action for an observation, the safe action where it would be bad.

        Args:
            obs: An array `[..., n]`, or a dictionary of them where the environment gives one.
            key: Random key; needed where the action is sampled.
            deterministic: The mode of the distribution rather than a sample.

        Returns:
            Action `[..., A]`, float32.

        Raises:
            ValueError: A sample is asked for without a key, or a policy that raises is used inside jit.
            NonFiniteAction: An action is bad and `on_bad` is `raise`.
        """
        return self._decide("act", None, obs, key, deterministic)[0]

    def start(self, batch_shape: tuple[int, ...] = ()) -> Carry:
        """The memory of `step` before the first action.

        Args:
            batch_shape: Leading axes of the observations; under vmap, those that `step` sees.
        """
        return Carry(self._guard.init(batch_shape).memory, WideCounter.zero())

    def step(
        self, carry: Carry, obs: Any, key: jax.Array | None = None, deterministic: bool = True
    ) -> tuple[jax.Array, Carry]:
        """Like `act`, but with the last good action in place of a bad one, and counted.

        Args:
            carry: From `start`, or from the step before.
            obs: An array `[..., n]`, or a dictionary of them where the environment gives one.
            key: Random key; needed where the action is sampled.
            deterministic: The mode of the distribution rather than a sample.

        Returns:
            Action `[..., A]`, float32, and the carry for the next step.

        Raises:
            ValueError: As for `act`, or the carry is of another batch shape.
            NonFiniteAction: An action is bad and `on_bad` is `raise`.
        """
        return self._decide("step", carry, obs, key, deterministic)

    def _decide(
        self, caller: str, carry: Carry | None, obs: Any, key: jax.Array | None, deterministic: bool
    ) -> tuple[jax.Array, Carry]:
        if key is None:
            if not deterministic:
                raise ValueError(f"{caller}: a sampled action needs a random key, e.g. key=jax.random.PRNGKey(0)")
            key = jax.random.PRNGKey(0)
        selected = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), self.networks.select(obs, acting=True))
        action, carry, trips = self._compiled(self.params, self.statistics, carry, selected, key, deterministic)
        if self.on_bad == "raise":
            _raise_if_bad(caller, trips, math.prod(action.shape[:-1]))
        return action, carry

    @property
    def _guard(self) -> InferenceGuard:
        zeros = (0.0,) * self.networks.action_size
        return InferenceGuard(zeros if self.safe_action is None else self.safe_action)

    @functools.cached_property
    def _compiled(self) -> Any:
        guarded = functools.partial(_guarded_action, self.networks, self.matmul, self._guard)
        return jax.jit(guarded, static_argnums=5)


def choose_action(
    networks: Networks,
    matmul: str,
    params: Any,
    statistics: Statistics,
    obs: Any,
    key: jax.Array,
    deterministic: bool,
) -> jax.Array:
    """The action that the networks give, unguarded: evaluation has to see what the policy does."""
    distribution, raw = _raw_action(networks, matmul, params, statistics, obs, key, deterministic)
    return distribution.action(raw)


def _raw_action(
    networks: Networks,
    matmul: str,
    params: Any,
    statistics: Statistics,
    obs: Any,
    key: jax.Array,
    deterministic: bool,
) -> tuple[Normal, jax.Array]:
    """The distribution, and the action `[..., A]` before it is squashed."""
    with jax.default_matmul_precision(None if matmul == "default" else matmul):
        distribution, _ = networks.distribution(params, statistics, obs)
    if deterministic:
        return distribution, distribution.loc
    return distribution, distribution.sample(jax.random.normal(key, distribution.loc.shape))


def _guarded_action(
    networks: Networks,
    matmul: str,
    guard: InferenceGuard,
    params: Any,
    statistics: Statistics,
    carry: Carry | None,
    obs: Any,
    key: jax.Array,
    deterministic: bool,
) -> tuple[jax.Array, Carry, jax.Array]:
    """The judged action, the next carry, and trips by the guard's causes; without a carry, as for a first step."""
    distribution, raw = _raw_action(networks, matmul, params, statistics, obs, key, deterministic)
    state = guard.init(raw.shape[:-1])
    fallbacks = WideCounter.zero()
    if carry is not None:
        if carry.last_action.shape != raw.shape:
            raise ValueError(
                f"step: the carry is of actions {carry.last_action.shape}, the observation of actions {raw.shape}; "
                f"begin with policy.start(batch_shape={raw.shape[:-1]})"
            )
        state, fallbacks = state._replace(memory=carry.last_action), carry.fallbacks
    # Critics may read what the policy does not.
    read = obs[networks.config.policy_obs_key] if isinstance(obs, Mapping) else obs
    action, _, state = guard.apply(ActionContext(distribution.action(raw), raw, read), state)
    return action, Carry(state.memory, fallbacks + jnp.sum(state.trips)), state.trips


def _is_action(x: Any, size: int) -> bool:
    # The comparison, which NaN fails, is with what the action's type holds.
    largest = float(np.finfo(np.float32).max)
    return (
        isinstance(x, tuple)
        and len(x) == size
        and all(isinstance(element, int | float | np.floating) and -largest <= element <= largest for element in x)
    )


def _raise_if_bad(caller: str, trips: jax.Array, total: int) -> None:
    if isinstance(trips, jax.core.Tracer):
        raise ValueError(
            f"{caller}: on_bad='raise' cannot raise inside jit, scan or vmap, where no value is known; "
            "use on_bad='fallback' there"
        )
    by_observation, by_action = np.asarray(trips).tolist()
    if by_observation + by_action > 0:
        raise NonFiniteAction(
            f"{caller}: {by_observation + by_action} of {total} actions are bad: {by_observation} for an observation "
            f"that is not finite, {by_action} not finite for an observation that is"
        )


def policy_arrays(state: TrainState) -> dict[str, Any]:
    """The arrays of a policy, as a checkpoint keeps them."""
    statistics = {"mean": state.normalizer.mean, "std": state.normalizer.std}
    return {"params": state.params["policy"], "statistics": statistics}


def policy_spec(networks: Networks, matmul: str) -> dict[str, Any]:
    """Specification of a policy's networks, as JSON data."""
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
    on_bad: OnBad = "fallback",
) -> Policy:
    """Loads the policy of a run.

    Args:
        run_dir: The run folder.
        which: `best`, `latest`, or an iteration. `best` is the policy that the end of the run has confirmed, else the
            best by a single evaluation, else the latest. Where the best or the latest is damaged, the next best or the
            one before is loaded, with a warning.
        safe_action: What stands in for a bad action, one finite number per action element; None for zeros.
        on_bad: `fallback` replaces bad actions, `raise` raises `NonFiniteAction`.

    Raises:
        ConfigError: There is no such run or checkpoint, or it is of another version.
        ValueError: `safe_action` does not fit the action, or `on_bad` is neither.
    """
    require_one_seed(Path(run_dir))
    arrays, host = restore_policy(Path(run_dir) / "checkpoints", which)
    spec: Mapping[str, Any] | None = host.get("policy")
    if spec is None:
        raise ConfigError(f"run_dir: the checkpoint in {run_dir} was not written by rlstable: it describes no policy")
    networks = Networks(
        validate(NetworkConfig, spec["network"]),
        validate(LimiterConfig, spec["limits"]),
        spec["action_size"],
        spec["normalize"],
        jnp.dtype(spec["dtype"]),
    )
    mean, std = arrays["statistics"]["mean"], arrays["statistics"]["std"]
    statistics = Statistics(WideCounter.zero(), mean, jax.tree.map(lambda s: s**2, std), std)
    return Policy(networks, {"policy": arrays["params"]}, statistics, spec["matmul"], host, safe_action, on_bad)
