"""Policies loaded from their run folders, and their replacement of bad actions."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_compile import ordinarily
from short_runs import trained
from toys import GUARDS_OFF, LIMITERS_OFF, equations

import rlstable
from rlstable.config import ConfigError
from rlstable.config.guards import LimiterConfig
from rlstable.config.networks import NetworkConfig
from rlstable.config.run import CheckpointConfig
from rlstable.io.checkpoint import Checkpoints
from rlstable.policy.evaluator import PolicySnapshot, snapshot_of
from rlstable.policy.policy import Policy, choose_action, load_policy, policy_arrays, policy_spec
from rlstable.ppo import normalizer
from rlstable.ppo.networks import Networks
from rlstable.runner.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")

NAN, INF = float("nan"), float("inf")
BAD = pytest.mark.parametrize("bad", [NAN, -INF])
SAFE = (0.5, -0.25)
HEALTHY = np.linspace(-2.0, 2.0, 12, dtype=np.float32).reshape(3, 4)


LIMITS = LIMITERS_OFF | {"observation": 5.0, "policy_std_max": 2.0}
LIMITED = {"guards": GUARDS_OFF | {"limiters": LIMITS}, "eval": {"num_evals": 1, "num_envs": 2}}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TrainingLoop:
    return trained(tmp_path_factory.mktemp("run"), **LIMITED)


def test_loaded_policy_is_the_trained_policy(runner: TrainingLoop) -> None:
    observations = jax.random.normal(jax.random.PRNGKey(3), (100, 4)) * 10
    state, networks = runner.single.state, runner.single.setup.ppo.networks
    expected, *_ = choose_action(networks, "default", state.params, state.normalizer, observations, None, True)
    policy = rlstable.load_policy(runner.run_dir)
    np.testing.assert_allclose(policy.act(observations), expected, atol=1e-6)
    assert policy.act(np.zeros(4)).shape == (2,)
    assert policy.host["step"] == 128
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(policy)).act(HEALTHY), policy.act(HEALTHY))


def test_evaluations_of_a_trained_and_of_a_loaded_policy_have_the_same_arguments(runner: TrainingLoop) -> None:
    """Otherwise a cached evaluation of training could not play the policy of a run, and the other way round."""
    policy, key = rlstable.load_policy(runner.run_dir), jax.random.PRNGKey(0)
    units = normalizer.init(jax.ShapeDtypeStruct((), np.float32))
    state = runner.single.state
    state = dataclasses.replace(state, normalizer=dataclasses.replace(state.normalizer, value=units))
    trained, loaded = snapshot_of(state, key), PolicySnapshot(policy.params, policy.statistics, key)
    assert jax.tree.structure(trained) == jax.tree.structure(loaded)
    shapes = ([(x.shape, x.dtype) for x in jax.tree.leaves(one)] for one in (trained, loaded))
    assert next(shapes) == next(shapes)


def test_loading_a_policy_imports_neither_the_environment_nor_brax(runner: TrainingLoop, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    code = f"""
import sys, numpy as np, rlstable
action = rlstable.load_policy({str(runner.run_dir)!r}).act(np.zeros(4))
assert action.shape == (2,), action
assert not [name for name in sys.modules if name.split('.')[0] in ('brax', 'mujoco', 'toys')]
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment)


def test_loaded_policy_reads_its_key_of_a_dictionary_observation(tmp_path: Path) -> None:
    keys = {"policy_obs_key": "state", "value_obs_key": "privileged_state"}
    runner = trained(tmp_path, **LIMITED, env={"name": "toys:NamedPointMass"}, network=keys)
    policy = rlstable.load_policy(tmp_path)
    observation = {"state": np.ones(4), "privileged_state": np.ones(5)}
    assert policy.act(observation).shape == (2,)
    # The value network's key is not needed to act, nor does the policy look at it.
    seen = {"state": observation["state"]}
    np.testing.assert_array_equal(policy.act(seen), policy.act(observation))
    np.testing.assert_array_equal(policy.step(policy.start(), seen)[0], policy.act(observation))
    with pytest.raises(ConfigError, match="policy_obs_key: the observation has no 'state'; it has privileged_state"):
        policy.act({"privileged_state": observation["privileged_state"]})
    assert runner.single.state.params["value"]["params"]["hidden_0"]["kernel"].shape == (5, 8)
    assert runner.single.state.params["policy"]["params"]["mlp"]["hidden_0"]["kernel"].shape == (4, 8)


# --- replacement of bad actions


def untrained(
    dtype: str = "float32",
    matmul: str = "default",
    limit: float | None = None,
    named: bool = False,
    network: Mapping[str, Any] | None = None,
    **options: Any,
) -> Policy:
    """Random parameters for four observed numbers and two action elements, behind one hidden layer."""
    keys = {"policy_obs_key": "state", "value_obs_key": "privileged_state"} if named else {}
    config = NetworkConfig(
        policy_hidden_layer_sizes=(8,),
        value_hidden_layer_sizes=(8,),
        **{"activation": "relu", **keys, **(network or {})},
    )
    limits = LimiterConfig(**dict.fromkeys(LimiterConfig.model_fields) | {"observation": limit})
    networks = Networks(config, limits, 2, True, jnp.dtype(dtype))
    one: Any = jax.ShapeDtypeStruct((4,), jnp.float32)
    one = {"state": one, "privileged_state": jax.ShapeDtypeStruct((5,), jnp.float32)} if named else one
    params = networks.init(jax.random.PRNGKey(0), one)
    return Policy(networks, params, normalizer.init(one), matmul, {}, **options)


def overflowing(dtype: str, signs: tuple[float, float], **options: Any) -> Policy:
    """Every hidden unit is 80,000 at an observation of ones: finite in float32 and beyond float16.

    `signs` are the weights of even and odd hidden units.
    """
    policy = untrained(dtype, **options)
    last = jnp.broadcast_to(jnp.resize(jnp.array(signs), 8)[:, None], (8, 4))
    first, second = {"kernel": jnp.full((4, 8), 2e4), "bias": jnp.zeros(8)}, {"kernel": last, "bias": jnp.zeros(4)}
    policy.params["policy"] = {"params": {"mlp": {"hidden_0": first, "hidden_1": second}}}
    return policy


def unguarded(policy: Policy, obs: Any, key: Any = None, deterministic: bool = True) -> np.ndarray:
    choose = jax.jit(functools.partial(choose_action, policy.networks, policy.matmul), static_argnums=4)
    return np.asarray(choose(policy.params, policy.statistics, obs, key, deterministic)[0])


def bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


def spoilt(row: int, value: float) -> np.ndarray:
    obs = HEALTHY.copy()
    obs[row, 2] = value
    return obs


@ordinarily()
@pytest.mark.parametrize(
    ("kind", "dtype", "deterministic"),
    [("tanh_normal", "float32", True), ("tanh_normal", "float16", False), ("normal", "float32", False)],
)
def test_check_of_a_policy_does_not_change_healthy_actions(kind: str, dtype: str, deterministic: bool) -> None:
    policy = untrained(dtype, network={"distribution_type": kind}, safe_action=SAFE)
    obs = jax.random.normal(jax.random.PRNGKey(5), (33, 4))
    key = jax.random.PRNGKey(7)
    expected = bits(unguarded(policy, obs, key, deterministic))
    np.testing.assert_array_equal(bits(policy.act(obs, key, deterministic)), expected)
    action, carry = policy.step(policy.start((33,)), obs, key, deterministic)
    np.testing.assert_array_equal(bits(action), expected)
    np.testing.assert_array_equal(bits(carry.last_action), expected)
    assert int(carry.fallbacks) == 0


def test_float16_overflow_of_a_policy_gives_the_safe_action() -> None:
    """Parameters and observation are finite, and float32 has an action: inf - inf happens in float16."""
    ones = np.ones(4, np.float32)
    policy = overflowing("float16", (1.0, -1.0), safe_action=SAFE)
    assert all(np.isfinite(x).all() and np.isfinite(np.float16(x)).all() for x in jax.tree.leaves(policy.params))
    distribution, _ = policy.networks.distribution(policy.params, policy.statistics, ones)
    assert np.isnan(distribution.loc).all()
    assert np.isnan(unguarded(policy, ones)).all()
    np.testing.assert_array_equal(unguarded(overflowing("float32", (1.0, -1.0)), ones), np.zeros(2))
    np.testing.assert_array_equal(policy.act(ones), SAFE)
    np.testing.assert_array_equal(overflowing("float16", (1.0, -1.0)).act(ones), np.zeros(2))


@BAD
@pytest.mark.parametrize("limit", [None, 5.0])
def test_bad_observation_in_a_batch_gives_the_safe_action_in_its_row(bad: float, limit: float | None) -> None:
    """The observation limiter would turn infinity into an ordinary number."""
    policy = untrained(limit=limit, safe_action=SAFE)
    expected = unguarded(policy, HEALTHY)
    if limit is not None and not np.isnan(bad):
        assert np.isfinite(unguarded(policy, spoilt(1, bad))).all()
    action = policy.act(spoilt(1, bad))
    np.testing.assert_array_equal(bits(action)[[0, 2]], bits(expected)[[0, 2]])
    np.testing.assert_array_equal(action[1], SAFE)
    np.testing.assert_array_equal(policy.act(spoilt(1, bad)[1]), SAFE)


@BAD
def test_bad_observation_under_a_key_of_the_critic_does_not_matter(bad: float) -> None:
    policy = untrained(named=True, safe_action=SAFE)
    other = np.full((3, 5), bad, np.float32)
    expected = bits(policy.act({"state": HEALTHY, "privileged_state": np.zeros((3, 5))}))
    assert not (np.asarray(policy.act({"state": HEALTHY, "privileged_state": other})) == np.float32(SAFE)).any()
    np.testing.assert_array_equal(bits(policy.act({"state": HEALTHY, "privileged_state": other})), expected)
    action = policy.act({"state": spoilt(2, bad), "privileged_state": np.zeros((3, 5))})
    np.testing.assert_array_equal(bits(action)[:2], expected[:2])
    np.testing.assert_array_equal(action[2], SAFE)


def test_bad_parameters_give_the_safe_action() -> None:
    policy = untrained()
    policy.params["policy"] = jax.tree.map(lambda x: x * NAN, policy.params["policy"])
    np.testing.assert_array_equal(policy.act(HEALTHY), np.zeros((3, 2)))
    np.testing.assert_array_equal(policy.act(HEALTHY, jax.random.PRNGKey(0), deterministic=False), np.zeros((3, 2)))


def test_policy_step_repeats_the_last_good_action_of_each_row() -> None:
    policy = untrained(safe_action=SAFE)
    good, later = unguarded(policy, HEALTHY), unguarded(policy, HEALTHY + 1)
    carry = policy.start((3,))
    np.testing.assert_array_equal(carry.last_action, np.float32([SAFE] * 3))
    action, carry = policy.step(carry, spoilt(0, NAN))
    np.testing.assert_array_equal(action, np.float32([SAFE, good[1], good[2]]))
    action, carry = policy.step(carry, np.where([[False], [True], [True]], INF, HEALTHY + 1))
    np.testing.assert_array_equal(action, np.float32([later[0], good[1], good[2]]))
    action, carry = policy.step(carry, np.full((3, 4), NAN))
    np.testing.assert_array_equal(action, np.float32([later[0], good[1], good[2]]))
    assert int(carry.fallbacks) == 1 + 2 + 3


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        ([0.0] * 3, "has 3 numbers (shape (3,)), this policy reads 4"),
        (np.zeros((4, 5)), "has 5 numbers (shape (4, 5)), this policy reads 4"),
        (0.0, "has no axis of numbers (shape ()), this policy reads 4"),
        (None, "is not an array of numbers: None is not a valid value for jnp.array"),
        ("left", "is not an array of numbers: could not convert string to float: 'left'"),
    ],
)
def test_observation_that_the_policy_cannot_read_is_one_line(obs: Any, message: str) -> None:
    policy, named = untrained(), untrained(named=True)
    for call, caller, name in (
        (lambda: policy.act(obs), "act", "the observation"),
        (lambda: policy.step(policy.start(), obs), "step", "the observation"),
        (lambda: named.act({"state": obs}), "act", "the observation 'state'"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == f"{caller}: {name} {message}"


def test_policy_step_rejects_a_carry_of_another_batch_shape() -> None:
    policy = untrained()
    with pytest.raises(ValueError, match=r"step: the carry holds actions \(2,\).*policy.start\(batch_shape=\(3,\)\)"):
        policy.step(policy.start(), HEALTHY)
    with pytest.raises(ValueError, match="step: a sampled action needs a random key"):
        policy.step(policy.start((3,)), HEALTHY, deterministic=False)


@pytest.mark.parametrize("safe", [(0.0,), (0.0, 0.0, 0.0), (0.0, NAN), (0.0, 1e39), (0.0, "0"), 0.0])
def test_invalid_safe_action_is_rejected(safe: Any) -> None:
    with pytest.raises(ValueError, match=r"safe_action: .* None for zeros, or a tuple of 2 finite numbers"):
        untrained(safe_action=safe)


def saved(folder: Path, policy: Policy, spec: Mapping[str, Any] | None = None) -> Path:
    """A run folder with this policy, as the runner writes it."""
    state: Any = SimpleNamespace(params=policy.params, normalizer=policy.statistics)
    host = {"policy": policy_spec(policy.networks, policy.matmul) if spec is None else spec}
    with Checkpoints(folder, CheckpointConfig(asynchronous=False)) as checkpoints:
        assert checkpoints.save(1, {"step": np.zeros(1)}, policy_arrays(state), host)
    return folder


@pytest.mark.parametrize(("dtype", "matmul"), [("float16", "highest"), ("bfloat16", "high"), ("float32", "default")])
def test_loaded_policy_keeps_the_precision_of_its_training(tmp_path: Path, dtype: str, matmul: str) -> None:
    original = untrained(dtype, matmul)
    policy = load_policy(saved(tmp_path, original))
    assert (policy.networks.dtype, policy.matmul) == (jnp.dtype(dtype), matmul)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(policy.params))
    with jax.default_matmul_precision("tensorfloat32"):  # the caller's own does not matter
        program = jax.make_jaxpr(policy.act)(HEALTHY)
    products = [equation for equation, _ in equations(program.jaxpr) if equation.primitive.name == "dot_general"]
    assert len(products) == 2
    expected = None if matmul == "default" else (jax.lax.Precision(matmul),) * 2
    for product in products:
        assert [x.aval.dtype for x in product.invars] == [jnp.dtype(dtype)] * 2
        assert product.params["precision"] == expected
    assert policy.act(HEALTHY).dtype == jnp.float32
    np.testing.assert_array_equal(bits(policy.act(HEALTHY)), bits(unguarded(original, HEALTHY)))
