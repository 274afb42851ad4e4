"""With guards off the traced program has the operations and the parameters of a plain PPO."""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters import partial_eval
from toys import GUARDS_OFF, assemble, equations, mesh, placed, tiny_config

from rlstable.device import sharding
from rlstable.envs.vector import pool_of
from rlstable.ppo.flat import ParamFlattener
from rlstable.ppo.guards import env_guards
from rlstable.ppo.initial import init_state
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.state import SPECS
from rlstable.runner.setup import make_ppo

pytestmark = pytest.mark.usefixtures("quick_compile")

R, SPLIT = sharding.REPLICATED, sharding.SPLIT
OFF = tiny_config(guards=GUARDS_OFF)


def reference(state, config, env, networks):
    """One iteration of plain PPO on one device, without guards, masks, limiters and metrics."""
    key_sgd, key_rollout, key = jax.random.split(state.key, 3)

    def step(env_state, drawn):
        key, noise = drawn
        policy, _ = networks.distribution(state.params, state.normalizer, env_state.obs)
        raw = policy.sample(noise)
        after = env.step(env_state, policy.action(raw), None, key, {}).state
        cut = after.info["truncation"]
        reward = after.reward * config.reward_scaling
        sample = (env_state.obs, raw, policy.log_prob(raw), reward, cut, after.done * (1.0 - cut))
        return after, sample

    def unroll(carry, _):
        env_state, key = carry
        key, next_key = jax.random.split(key)
        keys = jax.lax.scan(lambda key, _: tuple(jax.random.split(key))[::-1], key, length=config.unroll_length)[1]
        noise = jax.vmap(lambda key: jax.random.normal(key, (config.num_envs, networks.action_size)))(keys)
        env_state, samples = jax.lax.scan(step, env_state, (keys, noise))
        return (env_state, next_key), (*samples, env_state.obs[None])

    (env_state, _), data = jax.lax.scan(
        unroll, (state.env_state, key_rollout), None, length=config.rows // config.num_envs
    )
    data = [jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], *x.shape[3:]) for x in data]

    old, x = state.normalizer, data[0]
    samples = jnp.int32(x.shape[0] * x.shape[1])
    count = old.count + samples
    rate = jnp.float32(samples) / count.to_float()
    mean = old.mean + rate * jnp.sum(x - old.mean, (0, 1)) / samples
    spread = jnp.sum((x - old.mean) * (x - mean), (0, 1)) / samples
    variance = jnp.maximum(old.variance + rate * (spread - old.variance), 0.0)
    std = jnp.clip(jnp.sqrt(variance + config.normalize_observations_std_eps), 1e-6, 1e6)
    statistics = Statistics(count, mean, variance, std)
    data = ((x - mean) / std, *data[1:-1], (data[-1] - mean) / std)

    def loss(params, minibatch, noise):
        observation, raw, old_log_prob, reward, cut, terminated, last = minibatch
        policy, _ = bare.distribution(params, statistics, observation)
        value = bare.value(params, statistics, observation)
        baseline, after = jax.lax.stop_gradient((value, bare.value(params, statistics, last[0])))
        discount = config.discounting * (1.0 - terminated)
        following = jnp.concatenate([baseline[1:], after[None]])
        delta = jnp.where(cut > 0, 0.0, reward + discount * following - baseline)
        weight = jnp.where(cut > 0, 0.0, discount * config.gae_lambda)

        def backward(carry, x):
            carry = x[0] + x[1] * carry
            return carry, carry

        target = jax.lax.scan(backward, jnp.zeros_like(after), (delta, weight), reverse=True)[1] + baseline
        following = jnp.concatenate([target[1:], after[None]])
        advantage = jnp.where(cut > 0, 0.0, reward + discount * following - baseline)
        center = jnp.mean(advantage)
        deviation = jnp.sqrt(jnp.mean(jnp.square(advantage - center)))
        advantage = jax.lax.stop_gradient((advantage - center) / (deviation + 1e-8))
        ratio = jnp.exp(policy.log_prob(raw) - old_log_prob)
        clipped = jnp.clip(ratio, 1 - config.clipping_epsilon, 1 + config.clipping_epsilon)
        policy_loss = -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))
        value_loss = jnp.mean(jnp.square(jax.lax.stop_gradient(target) - value)) * 0.5 * config.vf_loss_coefficient
        entropy_loss = -config.entropy_cost * jnp.mean(policy.entropy(noise))
        return policy_loss + value_loss + entropy_loss

    bare = networks.without_preprocessing
    layout = ParamFlattener.of(state.params)  # one vector, as in our PPO
    optimizer = optax.chain(optax.scale_by_adam(eps=config.optimizer.eps))

    def update(carry, rows):
        params, opt_state, key = carry
        key, key_noise = jax.random.split(key)
        minibatch = [jnp.swapaxes(x[rows], 0, 1) for x in data]
        noise = jax.random.normal(key_noise, minibatch[1].shape)
        gradient = layout.join(jax.grad(loss)(layout.split(params), minibatch, noise))
        direction, opt_state = optimizer.update(gradient, opt_state, params)
        rate = state.tuning.learning_rate * state.tuning.learning_rate_scale
        params = optax.apply_updates(params, jax.tree.map(lambda d: -rate * d, direction))
        return (params, opt_state, key), None

    def epoch(carry, _):
        params, opt_state, key = carry
        key, key_shuffle, key_loss = jax.random.split(key, 3)
        order = jax.random.permutation(key_shuffle, data[0].shape[0])
        order = order.reshape(config.num_minibatches, -1)
        (params, opt_state, _), _ = jax.lax.scan(update, (params, opt_state, key_loss), order)
        return (params, opt_state, key), None

    (params, opt_state, _), _ = jax.lax.scan(
        epoch,
        (layout.join(state.params), layout.join_subtrees(state.opt_state), key_sgd),
        None,
        length=config.num_updates_per_batch,
    )
    params, opt_state = layout.split(params), layout.split_subtrees(opt_state, state.opt_state)
    return params, opt_state, statistics, env_state, state.tuning, key


def kept(state):
    """Fields of a training state that the reference returns: all but counters, guard memory and reset pool."""
    return state.params, state.opt_state, state.normalizer, state.env_state, state.tuning, state.key


def over_one_device(body, *more):
    return sharding.over_devices(body, mesh(), (SPECS,), (R, R, R, SPLIT, R, R, *more))


def executions(program, state):
    """Executions of each primitive, loops multiplied out: those the training state needs, and those of all outputs."""
    closed, shapes = jax.make_jaxpr(program, return_shape=True)(state)
    learnt = len(jax.tree.leaves(shapes[:6]))
    counts = []
    for used in (learnt, len(closed.jaxpr.outvars)):
        jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [i < used for i in range(len(closed.jaxpr.outvars))])
        counts.append(collections.Counter())
        for equation, inside in equations(jaxpr):
            times = math.prod(e.params["length"] for e in inside if e.primitive.name == "scan")
            counts[-1][equation.primitive.name] += times
    return counts


def ours(ppo):
    """Our iteration: the training state, then the verdict of the state site."""

    def body(state):
        state, metrics = ppo.iteration(state)
        return *kept(state), metrics.healthy, metrics.exhausted

    return over_one_device(body, R, R)


@pytest.fixture(scope="module")
def plain():
    """Our PPO with guards off, its first state, and the reference over the same environments."""
    ppo, state = assemble(OFF)
    return ppo, placed(state), over_one_device(lambda s: reference(s, OFF.ppo, ppo.env, ppo.networks))


@pytest.fixture(scope="module")
def off_executions(plain):
    """Executions of our PPO with guards off."""
    ppo, state, _ = plain
    return executions(ours(ppo), state)


def test_disabled_guards_add_no_operation_to_a_plain_ppo(plain, off_executions):
    """Compares every primitive: arithmetic, layout, random numbers, communication."""
    _, state, plain_program = plain
    found, expected = off_executions[0], executions(plain_program, state)[0]
    more = {name: (count, expected[name]) for name, count in found.items() if count > expected[name]}
    assert not more
    # The reference is not padded: it is at most 1 % longer.
    assert found.total() <= expected.total() <= 1.01 * found.total()


# Guards of the state site change no number of the training state, only the verdict on it.
STATE_GUARDS = {
    name: GUARDS_OFF | {name: {"enabled": True}} for name in ("finite_state", "storm", "value_loss", "policy")
}


def started(ppo, state):
    """The first state of another PPO on the same environments, with the same parameters."""
    pool = pool_of(state.env_state) if ppo.env.uses_pool else None
    fresh = init_state(ppo, jax.random.PRNGKey(0), state.env_state, pool)
    fields = {name: getattr(fresh, name) for name in ("reset_pool", "guard_memory", "counters")}
    return dataclasses.replace(state, opt_state=ppo.optimizer.init(state.params), **fields)


def with_guards(off, guards):
    settings = tiny_config(guards=guards)
    return make_ppo(settings, dataclasses.replace(off.env, guards=env_guards(settings.guards)), 2)


def test_default_guards_add_operations(plain, off_executions):
    """The comparison with a plain PPO can fail."""
    off, state, _ = plain
    guarded = with_guards(off, {})
    with_it, without = executions(ours(guarded), started(guarded, state))[0], off_executions[0]
    assert with_it.total() > without.total()
    assert not [primitive for primitive, count in without.items() if with_it[primitive] < count]


@pytest.mark.parametrize("name", STATE_GUARDS)
def test_state_guard_adds_operations_to_its_verdict_only(plain, off_executions, name):
    off, state, _ = plain
    guarded = with_guards(off, STATE_GUARDS[name])
    learnt, whole = executions(ours(guarded), started(guarded, state))
    assert learnt == off_executions[0]
    assert whole.total() > off_executions[1].total()


def test_parameters_with_disabled_guards_equal_those_of_a_plain_ppo(plain):
    ppo, state, plain_program = plain
    iteration = over_one_device(lambda state: kept(ppo.iteration(state)[0]))
    now, plain_now = state, state
    for _ in range(2):
        a, b = iteration(now), plain_program(plain_now)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)
        now, plain_now = (
            dataclasses.replace(
                state, params=x[0], opt_state=x[1], normalizer=x[2], env_state=x[3], tuning=x[4], key=x[5]
            )
            for x in (a, b)
        )
