"""Policy distance: exact values, bounds, mean of a batch, and the bounded normaliser."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import (
    GUARDS_OFF,
    LIMITERS_OFF,
    assemble,
    compiled,
    experience,
    make_networks,
    mesh,
    placed,
    settings_of,
    tiny_config,
)

from rlstable.device import sharding
from rlstable.device.counter import WideCounter
from rlstable.ppo import distance, normalizer, trust_region
from rlstable.ppo.distance import ActionMoments, moments
from rlstable.ppo.distributions import Normal, TanhNormal

pytestmark = pytest.mark.usefixtures("quick_compile")

R, SPLIT = sharding.REPLICATED, sharding.SPLIT
KINDS = (Normal, TanhNormal)
SETTINGS = tiny_config()


def policy(kind, loc, scale):
    """Distribution of one action element unless lists are given."""
    return kind(jnp.atleast_1d(jnp.float32(loc)), jnp.atleast_1d(jnp.float32(scale)))


def between(kind, old, new):
    return float(distance.distance(moments(policy(kind, *old)), moments(policy(kind, *new))))


def divergence(kind, old, new):
    """The KL of the raw Gaussians, as in Brax."""
    return float(policy(kind, *new).kl_from(policy(kind, *old)))


# --- one pair of policies


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("one", [(-11.3, 0.001), (1e30, 1e-3), ([0.1, 2.0], [0.3, 1.0])])
def test_equal_policies_have_no_distance(kind, one):
    assert between(kind, one, one) == 0.0


@pytest.mark.parametrize("size", [1, 2, 12])
def test_distance_of_two_gaussians_is_their_kl_divergence_per_action_element(size):
    """Means 0 and 0.2, variances 0.01 and 0.04: (0.25 + 1 - 1 + log 4) / 2 for any number of elements."""
    old, new = (
        ActionMoments(jnp.full(size, mean), jnp.full(size, variance)) for mean, variance in ((0.0, 0.01), (0.2, 0.04))
    )
    np.testing.assert_allclose(distance.distance(old, new), 0.5 * (0.25 + np.log(4)), rtol=1e-5)


def test_moments_of_a_normal_policy_add_the_resolution():
    """No node of the quadrature is beyond 1, so only the resolution is added to the variance."""
    found = moments(policy(Normal, 0.1, 0.2))
    np.testing.assert_allclose(found.mean, 0.1, rtol=1e-5)
    np.testing.assert_allclose(found.variance, 0.2**2 + 0.05**2, rtol=1e-5)


def test_moments_of_a_tanh_normal_policy_are_those_of_many_samples():
    loc, scale = np.float64(0.4), np.float64(0.3)
    samples = np.tanh(loc + scale * np.random.default_rng(0).standard_normal(1_000_000))
    found = moments(policy(TanhNormal, loc, scale))
    np.testing.assert_allclose(found.mean, samples.mean(), rtol=5e-3)
    np.testing.assert_allclose(found.variance, samples.var() + 0.05**2, rtol=0.03)


def test_moments_of_a_normal_policy_clip_the_action():
    """The environment bounds the action to [-1, 1], so means of 2 and 50 are one action, with no spread."""
    for loc in (2.0, 50.0):
        found = moments(policy(Normal, loc, 0.1))
        assert (found.mean, found.variance) == (1.0, np.float32(0.05**2))
    assert between(Normal, (2.0, 0.1), (50.0, 0.1)) == 0.0
    assert between(Normal, (0.5, 0.1), (0.8, 0.1)) > 1.0


def test_saturated_policy_that_acts_the_same_has_no_distance():
    """The case of the module's docstring: Brax's KL is 18,000 nats, and the environment sees the same action."""
    old, new = (-11.30, 0.001), (-11.11, 0.001)
    assert divergence(TanhNormal, old, new) > 1e4
    assert abs(between(TanhNormal, old, new)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("old", "new"), [((0.2, 0.3), (0.3, 0.3)), ((0.0, 0.5), (0.2, 0.5))])
def test_distance_of_noisy_policies_is_close_to_the_kl_divergence(kind, old, new):
    np.testing.assert_allclose(between(kind, old, new), divergence(kind, old, new), rtol=0.2)


def test_greatest_distance_is_800_nats_for_any_number_of_action_elements():
    """From one end of the action's range to the other, at the finest resolution."""
    assert between(TanhNormal, (-20.0, 0.001), (20.0, 0.001)) == pytest.approx(800.0, rel=1e-5)
    three = ([-20.0] * 3, [0.001] * 3), ([20.0] * 3, [0.001] * 3)
    assert between(TanhNormal, *three) == pytest.approx(800.0, rel=1e-5)


EXTREMES = [(loc, scale) for loc in (0.0, -20.0, 1e10, -1e38) for scale in (1e-38, 1e-3, 1.0, 1e10, 1e38)]


@pytest.mark.parametrize("kind", KINDS)
def test_distance_is_finite_and_bounded_for_extreme_policies(kind):
    old = policy(kind, *zip(*[a for a in EXTREMES for _ in EXTREMES], strict=True))
    new = policy(kind, *zip(*EXTREMES * len(EXTREMES), strict=True))
    old, new = (jax.tree.map(lambda x: x[:, None], one) for one in (old, new))
    found = np.asarray(distance.distance(moments(old), moments(new)))
    assert found.shape == (len(EXTREMES) ** 2,)
    assert (found >= -1e-4).all() and (found <= 801).all()
    assert not np.isfinite(new.kl_from(old)).all()  # the KL of Brax is not finite


# --- a batch

ROWS, T = 8, 16


@functools.cache
def parts():
    networks = make_networks(SETTINGS, 2)
    params, statistics, data, *_ = experience(networks, ROWS, T)
    return networks, params, statistics, data


def under(params, statistics):
    """Moments of a policy in the samples of the batch."""
    networks, _, _, data = parts()
    return moments(networks.distribution(params, statistics, data.observation)[0])


@functools.cache
def measuring(limit, devices=1):
    networks, *_ = parts()
    region = trust_region.TrustRegion(settings_of(SETTINGS), networks, None)
    return sharding.over_devices(
        lambda *x: region.mean_distance(*x, limit)[None], mesh(devices), (R, R, SPLIT, SPLIT), SPLIT
    )


def measured(reference, valid=None, limit=None, devices=1, observation=None):
    _, params, statistics, data = parts()
    data = data._replace(valid=valid, bootstrap_observation=None)
    if observation is not None:
        data = data._replace(observation=observation)
    first, *others = jax.device_get(measuring(limit, devices)(params, statistics, data, reference))
    assert all(other == first for other in others)  # of each device
    return first


def moved(where):
    """A reference with other means in some samples, and the distance of each sample from it."""
    _, params, statistics, _ = parts()
    now = under(params, statistics)
    mean = jnp.where(where[..., None], -0.5 * jnp.sign(now.mean), now.mean)
    reference = ActionMoments(mean, now.variance)
    return reference, np.asarray(distance.distance(reference, now))


EVERYWHERE = np.ones((ROWS, T), bool)


def test_distance_of_a_batch_is_the_mean_over_its_samples():
    reference, each = moved(EVERYWHERE)
    assert each.max() > 100.0  # a sample counts 100 nats at most where nothing is limited
    np.testing.assert_allclose(measured(reference), np.minimum(each, 100.0).mean(), rtol=1e-5)


@pytest.mark.parametrize("bad", [None, np.nan])
def test_invalid_samples_do_not_count_in_the_distance(bad):
    """Also if their observations are NaN."""
    valid = np.random.default_rng(0).random((ROWS, T)) > 0.5
    reference, each = moved(EVERYWHERE)
    observation = parts()[3].observation
    if bad is not None:
        observation = jnp.where(valid[..., None], observation, bad)
    found = measured(reference, jnp.asarray(valid), observation=observation)
    np.testing.assert_allclose(found, np.minimum(each[valid], 100.0).mean(), rtol=1e-5)


def test_batch_without_valid_samples_has_no_distance():
    reference, _ = moved(EVERYWHERE)
    assert measured(reference, jnp.asarray(~EVERYWHERE)) == 0.0


def test_valid_sample_of_nan_makes_the_mean_distance_nan():
    """Otherwise the limiter would take the policy for unchanged."""
    reference, _ = moved(EVERYWHERE)
    observation = parts()[3].observation.at[0, 0].set(jnp.nan)
    assert np.isnan(measured(reference, jnp.asarray(EVERYWHERE), observation=observation))


@pytest.mark.parametrize("masking", [False, True])
def test_distance_on_two_devices_equals_that_on_one(masking):
    """Only samples of one device differ, and both devices report the same mean."""
    where = np.arange(ROWS)[:, None] >= ROWS // 2
    reference, each = moved(np.broadcast_to(where, (ROWS, T)))
    valid = None
    if masking:
        valid = np.random.default_rng(1).random((ROWS, T)) > 0.5
        each = each[valid]
    one, two = (measured(reference, None if valid is None else jnp.asarray(valid), devices=n) for n in (1, 2))
    np.testing.assert_allclose([one, two], np.minimum(each, 100.0).mean(), rtol=1e-5)


def test_large_batch_is_sampled_at_equal_distances():
    """About 1,024 steps: every eighth of 512 unrolls of 16 steps. A small batch is used whole."""
    _, _, _, data = parts()
    large = jnp.broadcast_to(jnp.arange(512.0)[:, None], (512, 16))
    found = trust_region.subsample(large, (512, 16))
    np.testing.assert_array_equal(found[:, 0], np.arange(0.0, 512.0, 8.0))
    assert trust_region.subsample(data.log_prob, data.log_prob.shape).shape == data.log_prob.shape


# --- the normaliser

LIMIT = 0.4


def applied(params, old, new, preserves=True):
    """The statistics and the parameters after `with_same_function`."""
    rescaled = parts()[0].rescale_inputs(params, old, new)
    found = trust_region.with_same_function(params, rescaled, old, new, jnp.asarray(preserves))
    return found.statistics, found.params, bool(found.rescaled)


def burst(count=5000):
    """Statistics before and after a batch in which one feature is far from the statistics."""
    _, params, statistics, data = parts()
    old = normalizer.Statistics(WideCounter.of(count), statistics.mean, statistics.variance, statistics.std)
    observation = data.observation.at[:2, :, 0].add(20.0)
    update = sharding.over_devices(lambda s, x: normalizer.update(s, x, None, SETTINGS.ppo).statistics, mesh(), R, R)
    return params, old, jax.device_get(update(old, observation)), data


def _moved(params, old, new):
    each = distance.distance(under(params, old), under(params, new))
    return float(jnp.mean(jnp.minimum(each, 10.0 * LIMIT)))


def values(params, statistics):
    networks, _, _, data = parts()
    return networks.value(params, statistics, data.observation)


@pytest.mark.parametrize(("shift", "divisors"), [(4.0, [1000.0, 1.0, 1.0]), (None, [1.0, 1.0, 1.0])])
def test_large_first_observations_are_divided_by_their_size_until_there_are_statistics(shift, divisors):
    """One element of about 1,000, one of 9, one that is not finite in an environment; Brax takes them raw."""
    settings = tiny_config(guards={"limiters": LIMITERS_OFF | {"observation_shift": shift}})
    ppo, state = assemble(settings)
    region = trust_region.TrustRegion(ppo.settings, ppo.networks, ppo.optimizer)
    seen = jnp.tile(jnp.float32([-1000.0, 9.0, 20.0]), (8, 1)).at[0].set(jnp.array([500.0, 0.0, jnp.inf]))
    three = jax.ShapeDtypeStruct((3,), jnp.float32)
    state = dataclasses.replace(
        state, env_state=state.env_state.replace(obs=seen), normalizer=normalizer.init(three)
    )  # fmt: skip
    before = sharding.over_devices(lambda s: region.before_first_batch(s).normalizer.std, mesh(), (R,), R)
    np.testing.assert_array_equal(before(state), divisors)
    later = dataclasses.replace(state, normalizer=dataclasses.replace(state.normalizer, count=WideCounter.of(1)))
    np.testing.assert_array_equal(before(later), 1.0)


def test_statistics_that_would_move_the_policy_come_with_rescaled_first_layers():
    """Actions and values stay the same function; the statistics are taken in full, bit for bit."""
    params, old, new, _ = burst()
    assert _moved(params, old, new) > LIMIT  # without rescaling
    statistics, rescaled, active = applied(params, old, new)
    assert active
    jax.tree.map(np.testing.assert_array_equal, statistics, new)
    for found, before in zip(under(rescaled, new), under(params, old), strict=True):
        np.testing.assert_allclose(found, before, atol=1e-4)
    np.testing.assert_allclose(values(rescaled, new), values(params, old), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("preserves", "finite"), [(False, True), (False, False), (True, False)])
def test_statistics_without_rescaling_leave_the_parameters_and_are_not_taken_unless_finite(preserves, finite):
    params, old, new, _ = burst()
    new = new if finite else dataclasses.replace(new, mean=np.full_like(new.mean, np.nan))
    statistics, found, active = applied(params, old, new, preserves)
    assert not active
    jax.tree.map(np.testing.assert_array_equal, (statistics, found), (new if finite else old, params))


@pytest.mark.parametrize(("std", "factor"), [(0.1, 0.1), (50.0, 1.0)])
def test_untrained_weights_of_a_constant_shrink_but_do_not_grow_with_its_new_scale(std, factor):
    """The networks compute what they computed at the constant, 3.0."""
    networks, params, statistics, data = parts()
    ones = jnp.ones_like(statistics.mean)
    first = lambda x, value: x.at[0].set(value)  # noqa: E731
    old = dataclasses.replace(
        statistics, count=WideCounter.of(64), mean=first(0 * ones, 3.0), variance=first(ones, 0.0), std=ones
    )
    new = dataclasses.replace(old, mean=first(0 * ones, 4.0), variance=first(ones, std**2), std=first(ones, std))
    found = networks.rescale_inputs(params, old, new)
    kernels = [x["value"]["params"]["hidden_0"]["kernel"] for x in (found, params)]
    np.testing.assert_allclose(kernels[0][0], factor * kernels[1][0], rtol=1e-6)
    np.testing.assert_array_equal(kernels[0][1:], kernels[1][1:])
    at_the_constant = data.observation.at[..., 0].set(3.0)
    for before, after in [(networks.value(params, old, at_the_constant), networks.value(found, new, at_the_constant))]:
        np.testing.assert_allclose(before, after, rtol=1e-4, atol=1e-5)


def test_first_element_that_begins_to_vary_is_found():
    _, old, new, _ = burst()
    assert not trust_region.began_to_vary(old, new).any()
    was = dataclasses.replace(old, variance=old.variance.at[1].set(0.0))
    np.testing.assert_array_equal(trust_region.began_to_vary(was, new), np.arange(new.mean.size) == 1)


# --- a whole iteration


@functools.cache
def training(kl, policy_guard=False, **ppo):
    guards = GUARDS_OFF | {"limiters": LIMITERS_OFF | {"kl": kl}}
    if policy_guard:
        guards |= {"policy": {"enabled": True}}
    own, state = assemble(tiny_config(guards=guards, ppo=ppo))
    return compiled(own), placed(state)


def shaken(state):
    """A state whose normaliser has few and far samples, with a policy that depends strongly on observations."""
    weights = jax.tree.map(lambda x: 10.0 * x, state.params["policy"])
    statistics = dataclasses.replace(
        state.normalizer,
        mean=state.normalizer.mean + 10.0,
        variance=jnp.full_like(state.normalizer.variance, 0.01),
        std=jnp.full_like(state.normalizer.std, 0.1),
        count=jax.tree.map(lambda old, new: jnp.full_like(old, new), state.normalizer.count, WideCounter.of(64)),
    )
    return dataclasses.replace(state, params=state.params | {"policy": weights}, normalizer=statistics)


@pytest.mark.parametrize("order", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_kl_limiter_keeps_the_normalizer_from_moving_the_policy(order):
    """The statistics are taken in full, and the first layers are rescaled."""
    small = {"normalizer_update": order, "learning_rate": 1e-6}
    plain, state = training(None, policy_guard=True, **small)
    start = shaken(state)
    after, metrics = plain(start)
    assert metrics.values["training/policy_distance"] > 0.05
    whole = after.normalizer.mean - start.normalizer.mean
    limited, state = training(0.05, **small)
    after, metrics = limited(shaken(state))
    assert metrics.values["training/policy_distance"] <= 0.5 * 0.05 * 1.05  # updates move the policy a little
    assert metrics.values["limiters/kl/active"] == 0.0
    assert metrics.values["limiters/normalizer/active"] == 1.0
    np.testing.assert_allclose(after.normalizer.mean - start.normalizer.mean, whole, rtol=1e-3)
    assert int(after.normalizer.count) == 128


@pytest.mark.parametrize("order", ["before", "after"])
def test_first_batch_of_the_normalizer_does_not_trip_the_kl_limiter(order):
    """The distance is that of the updates under the new statistics."""
    limited, state = training(0.1, normalizer_update=order, learning_rate=1e-6)
    start = dataclasses.replace(state, params=shaken(state).params)
    after, metrics = limited(start)
    assert int(after.normalizer.count) == 64
    assert metrics.values["training/policy_distance"] < 1e-4
    assert metrics.values["limiters/kl/active"] == 0.0
