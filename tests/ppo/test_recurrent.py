"""A recurrent policy: the loss recomputes the states of the rollout, and environments carry and reset them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import NamedPointMass, PointMass, assemble, mesh, placed, tiny_config

from rlstable.config import Config, ConfigError
from rlstable.device import sharding
from rlstable.device.trees import MEMORY
from rlstable.envs.recurrent import RecurrentEnv, with_memory
from rlstable.ppo.iteration import PPO
from rlstable.ppo.records import Collected, swap_axes
from rlstable.ppo.state import SPECS, TrainState

pytestmark = pytest.mark.usefixtures("quick_compile")
SIZE, LENGTH = 6, 5  # of the state, and of an episode; unrolls have 4 steps


def config(**sections: Any) -> Config:
    network = {"recurrent": "gru", "recurrent_size": SIZE}
    return tiny_config(network=network, env={"episode_length": LENGTH}, **sections)


@functools.cache
def collected(faulty: bool = False) -> tuple[PPO, TrainState, Collected]:
    """PPO, its first state, and a batch `[rows, T]` of two unrolls in each of eight environments."""
    settings = config(guards={} if faulty else None)
    point = PointMass(fault="physics", probability=0.1) if faulty else PointMass()
    ppo, state = assemble(settings, with_memory(point, settings.network))
    collect = sharding.over_devices(lambda state: ppo.collect(state, state.key).data, mesh(), (SPECS,), sharding.SPLIT)
    return ppo, state, jax.tree.map(np.asarray, collect(placed(state)))


@pytest.mark.parametrize("faulty", [False, True])
def test_loss_recomputes_the_actions_probabilities_of_the_rollout(faulty: bool) -> None:
    """The states at the start of unrolls, the ends of episodes and replaced environments are those of the rollout."""
    ppo, state, data = collected(faulty)
    assert data.memory is not None and data.memory.shape == (16, 1, SIZE)
    assert np.abs(data.memory).max() > 0.01  # the second unrolls do not start from 0
    ended = (data.termination + data.truncation) > 0
    assert ended[:, :-1].any()  # within an unroll
    assert faulty == (data.valid is not None and not data.valid.all())
    distribution, _ = ppo.networks.over_time(state.params, state.normalizer, swap_axes(data))
    ours = swap_axes(distribution.log_prob(swap_axes(data.raw_action)))
    valid = True if data.valid is None else data.valid
    np.testing.assert_allclose(np.where(valid, ours, 0.0), np.where(valid, data.log_prob, 0.0), atol=1e-5)


def test_gradient_flows_back_to_the_first_step_but_not_over_the_end_of_an_episode() -> None:
    ppo, state, data = collected()
    data = swap_axes(data)._replace(termination=jnp.zeros((4, 16)), truncation=jnp.zeros((4, 16)))

    def last_mean(observation: jax.Array, ended: float) -> jax.Array:
        cut = data._replace(observation={"state": observation}, termination=data.termination.at[1].set(ended))
        return jnp.sum(ppo.networks.over_time(state.params, state.normalizer, cut)[0].loc[-1])

    gradient = jax.grad(last_mean)
    assert float(jnp.abs(gradient(jnp.asarray(data.observation["state"]), 0.0)[0]).max()) > 1e-6
    cut = gradient(jnp.asarray(data.observation["state"]), 1.0)
    np.testing.assert_array_equal(cut[:2], 0.0)
    assert float(jnp.abs(cut[2]).max()) > 1e-6


def test_rescaled_input_layers_of_the_gru_compute_the_same_policy() -> None:
    ppo, state, data = collected()
    new = jax.tree.map(lambda x: x, state.normalizer)
    old = new.__class__(new.count, *({"state": jnp.full(4, x)} for x in (0.5, 4.0, 2.0)))
    new = new.__class__(new.count, *({"state": jnp.full(4, x)} for x in (-1.0, 1.0, 1.0)))
    rescaled = ppo.networks.rescale_inputs(state.params, old, new)
    data = swap_axes(data)
    before, after = (
        ppo.networks.over_time(params, statistics, data)[0].loc
        for params, statistics in ((state.params, old), (rescaled, new))
    )
    np.testing.assert_allclose(after, before, atol=1e-5)
    assert rescaled["policy"]["params"]["mlp"] is state.params["policy"]["params"]["mlp"]


def test_environment_carries_the_state_from_the_action_to_the_next_observation() -> None:
    network = config().network
    for point, keys in ((PointMass(), {"state"}), (NamedPointMass(), {"state", "privileged_state"})):
        env = RecurrentEnv(point, network)
        first = env.reset(jax.random.PRNGKey(0))
        assert keys <= first.obs.keys() - {MEMORY} and env.action_size == 2
        np.testing.assert_array_equal(first.obs[MEMORY], np.zeros(SIZE))
        second = env.step(first, jnp.arange(2.0 + SIZE))
        np.testing.assert_array_equal(second.obs[MEMORY], np.arange(2.0, 2.0 + SIZE))
        plain = point.step(point.reset(jax.random.PRNGKey(0)), jnp.arange(2.0))
        np.testing.assert_array_equal(second.reward, plain.reward)


def test_networks_without_recurrence_leave_the_environment_as_it_is() -> None:
    env = PointMass()
    assert with_memory(env, tiny_config().network) is env


def test_symmetry_of_a_recurrent_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ppo.symmetry: auto needs network.recurrent=null"):
        config(ppo={"symmetry": "auto"})
