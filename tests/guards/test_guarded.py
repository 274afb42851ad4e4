"""Guards in loops of other trainers: an optimizer that rejects bad updates, and environments that are replaced."""

from __future__ import annotations

import functools
from typing import Any

import brax.envs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from commands import printed_by
from jax.sharding import Mesh, PartitionSpec

from rlstable import guards
from rlstable.guards import EnvParts, Quarantine, exhausted, guarded, quarantined, trips

pytestmark = pytest.mark.usefixtures("quick_compile")
PARAMS = {"w": jnp.array([3.0, -2.0, 1.0]), "b": jnp.array(0.5)}
GOOD = {"w": jnp.array([0.3, -0.2, 0.1]), "b": jnp.array(0.05)}
NAN, HUGE, SPIKE = (jax.tree.map(lambda x, f=factor: f * x, GOOD) for factor in (jnp.nan, 1e21, 1e6))


def trained(optimizer: Any, gradients: list[Any]) -> tuple[Any, Any]:
    """The parameters and the state after one update with each gradient, in one scan."""

    def step(carry: tuple[Any, Any], gradient: Any) -> tuple[tuple[Any, Any], None]:
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *gradients)
    first = PARAMS, optimizer.init(PARAMS)
    return jax.jit(lambda carry: jax.lax.scan(step, carry, stacked)[0])(first)


def same(x: Any, y: Any) -> None:
    """Equal up to the rounding of scans with other lengths."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-9), x, y)


def moved(params: Any) -> float:
    """How far ten good updates after the bad ones move the parameters: 0 if Adam is frozen, NaN if they are lost."""
    return float(jnp.abs(params["w"] - PARAMS["w"]).max())


def test_guards_load_jax_and_optax_only() -> None:
    code = "import sys, rlstable.guards; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = set(eval(printed_by(code)[-1]))
    assert {"jax", "numpy", "optax", "rlstable"} <= loaded
    heavy = {"brax", "mujoco", "flax", "hydra", "omegaconf", "orbax", "pydantic", "scipy", "wandb", "yaml"}
    assert not loaded & (heavy - loaded_by_jax_and_optax())
    assert not [name for name in guards.__all__ if not hasattr(guards, name)]


@functools.cache
def loaded_by_jax_and_optax() -> set[str]:
    code = "import sys, jax, optax; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    return set(eval(printed_by(code)[-1]))


@pytest.mark.parametrize(
    "bad, cause", [(NAN, "finite_update/gradient"), (HUGE, "finite_update/gradient"), (SPIKE, "spike/spike")]
)
def test_bad_gradient_changes_nothing_and_is_counted_by_its_cause(bad: Any, cause: str) -> None:
    clean, kept = trained(guarded(optax.adam(0.1)), [GOOD] * 12)
    params, state = trained(guarded(optax.adam(0.1)), [*[GOOD] * 6, bad, *[GOOD] * 6])
    same(params, clean)
    same(state.inner, kept.inner)  # the moments of Adam
    assert {name: count for name, count in trips(state).items() if count} == {cause: 1}
    assert (int(state.total), int(state.streak)) == (1, 0)


def test_without_a_guard_the_same_gradients_end_learning() -> None:
    clean = moved(trained(optax.adam(0.1), [GOOD] * 20)[0])
    assert np.isnan(moved(trained(optax.adam(0.1), [NAN, *[GOOD] * 20])[0]))
    frozen = moved(trained(optax.chain(optax.adam(0.1)), [HUGE, *[GOOD] * 20])[0])
    assert not frozen > 0.1 * clean  # NaN, or no step: the second moment is infinite
    last = optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=5)
    assert np.isnan(moved(trained(last, [*[NAN] * 100, *[GOOD] * 20])[0]))  # it accepts the sixth
    assert not moved(trained(last, [HUGE, *[GOOD] * 20])[0]) > 0.1 * clean


def test_hundred_bad_updates_in_a_row_are_rejected_and_exhaust_the_patience() -> None:
    params, state = trained(guarded(optax.adam(0.1)), [*[GOOD] * 6, *[NAN] * 100])
    same(params, trained(guarded(optax.adam(0.1)), [GOOD] * 6)[0])
    assert exhausted(state, 100) and not exhausted(state, 101)
    assert (int(state.streak), int(state.total)) == (100, 100)


def test_update_that_makes_parameters_too_large_is_rejected() -> None:
    params, state = trained(guarded(optax.sgd(1e4), max_parameter_norm=100.0, spike_factor=None), [GOOD])
    same(params, PARAMS)
    assert trips(state) == {"finite_update/gradient": 0, "finite_update/parameters": 1, "finite_update/optimizer": 0}


LABELS = {"w": "first", "b": "second"}


@pytest.mark.parametrize(
    "composed",
    [
        optax.chain(optax.clip_by_global_norm(1.0), guarded(optax.adam(0.1))),
        guarded(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))),
        guarded(optax.MultiSteps(optax.adam(0.1), 2)),
        optax.multi_transform({"first": guarded(optax.adam(0.1)), "second": guarded(optax.sgd(0.1))}, LABELS),
    ],
    ids=["chain", "of a chain", "of MultiSteps", "multi_transform"],
)
def test_guarded_optimizer_composes_with_those_of_optax(composed: Any) -> None:
    params, _ = trained(composed, [*[GOOD] * 4, NAN, NAN, *[GOOD] * 4])
    same(params, trained(composed, [GOOD] * 8)[0])


def test_sum_of_multi_steps_keeps_nan_so_that_a_guard_inside_of_it_rejects_for_ever_and_says_so() -> None:
    params, state = trained(optax.MultiSteps(guarded(optax.adam(0.1)), 2), [*[GOOD] * 4, NAN, *[GOOD] * 9])
    same(params, trained(optax.MultiSteps(guarded(optax.adam(0.1)), 2), [GOOD] * 4)[0])
    assert exhausted(state.inner_opt_state, 5)


def test_each_seed_of_a_vmap_is_guarded_alone() -> None:
    optimizer = guarded(optax.adam(0.1))
    params, gradients = (jax.tree.map(lambda x: jnp.stack([x, x]), tree) for tree in (PARAMS, GOOD))
    gradients["b"] = gradients["b"].at[1].set(jnp.nan)
    updates, state = jax.vmap(optimizer.update)(gradients, jax.vmap(optimizer.init)(params), params)
    assert jax.tree.map(lambda x: bool(jnp.any(x[0] != 0)), updates) == {"w": True, "b": True}
    assert jax.tree.map(lambda x: bool(jnp.any(x[1] != 0)), updates) == {"w": False, "b": False}
    assert state.streak.tolist() == [0, 1] and exhausted(state, 1)
    assert trips(state)["finite_update/gradient"] == 1


def test_devices_decide_alike_on_their_mean_gradient() -> None:
    optimizer, devices = guarded(optax.adam(0.1)), jax.devices()[:2]
    assert len(devices) == 2

    def update(gradient: Any) -> Any:
        gradient = jax.tree.map(lambda x: jax.lax.pmean(x[0], "batch"), gradient)
        updates, state = optimizer.update(gradient, optimizer.init(PARAMS), PARAMS)
        return jax.tree.map(lambda x: x[None], (updates, state.streak))

    gradients = jax.tree.map(lambda x: jnp.stack([x, jnp.nan * x]), GOOD)
    split = PartitionSpec("batch")
    mapped = jax.shard_map(update, mesh=Mesh(np.array(devices), ("batch",)), in_specs=split, out_specs=split)
    updates, streak = jax.jit(mapped)(gradients)
    assert streak.tolist() == [1, 1] and not np.any(updates["w"])


def test_update_without_parameters_is_named() -> None:
    optimizer = guarded(optax.adam(0.1))
    with pytest.raises(ValueError, match="needs the parameters"):
        optimizer.update(GOOD, optimizer.init(PARAMS))


# --- environments


def parts(state: dict[str, jax.Array]) -> EnvParts:
    return EnvParts(physics={"qvel": state["v"]}, obs=state["x"], reward=state["reward"], done=state["done"])


def reset(keys: jax.Array) -> dict[str, jax.Array]:
    zeros = jnp.zeros(len(keys))
    x = jax.vmap(lambda key: jax.random.uniform(key, (1,)))(keys)
    return {"x": x, "v": jnp.zeros((len(keys), 1)), "reward": zeros, "done": zeros}


def step(state: dict[str, jax.Array], action: jax.Array) -> dict[str, jax.Array]:
    v = state["v"] + action
    return {"x": state["x"] + v, "v": v, "reward": -jnp.abs(state["x"][:, 0]), "done": state["done"]}


def test_bad_environment_of_a_plain_dictionary_is_replaced_masked_and_counted() -> None:
    guard = Quarantine(max_abs_state=1e3)
    guarded_step = jax.jit(quarantined(step, reset, guard=guard, parts=parts))
    first = reset(jax.random.split(jax.random.PRNGKey(0), 3))
    action = jnp.array([[0.1], [jnp.nan], [1e4]])  # the last is finite, and too fast
    state, valid, counted = guarded_step(first, action, jax.random.PRNGKey(1), guard.init())
    assert valid.tolist() == [True, False, False]
    assert all(np.isfinite(x).all() for x in state.values())
    same(jax.tree.map(lambda x: x[0], state), jax.tree.map(lambda x: x[0], step(first, action)))
    fresh = reset(jax.random.split(jax.random.PRNGKey(1), 3))
    same(jax.tree.map(lambda x: x[1:], state), jax.tree.map(lambda x: x[1:], fresh))
    assert dict(zip(guard.causes, counted.trips.tolist(), strict=True))["action"] == 1
    assert int(counted.trips.sum()) == 2


def test_brax_environment_outside_of_our_trainer_goes_on_after_a_bad_action() -> None:
    env = brax.envs.get_environment("fast")
    batched, first = jax.vmap(env.step), jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.PRNGKey(0), 2))
    guard = Quarantine()
    guarded_step = jax.jit(quarantined(batched, jax.vmap(env.reset), guard=guard))
    action = jnp.zeros((2, env.action_size)).at[0].set(jnp.inf)
    state, valid, counted = guarded_step(first, action, jax.random.PRNGKey(1), guard.init())
    assert valid.tolist() == [False, True] and int(counted.trips.sum()) == 1
    state, valid, counted = guarded_step(state, jnp.zeros_like(action), jax.random.PRNGKey(2), counted)
    assert valid.tolist() == [True, True] and int(counted.trips.sum()) == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.obs))
