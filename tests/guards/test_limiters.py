"""Limiters: exact values, finite gradients that lead back inside, and the reported activity.

First the functions, then every limiter of the configuration.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import assert_same, finite, loss_and_metrics, minibatch_of, on_one_device

from rlstable.config.guards import LimiterConfig
from rlstable.config.networks import NetworkConfig
from rlstable.config.ppo import PPOConfig
from rlstable.device.counter import WideCounter
from rlstable.guards import limiters
from rlstable.ppo import normalizer, reward
from rlstable.ppo.distributions import Normal
from rlstable.ppo.loss import Loss, standardize
from rlstable.ppo.networks import Networks
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.optimizer import Candidate, Optimizer, Rates
from rlstable.ppo.records import Collected, Targets

pytestmark = pytest.mark.usefixtures("quick_compile")

NAN, INF = float("nan"), float("inf")
FLOATS = st.floats(-10, 10, width=32, allow_subnormal=False)  # XLA flushes subnormal numbers to zero


def gradient(function: Callable[[jax.Array], jax.Array], *at: float) -> list[float]:
    return jax.grad(lambda x: jnp.sum(function(x)))(jnp.array(at, jnp.float32)).tolist()


# --- clip


def test_clip_is_exact_and_its_gradient_finite():
    """NaN stays NaN, for a guard to reject."""
    x = jnp.array([-INF, -3.5, -3.0, -1e-8, 0.0, 2.9999998, 3.0, 1e30, INF, NAN])
    expected = np.array([-3.0, -3.0, -3.0, -1e-8, 0.0, 2.9999998, 3.0, 3.0, 3.0, NAN], np.float32)
    np.testing.assert_array_equal(limiters.clip(x, 3.0), expected)
    assert gradient(lambda x: limiters.clip(x, 3.0), 1.0, 5.0, -1e30, INF) == [1.0, 0.0, 0.0, 0.0]


# --- bounded, outside


@settings(max_examples=30)
@given(st.lists(FLOATS, min_size=8, max_size=8), FLOATS, st.floats(0.125, 10, width=32))
def test_bounded_equals_clip_and_has_the_gradient_of_the_identity_inside(xs, low, width):
    low, high = np.float32(low), np.float32(low + width)
    x = np.array(xs, np.float32)
    np.testing.assert_array_equal(limiters.bounded(jnp.array(x), float(low), float(high)), np.clip(x, low, high))
    inside = (x > low) & (x < high)
    for sign in (1.0, -1.0):
        got = np.array(gradient(lambda y, s=sign: s * limiters.bounded(y, float(low), float(high)), *xs))
        assert (got[inside] == sign).all() and np.isin(got, (0.0, sign)).all()


@pytest.mark.parametrize(
    ("x", "slope", "passes"),
    [
        # Gradient descent with a slope of 1 goes down: above the ceiling this leads back inside.
        (5.0, 1.0, True), (5.0, -1.0, False), (-5.0, -1.0, True), (-5.0, 1.0, False),
        # The same at a bound.
        (2.0, 1.0, True), (2.0, -1.0, False), (-2.0, -1.0, True), (-2.0, 1.0, False),
        (0.5, 1.0, True), (0.5, -1.0, True),
    ],
)  # fmt: skip
def test_gradient_of_bounded_leads_back_inside_and_not_further_out(x, slope, passes):
    assert gradient(lambda y: slope * limiters.bounded(y, -2.0, 2.0), x) == [slope if passes else 0.0]


# --- every limiter of the configuration

OFF = dict.fromkeys(LimiterConfig.model_fields)


def only(**limits: float) -> LimiterConfig:
    return LimiterConfig(**OFF | limits)


def test_every_limiter_has_a_test():
    """Adding a limiter means adding a test that names it. Other files of tests/ppo have three."""
    with open(__file__) as file:
        below = file.read().split("# --- every limiter of the configuration")[-1]
    elsewhere = [name for name in LimiterConfig.model_fields if f"{name}=" not in below]
    assert elsewhere == ["reward_outlier", "observation_shift", "kl"]


def samples(**fields: Any) -> Collected:
    """Four samples, `[1, 4]`."""
    zeros, none = jnp.zeros((1, 4)), jnp.zeros((1, 4, 0))
    plain = Collected(none, none, zeros, Normal(none, none), zeros, zeros, zeros, zeros, None, None, none[:, 0])
    return plain._replace(**fields)


def test_reward_limiter_clips_rewards_and_reports_its_share():
    """Invalid samples do not count."""
    paid = jnp.array([[2.0, -2.0, 2.5, -1e30]])
    valid = jnp.array([[True, True, True, False]])

    def shape(limits: LimiterConfig) -> Any:
        return on_one_device(
            lambda data: reward.shape(data, None, jnp.zeros(2), PPOConfig(), limits, lambda: data.value)
        )

    for limit, expected, active in ((2.0, [2.0, -2.0, 2.0, -2.0], 1 / 3), (1e3, [2.0, -2.0, 2.5, -1e3], 0.0)):
        data, _, _, metrics = shape(only(reward=limit))(samples(reward=paid, valid=valid))
        assert data.reward.tolist() == [expected]
        assert metrics == {
            "limiters/reward/active": pytest.approx(active), "training/reward_greatest": min(limit, 2.5),
        }  # fmt: skip
    data, _, _, metrics = shape(only())(samples(reward=paid))
    np.testing.assert_array_equal(data.reward, paid)
    assert metrics == {"training/reward_greatest": np.float32(1e30)}


STATISTICS = Statistics(WideCounter.of(10), jnp.array([1.0, 0.0]), jnp.array([4.0, 1.0]), jnp.array([2.0, 1.0]))


@functools.cache
def linear(limits: LimiterConfig, std: float = 0.5) -> tuple[Networks, Any]:
    """Networks of a single layer, and a standard deviation that is a parameter."""
    config = NetworkConfig(
        policy_hidden_layer_sizes=(4,), value_hidden_layer_sizes=(4,), activation="tanh",
        distribution_type="normal", init_noise_std=std,
    )  # fmt: skip
    networks = Networks(config, limits, 2, normalize=True)
    return networks, networks.init(jax.random.PRNGKey(0), jax.ShapeDtypeStruct((2,), jnp.float32))


def test_observation_limiter_clips_normalised_observations():
    """The reported share is that of elements."""
    networks, params = linear(only(observation=3.0))
    unlimited, _ = linear(only())
    seen = jnp.array([[7.0, -3.0], [7.2, 0.0], [1e30, -1e30]])
    inside = jnp.array([[7.0, -3.0], [7.0, 0.0], [7.0, -3.0]])
    distribution, _ = networks.distribution(params, STATISTICS, seen)
    expected, nothing = unlimited.distribution(params, STATISTICS, inside)
    np.testing.assert_array_equal(distribution.loc, expected.loc)
    np.testing.assert_array_equal(networks.value(params, STATISTICS, seen), unlimited.value(params, STATISTICS, inside))
    assert networks.beyond(STATISTICS, seen, 3.0).tolist() == [0.0, 0.5, 1.0]
    assert nothing == {}
    # Networks without preprocessing give the same bits for preprocessed observations.
    preprocessed, bare = networks.preprocess(STATISTICS, seen), networks.without_preprocessing
    np.testing.assert_array_equal(bare.distribution(params, STATISTICS, preprocessed)[0].loc, expected.loc)
    np.testing.assert_array_equal(
        bare.value(params, STATISTICS, preprocessed), unlimited.value(params, STATISTICS, inside)
    )


def test_observation_outlier_limiter_clips_what_the_normalizer_reads():
    """Within 3 standard deviations of the statistics so far; a first batch of four samples is not clipped."""
    batch = jnp.array([[[7.0, 0.0], [8.0, 3.0], [-1e30, -4.0], [1.0, 0.0]]])
    drawn_in = jnp.array([[[7.0, 0.0], [7.0, 3.0], [-5.0, -3.0], [1.0, 0.0]]])
    limit = only(observation_outlier=3.0).observation_outlier
    update = on_one_device(lambda s, x: normalizer.update(s, x, None, PPOConfig(), limit).statistics)
    plain = on_one_device(lambda s, x: normalizer.update(s, x, None, PPOConfig()).statistics)
    for ours, theirs in (
        (update(STATISTICS, batch), plain(STATISTICS, drawn_in)),
        (update(STATISTICS, drawn_in), plain(STATISTICS, drawn_in)),
        (update(normalizer.init(STATISTICS.mean), batch), plain(normalizer.init(STATISTICS.mean), batch)),
    ):
        assert_same(ours, theirs)
    assert normalizer.outlier_share(batch, STATISTICS, limit).tolist() == [[0.0, 0.5, 1.0, 0.0]]
    assert not normalizer.outlier_share(batch, normalizer.init(STATISTICS.mean), limit).any()


def test_glitches_of_the_first_batch_do_not_set_the_statistics():
    """Within 100 ranges of most samples; an element that is mostly constant keeps its rare events."""
    rng = np.random.default_rng(0)
    batch = np.stack([rng.uniform(-1.0, 1.0, (8, 128)), rng.uniform(size=(8, 128)) < 0.005], axis=-1).astype(np.float32)
    assert 0.0 < batch[..., 1].mean() < 0.01
    limit, empty = only(observation_outlier=100.0).observation_outlier, normalizer.init(jnp.zeros(2))
    update = on_one_device(lambda x: normalizer.update(empty, x, None, PPOConfig(), limit).statistics)
    clean = update(jnp.asarray(batch))
    np.testing.assert_allclose(clean.std, batch.std(axis=(0, 1)), rtol=1e-5)
    batch[3, 5, 0], batch[6, 9, 0] = 1e6, -1e30
    glitched = update(jnp.asarray(batch))
    assert np.asarray(glitched.std)[0] < 20.0 * np.asarray(clean.std)[0]  # about 194 * sqrt(2 / 1024) / 0.58
    np.testing.assert_array_equal(glitched.std[1], clean.std[1])


def test_advantage_std_min_suppresses_the_advantages_of_an_even_batch():
    """A batch with spread is not changed."""
    even = jnp.array([1.0, 1.0, 1.0, 1.0000001])
    least = only(advantage_std_min=1e-2).advantage_std_min
    unlimited, limited = (
        on_one_device(lambda x, least=bound: standardize(x, None, None, least)[0]) for bound in (None, least)
    )
    assert np.abs(unlimited(even)).max() > 1 and np.abs(limited(even)).max() < 1e-4
    np.testing.assert_allclose(limited(even), (even - np.mean(even)) / 1e-2, rtol=1e-4, atol=1e-8)
    spread = jnp.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(limited(spread), unlimited(spread))
    assert finite(limited(jnp.ones(4)))


@dataclasses.dataclass(frozen=True)
class Given:
    """Networks whose outputs are their parameters."""

    config = NetworkConfig()

    def over_time(self, params: Any, statistics: Any, data: Any) -> tuple[Normal, dict[str, jax.Array]]:
        return Normal(params["loc"], jnp.ones_like(params["loc"])), {}

    def value(self, params: Any, statistics: Any, observation: Any) -> jax.Array:
        return params["value"]


def loss(
    limits: LimiterConfig, target: Any, advantage: float = 0.0, log_prob: Any = None
) -> tuple[dict[str, float], Any]:
    """Metrics of the loss and its gradient, at standard normal actions and given values."""
    params = {"loc": jnp.zeros((1, 4, 1)), "value": jnp.zeros((1, 4))}
    data = samples(
        raw_action=jnp.full((1, 4, 1), 0.5),
        distribution=Normal(jnp.zeros((1, 4, 1)), jnp.ones((1, 4, 1))),
        log_prob=jnp.zeros((1, 4)) if log_prob is None else log_prob,
    )
    minibatch = minibatch_of(data, jnp.zeros((1, 4, 1)), targets=Targets(target, jnp.full((1, 4), advantage)))
    call = loss_and_metrics(Given(), PPOConfig(), limits)
    slopes, metrics = on_one_device(jax.grad(lambda p, data: call(p, STATISTICS, data, None), has_aux=True))(
        params, minibatch
    )
    return {name: float(x) for name, x in metrics.items()}, slopes


def test_value_target_limiter_clips_targets():
    """The loss is a quarter of the mean square."""
    target = jnp.array([[10.0, -10.0, 11.0, 1e30]])
    metrics, slopes = loss(only(value_target=10.0), target)
    assert metrics["training/v_loss"] == pytest.approx(25.0) and metrics["limiters/value_target/active"] == 0.5
    np.testing.assert_allclose(slopes["value"], [[-1.25, 1.25, -1.25, -1.25]], rtol=1e-6)
    assert np.isinf(loss(only(), target)[0]["training/v_loss"])


def test_value_range_limiter_bounds_values_where_an_episode_is_cut():
    """Rewards from -1 to 2 and a discount of 0.9 pay -10 to 20; steps pay 1, the second and the fourth are cut.

    Beyond the bounds, an estimate at a cut is neither a target itself nor part of the target before.
    """
    config, values = PPOConfig(discounting=0.9, gae_lambda=0.0), jnp.array([[5.0], [30.0], [-1e3], [-50.0], [80.0]])
    data = samples(**{name: jnp.zeros((5, 1)) for name in ("reward", "truncation", "termination")})
    data = data._replace(reward=jnp.ones((5, 1)), bootstrap_observation=jnp.zeros((1, 1, 0)))
    data = data._replace(truncation=jnp.array([[0.0], [1.0], [0.0], [1.0], [0.0]]))
    targets = {}
    for limits in (only(value_range=1.0), only(value_range=2.0), only()):
        bounds = reward.value_range(jnp.array([-1.0, 2.0]), config, limits)
        own = Loss(Given(), config, limits, bounds)
        estimate = on_one_device(lambda p, data, own=own: own.estimate(p, STATISTICS, data, p["values"]).value)
        targets[limits.value_range] = np.ravel(estimate({"values": values, "value": jnp.array([1e4])}, data))
    last = 1 + 0.9 * 1e4
    np.testing.assert_allclose(targets[1.0], [1 + 0.9 * 20, 20, 1 - 0.9 * 10, -10, last], rtol=1e-6)
    np.testing.assert_allclose(targets[2.0], [1 + 0.9 * 30, 30, 1 - 0.9 * 20, -20, last], rtol=1e-6)
    np.testing.assert_allclose(targets[None], [1 + 0.9 * 30, 30, 1 - 0.9 * 50, -50, last], rtol=1e-6)


def test_linear_critic_runs_away_from_a_cut_without_the_limiter_of_values():
    """Two steps that pay 1, the second is cut; a linear critic sees 1, then 2 (as in Tsitsiklis and Van Roy 1996).

    No value is above 10. Least squares to the targets multiply the weight by 1.16 without bounds.
    """
    data = samples(**{name: jnp.zeros((2, 1)) for name in ("truncation", "termination")})
    data = data._replace(reward=jnp.ones((2, 1)), bootstrap_observation=jnp.zeros((1, 1, 0)))
    data, seen = data._replace(truncation=jnp.array([[0.0], [1.0]])), np.array([[1.0], [2.0]], np.float32)
    weights, config = {}, PPOConfig(discounting=0.9, gae_lambda=0.0)
    for limits in (only(value_range=1.0), only()):
        own = Loss(Given(), config, limits, reward.value_range(jnp.array([0.0, 1.0]), config, limits))
        targets = on_one_device(lambda p, data, own=own: own.estimate(p, STATISTICS, data, p["values"]).value)
        weight = 1.0
        for _ in range(80):
            fitted = targets({"values": weight * seen, "value": jnp.zeros(1)}, data)
            weight = np.sum(seen * fitted) / np.sum(np.square(seen))
        weights[limits.value_range] = weight
    assert weights[1.0] == pytest.approx((10 + 2 * 10) / 5)
    assert weights[None] > 1e4


def test_undiscounted_values_have_no_range():
    assert reward.value_range(jnp.ones(2), PPOConfig(discounting=1.0), only(value_range=1.0)) is None
    config, limits = PPOConfig(discounting=0.5), only(value_range=1.0)
    assert reward.value_range(jnp.array([0.0, 3.0]), config, limits).tolist() == [0.0, 6.0]
    assert limiters.within(jnp.array([7.0, -1.0, np.inf]), jnp.array([0.0, 6.0])).tolist() == [6.0, 0.0, np.inf]


def test_value_error_limiter_makes_the_loss_linear_beyond_delta():
    target = jnp.array([[1.0, 2.0, -4.0, 1e30]])
    metrics, slopes = loss(only(value_error=2.0), target)
    assert metrics["training/v_loss"] == pytest.approx((1 + 4 + 12 + 4e30) / 16)
    assert metrics["limiters/value_error/active"] == 0.5
    np.testing.assert_allclose(slopes["value"], [[-0.125, -0.25, 0.25, -0.25]], rtol=1e-6)


@pytest.mark.parametrize(
    ("advantage", "policy_loss", "slopes"),
    [
        (-1.0, (np.e + 2 * np.exp(2) + 0.7) / 4, [np.e / 8, 1 / 8, 1 / 8, 0.0]),
        (1.0, -(3 * 1.3 + np.exp(-2)) / 4, [0.0, 0.0, 0.0, -1 / 8]),
    ],
)
def test_log_ratio_limiter_keeps_a_gradient_that_leads_back(advantage, policy_loss, slopes):
    """The ratio is at most the exponential of the limit; beyond the limit the gradient is that of a ratio of 1.

    Log-ratios are 1, 2.5, 1000 and -1000. A bad action that became far likelier becomes less likely again, and a good
    action that became far less likely becomes likelier. Samples clipped by PPO have no gradient.
    """
    now = -0.5 * 0.25 - 0.9189385332046727
    samples_of = (jnp.zeros((1, 4)), advantage, now - jnp.array([[1.0, 2.5, 1000.0, -1000.0]]))
    metrics, found = loss(only(log_ratio=2.0), *samples_of)
    assert metrics["training/policy_loss"] == pytest.approx(policy_loss, rel=1e-5)
    assert metrics["limiters/log_ratio/active"] == 0.75
    np.testing.assert_allclose(found["loc"][0, :, 0], slopes, rtol=1e-4, atol=1e-7)
    assert advantage > 0 or not finite(loss(only(), *samples_of)[1])


@pytest.mark.parametrize(
    ("limits", "std", "expected", "active"),
    [
        (only(policy_std_min=0.1), 0.01, 0.1, 1.0), (only(policy_std_min=0.1), 0.1, 0.1, 0.0),
        (only(policy_std_max=2.0), 5.0, 2.0, 1.0), (only(policy_std_max=2.0), 2.0, 2.0, 0.0),
        (only(policy_std_min=0.1, policy_std_max=2.0), 1.0, 1.0, 0.0),
    ],
)  # fmt: skip
def test_policy_std_limiters_bound_the_standard_deviation_and_its_gradient_leads_back(limits, std, expected, active):
    networks, params = linear(limits, std)
    observation = jnp.zeros((3, 2))
    distribution, activity = networks.distribution(params, STATISTICS, observation)
    np.testing.assert_array_equal(distribution.scale, np.full((3, 2), expected, np.float32))
    assert activity.keys() == {"policy_std"} and activity["policy_std"].tolist() == [active] * 3

    def missed(params: Any) -> jax.Array:
        scale = networks.distribution(params, STATISTICS, observation)[0].scale
        return jnp.sum(jnp.square(jnp.log(scale) - jnp.log(1.1)))

    slope = jax.grad(missed)(params)["policy"]["params"]["std_param"]["value"]
    assert finite(slope) and (np.sign(slope) == np.sign(std - 1.1)).all()


# --- gradients and updates

PARAMS = {"w": jnp.array([[3.0, 0.0], [0.0, 0.3], [4.0, 0.4]]), "b": jnp.array([0.0, 0.0])}
# Norms of the columns of w: 0.05 and 0.04; of b: 0.00005.
SMALL = {"w": jnp.array([[0.03, 0.0], [0.04, 0.0], [0.0, 0.04]]), "b": jnp.array([5e-5, 0.0])}


def candidate(limits: LimiterConfig, gradients: Any, rate: float = 1e-3, params: Any = PARAMS, **ppo: Any) -> Candidate:
    optimizer = Optimizer(PPOConfig(**ppo), limits)

    def step(gradients: Any, params: Any) -> Candidate:
        norm = optax.global_norm(gradients)
        return optimizer.candidate(gradients, norm, optimizer.init(params), params, Rates(*[jnp.float32(rate)] * 2))

    return jax.jit(step)(gradients, params)


def seen_by_adam(candidate: Candidate) -> Any:
    """After one step its first moment is a tenth of the gradient."""
    adam = next(state for state in candidate.opt_state if isinstance(state, optax.ScaleByAdamState))
    return jax.tree.map(lambda m: np.asarray(m) / np.float32(0.1), adam.mu)


def step_of(candidate: Candidate, params: Any = PARAMS) -> float:
    return float(optax.global_norm(jax.tree.map(jnp.subtract, candidate.params, params)))


def scaled(tree: Any, factor: float) -> Any:
    return jax.tree.map(lambda x: factor * x, tree)


@pytest.mark.parametrize("limits", [only(gradient_norm=1.0), only(update_norm=0.1), LimiterConfig()])
def test_update_limiters_leave_a_healthy_update_unchanged(limits):
    first, second = candidate(limits, SMALL), candidate(only(), SMALL)
    for a, b in zip(jax.tree.leaves(first[:3]), jax.tree.leaves(second[:3]), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert set(map(float, first.activity.values())) == {0.0} and second.activity == {}


@pytest.mark.parametrize("factor", [2.0, 1e10])
def test_gradient_norm_limiter_scales_the_gradient(factor):
    """Adam gets exactly the allowed norm, in the same direction."""
    norm = float(optax.global_norm(SMALL))
    limits = only(gradient_norm=norm * 1.5)
    large = candidate(limits, scaled(SMALL, factor))
    given = seen_by_adam(large)
    assert optax.global_norm(given) == pytest.approx(1.5 * norm, rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 1.5 * b, rtol=1e-5), given, SMALL)
    assert large.activity == {"gradient_norm": 1.0} and finite(large.params)
    assert candidate(limits, SMALL).activity == {"gradient_norm": 0.0}


@pytest.mark.parametrize("limits", [only(gradient_norm=1.0), only(update_norm=0.1)])
def test_limiters_leave_a_bad_gradient_to_the_guard(limits):
    """No limiter turns NaN into a number that looks good."""
    spoiled = candidate(limits, SMALL | {"w": SMALL["w"].at[0, 0].set(NAN)})
    assert not finite(spoiled.params)


@pytest.mark.parametrize(("params", "rate"), [(scaled(PARAMS, 1e-3), 1.0), (scaled(PARAMS, 1e3), 1e6)])
def test_update_norm_is_limited_to_a_share_of_the_norm_of_the_parameters(params, rate):
    """A norm of the parameters below 1 counts as 1."""
    share = 1e-4
    bound = share * max(float(optax.global_norm(params)), 1.0)
    unlimited, limited = (candidate(limits, SMALL, rate, params) for limits in (only(), only(update_norm=share)))
    assert limited.update_norm == pytest.approx(bound, rel=1e-5)
    assert limited.activity == {"update_norm": 1.0}
    assert step_of(limited, params) == pytest.approx(bound, rel=2e-3)  # rounding of large parameters
    assert unlimited.update_norm == pytest.approx(
        rate * 2, rel=0.02
    )  # every element of the first step of Adam has the size of the rate
    assert_same(limited.opt_state, unlimited.opt_state)
