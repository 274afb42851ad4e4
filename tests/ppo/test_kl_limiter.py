"""The KL limiter: an overshoot is rolled back and ends the epochs, and steps shrink and recover.

The policy is measured again at the end of an iteration and rolled back to the start if it is beyond the bound.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_compile import ordinarily
from toys import (
    GUARDS_OFF,
    LIMITERS_OFF,
    PointMass,
    assemble,
    assert_same,
    compiled,
    experience,
    finite,
    loss_and_metrics,
    make_networks,
    mesh,
    minibatch_of,
    placed,
    settings_of,
    tiny_config,
)

from rlstable.device import sharding
from rlstable.device.counter import WideCounter
from rlstable.device.packed import PackedDict
from rlstable.envs.vector import VectorEnv
from rlstable.guards.base import GuardState, Verdict, no_trips
from rlstable.ppo import kl_limiter
from rlstable.ppo.distance import ActionMoments, distance, moments
from rlstable.ppo.flat import ParamFlattener
from rlstable.ppo.gradient import preprocess_batch
from rlstable.ppo.initial import init_state, init_tuning
from rlstable.ppo.sgd import SGD, SGDCarry, SGDState
from rlstable.ppo.state import Counters
from rlstable.runner.setup import make_ppo

pytestmark = pytest.mark.usefixtures("quick_compile")

MINIBATCHES = 4  # two in each of two epochs
T, B = 4, 8
R = sharding.REPLICATED


def limited(kl=1.0):
    return GUARDS_OFF | {"limiters": LIMITERS_OFF | {"kl": kl}}


def built(kl, **ppo):
    """The iteration of PPO with the KL limiter only, and a first state."""
    own, state = assemble(tiny_config(guards=limited(kl), ppo=ppo))
    return compiled(own), placed(state)


training = functools.cache(built)


def tuned(state, **tuning):
    """The state with other tuning, which compiles nothing."""
    changes = {name: jnp.full_like(getattr(state.tuning, name), value) for name, value in tuning.items()}
    return dataclasses.replace(state, tuning=dataclasses.replace(state.tuning, **changes))


def learnt(state):
    """Parameters and optimizer state."""
    return state.params, state.opt_state


# --- a learning rate that is far too high


def test_update_that_overshoots_is_rolled_back():
    """The rate is a thousand times too high: the first step is too long, and no update counts."""
    iteration, state = training(1.0)
    start = tuned(state, learning_rate=3.0)
    after, metrics = iteration(start)
    assert_same(learnt(after), learnt(start))
    assert metrics.values["limiters/kl/active"] == (MINIBATCHES - 1) / MINIBATCHES
    assert after.tuning.step_scale == 0.25
    assert int(after.counters.env_steps) == int(start.counters.env_steps) + 64  # the iteration collected
    assert (int(after.counters.updates), float(metrics.values["training/accepted_share"])) == (0, 0.0)


def test_steps_shrink_until_they_fit_and_grow_back_to_full_length():
    """By a factor of 4 in each iteration that overshot, and by 1.05 in each that did not."""
    iteration, now = training(1.0)
    now = tuned(now, learning_rate=3.0)
    found, moved = [], False
    for _ in range(12):
        before = now
        now, metrics = iteration(now)
        overshot = metrics.values["limiters/kl/active"] > 0
        factor = 0.25 if overshot else 1.05
        np.testing.assert_allclose(now.tuning.step_scale, min(before.tuning.step_scale * factor, 1.0), rtol=1e-6)
        # The metric is a mean over accepted updates, of which an overshoot leaves none.
        rate = np.nan if overshot else 3.0 * before.tuning.step_scale
        np.testing.assert_allclose(metrics.values["training/learning_rate"], rate, rtol=1e-6)
        assert now.tuning.learning_rate == 3.0  # the configured rate does not change
        found.append(bool(overshot))
        moved |= not overshot
        assert finite(now.params)
    assert found[0] and moved and not found[-1]
    for _ in range(3):
        now, _ = iteration(tuned(now, learning_rate=3e-3, step_scale=0.99))
        assert now.tuning.step_scale == 1.0  # and no further


@pytest.fixture(scope="module")
def steps():
    """SGD steps on one minibatch, with a limit that five updates exceed; an epoch has two updates."""
    ppo = make_ppo(tiny_config(guards=limited(LIMIT)), VectorEnv(PointMass(), 12, 1, {}), 2)
    params, statistics, data, _, noise = experience(ppo.networks, T, B)
    policy, _ = ppo.networks.distribution(params, statistics, data.observation)
    data = preprocess_batch(ppo.networks, statistics, data._replace(distribution=policy))
    minibatch = minibatch_of(data, noise, reference=moments(policy))
    zero = WideCounter.zero()
    counters = Counters(zero, zero, zero, zero, PackedDict.of({}))
    settings = tiny_config(ppo={"learning_rate": RATE, "num_updates_per_batch": 1})
    tuning = init_tuning(settings_of(settings), ppo.precision)

    sgd = SGD(ppo.settings, ppo.optimizer, ppo.precision, ppo.update_guards, ppo.gradient)
    layout = dataclasses.replace(ParamFlattener.of(params), joined=False)

    def step(learning):
        return sgd.step(layout, statistics, counters, learning, minibatch, None)

    program = sharding.over_devices(step, mesh(), R, R)
    none = jnp.int32(0)
    start = proven = SGDState(params, ppo.optimizer.init(params), PackedDict.of({}), none)
    history, moved = [SGDCarry(start, tuning, {}, jax.random.PRNGKey(0), none)], []
    for n in range(1, 13):
        after, metrics = program(history[-1])
        moved.append(float(metrics["training/policy_distance"]))
        if n % EPOCH == 0:
            end, proven = kl_limiter.close_epoch(after.skipped, start, proven, after.progress)
            after, start = after._replace(progress=end), end
        history.append(after)

    def distance_of(carry):
        found, _ = ppo.networks.without_preprocessing.distribution(carry.progress.params, statistics, data.observation)
        return float(jnp.mean(distance(minibatch.reference, moments(found))))

    return history, moved, distance_of


RATE, LIMIT, EPOCH = 1e-4, 0.00105, 2


def test_overshoot_rolls_back_to_the_last_epoch_within_the_limit(steps):
    """Parameters and moments are bit for bit those of that epoch; later minibatches are skipped."""
    steps, moved, distance_of = steps
    passed = [int(x.skipped) for x in steps]
    first = passed.index(1)  # the parameters before this step were found beyond the limit
    epoch, within = divmod(first - 1, EPOCH)
    assert epoch > 1 and within != 0
    assert distance_of(steps[first - 1]) > LIMIT >= max(moved[: first - 1])
    assert moved[first - 1 :] == [0.0] * (len(moved) - first + 1)  # a rejected minibatch adds nothing to the metrics
    assert passed == [max(0, n - first + 1) for n in range(len(steps))]
    kept = steps[(epoch - 1) * EPOCH]
    assert not np.array_equal(*(jax.tree.leaves(x.progress.params)[0] for x in (kept, steps[0])))
    assert [int(x.progress.accepted) for x in steps[:first]] == list(range(first))
    for later in steps[first:]:
        assert_same(learnt(later.progress), learnt(kept.progress))
        assert int(later.progress.accepted) == (epoch - 1) * EPOCH
        assert later.tuning.step_scale == 0.25


@pytest.mark.parametrize(
    ("moved", "going", "scale"),
    [(0.0, True, 1.0), (1.0, True, 1.0), (1.01, False, 0.25), (1e6, False, 0.25), (np.nan, False, 1.0)],
)
def test_kl_limiter_stops_sgd_beyond_the_limit_and_shortens_steps_once(moved, going, scale):
    """A distance of NaN stops SGD and shortens no step."""
    tuning = training(1.0)[1].tuning
    metrics = {"training/kl_mean": jnp.float32(99.0), "training/policy_distance": jnp.float32(moved)}
    found, skipped, tuning = kl_limiter.check(jnp.int32(0), metrics, tuning, 1.0)
    assert (bool(found), float(tuning.step_scale)) == (going, scale)
    assert int(skipped) == (0 if going else 1)
    assert (kl_limiter.relax(skipped, scaled(tuning, 0.5)).step_scale > 0.5) == going
    # Later minibatches are skipped at any distance and shorten no step.
    again, then, after = kl_limiter.check(skipped, metrics, tuning, 1.0)
    if not going:
        assert (bool(again), int(then)) == (False, 2)
        assert after.step_scale == tuning.step_scale


def scaled(tuning, scale):
    return dataclasses.replace(tuning, step_scale=jnp.float32(scale))


def test_step_scale_has_a_minimum():
    tuning, metrics = training(1.0)[1].tuning, {"training/policy_distance": jnp.float32(2)}
    for _ in range(100):
        _, _, tuning = kl_limiter.check(jnp.int32(0), metrics, tuning, 1.0)
    np.testing.assert_allclose(tuning.step_scale, 1e-6, rtol=1e-5)
    assert kl_limiter.relax(jnp.int32(0), tuning).step_scale > tuning.step_scale


@pytest.mark.parametrize(("moved", "overshot"), [(1, False), (T * B, True)])
def test_single_sample_is_no_overshoot(moved, overshot):
    """In one sample the policy moved across the whole action range; elsewhere it is unchanged."""
    settings = tiny_config(guards=limited(0.1))
    networks = make_networks(settings, 2)
    params, statistics, data, _, noise = experience(networks, T, B)
    now, _ = networks.distribution(params, statistics, data.observation)
    here = moments(now)
    away = jnp.arange(T * B).reshape(T, B, 1) < moved
    reference = ActionMoments(jnp.where(away, -jnp.sign(here.mean), here.mean), here.variance)
    assert jnp.min(jnp.where(away[..., 0], distance(reference, here), jnp.inf)) > 1.0
    data = minibatch_of(data._replace(distribution=now), noise, reference=reference)
    loss = loss_and_metrics(networks, settings.ppo, settings.guards.limiters)
    metrics = sharding.over_devices(lambda *x: loss(*x, None)[1], mesh(), R, R)(params, statistics, data)
    np.testing.assert_allclose(metrics["training/policy_distance"], 10.0 * 0.1 * moved / (T * B), rtol=1e-5)
    assert (metrics["training/policy_distance"] > 0.1) == overshot


@dataclasses.dataclass(frozen=True)
class Asked:
    """A guard of the update site that counts its verdicts that had an effect."""

    causes = ("never",)

    def init(self):
        return GuardState(no_trips(self.causes), jnp.int32(0))

    def apply(self, ctx, state):
        return Verdict(ctx.value, jnp.ones((), bool), GuardState(state.trips, state.memory + 1))


def test_guards_do_not_see_skipped_minibatches():
    """Gradients beyond the bound must not change the usual level."""
    settings = tiny_config(guards=limited(1.0))
    plain, state = assemble(settings)
    own = make_ppo(settings, plain.env, 2, more_guards={"update": {"asked": Asked()}})
    state = placed(init_state(own, jax.random.PRNGKey(2), state.env_state, None))
    iteration = compiled(own)
    for rate, asked in ((3e-4, MINIBATCHES), (3.0, 1)):
        after, _ = iteration(tuned(state, learning_rate=rate))
        assert after.guard_memory["asked"] == asked


# --- no effect on healthy iterations


@pytest.mark.slow
@ordinarily()
def test_kl_limiter_does_not_change_a_healthy_iteration():
    (with_it, state), (without, other) = built(1.0), built(None)
    assert_same(state, other)
    for _ in range(3):
        (state, metrics), (other, plain) = with_it(state), without(other)
        assert_same(state, other)
        assert_same({name: metrics.values[name] for name in plain.values}, dict(plain.values))
        assert metrics.values["limiters/kl/active"] == 0.0
    assert set(metrics.values) - set(plain.values) == {
        "limiters/kl/active", "limiters/normalizer/active", "training/policy_distance", "training/step_scale",
        "training/value_learning_rate",
    }  # fmt: skip


# --- the end of the iteration

ONE = {"batch_size": 16, "num_minibatches": 1, "num_updates_per_batch": 1}  # no later update measures this one


@pytest.mark.parametrize(
    ("skipped", "moved", "expected"),
    [
        (0, 1.0, (False, 0, 1.0)),
        (0, 1.01, (True, 4, 0.25)),
        (0, np.nan, (True, 4, 1.0)),
        (3, 0.5, (False, 3, 1.0)),
        (3, 1.01, (True, 4, 1.0)),
    ],
)
def test_kl_limiter_measures_the_end_of_an_iteration(skipped, moved, expected):
    """Steps are shortened once per iteration, and not if the distance is NaN."""
    tuning = training(1.0)[1].tuning
    over, skipped, tuning = kl_limiter.check_iteration(
        jnp.int32(skipped), jnp.float32(moved), tuning, 1.0, jnp.int32(MINIBATCHES)
    )
    assert (bool(over), int(skipped), float(tuning.step_scale)) == expected


@pytest.mark.parametrize("order", ["before", "after"])
def test_overshoot_of_the_last_update_rolls_back_to_the_start_of_the_iteration(order):
    """Bit for bit, critic and moments included; the distance is that of the restored state."""
    iteration, state = training(1.0, **ONE, normalizer_update=order)
    state, _ = iteration(state)
    start = tuned(state, learning_rate=3.0)
    after, metrics = iteration(start)
    assert_same(learnt(after), learnt(start))
    values = metrics.values
    assert after.tuning.step_scale == 0.25
    assert values["limiters/kl/active"] == 1.0
    assert (int(after.counters.updates) - int(start.counters.updates), values["training/accepted_share"]) == (0, 0.0)
    assert values["training/policy_distance"] <= 0.1  # of the normaliser
    if order == "after":  # the statistics are rolled back with the parameters
        assert_same(after.normalizer, start.normalizer)
        assert abs(values["training/policy_distance"]) < 1e-6
    else:
        assert int(after.normalizer.count) > int(start.normalizer.count)
        assert values["training/policy_distance"] > 0.0


# --- with an adaptive learning rate


def test_adaptive_rate_does_not_rise_while_updates_are_rolled_back():
    """The KL of a restored policy is small and says nothing about the rate."""
    adaptive = {"learning_rate_schedule": "adaptive_kl", "desired_kl": 0.01, "learning_rate_schedule_max_lr": 3.0}
    iteration, state = training(1.0, num_updates_per_batch=4, **adaptive)
    start = tuned(state, learning_rate=2.0)
    after, metrics = iteration(start)
    assert metrics.values["limiters/kl/active"] > 0.5
    assert after.tuning.learning_rate <= start.tuning.learning_rate


# --- with a loss scale


def test_overflow_trips_the_update_guard_only_at_the_floor_of_the_loss_scale():
    """Two of the four updates lower the scale to its floor, and all are rejected."""
    scale = {"initial": 2.0**100, "cap": 2.0**100, "floor": 2.0**98}
    settings = tiny_config(
        guards=GUARDS_OFF | {"finite_update": {"enabled": True}}, precision={"network": "float16", "loss_scale": scale}
    )
    own, state = assemble(settings)
    after, metrics = compiled(own)(placed(state))
    assert metrics.values["training/accepted_share"] == 0.0
    assert metrics.trips["finite_update"].tolist() == [MINIBATCHES - 2, 0, 0]
    assert after.tuning.loss_scale == 2.0**98
