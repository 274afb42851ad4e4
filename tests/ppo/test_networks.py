"""The networks over several leading axes, their matrix products, and layer normalisation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import equations, experience

from rlstable.config.guards import LimiterConfig
from rlstable.config.networks import NetworkConfig
from rlstable.device.counter import WideCounter
from rlstable.ppo.modules import MLP
from rlstable.ppo.networks import Networks
from rlstable.ppo.normalizer import Statistics

pytestmark = pytest.mark.usefixtures("quick_compile")
T, B, A = 3, 5, 2
KINDS = {
    "tanh_normal": {},
    "normal": {"distribution_type": "normal"},
    "normal, std from the network": {"distribution_type": "normal", "state_dependent_std": True},
}
NORM = {"policy_layer_norm": True, "value_layer_norm": True}
KINDS["normal, layer normalisation"] = KINDS["normal"] | NORM


@pytest.fixture(params=KINDS)
def case(request):
    sizes = {"policy_hidden_layer_sizes": [8, 8], "value_hidden_layer_sizes": [8, 8]}
    networks = Networks(NetworkConfig(**sizes, **KINDS[request.param]), LimiterConfig(), A, normalize=True)
    return (networks, *experience(networks, T, B)[:3])


def networks_of(dtype="float32", **config):
    """Two hidden layers each, observations as they are."""
    sizes = {"policy_hidden_layer_sizes": [6, 5], "value_hidden_layer_sizes": [6, 5]}
    return Networks(NetworkConfig(**sizes | config), LimiterConfig(observation=None), A, False, jnp.dtype(dtype))


def shapes_of(networks):
    params = jax.eval_shape(networks.init, jax.random.PRNGKey(0), jax.ShapeDtypeStruct((4,), jnp.float32))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }


def test_networks_treat_leading_axes_as_rows(case):
    networks, params, statistics, data = case

    @jax.jit
    def all_of(observation):
        return (
            *networks.distribution(params, statistics, observation),
            networks.value(params, statistics, observation),
        )

    whole, alone = all_of(data.observation), jax.jit(jax.vmap(jax.vmap(all_of)))(data.observation)
    assert whole[0].loc.shape == whole[0].scale.shape == (T, B, A)
    assert whole[2].shape == (T, B)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), whole, alone)


@pytest.mark.parametrize("kind", ["tanh_normal", "normal"])
def test_layer_norm_option_adds_layers_to_its_own_network(kind):
    off = shapes_of(networks_of(**KINDS[kind]))
    assert not any("LayerNorm" in name for name in off)
    policy = "policy/params/mlp" if kind == "tanh_normal" else "policy/params/MLP_0"
    for flag, prefix in {"policy_layer_norm": policy, "value_layer_norm": "value/params"}.items():
        on = shapes_of(networks_of(**KINDS[kind], **{flag: True}))
        assert {name: on[name] for name in off} == off
        added = {name: (x.shape, x.dtype) for name, x in on.items() if name not in off}
        assert added == {
            f"{prefix}/LayerNorm_{index}/{name}": ((size,), jnp.float32)
            for index, size in enumerate((6, 5))
            for name in ("bias", "scale")
        }


def hand_made():
    """An MLP of one hidden layer of two units, and the parameters of the examples below."""
    network = MLP((2, 1), jax.nn.relu, jax.nn.initializers.lecun_uniform(), layer_norm=True)
    params = {
        "hidden_0": {"kernel": jnp.array([[1.0, 0.0], [0.0, 1.0]]), "bias": jnp.array([1.0, -1.0])},
        "LayerNorm_0": {"scale": jnp.array([3.0, 2.0]), "bias": jnp.array([-1.0, 5.0])},
        "hidden_1": {"kernel": jnp.array([[10.0], [100.0]]), "bias": jnp.array([0.5])},
    }
    return network, {"params": params}


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        # Dense [6, 2]: mean 4, deviation 2, so [1, -1]; scaled and shifted [2, 3]; relu changes nothing.
        ([5.0, 3.0], 10.0 * 2.0 + 100.0 * 3.0 + 0.5),
        # Dense [0, 8]: [-1, 1], then [-4, 7]; relu comes after the normalisation and leaves [0, 7].
        ([-1.0, 9.0], 700.5),
        # Dense [7, 7] has no deviation: the bias alone, [-1, 5], then [0, 5].
        ([6.0, 8.0], 500.5),
    ],
)
def test_layer_norm_is_between_the_dense_layer_and_its_activation(x, expected):
    network, params = hand_made()
    np.testing.assert_allclose(network.apply(params, jnp.array([x])), [[expected]], rtol=1e-5)


def test_layer_norm_of_huge_activations_is_finite():
    """The mean of squares overflows float32; the fast variance of flax would be NaN."""
    network, params = hand_made()
    x = jnp.array([[1e25, -3e25]])
    value, gradient = jax.value_and_grad(lambda params: jnp.sum(network.apply(params, x)))(params)
    assert np.isfinite(value)
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(np.isfinite(leaf), True), gradient)


def test_half_precision_networks_normalise_in_float32():
    networks = networks_of("bfloat16", **NORM)
    params = jax.jit(lambda key: networks.init(key, jax.ShapeDtypeStruct((4,), jnp.float32)))(jax.random.PRNGKey(0))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    statistics = Statistics(WideCounter.zero(), jnp.zeros(4), jnp.ones(4), jnp.ones(4))
    x = jax.random.normal(jax.random.PRNGKey(1), (7, 4))
    program = jax.make_jaxpr(lambda params: networks.value(params, statistics, x))(params)
    types = {}
    for equation, _ in equations(program.jaxpr):
        types.setdefault(equation.primitive.name, set()).add(str(equation.outvars[0].aval.dtype))
    assert types["rsqrt"] == types["reduce_sum"] == {"float32"}
    assert types["dot_general"] == types["logistic"] == {"bfloat16"}
    wide = networks_of(**NORM)
    ours, theirs = (jax.jit(own.value)(params, statistics, x) for own in (networks, wide))
    np.testing.assert_allclose(ours, theirs, atol=0.05)
