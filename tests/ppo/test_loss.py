"""The PPO loss: equal to the loss of Brax, and with masks, limiters and gradient accumulation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brax.training.acme import running_statistics
from brax.training.agents.ppo import losses as brax_losses
from brax.training.agents.ppo import networks as brax_networks
from brax.training.types import Transition as BraxTransition
from toys import (
    PointMass,
    assert_close,
    experience,
    finite,
    loss_and_metrics,
    make_networks,
    minibatch_of,
    on_one_device,
    tiny_config,
)

from rlstable.envs.vector import VectorEnv
from rlstable.guards import masked
from rlstable.ppo.gradient import LossGradient, preprocess_batch
from rlstable.ppo.initial import init_tuning
from rlstable.ppo.loss import Loss, standardize
from rlstable.ppo.records import Targets
from rlstable.runner.setup import make_ppo

pytestmark = pytest.mark.usefixtures("quick_compile")

T, B, A = 5, 8, 2
KEY = jax.random.PRNGKey(7)
NOISE = jax.random.normal(KEY, (T, B, A))  # as Brax draws it


def batch(networks, named=False):
    """Random experience."""
    return experience(networks, T, B, named)[:4]


# --- against Brax


def brax_params(params):
    """Converts our parameters to those of Brax. Our tanh policy has one more level."""
    policy, value = params["policy"]["params"], params["value"]
    if value["params"]["hidden_1"]["bias"].size > 1:  # quantiles, which Brax has one level deeper
        value = {"params": {"MLP_0": value["params"]}}
    return brax_losses.PPONetworkParams(policy={"params": policy.get("mlp", policy)}, value=value)


def brax_network(settings, named):
    network = settings.network
    fields = {
        name: getattr(network, name)
        for name in (
            "policy_hidden_layer_sizes", "value_hidden_layer_sizes", "policy_obs_key", "value_obs_key",
            "distribution_type", "noise_std_type", "init_noise_std", "state_dependent_std", "mean_clip_scale",
            "use_distributional_critic", "num_quantiles",
        )
    }  # fmt: skip
    normalize = running_statistics.normalize if settings.ppo.normalize_observations else lambda x, _: x
    return brax_networks.make_ppo_networks(
        {"state": (4,), "privileged_state": (5,)} if named else 4, A, preprocess_observations_fn=normalize, **fields
    )


def brax_data(network, statistics, data, old, reward):
    """Converts our data `[T, B]` to that of Brax `[B, T]`, with the policy parameters of the network of Brax."""
    logits = network.policy_network.apply(statistics, brax_params(old).policy, data.observation)
    log_prob = network.parametric_action_distribution.log_prob(logits, data.raw_action)
    after = jax.tree.map(lambda x: jnp.repeat(x, T, axis=0), data.bootstrap_observation)
    theirs = BraxTransition(
        observation=data.observation,
        action=data.raw_action,
        reward=reward,
        discount=1.0 - jnp.maximum(data.truncation, data.termination),
        next_observation=after,
        extras={
            "state_extras": {"truncation": data.truncation},
            "policy_extras": {
                "raw_action": data.raw_action, "log_prob": log_prob, "value": data.value, "distribution_params": logits,
            },
        },
    )  # fmt: skip
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), theirs)


CASES = {
    "tanh_normal": ({}, {}),
    "raw advantages, clipped values, scaled rewards": (
        {}, {"normalize_advantage": False, "clipping_epsilon_value": 0.2, "reward_scaling": 0.1,
        "vf_loss_coefficient": 0.7},
    ),
    "clipped values, observations as they are": (
        {}, {"clipping_epsilon_value": 0.05, "normalize_observations": False, "clipping_epsilon": 0.02},
    ),
    "normal": ({"distribution_type": "normal", "init_noise_std": 0.7}, {"reward_scaling": 3.0}),
    "normal, log std, bounded mean": (
        {"distribution_type": "normal", "noise_std_type": "log", "mean_clip_scale": 0.8}, {"normalize_advantage":
            False},
    ),
    "normal, std from the network": ({"distribution_type": "normal", "state_dependent_std": True}, {}),
    "normal, log std from the network": (
        {"distribution_type": "normal", "state_dependent_std": True, "noise_std_type": "log"}, {"entropy_cost": 0.1},
    ),
    "quantile critic": (
        {"use_distributional_critic": True, "num_quantiles": 7}, {"clipping_epsilon_value": 0.3, "discounting": 0.9},
    ),
    "named observations": ({"value_obs_key": "privileged_state"}, {"discounting": 0.9, "gae_lambda": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_brax_with_guards_off(case):
    network, ppo = CASES[case]
    named = case == "named observations"
    settings = tiny_config(ppo=ppo, network=network)
    networks = make_networks(settings, A)
    params, statistics, data, old = batch(networks, named)
    theirs = brax_network(settings, named)
    normalizer = running_statistics.RunningStatisticsState(
        count=jnp.float32(100), mean=statistics.mean, std=statistics.std, summed_variance=statistics.variance
    )
    config = settings.ppo

    @jax.jit
    def brax_side(params, data, old):
        return jax.value_and_grad(brax_losses.compute_ppo_loss, has_aux=True)(
            params, normalizer, brax_data(theirs, normalizer, data, old, data.reward), KEY, theirs,
            entropy_cost=config.entropy_cost, discounting=config.discounting, reward_scaling=config.reward_scaling,
            gae_lambda=config.gae_lambda, clipping_epsilon=config.clipping_epsilon,
            normalize_advantage=config.normalize_advantage, vf_coefficient=config.vf_loss_coefficient,
            clipping_epsilon_value=config.clipping_epsilon_value,
            use_distributional_critic=settings.network.use_distributional_critic,
        )  # fmt: skip

    @on_one_device
    def our_side(params, data):
        loss = loss_and_metrics(networks, config, settings.guards.limiters)
        return jax.value_and_grad(loss, has_aux=True)(params, statistics, minibatch_of(data, NOISE), None)

    (loss, metrics), gradients = our_side(params, data._replace(reward=data.reward * config.reward_scaling))
    (their_loss, their_metrics), their_gradients = brax_side(brax_params(params), data, old)
    np.testing.assert_allclose(loss, their_loss, rtol=1e-5, atol=1e-5)
    common = {name for name in their_metrics if f"training/{name}" in metrics}
    assert common == {
        "total_loss", "policy_loss", "v_loss", "entropy_loss", "kl_mean",
        "policy_dist_mean_std", "policy_dist_min_std", "policy_dist_max_std",
    }  # fmt: skip
    for name in common:
        np.testing.assert_allclose(metrics[f"training/{name}"], their_metrics[name], rtol=1e-5, atol=1e-5, err_msg=name)
    mapped = brax_params(gradients)
    assert_close(mapped, their_gradients, 1e-4)
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(gradients))  # every parameter has a gradient


# --- masks


MASKED = tiny_config(ppo={"clipping_epsilon_value": 0.2, "normalize_advantage": True})


@pytest.fixture(scope="module")
def loss():
    """Loss, metrics and gradients of (params, data), compiled once per shape and kind of mask."""
    networks = make_networks(MASKED, A)
    bare = networks.without_preprocessing
    whole = loss_and_metrics(bare, MASKED.ppo, MASKED.guards.limiters)
    statistics = batch(networks)[1]

    @on_one_device
    def call(params, data, noise=NOISE):
        minibatch = minibatch_of(preprocess_batch(networks, statistics, data), noise)
        return jax.value_and_grad(whole, has_aux=True)(params, statistics, minibatch, masked.share(data.valid))

    return call


@pytest.fixture(scope="module")
def sample():
    params, statistics, data, _ = batch(make_networks(MASKED, A))
    return params, statistics, data


def mask(seed=3):
    """A mask with some invalid samples."""
    return np.random.default_rng(seed).random((T, B)) > 0.3


def cut(data, valid):
    return data._replace(
        valid=jnp.array(valid),
        truncation=jnp.where(valid, data.truncation, 1.0),
        termination=jnp.where(valid, data.termination, 0.0),
        reward=jnp.where(valid, data.reward, 0.0),
    )


def test_masked_loss_equals_the_loss_on_the_valid_samples(loss, sample):
    """Value targets and advantages come from the whole batch."""
    params, statistics, data = sample
    valid = mask()
    data = cut(data, valid)
    networks = make_networks(MASKED, A)

    @on_one_device
    def subset(params, data):
        values = networks.value(params, statistics, data.observation)
        targets = Loss(networks, MASKED.ppo, MASKED.guards.limiters).estimate(params, statistics, data, values)
        data = data._replace(bootstrap_observation=None, valid=None)
        rows = np.nonzero(valid)
        data, targets, noise = jax.tree.map(lambda x: x[rows][None], (data, targets, NOISE))
        advantage, std = standardize(targets.advantage, None, None, None)
        minibatch = minibatch_of(data, noise, targets=Targets(targets.value, advantage), advantage_std=std)
        return jax.value_and_grad(loss_and_metrics(networks, MASKED.ppo, MASKED.guards.limiters), has_aux=True)(
            params, statistics, minibatch, None
        )

    assert_close(loss(params, data), subset(params, data))


POISONED = ("observation", "raw_action", "scale", "value", "reward")


@pytest.mark.parametrize("bad", [np.nan, 1e30])
@pytest.mark.parametrize("field", POISONED)
def test_bad_numbers_in_invalid_samples_do_not_change_the_loss(loss, sample, field, bad):
    """Bit for bit, in the loss, the metrics and the gradient."""
    params, _, data = sample
    valid = mask()
    if field == "observation":  # the step before reads the value of this sample
        valid = np.cumprod(valid, axis=0).astype(bool)
    data = cut(data, valid)

    def poison(x):
        return jnp.where(jnp.reshape(valid, valid.shape + (1,) * (x.ndim - 2)), x, bad)

    if field == "scale":
        distribution = dataclasses.replace(data.distribution, scale=poison(data.distribution.scale))
        poisoned = data._replace(distribution=distribution)
    else:
        poisoned = data._replace(**{field: poison(getattr(data, field))})
    if field == "observation":
        last = valid[-1]
        data = data._replace(bootstrap_observation=jnp.where(last[:, None], data.bootstrap_observation, 0.0))
        data = data._replace(truncation=jnp.where(np.roll(valid, -1, axis=0) | ~valid, data.truncation, 1.0))
        poisoned = poisoned._replace(
            truncation=data.truncation, bootstrap_observation=jnp.where(last[:, None], data.bootstrap_observation, bad)
        )
    expected, found = loss(params, data), loss(params, poisoned)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert finite(found)


def test_loss_and_gradient_without_a_valid_sample_are_zero(loss, sample):
    params, _, data = sample
    (value, metrics), gradients = loss(params, cut(data, np.zeros((T, B), bool)))
    assert value == 0
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0.0), gradients)
    # The minimum and maximum of no samples are infinite.
    assert {name for name, x in metrics.items() if not jnp.isfinite(x)} == {
        "training/policy_dist_min_std", "training/policy_dist_max_std",
    }  # fmt: skip


@pytest.mark.parametrize("count", [0, 1])
def test_standardizing_one_sample_or_none_gives_zeros(count):
    valid = np.zeros((T, B), bool)
    valid.flat[:count] = True
    advantages = np.float32(np.random.default_rng(0).normal(size=(T, B)) * 1e3)
    program = on_one_device(lambda x, valid: standardize(x, valid, masked.share(valid), 1e-5)[0])
    found = program(advantages, jnp.array(valid))
    np.testing.assert_array_equal(found[valid], 0.0)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(program(advantages[:1, :1], None), 0.0)


# --- gradient accumulation


def gradient(gae, parts):
    """The gradient of a minibatch, taken in parts."""
    settings = tiny_config(
        ppo={"gradient_accumulation": parts, "gae": gae, "clipping_epsilon_value": 0.2, "entropy_cost": 0.1}
    )
    ppo = make_ppo(settings, VectorEnv(PointMass(), 12, 1, {}), A)

    @on_one_device
    def call(params, statistics, data):
        targets = None
        if gae == "per_iteration":
            values = ppo.networks.value(params, statistics, data.observation)
            loss = Loss(ppo.networks, settings.ppo, settings.guards.limiters)
            targets = loss.estimate(params, statistics, data, values)
        minibatch = minibatch_of(preprocess_batch(ppo.networks, statistics, data), NOISE, targets=targets)
        return ppo.gradient(
            params, statistics, minibatch, masked.share(data.valid), init_tuning(ppo.settings, ppo.precision)
        )

    return call


@pytest.mark.parametrize(("gae", "masking"), [("per_update", False), ("per_update", True), ("per_iteration", True)])
def test_accumulated_gradient_equals_the_gradient_of_the_whole_minibatch(gae, masking):
    """Normalisation, mask and noise span the minibatch; the mask is uneven over the parts."""
    params, statistics, data, _ = batch(make_networks(MASKED, A))
    if masking:
        valid = mask(5)
        valid[:, :2] = False  # the first of four parts has no valid sample
        data = cut(data, valid)
    whole, _ = gradient(gae, 1)(params, statistics, data)
    accumulated, metrics = gradient(gae, 4)(params, statistics, data)
    assert_close(accumulated, whole)
    assert jnp.isfinite(metrics["training/total_loss"])


@pytest.mark.parametrize("parts", [1, 2])
def test_advantages_once_per_iteration_reach_over_all_unrolls_of_an_environment(parts):
    """Two unrolls of four environments are four sequences, as if each were one unroll of twice the length."""
    envs = B // 2
    settings = tiny_config(
        ppo={
            "num_envs": envs, "batch_size": envs, "num_minibatches": 2, "unroll_length": T, "gae": "per_iteration",
            "gradient_accumulation": parts,
        }
    )  # fmt: skip
    ppo = make_ppo(settings, VectorEnv(PointMass(), 12, 1, {}), A)
    params, statistics, long = experience(ppo.networks, 2 * T, envs)[:3]

    def rows(x):  # as `collect` orders them: all environments of the first unroll, then those of the second
        return jnp.concatenate([jnp.swapaxes(x[:T], 0, 1), jnp.swapaxes(x[T:], 0, 1)])

    unused = jnp.full_like(long.bootstrap_observation, jnp.nan)  # observations after the first unrolls
    data = jax.tree.map(rows, long._replace(bootstrap_observation=None))._replace(
        bootstrap_observation=jnp.swapaxes(jnp.concatenate([unused, long.bootstrap_observation], axis=1), 0, 1)
    )

    @on_one_device
    def both(params, data, long):
        loss = Loss(ppo.networks, settings.ppo, settings.guards.limiters)
        values = ppo.networks.value(params, statistics, long.observation)
        found = LossGradient(loss, False, False).targets(params, statistics, data)
        return found, loss.estimate(params, statistics, long, values)

    found, wanted = both(params, data, long)
    for name in ("value", "advantage"):
        np.testing.assert_allclose(getattr(found, name), rows(getattr(wanted, name)), rtol=1e-5, atol=1e-6)
