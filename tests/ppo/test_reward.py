"""Rewards as used for learning: the limiters of rewards, and the time-out credit."""

import functools

import numpy as np
import pytest
from toys import LIMITERS_OFF, mesh, tiny_config

from rlstable.device import sharding
from rlstable.guards import outlier
from rlstable.ppo import reward
from rlstable.ppo.records import Collected

pytestmark = pytest.mark.usefixtures("quick_compile")

ENVS, T, DISCOUNT = 4, 5, 0.9
R, SPLIT = sharding.REPLICATED, sharding.SPLIT


def config(**ppo):
    sizes = {"num_envs": ENVS, "batch_size": ENVS, "num_minibatches": 1, "discounting": DISCOUNT}
    return tiny_config(ppo=sizes | ppo).ppo


def limits(limit=None, rare=None, values=None):
    own = {"reward": limit, "reward_outlier": rare, "value_range": values}
    return tiny_config(guards={"limiters": LIMITERS_OFF | own}).guards.limiters


def transition(rewards, end=None, valid=None, value=None, time_out=None):
    """`[rows, T]`; an end is 0 for none, 1 for a truncation, 2 for a termination."""
    end = np.zeros(rewards.shape, int) if end is None else end
    observation = action = log_prob = policy = None
    return Collected(
        observation, action, log_prob, policy, value, np.float32(rewards), np.float32(end == 1), np.float32(end == 2),
        valid, time_out, None,
    )  # fmt: skip


@functools.cache
def shaping(settings, limit=None, rare=None):
    """`value` stands for the rewards that the value network expects."""

    def shape(data):
        recent = None if rare is None else outlier.no_magnitudes()
        data, _, _, metrics = reward.shape(data, recent, np.zeros(2), settings, limits(limit, rare), lambda: data.value)
        return data, metrics

    return sharding.over_devices(shape, mesh(1), (SPLIT,), (SPLIT, R))


def test_rewards_are_limited_then_credited_for_a_time_out():
    """The credit is not limited. Brax scales the credit with the reward."""
    rewards, value = np.zeros((ENVS, T)), np.full((ENVS, T), 50.0, np.float32)
    rewards[0, 0] = 8.0
    rewards[1, 3] = -6.0
    end, valid = np.zeros((ENVS, T), int), np.ones((ENVS, T), bool)
    end[1, 3] = 1
    valid[3, 4] = False
    time_out = np.zeros((ENVS, T), np.float32)
    time_out[1, 3] = 1.0
    value[2, 2] = np.nan  # of a sample whose episode goes on
    data = transition(rewards, end, valid, value, time_out)
    shaped, metrics = shaping(config(bootstrap_on_timeout=True, reward_scaling=0.1), limit=1.5)(data)
    expected = np.zeros((ENVS, T))
    expected[0, 0] = 1.5
    expected[1, 3] = -1.5 + DISCOUNT * 0.1 * 50.0
    np.testing.assert_allclose(shaped.reward, expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["limiters/reward/active"], 2 / (ENVS * T - 1), rtol=1e-6)
    np.testing.assert_allclose(metrics["training/reward_greatest"], 1.5)


BOUND = 8.0  # 2 / (20 p), of one outlier among 80 rewards of 1


def unit_rewards(paid):
    """80 rewards of 1, one of which is replaced."""
    rewards = np.ones((ENVS, 20))
    rewards[1, 2] = paid
    return rewards


@pytest.mark.parametrize(
    ("paid", "expected", "learned"),
    [(300.0, 0.0, BOUND), (300.0, 2.0, BOUND + 16.0), (300.0, 50.0, 300.0), (-300.0, 2.0, -BOUND),
     (-300.0, -2.0, -BOUND - 16.0)],
)  # fmt: skip
def test_rare_prize_counts_for_a_multiple_of_what_the_value_network_expects(paid, expected, learned):
    rewards = unit_rewards(paid)
    value = np.zeros_like(rewards, np.float32)
    value[1, 2] = expected
    data = transition(rewards, value=value)
    shaped, metrics = shaping(config(), rare=2.0)(data)
    np.testing.assert_allclose(metrics["limiters/reward_outlier/active"], float(learned != paid) / 80, rtol=1e-6)
    np.testing.assert_allclose(shaped.reward[1, 2], learned, rtol=1e-5)
    assert np.sum(shaped.reward != 1.0) == 1


def test_bad_expectation_and_bad_reward_do_not_spread():
    """A value network that is not finite widens no bound, and infinity stays for a guard to find."""
    rewards = unit_rewards(300.0)
    rewards[2, 2] = np.inf
    data = transition(rewards, value=np.full_like(rewards, np.nan, np.float32))
    shaped, _ = shaping(config(), rare=2.0)(data)
    np.testing.assert_allclose(shaped.reward[1, 2], BOUND, rtol=1e-5)
    assert shaped.reward[2, 2] == np.inf


def test_range_of_rewards_widens_with_valid_finite_rewards_before_credits():
    """Values that a time-out credits are in the range that rewards pay, 0 to 2 / (1 - 0.9)."""
    rewards, value = np.zeros((ENVS, T)), np.full((ENVS, T), 50.0, np.float32)
    rewards[0, :3] = (2.0, -7.0, np.inf)
    valid = np.ones((ENVS, T), bool)
    valid[0, 1] = False
    data = transition(rewards, valid=valid, value=value, time_out=np.eye(ENVS, T, 1, dtype=np.float32))
    own, settings = limits(values=1.0), config(bootstrap_on_timeout=True)

    def shape(seen, data):
        data, _, seen, _ = reward.shape(data, None, seen, settings, own, lambda: data.value)
        return seen, data.reward

    seen, credited = sharding.over_devices(shape, mesh(1), (R, SPLIT), (R, SPLIT))(np.zeros(2, np.float32), data)
    assert seen.tolist() == [0.0, 2.0]
    np.testing.assert_allclose(credited[1, 2], DISCOUNT * 20.0, rtol=1e-5)
    seen, _ = sharding.over_devices(shape, mesh(1), (R, SPLIT), (R, SPLIT))(np.float32([-3.0, 1.0]), data)
    assert seen.tolist() == [-3.0, 2.0]
