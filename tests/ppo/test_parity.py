"""SGD of two iterations equals the minibatch loop of Brax on the same transitions and permutations.

The loop is a copy of `training_step`, `sgd_step` and `minibatch_step` of `brax.training.agents.ppo.train`, where the
functions are local and cannot be imported. Loss, gradient, normalizer and optimizer are those of Brax.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from brax.training import gradients
from brax.training.acme import running_statistics, specs
from brax.training.agents.ppo import losses as brax_losses
from brax.training.agents.ppo import networks as brax_networks
from brax.training.agents.ppo.optimizer import adaptive_kl_learning_rate
from brax.training.distribution import NormalTanhDistribution
from brax.training.types import Transition as BraxTransition
from toys import SPECS, assemble, compiled, mesh, placed, tiny_config

from rlstable.device import sharding
from rlstable.ppo.rollout import collect

pytestmark = pytest.mark.usefixtures("quick_compile")

ITERATIONS = 2
BASE = {
    "num_updates_per_batch": 3, "clipping_epsilon_value": 0.2, "reward_scaling": 0.5, "max_grad_norm": 0.8,
    "entropy_cost": 0.05,
}  # fmt: skip
SETTINGS = {
    "constant rate": tiny_config(ppo=BASE, env={"episode_length": 5}),
    # A rate this high moves the policy enough for the KL to cross both of its bounds.
    "adaptive rate": tiny_config(
        ppo={**BASE, "learning_rate": 9e-3, "learning_rate_schedule": "ADAPTIVE_KL", "desired_kl": 2e-3},
        env={"episode_length": 5},
    ),
}


def brax_training(settings):
    """`training_step` of Brax without the rollout: new (params, optimizer state, normalizer), with rates and KLs."""
    config = settings.ppo
    adaptive = config.learning_rate_schedule == "adaptive_kl"
    network = brax_networks.make_ppo_networks(
        4, 2, preprocess_observations_fn=running_statistics.normalize,
        policy_hidden_layer_sizes=settings.network.policy_hidden_layer_sizes,
        value_hidden_layer_sizes=settings.network.value_hidden_layer_sizes,
    )  # fmt: skip
    base = optax.adam(config.learning_rate)
    if adaptive:
        base = optax.inject_hyperparams(optax.adam)(learning_rate=config.learning_rate)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), base)
    loss = functools.partial(
        brax_losses.compute_ppo_loss, ppo_network=network, entropy_cost=config.entropy_cost,
        discounting=config.discounting, reward_scaling=config.reward_scaling, gae_lambda=config.gae_lambda,
        clipping_epsilon=config.clipping_epsilon, normalize_advantage=config.normalize_advantage,
        vf_coefficient=config.vf_loss_coefficient, clipping_epsilon_value=config.clipping_epsilon_value,
    )  # fmt: skip
    loss_and_gradient = gradients.loss_and_pgrad(loss, pmap_axis_name=None, has_aux=True)

    def minibatch_step(carry, data, normalizer):
        optimizer_state, params, key = carry
        key, key_loss = jax.random.split(key)
        (_, metrics), grads = loss_and_gradient(params, normalizer, data, key_loss)
        rate = jnp.float32(config.learning_rate)
        if adaptive:
            optimizer_state, rate = adaptive_kl_learning_rate(
                optimizer_state, metrics["kl_mean"], config.desired_kl,
                config.learning_rate_schedule_min_lr, config.learning_rate_schedule_max_lr,
            )  # fmt: skip
        update, optimizer_state = optimizer.update(grads, optimizer_state)
        return (optimizer_state, optax.apply_updates(params, update), key), (rate, metrics["kl_mean"])

    def sgd_step(carry, _, data, normalizer):
        optimizer_state, params, key = carry
        key, key_perm, key_grad = jax.random.split(key, 3)

        def convert(x):
            x = jax.random.permutation(key_perm, x)
            return jnp.reshape(x, (config.num_minibatches, -1, *x.shape[1:]))

        (optimizer_state, params, _), told = jax.lax.scan(
            functools.partial(minibatch_step, normalizer=normalizer),
            (optimizer_state, params, key_grad),
            jax.tree.map(convert, data),
            length=config.num_minibatches,
        )
        return (optimizer_state, params, key), told

    def training_step(training_state, data, key):
        params, optimizer_state, normalizer = training_state
        key_sgd, _, _ = jax.random.split(key, 3)
        if not adaptive:
            normalizer = running_statistics.update(normalizer, data.observation)
        (optimizer_state, params, _), told = jax.lax.scan(
            functools.partial(sgd_step, data=data, normalizer=normalizer),
            (optimizer_state, params, key_sgd),
            (),
            length=config.num_updates_per_batch,
        )
        if adaptive:
            normalizer = running_statistics.update(normalizer, data.observation)
        return (params, optimizer_state, normalizer), told

    return optimizer, jax.jit(training_step)


def brax_params(params):
    """Converts our parameters to those of Brax. Our tanh policy has one more level."""
    policy = params["policy"]["params"]["mlp"]
    return brax_losses.PPONetworkParams(policy={"params": policy}, value=params["value"])


def brax_data(data, settings):
    """Converts our data `[rows, T]` to that of Brax: unscaled rewards, scales before the softplus."""
    scale = data.distribution.scale - 0.001
    logits = jnp.concatenate([data.distribution.loc, jnp.log(jnp.expm1(scale))], -1)
    last = jnp.repeat(data.bootstrap_observation, data.reward.shape[1], axis=1)
    return BraxTransition(
        observation=data.observation,
        action=jnp.tanh(data.raw_action),
        reward=data.reward / settings.ppo.reward_scaling,
        discount=1.0 - jnp.maximum(data.truncation, data.termination),
        next_observation=last,
        extras={
            "state_extras": {"truncation": data.truncation},
            "policy_extras": {
                "raw_action": data.raw_action, "value": data.value, "distribution_params": logits,
                "log_prob": NormalTanhDistribution(data.raw_action.shape[-1]).log_prob(logits, data.raw_action),
            },
        },
    )  # fmt: skip


def close(ours, theirs, what):
    np.testing.assert_allclose(
        ours, theirs, rtol=1e-4, atol=1e-4 * max(1e-3, float(np.max(np.abs(theirs)))), err_msg=what
    )


@pytest.mark.parametrize("case", ["constant rate", pytest.param("adaptive rate", marks=pytest.mark.slow)])
def test_training_equals_brax(case):
    settings = SETTINGS[case]
    ppo, state = assemble(settings)
    state = placed(state)
    iteration = compiled(ppo)
    experience = sharding.over_devices(
        lambda state, key: collect(state, key, env=ppo.env, networks=ppo.networks, config=settings).data,
        mesh(), (SPECS, sharding.REPLICATED), sharding.SPLIT,
    )  # fmt: skip
    optimizer, training_step = brax_training(settings)
    theirs = (
        brax_params(state.params),
        optimizer.init(brax_params(state.params)),
        running_statistics.init_state(specs.Array((4,), jnp.dtype("float32"))),
    )
    first = state
    rates, their_rates, kls = [], [], []
    for _ in range(ITERATIONS):
        key = state.key
        data = experience(state, jax.random.split(key, 3)[1])
        assert data.truncation.any() and data.termination.any()
        state, metrics = iteration(state)
        theirs, (rate, kl) = training_step(theirs, brax_data(data, settings), key)
        rates.append(metrics.values["training/learning_rate"])
        their_rates.append(jnp.mean(rate))
        kls.append((metrics.values["training/kl_mean"], jnp.mean(kl)))

    params, optimizer_state, normalizer = theirs
    moved = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), state.params, first.params)
    assert min(jax.tree.leaves(moved)) > 1e-2  # training changed the parameters
    jax.tree.map(lambda a, b: close(a, b, "parameters"), brax_params(state.params), params)

    adam = next(part for part in jax.tree.leaves(optimizer_state, is_leaf=is_adam) if is_adam(part))
    own = next(part for part in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(part))
    assert own.count == adam.count == ITERATIONS * 3 * settings.ppo.num_minibatches
    for moment in ("mu", "nu"):
        jax.tree.map(lambda a, b, m=moment: close(a, b, m), brax_params(getattr(own, moment)), getattr(adam, moment))

    close(state.normalizer.mean, normalizer.mean, "mean")
    close(state.normalizer.std, normalizer.std, "std")
    rows = ITERATIONS * settings.ppo.rows * settings.ppo.unroll_length
    assert int(state.normalizer.count) == int(normalizer.count.lo) == rows
    np.testing.assert_allclose(rates, their_rates, rtol=1e-5)
    np.testing.assert_allclose(*zip(*kls, strict=True), rtol=1e-3)
    if case == "adaptive rate":
        assert len({float(r) for r in rates}) == ITERATIONS  # it did adapt


def is_adam(part):
    return isinstance(part, optax.ScaleByAdamState)
