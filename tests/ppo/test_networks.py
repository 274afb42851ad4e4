"""The networks over several leading axes: row by row the same, and every kernel's gradient one matrix product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import equations, experience

from rlstable.guard_config import LimiterConfig
from rlstable.network_config import NetworkConfig
from rlstable.ppo.networks import Networks

T, B, A = 3, 5, 2
KINDS = {
    "tanh_normal": {},
    "normal": {"distribution_type": "normal"},
    "normal, std from the network": {"distribution_type": "normal", "state_dependent_std": True},
}


@pytest.fixture(params=KINDS)
def case(request):
    sizes = {"policy_hidden_layer_sizes": [8, 8], "value_hidden_layer_sizes": [8, 8]}
    networks = Networks(NetworkConfig(**sizes, **KINDS[request.param]), LimiterConfig(), A, normalize=True)
    return (networks, *experience(networks, T, B)[:3])


def test_more_axes_are_more_rows(case):
    networks, params, statistics, data = case

    def all_of(observation):
        return (
            *networks.distribution(params, statistics, observation),
            networks.value(params, statistics, observation),
        )

    whole, alone = all_of(data.observation), jax.vmap(jax.vmap(all_of))(data.observation)
    assert whole[0].loc.shape == whole[0].scale.shape == (T, B, A)
    assert whole[2].shape == (T, B)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), whole, alone)


def test_no_product_of_more_than_matrices(case):
    networks, params, statistics, data = case

    def total(params):
        distribution, _ = networks.distribution(params, statistics, data.observation)
        value = networks.value(params, statistics, data.observation)
        return jnp.sum(distribution.log_prob(data.raw_action)) + jnp.sum(value)

    program = jax.make_jaxpr(jax.grad(total))(params)
    products = [e for e, _ in equations(program.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) >= 3 * 6 - 2  # forward, of the input but for the first, of the kernel
    assert {x.aval.ndim for equation in products for x in equation.invars} == {2}
