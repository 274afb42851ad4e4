"""The KL limiter: what overshot is taken back and ends the epochs, steps shrink and recover, health is not touched."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_compile import ordinarily
from toys import GUARDS_OFF, LIMITERS_OFF, PointMass, assemble, compiled, experience, mesh, placed, tiny_config

from rlstable import sharding
from rlstable.counter import WideCounter
from rlstable.envs.wrappers import VectorEnv
from rlstable.guards.base import GuardState, Verdict, no_trips
from rlstable.packed import Packed
from rlstable.ppo import overshoot
from rlstable.ppo.build import first_tuning, init_state, make_networks, make_ppo
from rlstable.ppo.flat import Layout
from rlstable.ppo.gradient import prepared
from rlstable.ppo.iteration import PPO
from rlstable.ppo.learning import Learning, Progress
from rlstable.ppo.loss import ppo_loss
from rlstable.ppo.state import SPECS, Counters

pytestmark = pytest.mark.usefixtures("quick_compile")

MINIBATCHES = 4  # two in each of two epochs
T, B = 4, 8
R = sharding.REPLICATED


def limited(kl=1.0):
    return GUARDS_OFF | {"limiters": LIMITERS_OFF | {"kl": kl}}


def built(kl, kind=PPO, **ppo):
    """PPO with that limit and nothing else, its iteration, and a first state."""
    own, state = assemble(tiny_config(guards=limited(kl), ppo=ppo))
    own = kind(**{field.name: getattr(own, field.name) for field in dataclasses.fields(PPO)})
    return own, compiled(own), placed(state)


training = functools.cache(built)


def tuned(state, **tuning):
    """The state with other numbers in its tuning, for which nothing compiles anew."""
    changes = {name: jnp.full_like(getattr(state.tuning, name), value) for name, value in tuning.items()}
    return dataclasses.replace(state, tuning=dataclasses.replace(state.tuning, **changes))


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def learnt(state):
    """Of a training state, or of progress."""
    return state.params, state.opt_state


# --- a learning rate that is far too high


def test_an_update_that_overshot_is_taken_back():
    """A thousand times the rate: the first step is too long, so that the iteration leaves what it found."""
    _, iteration, state = training(1.0)
    start = tuned(state, learning_rate=3.0)
    after, metrics = iteration(start)
    same(learnt(after), learnt(start))
    assert metrics.values["limiters/kl/active"] == (MINIBATCHES - 1) / MINIBATCHES
    assert after.tuning.step_scale == 0.25
    assert int(after.counters.env_steps) == int(start.counters.env_steps) + 64  # it is not stuck: it collected


def test_steps_shrink_until_they_fit_and_grow_back():
    """By a factor of 4 in each iteration that overshot, and by 1.05 in each that did not."""
    _, iteration, now = training(1.0)
    now = tuned(now, learning_rate=3.0)
    found, moved = [], False
    for _ in range(12):
        before = now
        now, metrics = iteration(now)
        overshot = metrics.values["limiters/kl/active"] > 0
        factor = 0.25 if overshot else 1.05
        np.testing.assert_allclose(now.tuning.step_scale, min(before.tuning.step_scale * factor, 1.0), rtol=1e-6)
        # A mean over accepted updates: of two epochs, neither is proven where one overshot.
        rate = np.nan if overshot else 3.0 * before.tuning.step_scale
        np.testing.assert_allclose(metrics.values["training/learning_rate"], rate, rtol=1e-6)
        assert now.tuning.learning_rate == 3.0  # the rate itself is the user's or the schedule's
        found.append(bool(overshot))
        moved |= not overshot
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(now.params))
    assert found[0] and moved and not found[-1]
    for _ in range(3):
        now, _ = iteration(tuned(now, learning_rate=3e-3, step_scale=0.99))
        assert now.tuning.step_scale == 1.0  # and no further


@pytest.fixture(scope="module")
def steps():
    """Minibatch after minibatch of one batch, under a limit that five updates exceed; an epoch has two."""
    ppo = make_ppo(tiny_config(guards=limited(LIMIT)), VectorEnv(PointMass(), 12, 1, {}), 2)
    params, statistics, data, _ = experience(ppo.networks, T, B)
    policy, _ = ppo.networks.distribution(params, statistics, data.observation)
    data = prepared(ppo.networks, statistics, data._replace(distribution=policy))
    zero = WideCounter.zero()
    counters = Counters(zero, zero, zero, zero, Packed.of({}))
    settings = tiny_config(ppo={"learning_rate": RATE, "num_updates_per_batch": 1})
    tuning = first_tuning(settings)

    def bare(progress):
        return progress._replace(sums=Packed.of({}))

    layout = Layout.of(params)

    def step(learning):
        learning = learning._replace(progress=bare(learning.progress))
        return ppo._minibatch(ppo.gradient, layout, statistics, counters, learning, data)

    program = sharding.over_devices(step, mesh(), R, R)
    none = jnp.int32(0)
    moments = layout.join_in(ppo.optimizer.init(params))
    start = proven = Progress(layout.join(params), moments, Packed.of({}), none)
    history, kls = [Learning(start, tuning, {}, jax.random.PRNGKey(0), none)], []
    for n in range(1, 13):
        after = program(history[-1])
        kls.append(float(after.progress.sums["training/kl_update"]))
        if n % EPOCH == 0:
            end, proven = overshoot.settle(after.passed_over, start, proven, bare(after.progress))
            after, start = after._replace(progress=end), end
        history.append(after)
    return history, kls


RATE, LIMIT, EPOCH = 1e-4, 0.04, 2


def test_what_is_not_proven_is_taken_back_and_the_rest_is_passed_over(steps):
    """Parameters and moments are those that a whole epoch within the limit began with, bit for bit, and stay so.

    What was accepted since is so no longer, and the step is shortened once.
    """
    steps, kls = steps
    passed = [int(x.passed_over) for x in steps]
    first = passed.index(1)  # here the KL of the parameters before was seen to be beyond the limit
    epoch, within = divmod(first - 1, EPOCH)
    assert epoch > 1 and within != 0
    assert kls[first - 1] > LIMIT >= max(kls[: first - 1])
    assert passed == [max(0, n - first + 1) for n in range(len(steps))]
    kept = steps[(epoch - 1) * EPOCH]
    assert not np.array_equal(kept.progress.params, steps[0].progress.params)
    assert [int(x.progress.accepted) for x in steps[:first]] == list(range(first))
    for later in steps[first:]:
        same(learnt(later.progress), learnt(kept.progress))
        assert int(later.progress.accepted) == (epoch - 1) * EPOCH
        assert later.tuning.step_scale == 0.25


@pytest.mark.parametrize(
    ("kl", "going", "scale"),
    [(0.0, True, 1.0), (1.0, True, 1.0), (1.01, False, 0.25), (1e6, False, 0.25), (np.nan, False, 1.0)],
)
def test_one_verdict(kl, going, scale):
    """At the limit it goes on. A KL that is NaN stops it, but says nothing of the length of steps."""
    tuning = training(1.0)[2].tuning
    metrics = {"training/kl_mean": jnp.float32(99.0), "training/kl_update": jnp.float32(kl)}
    found, passed_over, tuning = overshoot.judge(jnp.int32(0), metrics, tuning, 1.0)
    assert (bool(found), float(tuning.step_scale)) == (going, scale)
    assert int(passed_over) == (0 if going else 1)
    assert (overshoot.recover(passed_over, scaled(tuning, 0.5)).step_scale > 0.5) == going
    # The minibatches that follow are passed over, whatever their KL, and shorten nothing more.
    again, then, after = overshoot.judge(passed_over, metrics, tuning, 1.0)
    if not going:
        assert (bool(again), int(then)) == (False, 2)
        assert after.step_scale == tuning.step_scale


def scaled(tuning, scale):
    return dataclasses.replace(tuning, step_scale=jnp.float32(scale))


def test_steps_do_not_shrink_for_ever():
    """There is a least one, from which they come back."""
    tuning, metrics = training(1.0)[2].tuning, {"training/kl_update": jnp.float32(2)}
    for _ in range(100):
        _, _, tuning = overshoot.judge(jnp.int32(0), metrics, tuning, 1.0)
    np.testing.assert_allclose(tuning.step_scale, 1e-6, rtol=1e-5)
    assert overshoot.recover(jnp.int32(0), tuning).step_scale > tuning.step_scale


@pytest.mark.parametrize(("moved", "overshot"), [(1, False), (T * B, True)])
def test_no_single_sample_is_an_overshoot(moved, overshot):
    """A thousand nats in one sample are a mean of 25, far beyond the limit; the policy is where it was."""
    settings = tiny_config(guards=limited(1.0))
    networks = make_networks(settings, 2)
    params, statistics, data, _ = experience(networks, T, B)
    now, _ = networks.distribution(params, statistics, data.observation)
    away = jnp.where(jnp.arange(T * B).reshape(T, B, 1) < moved, 50.0, 0.0)
    data = data._replace(distribution=dataclasses.replace(now, loc=now.loc + away * now.scale))
    loss = functools.partial(ppo_loss, networks=networks, config=settings.ppo, limits=settings.guards.limiters)
    metrics = sharding.over_devices(lambda *x: loss(*x, None)[1], mesh(), R, R)(params, statistics, data)
    assert metrics["training/kl_mean"] > 25
    np.testing.assert_allclose(metrics["training/kl_update"], 10.0 * moved / (T * B), rtol=1e-3, atol=1e-3)
    assert (metrics["training/kl_update"] > 1.0) == overshot


@dataclasses.dataclass(frozen=True)
class Blind(PPO):
    """PPO whose KL is never a number."""

    def gradient(self, *args):
        gradients, metrics = super().gradient(*args)
        nan = jnp.float32(jnp.nan)
        return gradients, metrics | {"training/kl_update": nan, "training/kl_mean": nan}


def test_a_kl_that_is_nan_ends_the_epochs_without_shortening_steps():
    _, iteration, state = training(1.0, Blind)
    start = tuned(state, step_scale=0.5)
    after, metrics = iteration(start)
    same(learnt(after), learnt(start))
    assert metrics.values["limiters/kl/active"] == 1.0
    assert metrics.values["training/accepted_share"] == 0.0
    assert after.tuning.step_scale == 0.5


def test_the_last_update_of_an_epoch_is_taken_back_too():
    """One minibatch in each epoch: what the first one did is seen in the second."""
    _, iteration, state = training(1.0, batch_size=16, num_minibatches=1, num_updates_per_batch=2)
    start = tuned(state, learning_rate=3.0)
    after, metrics = iteration(start)
    assert metrics.values["limiters/kl/active"] == 0.5
    assert after.tuning.step_scale == 0.25
    same(learnt(after), learnt(start))


@dataclasses.dataclass(frozen=True)
class Asked:
    """A guard of the update site that counts how often its opinion counted."""

    causes = ("never",)

    def init(self):
        return GuardState(no_trips(self.causes), jnp.int32(0))

    def apply(self, ctx, state):
        return Verdict(ctx.value, jnp.ones((), bool), GuardState(state.trips, state.memory + 1))


@pytest.mark.parametrize(("rate", "asked"), [(3e-4, MINIBATCHES), (3.0, 1)])
def test_guards_forget_what_is_passed_over(rate, asked):
    """Gradients out there are no fault of the training, nor is their size what is usual."""
    plain, state = assemble(tiny_config(guards=limited(1.0)))
    own = make_ppo(plain.config, plain.env, 2, more_guards={"update": {"asked": Asked()}})
    state = placed(init_state(own, jax.random.PRNGKey(2), state.env_state, None))
    after, _ = compiled(own)(tuned(state, learning_rate=rate))
    assert after.guard_memory["asked"] == asked


def test_what_was_taken_back_is_no_progress():
    """Else a run that takes back everything, for ever, never ends as one that learns nothing."""
    _, iteration, state = training(1.0)
    after, metrics = iteration(tuned(state, learning_rate=3.0))
    assert (int(after.counters.updates), float(metrics.values["training/accepted_share"])) == (0, 0.0)


# --- what it does not do


@ordinarily()
def test_a_healthy_iteration_is_the_same_with_it_and_without():
    """Bit for bit, over several iterations."""
    (_, with_it, state), (_, without, other) = built(1.0), built(None)
    same(state, other)
    for _ in range(3):
        (state, metrics), (other, plain) = with_it(state), without(other)
        same(state, other)
        same({name: metrics.values[name] for name in plain.values}, dict(plain.values))
        assert metrics.values["limiters/kl/active"] == 0.0
    assert set(metrics.values) - set(plain.values) == {"limiters/kl/active", "training/kl_update"}


def test_off_it_leaves_no_trace():
    """No number of it, nothing to go back to, and steps of a length that nobody shortened."""
    _, iteration, state = training(None)
    going, passed_over, tuning = overshoot.judge(None, {}, state.tuning, None)
    assert going is True and passed_over is None and tuning is state.tuning
    end, proven = overshoot.settle(None, state.opt_state, None, state.params)
    assert end is state.params and proven is None
    assert overshoot.recover(None, tuning) is tuning
    start = tuned(state, learning_rate=3.0, step_scale=0.5)
    after, metrics = iteration(start)
    assert after.tuning.step_scale == 0.5
    np.testing.assert_allclose(metrics.values["training/learning_rate"], 3.0)
    assert metrics.values["training/accepted_share"] == 1.0


# --- what the KL is measured from


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_kl_is_that_of_the_updates_alone(order):
    """The normaliser moves a lot; before the first update the policy is, under the new one, where it was."""
    _, iteration, state = training(
        1.0, batch_size=16, num_minibatches=1, num_updates_per_batch=1, normalizer_update=order
    )
    state = iteration(state)[0]
    normalizer = dataclasses.replace(
        state.normalizer, mean=state.normalizer.mean + 10.0, count=placed_count(state.normalizer.count, 1)
    )
    _, metrics = iteration(dataclasses.replace(state, normalizer=normalizer))
    values = metrics.values
    zero = 2 * np.log(1 + 1e-5)  # of two action elements: Brax has 1e-5 inside its logarithm
    if order == "before":
        np.testing.assert_allclose(values["training/kl_update"], zero, rtol=0.05)
        assert values["training/kl_mean"] > 0.1
    else:  # the collecting policy is the reference, and that is why Brax's order is this one
        np.testing.assert_allclose(values["training/kl_update"], zero, rtol=0.05)
        np.testing.assert_allclose(values["training/kl_mean"], zero, rtol=0.05)
    assert values["limiters/kl/active"] == 0.0


def placed_count(count, value):
    return jax.tree.map(lambda old, new: jnp.full_like(old, new), count, WideCounter.of(value))


# --- together with the rate that follows the KL


def test_the_adaptive_rate_does_not_rise_while_nothing_is_learnt():
    """The KL of a policy that was put back is small, which says nothing of the rate that threw it away."""
    adaptive = {"learning_rate_schedule": "adaptive_kl", "desired_kl": 0.01, "learning_rate_schedule_max_lr": 3.0}
    _, iteration, state = training(1.0, num_updates_per_batch=4, **adaptive)
    start = tuned(state, learning_rate=2.0)
    after, metrics = iteration(start)
    assert metrics.values["limiters/kl/active"] > 0.5
    assert after.tuning.learning_rate <= start.tuning.learning_rate


# --- what is reported beside it


@pytest.mark.parametrize(("floor", "trips"), [(1.0, 0), (2.0**100, MINIBATCHES)])
def test_an_overflow_is_no_trip_while_a_loss_scale_is_searched_for(floor, trips):
    """Rejected either way; at its floor there is nothing left to search, and it is the gradient's fault."""
    scale = {"initial": 2.0**100, "cap": 2.0**100, "floor": floor}
    settings = tiny_config(
        guards=GUARDS_OFF | {"update": {"enabled": True}}, precision={"network": "float16", "loss_scale": scale}
    )
    own, state = assemble(settings)
    after, metrics = compiled(own)(placed(state))
    assert metrics.values["training/accepted_share"] == 0.0
    assert metrics.trips["update"].tolist() == [trips, 0, 0]
    assert after.tuning.loss_scale == max(2.0 ** (100 - MINIBATCHES), floor)


def test_the_observation_limiter_reports_what_sgd_read():
    """With the normaliser updated afterwards that is the raw observation, in the first iteration."""
    limits = GUARDS_OFF | {"limiters": LIMITERS_OFF | {"observation": 0.5}}
    own, state = assemble(tiny_config(guards=limits, ppo={"normalizer_update": "after"}))

    def both(state):
        raw = own._collect(state, jax.random.split(state.key, 3)[1]).data.observation
        return own.iteration(state)[1], jnp.mean(jnp.abs(raw) > 0.5)

    metrics, share = sharding.over_devices(both, mesh(), (SPECS,), (R, R))(placed(state))
    assert 0 < share < 1
    np.testing.assert_allclose(metrics.values["limiters/observation/active"], share, rtol=1e-5)
