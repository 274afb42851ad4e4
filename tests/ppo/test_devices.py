"""Eight devices: the gradient of one device, no communication while collecting, one count per fault."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import (
    PointMass,
    assemble,
    assert_close,
    compiled,
    equations,
    experience,
    mesh,
    minibatch_of,
    placed,
    tiny_config,
)

from rlstable.device import sharding
from rlstable.envs.vector import VectorEnv
from rlstable.guards import masked
from rlstable.ppo.initial import init_tuning
from rlstable.ppo.records import swap_axes
from rlstable.ppo.rollout import collect
from rlstable.ppo.state import SPECS
from rlstable.runner.setup import make_ppo

pytestmark = pytest.mark.usefixtures("quick_compile")

DEVICES = 8
T, B = 4, 16
R, SPLIT = sharding.REPLICATED, sharding.SPLIT
COLLECTIVES = {
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "pmean", "all_gather", "all_gather_invariant", "all_to_all",
    "ppermute", "pbroadcast", "reduce_scatter", "psum_scatter", "ragged_all_to_all", "pgather",
}  # fmt: skip


# --- one global batch


@pytest.fixture(scope="module")
def settings():
    return tiny_config(ppo={"clipping_epsilon_value": 0.2, "entropy_cost": 0.1})


@pytest.fixture(scope="module")
def gradients(settings):
    """Gradient and metrics of a `[T, B]` batch that is split along B over devices."""
    ppo = make_ppo(settings, VectorEnv(PointMass(), 12, 1, {}), 2)

    def gradient(params, statistics, rows, noise):
        minibatch = minibatch_of(swap_axes(rows), jnp.swapaxes(noise, 0, 1))
        return ppo.gradient(
            params, statistics, minibatch, masked.share(rows.valid), init_tuning(ppo.settings, ppo.precision)
        )

    programs = {n: sharding.over_devices(gradient, mesh(n), (R, R, SPLIT, SPLIT), R) for n in (1, DEVICES)}

    def call(devices, params, statistics, data, noise):
        noise = jnp.swapaxes(noise, 0, 1)
        return jax.device_get(programs[devices](params, statistics, swap_axes(data), noise))

    return ppo, call


@pytest.mark.parametrize("masking", [False, True])
def test_gradient_on_eight_devices_equals_that_on_one(gradients, masking):
    """With a mask that is uneven over the devices, too."""
    ppo, gradient = gradients
    params, statistics, data, _, noise = experience(ppo.networks, T, B)
    if masking:
        valid = np.random.default_rng(0).random((T, B)) > 0.2
        valid[:, :2] = False  # the first device has nothing valid
        valid[1:, 2:4] = False  # and the second hardly anything
        data = data._replace(valid=jnp.array(valid), truncation=jnp.where(valid, data.truncation, 1.0))
    (one, metrics), (many, metrics_of_many) = (gradient(n, params, statistics, data, noise) for n in (1, DEVICES))
    assert_close(many, one)
    assert_close(metrics_of_many, metrics)
    assert max(np.max(np.abs(x)) for x in jax.tree.leaves(one)) > 0.1
    if masking:
        assert metrics["training/policy_dist_max_std"] < np.inf


# --- collecting


def crossings(function, *arguments):
    """The number of loops around each collective operation of a program."""
    program = jax.make_jaxpr(function)(*arguments).jaxpr
    return [loops(inside) for equation, inside in equations(program) if equation.primitive.name in COLLECTIVES]


def loops(inside):
    return sum(equation.primitive.name in ("scan", "while") for equation in inside)


def test_devices_do_not_communicate_while_collecting():
    """Only the sums of the metrics are reduced, after the last step."""
    settings = tiny_config(guards={"limiters": {"reward": 5.0}})
    ppo, state = assemble(settings)
    collecting = sharding.over_devices(
        lambda state, key: collect(state, key, env=ppo.env, networks=ppo.networks, settings=ppo.settings).metrics,
        mesh(DEVICES), (SPECS, R), R,
    )  # fmt: skip
    key = jax.random.PRNGKey(0)
    program = jax.make_jaxpr(collecting)(state, key).jaxpr
    assert max(loops(inside) for _, inside in equations(program)) >= 2  # over unrolls and over steps
    assert set(crossings(collecting, state, key)) == {0}
    # The test can fail: in a whole iteration gradients are reduced once per minibatch of an epoch.
    assert max(crossings(compiled(ppo, DEVICES), state)) == 2


# --- a fault on one device

POISONED = 3  # of eight environments, one on each device


@pytest.fixture(scope="module")
def poisoned():
    """One iteration on eight devices, the physics of one environment NaN."""
    ppo, state = assemble(tiny_config(guards={}))
    physics = state.env_state.pipeline_state
    physics = physics.replace(q=np.where(np.arange(8)[:, None] == POISONED, np.nan, physics.q))
    state = dataclasses.replace(state, env_state=state.env_state.replace(pipeline_state=physics))
    return compiled(ppo, DEVICES)(placed(state, DEVICES))


def test_all_devices_hold_the_same_state_after_an_iteration(poisoned):
    """Bit for bit; JAX does not check replication (`check_vma=False`)."""
    after, metrics = poisoned
    for leaf in jax.tree.leaves((dataclasses.replace(after, env_state=None, reset_pool=None), metrics)):
        assert len(leaf.addressable_shards) == DEVICES
        first, *rest = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        for other in rest:
            np.testing.assert_array_equal(other, first)


def test_fault_on_one_device_is_counted_once(poisoned):
    after, metrics = poisoned
    assert metrics.trips["quarantine"].tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert {name for name, counts in metrics.trips.items() if any(counts)} == {"quarantine"}
    assert int(after.counters.updates) == 4  # two minibatches in each of two epochs
    np.testing.assert_allclose(metrics.values["training/valid_share"], 1 - 1 / 64)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after) if x.dtype == jnp.float32)
