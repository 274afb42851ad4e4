"""Learning rates, loss scale and candidates: exact values, equality with optax, and rejected updates."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import GUARDS_OFF, LIMITERS_OFF, PointMass, experience, mesh, minibatch_of, settings_of, tiny_config

from rlstable.config.precision import LossScaleConfig
from rlstable.device import sharding
from rlstable.device.counter import WideCounter
from rlstable.device.packed import PackedDict
from rlstable.device.precision import level
from rlstable.envs.vector import VectorEnv
from rlstable.ppo.flat import ParamFlattener
from rlstable.ppo.initial import init_tuning
from rlstable.ppo.optimizer import Optimizer, Rates, adapt_loss_scale, adapt_to_kl
from rlstable.ppo.sgd import SGD, SGDCarry, SGDState
from rlstable.ppo.state import Counters
from rlstable.runner.setup import make_ppo

pytestmark = pytest.mark.usefixtures("quick_compile")

LR, MIN = 4e-3, 1e-3
TOTAL = 10_000
STEPS = WideCounter.of(0)


def first_tuning(settings):
    return init_tuning(settings_of(settings), level(settings.precision))


def tuning(**fields):
    return dataclasses.replace(first_tuning(tiny_config(ppo={"learning_rate": LR})), **fields)


def optimizer(limits=None, **ppo):
    settings = tiny_config(ppo={"learning_rate": LR, **ppo}, guards={"limiters": LIMITERS_OFF | (limits or {})})
    return Optimizer(settings.ppo, settings.guards.limiters)


def candidate(ours, gradient, state, params, rate=LR):
    return ours.candidate(gradient, optax.global_norm(gradient), state, params, Rates(*[jnp.float32(rate)] * 2))


# --- schedules


def scheduled(progress, learning_rate_scale=1.0, **ppo):
    """The rates after a share of the run."""
    first = first_tuning(tiny_config(total_steps=TOTAL, ppo={"learning_rate": LR, **ppo}))
    now = dataclasses.replace(first, learning_rate_scale=learning_rate_scale)
    return optimizer(**ppo).rates(now, WideCounter.of(int(progress * TOTAL)))


SHAPES = {"learning_rate_schedule_min_lr": MIN}
MIDDLE = (LR + MIN) / 2  # where half of a linear or cosine decay is done
QUARTER = MIN + (LR - MIN) * 0.5 * (1 + np.cos(np.pi / 4))


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0.0, {0: LR, 0.5: LR, 1: LR}),
        ("constant", 0.2, {0: 0, 0.1: LR / 2, 0.2: LR, 0.6: LR, 1: LR}),
        ("linear", 0.0, {0: LR, 0.25: LR - (LR - MIN) / 4, 0.5: MIDDLE, 1: MIN}),
        ("linear", 0.2, {0: 0, 0.1: LR / 2, 0.2: LR, 0.6: MIDDLE, 1: MIN}),
        ("cosine", 0.0, {0: LR, 0.25: QUARTER, 0.5: MIDDLE, 1: MIN}),
        ("cosine", 0.2, {0: 0, 0.1: LR / 2, 0.2: LR, 0.4: QUARTER, 0.6: MIDDLE, 1: MIN}),
        ("adaptive_kl", 0.0, {0: LR, 0.5: LR, 1: LR}),
    ],
)
def test_learning_rate_schedules_have_exact_values_at_their_corners(schedule, warmup, expected):
    settings = {"learning_rate_schedule": schedule, "learning_rate_warmup": warmup, **SHAPES}
    for progress, value in expected.items():
        np.testing.assert_allclose(scheduled(progress, **settings), value, rtol=1e-5, atol=1e-9)
        halved = scheduled(progress, **settings, learning_rate_scale=jnp.float32(0.5))  # as a remedy does
        np.testing.assert_allclose(halved, value / 2, rtol=1e-5, atol=1e-9)


def test_decaying_learning_rate_never_rises():
    """With a floor above the learning rate the rate stays constant."""
    floor = {"learning_rate_schedule": "linear", "learning_rate_schedule_min_lr": 2 * LR}
    np.testing.assert_allclose([scheduled(progress, **floor) for progress in (0, 0.5, 1)], LR, rtol=1e-6)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.0201, 1 / 1.5),
        (np.nan, 1 / 1.5),  # Brax ignores NaN
        (0.02, 1.0),
        (0.005, 1.0),
        (0.0049, 1.5),
        (0.0, 1.0),  # no step was taken
        (-0.001, 1.0),
    ],
)
def test_adaptive_learning_rate_follows_the_kl(kl, factor):
    config = tiny_config(ppo={"learning_rate_schedule": "adaptive_kl", "desired_kl": 0.01}).ppo
    new = adapt_to_kl(tuning(), jnp.float32(kl), config)
    np.testing.assert_allclose(new.learning_rate, LR * factor, rtol=1e-6)


def test_adaptive_learning_rate_stays_within_its_bounds():
    config = tiny_config(ppo={"learning_rate_schedule": "adaptive_kl", "desired_kl": 0.01}).ppo
    low = high = tuning()
    for _ in range(30):
        low = adapt_to_kl(low, jnp.float32(np.nan), config)
        high = adapt_to_kl(high, jnp.float32(1e-4), config)
    assert low.learning_rate == np.float32(config.learning_rate_schedule_min_lr)
    assert high.learning_rate == np.float32(config.learning_rate_schedule_max_lr)


# --- rates of policy and critic


def separate(rate, **tuned):
    settings = tiny_config(ppo={"learning_rate": rate})
    now = dataclasses.replace(first_tuning(settings), **{name: jnp.float32(x) for name, x in tuned.items()})
    return Optimizer(settings.ppo, settings.guards.limiters, separate_rates=True).rates(now, STEPS)


@pytest.mark.parametrize(
    ("rate", "tuned", "policy", "value"),
    [
        (1e-3, {}, 1e-3, 1e-3),
        (1e-3, {"step_scale": 1e-4}, 1e-7, 1e-3),  # the critic is not slowed
        (3e-4, {"step_scale": 1e-4}, 3e-8, 3e-4),  # the critic is not faster than configured
        (0.3, {"step_scale": 0.25}, 0.075, 0.075),  # a rate that is too high for both
        (0.3, {"step_scale": 1e-4}, 3e-5, 1e-3),  # the critic is not slower than 1e-3
        (1e-3, {"policy_rate_scale": 0.5}, 5e-4, 1e-3),
        (0.3, {"policy_rate_scale": 0.5, "step_scale": 0.25}, 0.0375, 0.075),
        (1e-3, {"learning_rate_scale": 0.1}, 1e-4, 1e-4),  # a remedy for both
        (1e-3, {"critic_rate_scale": 3.0}, 1e-3, 3e-3),  # a remedy for a critic that lags
        (1e-3, {"policy_hold": 1.0}, 0.0, 1e-3),
        (0.3, {"policy_hold": 3.0, "step_scale": 1e-4}, 0.0, 1e-3),
    ],
)
def test_policy_is_slowed_and_critic_keeps_its_rate(rate, tuned, policy, value):
    np.testing.assert_allclose(separate(rate, **tuned), (policy, value), rtol=1e-5)


NETWORKS = {
    "policy": {"w": jnp.ones((3, 2)), "b": jnp.full(2, 0.5)},
    "value": {"w": jnp.full((3, 1), 2.0), "c": jnp.zeros(4)},
}


@pytest.mark.parametrize("rates", [(1e-3, 1e-3), (0.0, 1e-3), (1e-5, 1e-2)])
def test_policy_and_critic_take_steps_of_their_own_rates(rates):
    """First steps of Adam are as long as the rate."""
    ours, gradients = optimizer(), jax.tree.map(lambda x: jnp.full_like(x, 0.1), NETWORKS)
    own = Rates(*map(jnp.float32, rates))
    found = ours.candidate(gradients, optax.global_norm(gradients), ours.init(NETWORKS), NETWORKS, own)
    after = found.params
    for name, rate in zip(("policy", "value"), rates, strict=True):
        for before, now in zip(jax.tree.leaves(NETWORKS[name]), jax.tree.leaves(after[name]), strict=True):
            np.testing.assert_allclose(before - now, rate, rtol=1e-4, atol=3e-7)
            assert rate or np.array_equal(now, before)
    np.testing.assert_allclose(found.update_norm, np.sqrt(8 * rates[0] ** 2 + 7 * rates[1] ** 2), rtol=1e-4)


# --- loss scale


def test_loss_scale_halves_on_overflow_and_doubles_after_good_steps():
    """Between its floor and its cap."""
    config = LossScaleConfig(initial=8.0, floor=2.0, cap=16.0, growth_interval=3)
    signs = "x x x . . . . . x . . . . . . . . . . . . x"
    expected = [4, 2, 2, 2, 2, 4, 4, 4, 2, 2, 2, 4, 4, 4, 8, 8, 8, 16, 16, 16, 16, 8]
    now = tuning(loss_scale=jnp.float32(8))
    found = []
    for sign in signs.split():
        now = adapt_loss_scale(now, jnp.bool_(sign == "."), config)
        found.append(float(now.loss_scale))
    assert found == expected


# --- candidates


def trees(seed, count):
    rng = np.random.default_rng(seed)
    return [
        {"w": jnp.float32(rng.normal(size=(3, 2))), "b": jnp.float32(rng.normal(size=2) * 100)} for _ in range(count)
    ]


OPTIMIZERS = {
    "adam": ({"name": "adam"}, optax.adam(LR)),
    "adam, betas and epsilon": (
        {"name": "adam", "b1": 0.8, "b2": 0.95, "eps": 1e-3},
        optax.adam(LR, b1=0.8, b2=0.95, eps=1e-3),
    ),
    "adamw": ({"name": "adamw", "weight_decay": 0.1, "eps": 1e-5}, optax.adamw(LR, weight_decay=0.1, eps=1e-5)),
    "amsgrad": ({"name": "amsgrad", "b2": 0.9}, optax.amsgrad(LR, b2=0.9)),
}


@pytest.mark.parametrize(("name", "limit"), [*((name, None) for name in OPTIMIZERS), ("adamw", 5.0)])
def test_optimizer_equals_optax_after_three_steps(name, limit):
    own, theirs = OPTIMIZERS[name]
    if limit is not None:
        theirs = optax.chain(optax.clip_by_global_norm(limit), theirs)
    ours = optimizer(optimizer=own, max_grad_norm=limit)
    params = their_params = trees(0, 1)[0]
    state, their_state = ours.init(params), theirs.init(params)
    for gradient in trees(1, 3):
        before, (params, state, norm, old_norm, activity) = params, candidate(ours, gradient, state, params)
        assert activity == ({} if limit is None else {"gradient_norm": 1.0})
        their_update, their_state = theirs.update(gradient, their_state, their_params)
        their_params = optax.apply_updates(their_params, their_update)
        np.testing.assert_allclose(norm, optax.global_norm(their_update), rtol=1e-5)
        np.testing.assert_allclose(old_norm, optax.global_norm(before), rtol=1e-6)
        jax.tree.map(lambda a, b, u: np.testing.assert_allclose(a - b, u, atol=1e-5), params, before, their_update)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, their_params)


@pytest.mark.parametrize(
    ("own", "limit", "expected"),
    [(None, None, None), (1.0, None, 1.0), (None, 2.0, 2.0), (1.0, 2.0, 1.0), (3.0, 2.0, 2.0)],
)
def test_tighter_of_two_bounds_of_the_gradient_norm_holds(own, limit, expected):
    assert optimizer({"gradient_norm": limit}, max_grad_norm=own).max_norm == expected


# --- a rejected update

T, B = 4, 8


@pytest.fixture(scope="module")
def stepping():
    """One minibatch step of PPO with the update guard, from a fresh optimizer."""
    settings = tiny_config(guards={**GUARDS_OFF, "finite_update": {"enabled": True}})
    ppo = make_ppo(settings, VectorEnv(PointMass(), 12, 1, {}), 2)
    params, statistics, data, _, noise = experience(ppo.networks, T, B)
    zero = WideCounter.zero()
    counters = Counters(zero, zero, zero, zero, PackedDict.of({}))
    replicated = sharding.REPLICATED

    sgd = SGD(ppo.settings, ppo.optimizer, ppo.precision, ppo.update_guards, ppo.gradient)
    layout = dataclasses.replace(ParamFlattener.of(params), joined=False)

    def step(learning, data):
        return sgd.step(layout, statistics, counters, learning, minibatch_of(data, noise), None)[0]

    guard_state = {name: guard.init() for name, guard in ppo.update_guards.items()}
    progress = SGDState(params, ppo.optimizer.init(params), PackedDict.of({}), jnp.int32(0))
    start = SGDCarry(progress, tuning(), guard_state, jax.random.PRNGKey(0), skipped=None)
    return sharding.over_devices(step, mesh(), replicated, replicated), start, data


def kept(learning):
    return learning.progress.params, learning.progress.opt_state


def same(a, b):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


def changed(a, b):
    """Whether every array changed."""
    return not any(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


# A reward of 1e24 makes a gradient near 1e22: finite, and its square is not.
@pytest.mark.parametrize("bad", [1e24, np.nan, np.inf])
def test_rejected_gradient_leaves_the_optimizer_unchanged(stepping, bad):
    step, start, data = stepping
    poisoned = data._replace(
        reward=data.reward.at[1, 2].set(bad),
        truncation=data.truncation.at[1, 2].set(0),
        termination=data.termination.at[1, 2].set(0),
    )
    before = step(start, data)
    after = step(before, poisoned)
    assert same(kept(after), kept(before))
    assert (after.progress.accepted, after.guard_state["finite_update"].trips.tolist()) == (1, [1, 0, 0])
    later = step(after, data)
    assert changed(later.progress.params, after.progress.params)
    assert later.progress.accepted == 2
