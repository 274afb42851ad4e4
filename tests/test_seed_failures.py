"""The failures that this project was started for: each is shown without guards, and does not happen with guards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_faults import armed
from toys import GUARDS_OFF, PointMass, assemble, compiled, placed, tiny_config

from rlstable import faults
from rlstable.config.faults import FaultConfig
from rlstable.device.counter import WideCounter
from rlstable.policy import Policy
from rlstable.policy.evaluator import make_evaluator, snapshot_of
from rlstable.policy.policy import choose_action
from rlstable.ppo.build import init_state, make_networks
from rlstable.ppo.normalizer import init as no_statistics
from rlstable.ppo.state import Metrics, TrainState

pytestmark = pytest.mark.usefixtures("quick_compile")
NEVER = {"site": "adam", "start": 1_000}
GUARDS: dict[str, dict[str, Any]] = {"off": GUARDS_OFF, "default": {}}
STEPS = 64  # of an iteration of the miniature


def finite(tree: Any) -> bool:
    return all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(tree))


def learnt(state: TrainState) -> Any:
    return state.params, state.opt_state, state.normalizer


def train(iterate: Any, state: TrainState, iterations: int) -> tuple[TrainState, list[Metrics]]:
    history = []
    for _ in range(iterations):
        state, metrics = iterate(state)
        history.append(metrics)
    return state, history


def column(history: list[Metrics], name: str) -> np.ndarray:
    return np.array([float(metrics.values[name]) for metrics in history])


def test_float16_policy_gives_nan_without_and_the_safe_action_with_the_guard() -> None:
    """A weight beyond 65,504 is infinite in float16, and infinity from two sides is NaN."""
    networks = make_networks(tiny_config(guards={}, precision={"network": "float16"}), action_size=2)
    params = networks.init(jax.random.PRNGKey(0), jax.ShapeDtypeStruct((4,), jnp.float32))
    params = jax.tree.map(lambda x: x * 1e6, params)
    statistics = no_statistics(jax.ShapeDtypeStruct((4,), jnp.float32))
    observation = np.float32([[0.3, -0.2, 0.5, 0.1]])
    action, _ = choose_action(networks, "default", params, statistics, observation, jax.random.PRNGKey(0), True)
    assert not np.isfinite(action).any()
    policy = Policy(networks, params, statistics, "default", safe_action=(0.5, -0.5))
    np.testing.assert_array_equal(policy.act(observation), [[0.5, -0.5]])


def test_step_counter_and_schedule_pass_32_bits() -> None:
    """Brax's int32 counter wraps to -1,627 million; this counter and the schedule that reads it do not."""
    steps, more = 2_000_683_008, 666_894_336
    with np.errstate(over="ignore"):
        assert np.int32(steps) + np.int32(more) == steps + more - 2**32 < 0
    assert int(jnp.int32(steps) + jnp.int32(more)) == steps + more - 2**32
    assert int(WideCounter.of(steps) + more) == steps + more

    ppo, state = assemble(tiny_config(total_steps=2**32, ppo={"learning_rate_schedule": "linear"}))
    start = 2**31 - 2 * STEPS - 1
    counters = dataclasses.replace(state.counters, env_steps=WideCounter.of(start))
    state, history = train(compiled(ppo), placed(dataclasses.replace(state, counters=counters)), 5)
    counted = [int(metrics.counters.env_steps) for metrics in history]
    assert counted == [start + STEPS * (i + 1) for i in range(5)]
    assert counted[1] < 2**31 < counted[2]
    own = ppo.config.ppo
    expected = [
        own.learning_rate + (own.learning_rate_schedule_min_lr - own.learning_rate) * n / 2**32 for n in counted
    ]
    np.testing.assert_allclose(column(history, "training/learning_rate"), expected, rtol=1e-6)
    assert finite(learnt(state))


@functools.cache
def orbit(guards: str) -> tuple[Any, TrainState]:
    """Isaac Lab's policy, a Gaussian whose standard deviations are plain parameters, with enormous rewards."""
    config = tiny_config(
        guards=GUARDS[guards], ppo={"entropy_cost": 0.0}, network={"distribution_type": "normal"}, fault=NEVER
    )
    ppo, state = armed(config, PointMass())
    fault = FaultConfig(site="reward", value=1e6, probability=0.02, start=5, iterations=20)
    state = placed(dataclasses.replace(state, fault=faults.as_data(fault)))
    return compiled(ppo).lower(state).compile(), state


def begun(state: TrainState, std: float, rate: float) -> TrainState:
    """The state with other standard deviations and another learning rate."""
    params = jax.tree.map(lambda x: x, state.params)
    params["policy"]["params"]["std_param"]["value"] = jnp.full(2, jnp.float32(std))
    tuning = dataclasses.replace(state.tuning, learning_rate=jnp.float32(rate))
    return placed(dataclasses.replace(state, params=params, tuning=tuning))


@pytest.mark.slow
def test_orbit_explodes_or_gets_nan_deviations_only_without_guards() -> None:
    iterate, state = orbit("off")
    exploded, history = train(iterate, begun(state, 0.5, 0.1), 40)
    assert column(history, "training/v_loss").max() > 2e10
    assert finite(exploded.params)
    state = begun(state, 0.05, 0.03)
    deviations = []
    for _ in range(40):
        state, _ = iterate(state)
        deviations.append(np.asarray(state.params["policy"]["params"]["std_param"]["value"]))
    assert np.isnan(deviations[-1]).all()
    assert not finite(learnt(state))

    iterate, state = orbit("default")
    for std, rate in ((0.5, 0.1), (0.05, 0.03)):
        after, history = train(iterate, begun(state, std, rate), 40)
        assert finite(learnt(after))
        assert np.nanmax(column(history, "training/v_loss")) < 1e3  # NaN if no update was accepted
        assert np.nanmin(column(history, "training/policy_dist_min_std")) >= 1e-4
        assert column(history, "training/accepted_share").mean() > 0.8
        assert sum(metrics.trips["reward_outlier"][0] for metrics in history) > 10


def test_trellis_underflows_in_plain_optax() -> None:
    """Epsilon, 1e-8, underflows to 0 in float16, and so does the square of a small gradient."""
    optimizer = optax.adam(1e-3, eps=1e-8)
    params = jnp.zeros(2, jnp.float16)
    updates, _ = optimizer.update(jnp.array([1e-4, 0.0], jnp.float16), optimizer.init(params), params)
    after = np.asarray(optax.apply_updates(params, updates))
    assert after.dtype == np.float16
    assert np.isneginf(after[0])
    assert np.isnan(after[1])


@functools.cache
def miniature(guards: str) -> tuple[Any, TrainState]:
    ppo, state = armed(tiny_config(guards=GUARDS[guards], fault=NEVER), PointMass())
    state = placed(state)
    return compiled(ppo).lower(state).compile(), state


def underflowing(guards: str) -> tuple[TrainState, list[Metrics]]:
    iterate, state = miniature(guards)
    fault = FaultConfig(site="adam", start=1, iterations=20, probability=0.5)  # while second moments are small
    return train(iterate, placed(dataclasses.replace(state, fault=faults.as_data(fault))), 100)


def test_trellis_ends_in_nan_without_guards() -> None:
    state, _ = underflowing("off")
    assert not finite(state.params)


def test_trellis_is_survived_with_guards() -> None:
    state, history = underflowing("default")
    assert finite(learnt(state))
    trips = np.sum([metrics.trips["finite_update"] for metrics in history], axis=0)
    assert trips[1] >= 5
    assert trips[0] == trips[2] == 0
    assert column(history, "training/accepted_share").mean() > 0.85
    assert column(history[-20:], "training/reward_mean").mean() > column(history[:20], "training/reward_mean").mean()


@functools.cache
def returns(guards: str, factor: float) -> tuple[tuple[float, ...], bool]:
    """Returns of three seeds with the learning rate times a factor, and whether all states are finite."""
    iterate, evaluate, states = whole(guards)
    values, sane = [], True
    for state in states:
        tuning = dataclasses.replace(state.tuning, learning_rate_scale=jnp.float32(factor))
        state, _ = train(iterate, placed(dataclasses.replace(state, tuning=tuning)), 30)
        sane &= finite(learnt(state))
        value = evaluate.evaluate([snapshot_of(state, jax.random.PRNGKey(7))])[0]["eval/episode_reward"]
        values.append(float("nan") if value is None else value)
    return tuple(values), sane


@functools.cache
def whole(guards: str) -> tuple[Any, Any, list[TrainState]]:
    """Program, evaluator and first states of three seeds, for a training that learns in 30 iterations."""
    config = tiny_config(
        guards=GUARDS[guards],
        env={"episode_length": 100},
        eval={"num_evals": 1, "num_envs": 64},
        ppo={
            "num_envs": 32, "batch_size": 32, "num_minibatches": 4, "num_updates_per_batch": 4, "unroll_length": 8,
            "learning_rate": 3e-3, "entropy_cost": 1e-3, "discounting": 0.95,
        },
        network={"policy_hidden_layer_sizes": (32,), "value_hidden_layer_sizes": (32,)},
    )  # fmt: skip
    ppo, first = assemble(config)
    states = [init_state(ppo, jax.random.PRNGKey(seed), first.env_state, first.reset_pool) for seed in range(3)]
    evaluator = make_evaluator(config, ppo.networks, lambda _: contextlib.nullcontext(), print)
    return compiled(ppo), evaluator, states


@pytest.mark.slow  # docs/survival.md and docs/recovery.md show this too
def test_learning_rate_a_thousand_times_too_high_ruins_rhvae_only_without_guards() -> None:
    clean, _ = returns("default", 1.0)
    assert min(clean) > 60.0
    destroyed, sane = returns("off", 1000.0)
    assert not sane or np.median(destroyed) < 0.1 * np.median(clean)  # an untrained policy falls off the edge
    saved, sane = returns("default", 1000.0)
    assert sane
    assert np.median(saved) >= 0.95 * np.median(clean)


@pytest.mark.slow  # the tests of limiters check the division too
def test_batches_of_one_sample_explode_only_without_guards() -> None:
    """One sample has no variance: the second is divided by almost 0, so the networks get values of millions.

    The KL divergence explodes with guards too, because the first update of an iteration is never passed over.
    """
    one = {"num_envs": 1, "batch_size": 1, "num_minibatches": 1, "unroll_length": 1}
    worst = {}
    for name, guards in GUARDS.items():
        ppo, state = assemble(tiny_config(guards=guards, ppo=one))
        state, history = train(compiled(ppo), placed(state), 200)
        worst[name] = np.nanmax(column(history, "training/v_loss"))
        assert np.nanmax(column(history, "training/kl_mean")) >= 1e6  # as far as it is counted
        assert name == "off" or (finite(learnt(state)) and column(history, "training/accepted_share").mean() > 0.95)
    assert worst["off"] > 1e7
    assert worst["default"] < 1e-4 * worst["off"]
