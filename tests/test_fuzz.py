"""Fuzzing: one bad number anywhere in an iteration leaves parameters, optimizer and normaliser finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from toys import PointMass, State, assemble, compiled, finite, learnt, placed, tiny_config

from rlstable.envs.vector import VectorEnv
from rlstable.ppo.iteration import PPO
from rlstable.ppo.rollout import Rollout
from rlstable.ppo.state import Metrics, TrainState

pytestmark = pytest.mark.usefixtures("quick_compile")
# State before a step, state after a step, action of the policy, samples, gradient.
SITES = ("none", "before", "after", "action", "transition", "gradient")
VALUES = (
    float("nan"), float("inf"), -float("inf"), 1e30, -1e20, 3e38, 65504.0, -65504.0, 1e6, -1e3, 0.0, 1e-40, -1e-45,
)  # fmt: skip
ENVS, STEPS = 8, 8  # steps of each environment in an iteration


class Corruption(NamedTuple):
    """The place and the value of a bad number, as traced scalars."""

    site: Any
    leaf: Any
    index: Any
    value: Any
    step: Any

    @classmethod
    def of(cls, site: str, leaf: int = 0, index: int = 0, value: float = 0.0, step: int = 0) -> Corruption:
        with np.errstate(over="ignore"):
            return cls(*map(np.int32, (SITES.index(site), leaf, index)), np.float32(value), np.int32(step))

    def put(self, site: str, tree: Any, hit: Any = True, index: Any = None) -> Any:
        """Replaces one element of one float leaf if the corruption is of this site."""
        leaves, structure = jax.tree.flatten(tree)
        floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        chosen = self.leaf % len(floats)
        for number, i in enumerate(floats):
            flat = leaves[i].reshape(-1)
            place = (self.index if index is None else index) % flat.size
            mine = (self.site == SITES.index(site)) & (chosen == number) & hit
            leaves[i] = (
                flat.at[place].set(jnp.where(mine, self.value.astype(flat.dtype), flat[place])).reshape(leaves[i].shape)
            )
        return jax.tree.unflatten(structure, leaves)


HEALTHY = Corruption.of("none")


class Clocked:
    """An environment that counts its steps and knows its index."""

    def __init__(self, env: Any, corruption: Corruption | None = None):
        self.env = env
        self._corruption = corruption

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, rng: jax.Array) -> State:
        state = self.env.reset(rng)
        return state.replace(info={**state.info, "clock": jnp.int32(0), "lane": jnp.int32(0)})

    def step(self, state: State, action: jax.Array) -> State:
        info = dict(state.info)
        state = self.env.step(state, action)
        state = state.replace(info={**state.info, "clock": info["clock"] + 1})
        c = self._corruption
        hit = (info["clock"] % STEPS == c.step) & (info["lane"] == c.index % ENVS)
        return c.put("after", state, hit, c.index // ENVS)


@dataclasses.dataclass(frozen=True)
class FuzzedEnvs(VectorEnv):
    """Environments with a corrupted state before a step, or a corrupted action."""

    corruption: Any = None

    def repeat_action(self, state: Any, action: jax.Array, guard_state: Any, *more: Any) -> Any:
        hit = state.info["clock"][0] % STEPS == self.corruption.step
        state = self.corruption.put("before", state, hit)
        return super().repeat_action(state, self.corruption.put("action", action, hit), guard_state, *more)


@dataclasses.dataclass(frozen=True)
class CorruptedPPO(PPO):
    """PPO with corrupted samples or gradients."""

    corruption: Any = None

    def collect(self, state: TrainState, key: jax.Array) -> Rollout:
        rollout = super().collect(state, key)
        return rollout._replace(data=self.corruption.put("transition", rollout.data))

    def gradient(self, *args: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Corrupts the gradient of every minibatch, or of those chosen by the bits of the loss."""
        gradients, metrics = super().gradient(*args)
        bits = jax.lax.bitcast_convert_type(metrics["training/total_loss"], jnp.int32)
        hit = (self.corruption.step >= 4) | (bits % 2 == self.corruption.step % 2)
        return self.corruption.put("gradient", gradients, hit), metrics


@dataclasses.dataclass(frozen=True)
class FuzzedPPO(PPO):
    """PPO that takes the corruption from its training state."""

    def iteration(self, state: TrainState) -> tuple[TrainState, Metrics]:
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(PPO)}
        fields = {field.name: getattr(self.env, field.name) for field in dataclasses.fields(VectorEnv)}
        parts["env"] = FuzzedEnvs(**fields | {"env": Clocked(self.env.env.env, state.fault)}, corruption=state.fault)
        return CorruptedPPO(**parts, corruption=state.fault).iteration(state)


class Trained:
    """The compiled iteration, and a state after some iterations, whose guards know the usual levels."""

    def __init__(self, iterate: Callable[[TrainState], tuple[TrainState, Metrics]], state: TrainState, ppo: PPO):
        self.iterate, self.state, self.ppo = iterate, state, ppo

    def under(self, corruption: Corruption, state: TrainState | None = None) -> tuple[TrainState, Metrics]:
        state = self.state if state is None else state
        return self.iterate(dataclasses.replace(state, fault=corruption))


@pytest.fixture(scope="module")
def trained() -> Trained:
    ppo, state = assemble(tiny_config(guards={}), Clocked(PointMass()))
    info = {**state.env_state.info, "lane": np.arange(ENVS, dtype=np.int32)}
    state = placed(dataclasses.replace(state, env_state=state.env_state.replace(info=info), fault=HEALTHY))
    ppo = FuzzedPPO(**{field.name: getattr(ppo, field.name) for field in dataclasses.fields(PPO)})
    iterate = compiled(ppo).lower(state).compile()
    for _ in range(3):
        state, metrics = iterate(state)
    assert healthy(metrics)
    return Trained(iterate, state, ppo)


def healthy(metrics: Metrics) -> bool:
    return bool(metrics.healthy) and float(metrics.values["training/accepted_share"]) == 1.0


def missing(metrics: Metrics, episodes: int) -> set[str]:
    """Names of metrics that are not finite though they should be.

    Means over accepted updates or ended episodes are NaN if there was none.
    """
    values = {name: float(metrics.values[name]) for name in metrics.values}
    always = {"training/accepted_share", "training/valid_share", "training/reward_mean", "training/reward_greatest"}
    always |= {f"limiters/{name}/active" for name in ("kl", "reward", "reward_outlier", "observation_outlier")}

    def exists(name: str) -> bool:
        if name.startswith("episode/"):
            return episodes > 0
        return name in always or values["training/accepted_share"] > 0

    return {name for name, value in values.items() if exists(name) and not np.isfinite(value)}


corruptions = st.fixed_dictionaries(
    {
        "site": st.sampled_from(SITES[1:]),
        "leaf": st.integers(0, 63),
        "index": st.integers(0, 2**16),
        "value": st.sampled_from(VALUES) | st.floats(width=32),
        "step": st.integers(0, STEPS - 1),
    }
)


@given(corruptions)
@settings(max_examples=30, derandomize=True, database=None)
def test_one_bad_number_leaves_the_training_state_finite(trained: Trained, corruption: dict[str, Any]) -> None:
    """Runs the iteration with the corruption and three without, in which a corrupted environment may show.

    Two corruptions of samples are finite and trip a state guard instead: a negative standard deviation of the
    collecting policy, whose KL is NaN, and an end of an episode that is neither 0 nor 1. A corrupted observation
    within the limits is valid, but the KL limiter may roll the iteration back.
    """
    event(corruption["site"])
    allowed = abs(corruption["value"]) <= tiny_config(guards={}).guards.quarantine.max_abs_observation
    state = trained.state
    for own in (Corruption.of(**corruption), HEALTHY, HEALTHY, HEALTHY):
        before = int(state.counters.episodes)
        state, metrics = trained.under(own, state)
        assert finite(learnt(state))
        tripped = {name for name in trained.ppo.state_guards if metrics.trips[name].any()}
        assert not tripped or (own is not HEALTHY and corruption["site"] == "transition")
        assert tripped <= {"value_loss", "policy"}
        assert bool(metrics.healthy) == (not tripped)
        not_finite = missing(metrics, int(state.counters.episodes) - before)
        negative = corruption["site"] == "transition" and corruption["value"] < 0 and own is not HEALTHY
        assert not_finite <= ({"training/kl_mean"} if negative else set())
        rolled_back = allowed and metrics.values["limiters/kl/active"] > 0
        assert own is not HEALTHY or healthy(metrics) or rolled_back


@pytest.mark.parametrize("site", SITES[1:])
def test_nan_at_every_site_trips_its_guard_once(site: str, trained: Trained) -> None:
    """The corruptions of the tests above have an effect."""
    state, metrics = trained.under(Corruption.of(site, value=float("nan"), step=5))
    assert {name for name in metrics.trips if metrics.trips[name].any()} == {
        {"transition": "finite_samples", "gradient": "finite_update"}.get(site, "quarantine")
    }
    _, metrics = trained.under(HEALTHY, state)
    assert not any(metrics.trips[name].any() for name in metrics.trips)
