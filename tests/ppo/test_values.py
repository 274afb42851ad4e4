"""Normalised values: unchanged estimates, statistics equal to NumPy, and a gradient independent of the reward scale."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import LIMITERS_OFF, PointMass, experience, minibatch_of, on_one_device, tiny_config

from rlstable.device.counter import WideCounter
from rlstable.envs.vector import VectorEnv
from rlstable.guards import masked
from rlstable.ppo.initial import init_tuning
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.records import swap_axes
from rlstable.ppo.value_units import ValueUnits
from rlstable.runner.setup import make_ppo

pytestmark = pytest.mark.usefixtures("quick_compile")

T, B = 4, 8


def target_statistics(mean, std, count=100):
    scalars = jnp.float32(mean), jnp.float32(std) ** 2, jnp.float32(std)
    return Statistics(WideCounter.of(count), *scalars)


NOTHING = dataclasses.replace(target_statistics(0, 1, 0), variance=jnp.float32(0))


@functools.cache
def ppo(normalized=True, limits=(), layer_norm=False, **settings):
    config = tiny_config(
        ppo={"normalize_values": normalized, **settings},
        network={"policy_layer_norm": layer_norm, "value_layer_norm": layer_norm},
        guards={"limiters": LIMITERS_OFF | dict(limits)},
    )
    return make_ppo(config, VectorEnv(PointMass(), 12, 1, {}), 2)


def objective(own):
    return own.objective(init_tuning(own.settings, own.precision))


@pytest.fixture(scope="module")
def sample():
    """Parameters, observation statistics without those of targets, and experience `[T, B]`."""
    return experience(ppo().networks, T, B)[:3]


@functools.cache
def following(*limits, **settings):
    own = ppo(True, limits, **settings)
    return on_one_device(ValueUnits(own.networks.without_preprocessing, objective(own)).after_sgd)


@pytest.mark.parametrize(("mean", "std", "layer_norm"), [(50.0, 30.0, True), (-2000.0, 1e-3, False), (0.5, 1e4, False)])
def test_value_estimates_do_not_change_with_the_units(sample, mean, std, layer_norm):
    """For every observation, in both directions."""
    networks, old, new = ppo(layer_norm=layer_norm).networks, target_statistics(3.0, 7.0), target_statistics(mean, std)
    params, statistics, data = experience(networks, T, B)[:3] if layer_norm else sample

    @on_one_device
    def values(params, value):
        return networks.value(params, dataclasses.replace(statistics, value=value), data.observation)

    rescaled = networks.rescale_value(params, old, new)
    before, after = values(params, old), values(rescaled, new)
    # float32 rounds a value to the precision of the larger mean and unit.
    scale = max(float(jnp.max(jnp.abs(before))), abs(mean), std)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6 * scale)
    assert rescaled["policy"] is params["policy"]
    back = networks.rescale_value(rescaled, new, old)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), back, params)


OF_OBSERVATIONS = {
    "normalize_observations_mode": "ema", "normalize_until_count": 1, "normalize_observations_std_eps": 1.0
}  # fmt: skip


@pytest.mark.parametrize(("limit", "settings"), [(None, {}), (1.5, {}), (None, OF_OBSERVATIONS)])
def test_target_statistics_equal_numpy_over_valid_targets(sample, limit, settings):
    """Over two batches, with the targets limited as in the loss; estimates do not change."""
    params, statistics, data = sample
    networks = ppo().networks
    follow = following(*([("value_target", limit)] if limit else []), **settings)
    statistics = dataclasses.replace(statistics, value=NOTHING)
    estimates = on_one_device(objective(ppo()).targets)
    seen = []
    for seed in range(2):
        valid = np.random.default_rng(seed).random((T, B)) > 0.3
        batch = swap_axes(data._replace(valid=jnp.array(valid), reward=data.reward * (1 + 5 * seed)))
        targets = np.float64(estimates(params, statistics, batch).value)
        targets = targets if limit is None else np.clip(targets, -limit, limit)
        seen += list(targets[valid.T])
        before = networks.value(params, statistics, data.observation)
        params, statistics = follow(params, statistics, batch)
        after = networks.value(params, statistics, data.observation)
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)
        found = statistics.value
        assert int(found.count) == len(seen)
        np.testing.assert_allclose(found.mean, np.mean(seen), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.std, np.std(seen), rtol=1e-5)
    if limit:
        assert np.max(np.abs(seen)) == limit


def ignorant(params):
    """A value function of 0, so that targets are sums of rewards."""
    layers = dict(params["value"]["params"])
    layers["hidden_1"] = jax.tree.map(jnp.zeros_like, layers["hidden_1"])
    return {**params, "value": {"params": layers}}


@pytest.mark.parametrize(("own", "delta"), [({}, None), ({"clipping_epsilon_value": 0.2}, 0.5)])
def test_gradient_with_normalised_values_does_not_depend_on_the_reward_scale(sample, own, delta):
    """Rewards a thousand times larger give the same gradient, with and without the Huber loss."""
    params, statistics, data = sample
    statistics = dataclasses.replace(statistics, value=NOTHING)
    limits = (("value_error", delta),)
    gradients = {}
    for normalized in (True, False):
        trained = ppo(normalized, limits if normalized else (), **(own if normalized else {}))
        gradient, tuning = on_one_device(trained.gradient), init_tuning(trained.settings, trained.precision)
        for scale in (1.0, 1000.0):
            batch = data._replace(reward=data.reward * scale, value=data.value * scale)
            if normalized:
                adapted, now = following()(ignorant(params), statistics, swap_axes(batch))
            else:
                now, adapted = dataclasses.replace(statistics, value=None), ignorant(params)
            minibatch = minibatch_of(batch, jnp.zeros((T, B, 2)))
            share = masked.share(batch.valid)
            gradients[normalized, scale], metrics = gradient(adapted, now, minibatch, share, tuning)
            if normalized:
                assert float(metrics["training/v_loss"]) < 2.0
    small, large = (gradients[True, scale] for scale in (1.0, 1000.0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), large, small)
    assert float(jnp.max(jnp.abs(small["value"]["params"]["hidden_1"]["kernel"]))) > 1e-3
    plain, thousandfold = (gradients[False, s]["value"]["params"]["hidden_1"]["bias"] for s in (1.0, 1000.0))
    np.testing.assert_allclose(
        thousandfold, plain * 1000.0, rtol=1e-4
    )  # without normalisation the gradient scales with rewards
