"""Mirror images of a batch: their order, the likelihood ratio, the gradient and the value targets."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import PointMass, experience, mesh, minibatch_of, tiny_config

from rlstable.device import sharding
from rlstable.device.reflection import Mirror, Reflection, joined
from rlstable.envs.vector import VectorEnv
from rlstable.ppo.gradient import preprocess_batch
from rlstable.ppo.initial import init_tuning
from rlstable.ppo.iteration import PPO
from rlstable.ppo.mirror_image import with_mirror_image
from rlstable.ppo.records import Collected, swap_axes
from rlstable.runner.setup import make_ppo

pytestmark = pytest.mark.usefixtures("quick_compile")

T, ENVS, UNROLLS = 4, 4, 2
ROWS = UNROLLS * ENVS
# The point mass in a mirror: position and velocity along the second axis change their sign, and so does its action.
MIRROR = Mirror({"state": Reflection.of_signs(1, -1, 1, -1)}, Reflection.of_signs(1, -1))


@functools.cache
def ppo(**settings: Any) -> PPO:
    sizes = {"num_envs": ENVS, "batch_size": ENVS, "num_minibatches": UNROLLS, "unroll_length": T}
    config = tiny_config(ppo={**sizes, "normalize_advantage": True, **settings})
    return make_ppo(config, VectorEnv(PointMass(), 12, 1, {}), 2, mirror=MIRROR)


@dataclasses.dataclass(frozen=True)
class Collecting:
    """The part of a training state that `with_mirror_image` reads."""

    params: Any
    normalizer: Any


@functools.cache
def collected(symmetric: bool = True) -> tuple[Any, Any, Collected]:
    """Parameters, statistics and rows `[rows, T]` that these parameters collected."""
    networks = ppo().networks
    params, statistics, data = jax.tree.map(np.array, experience(networks, T, ROWS)[:3])
    statistics = dataclasses.replace(statistics, mean=statistics.mean * np.float32([1, 0, 1, 0]))
    if symmetric:  # blind to the second axis, with mean 0 along it
        policy = params["policy"]["params"]["mlp"]
        for first in (policy["hidden_0"], params["value"]["params"]["hidden_0"]):
            first["kernel"][[1, 3]] = 0.0
        policy["hidden_1"]["kernel"][:, 1] = policy["hidden_1"]["bias"][1] = 0.0
    distribution, _ = networks.distribution(params, statistics, data.observation)
    data = data._replace(distribution=distribution, log_prob=distribution.log_prob(data.raw_action))
    return params, statistics, jax.tree.map(jnp.asarray, swap_axes(data))


def with_image(symmetric: bool = True) -> Collected:
    params, statistics, data = collected(symmetric)
    return with_mirror_image(data, MIRROR, ppo().networks, Collecting(params, statistics), UNROLLS)  # type: ignore[arg-type]


@functools.cache
def gradient() -> Any:
    own = ppo()

    def call(params: Any, statistics: Any, data: Collected) -> Any:
        minibatch = minibatch_of(swap_axes(preprocess_batch(own.networks, statistics, data)))
        minibatch = minibatch._replace(noise=jnp.zeros(minibatch.collected.raw_action.shape))
        return own.gradient(params, statistics, minibatch, None, init_tuning(own.settings, own.precision))

    return sharding.over_devices(call, mesh(), sharding.REPLICATED, sharding.REPLICATED)


def test_reflection_permutes_and_changes_signs() -> None:
    swap = Reflection(np.array([1, 0]), np.float32([-1, 1]))
    np.testing.assert_array_equal(swap(np.array([[1.0, 2.0]])), [[-2.0, 1.0]])
    both = joined([Reflection.of_signs(-1), swap])
    np.testing.assert_array_equal(both(np.array([5.0, 1.0, 2.0])), [-5.0, -2.0, 1.0])
    np.testing.assert_array_equal(swap.repeated(2).order, [1, 0, 3, 2])


def test_mirror_reflects_only_the_observations_that_are_there() -> None:
    mirror = Mirror({"state": Reflection.of_signs(-1), "privileged_state": Reflection.of_signs(1, -1)}, MIRROR.action)
    assert mirror.observation({"state": jnp.ones(1)}) == {"state": jnp.array([-1.0])}


def test_images_are_those_of_as_many_further_environments() -> None:
    data, both = collected()[2], with_image()

    def unrolls(x: jax.Array) -> jax.Array:
        return x.reshape(UNROLLS, -1, *x.shape[1:])

    for whole, one in zip(jax.tree.leaves(both), jax.tree.leaves(data), strict=True):
        np.testing.assert_array_equal(unrolls(whole)[:, :ENVS], unrolls(one))
    images = jax.tree.map(lambda x: unrolls(x)[:, ENVS:], both)
    np.testing.assert_array_equal(images.raw_action, unrolls(data.raw_action) * np.float32([1, -1]))
    np.testing.assert_array_equal(images.observation, unrolls(data.observation) * np.float32([1, -1, 1, -1]))
    last = unrolls(data.bootstrap_observation) * np.float32([1, -1, 1, -1])
    np.testing.assert_array_equal(images.bootstrap_observation, last)
    for name in ("log_prob", "reward", "termination", "truncation", "value"):
        np.testing.assert_array_equal(getattr(images, name), unrolls(getattr(data, name)))


def test_ratio_of_a_symmetric_policy_is_1_at_the_image_and_of_another_policy_it_is_not() -> None:
    for symmetric in (True, False):
        params, statistics, _ = collected(symmetric)
        both = with_image(symmetric)
        ours = ppo().networks.distribution(params, statistics, both.observation)[0].log_prob(both.raw_action)
        apart = float(jnp.abs(ours - both.log_prob).max())
        assert apart < 1e-3 if symmetric else apart > 0.1  # float32, and other versions of XLA round otherwise


def test_distance_compares_policies_in_the_same_state() -> None:
    """Before the first update no policy has moved, however asymmetric it is."""
    params, statistics, _ = collected(False)
    metrics = gradient()(params, statistics, with_image(False))[1]
    assert abs(float(metrics["training/kl_mean"])) < 1e-3


def test_images_change_only_the_asymmetric_part_of_a_symmetric_policys_gradient() -> None:
    params, statistics, data = collected()
    plain, plain_metrics = gradient()(params, statistics, data)
    both, metrics = gradient()(params, statistics, with_image())
    for name in ("training/policy_loss", "training/v_loss", "training/entropy"):
        np.testing.assert_allclose(metrics[name], plain_metrics[name], rtol=1e-4, atol=1e-6)
    for network in ("policy", "value"):
        layers = [grads[network]["params"] for grads in (plain, both)]
        layers = [layer.get("mlp", layer) for layer in layers]
        first, first_both = (layer["hidden_0"]["kernel"] for layer in layers)
        np.testing.assert_allclose(first_both[::2], first[::2], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(first_both[1::2], 0.0, atol=1e-5)
        assert float(jnp.abs(first[1::2]).max()) > 1e-3
    last, last_both = (grads["policy"]["params"]["mlp"]["hidden_1"]["kernel"] for grads in (plain, both))
    np.testing.assert_allclose(last_both[:, [0, 2, 3]], last[:, [0, 2, 3]], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(last_both[:, 1], 0.0, atol=1e-5)
    assert float(jnp.abs(last[:, 1]).max()) > 1e-3


def test_value_targets_of_the_originals_do_not_depend_on_the_images() -> None:
    own = ppo(gae="per_iteration")
    params, statistics, data = collected()
    objective = own.objective(init_tuning(own.settings, own.precision))
    targets = [
        objective.targets(params, statistics, preprocess_batch(own.networks, statistics, x)).value
        for x in (data, with_image())
    ]
    whole = targets[1].reshape(UNROLLS, -1, T)
    np.testing.assert_allclose(whole[:, :ENVS].reshape(ROWS, T), targets[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(whole[:, ENVS:].reshape(ROWS, T), targets[0], rtol=1e-4, atol=1e-4)
