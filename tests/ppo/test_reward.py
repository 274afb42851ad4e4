"""Rewards as used for learning: running normalisation as in Gymnasium, the reward limiter, and the time-out credit."""

import functools

import numpy as np
import pytest
from toys import LIMITERS_OFF, mesh, tiny_config

from rlstable.device import sharding
from rlstable.ppo import reward
from rlstable.ppo.records import Collected
from rlstable.ppo.reward import RewardState

pytestmark = pytest.mark.usefixtures("quick_compile")

ENVS, T, DISCOUNT = 4, 5, 0.9
R, SPLIT = sharding.REPLICATED, sharding.SPLIT
SPLITS = (RewardState(R, R, SPLIT), SPLIT)


def config(**ppo):
    sizes = {"num_envs": ENVS, "batch_size": ENVS, "num_minibatches": 1, "discounting": DISCOUNT}
    return tiny_config(ppo=sizes | ppo).ppo


NORMALIZED = config(normalize_rewards=True)
OF_OBSERVATIONS = config(
    normalize_rewards=True, normalize_observations_mode="ema", normalize_until_count=1, normalize_observations_std_eps=1
)


def limits(limit=None, outlier=None):
    return tiny_config(guards={"limiters": LIMITERS_OFF | {"reward": limit, "reward_outlier": outlier}}).guards.limiters


def transition(rewards, end=None, valid=None, value=None, time_out=None):
    """`[rows, T]`; an end is 0 for none, 1 for a truncation, 2 for a termination."""
    end = np.zeros(rewards.shape, int) if end is None else end
    observation = action = log_prob = policy = None
    return Collected(
        observation, action, log_prob, policy, value, np.float32(rewards), np.float32(end == 1), np.float32(end == 2),
        valid, time_out, None,
    )  # fmt: skip


@functools.cache
def shaping(devices=1, limit=None, settings=NORMALIZED, outlier=None):
    """`value` stands for the rewards that the value network expects."""

    def shape(state, data):
        data, state, metrics = reward.shape(data, state, settings, limits(limit, outlier), lambda: data.value)
        return state, data, metrics

    return sharding.over_devices(shape, mesh(devices), SPLITS, (*SPLITS, R))


def batch(unrolls, seed, masking):
    """Rewards, ends and mask `[unrolls, ENVS, T]`. Invalid samples are truncated and have no reward."""
    rng = np.random.default_rng(seed)
    shape = (unrolls, ENVS, T)
    rewards = rng.normal(size=shape) * 3 + 1
    end = rng.choice(3, shape, p=(0.8, 0.1, 0.1))
    valid = rng.random(shape) > (0.2 if masking else -1)
    return np.where(valid, rewards, 0.0), np.where(valid, end, 1), valid


class NormalizeReward:
    """Gymnasium's wrapper on all environments, one batch at a time."""

    def __init__(self):
        self.running, self.seen = np.zeros(ENVS), []

    def __call__(self, rewards, end, valid):
        for unroll in range(len(rewards)):
            for t in range(T):
                self.running = DISCOUNT * self.running + rewards[unroll, :, t]
                self.seen += list(self.running[valid[unroll, :, t]])
                self.running = np.where(end[unroll, :, t] > 0, 0.0, self.running)
        return rewards / np.std(self.seen)


def by_device(x, devices):
    """`[unrolls, ENVS, T]` to rows: each device has all unrolls of its own environments."""
    parts = np.split(x, devices, axis=1)
    return np.concatenate([part.reshape(-1, T) for part in parts])


@pytest.mark.parametrize(
    ("unrolls", "masking", "devices", "settings"),
    [(1, False, 1, NORMALIZED), (3, True, 1, NORMALIZED), (3, True, 2, NORMALIZED), (1, False, 1, OF_OBSERVATIONS)],
)
def test_reward_normalisation_equals_gymnasium(unrolls, masking, devices, settings):
    """Episodes end within and between unrolls; statistics are those of all devices together."""
    reference, returns = NormalizeReward(), reward.init(ENVS, NORMALIZED, limits())
    for seed in range(2):
        rewards, end, valid = batch(unrolls, seed, masking)
        data = transition(*(by_device(x, devices) for x in (rewards, end)), by_device(valid, devices))
        if not masking:
            data = data._replace(valid=None)
        returns, shaped, metrics = shaping(devices, settings=settings)(returns, data)
        expected = by_device(reference(rewards, end, valid), devices)
        np.testing.assert_allclose(shaped.reward, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(returns.running, reference.running, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(returns.statistics.std, np.std(reference.seen), rtol=1e-5)
        np.testing.assert_allclose(returns.statistics.mean, np.mean(reference.seen), rtol=1e-4)
        assert int(returns.statistics.count) == len(reference.seen)
        assert metrics.keys() == {"training/reward_greatest"}
        greatest = np.max(np.abs(expected), where=by_device(valid, devices), initial=0.0)
        np.testing.assert_allclose(metrics["training/reward_greatest"], greatest, rtol=1e-5)


def test_rewards_are_normalised_then_limited_then_credited_for_a_time_out():
    """The credit is neither normalised nor limited and does not enter the statistics."""
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
    settings = config(normalize_rewards=True, bootstrap_on_timeout=True)
    returns, shaped, metrics = shaping(1, 1.5, settings)(reward.init(ENVS, settings, limits()), data)
    seen = [8.0 * DISCOUNT**t for t in range(T)] + [-6.0] + [0.0] * (ENVS * T - T - 2)
    np.testing.assert_allclose(returns.statistics.std, np.std(seen), rtol=1e-6)
    expected = np.zeros((ENVS, T))
    expected[0, 0] = 1.5  # 8 / 2.98 is beyond
    expected[1, 3] = -1.5 + DISCOUNT * 50.0
    assert 6.0 / np.std(seen) > 1.5
    np.testing.assert_allclose(shaped.reward, expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["limiters/reward/active"], 2 / (ENVS * T - 1), rtol=1e-6)


@pytest.mark.parametrize("normalized", [False, True])
def test_time_out_credit_is_in_the_units_of_values(normalized):
    """Brax scales the credit with the reward; with normalised rewards `reward_scaling` has no effect."""
    settings = config(normalize_rewards=normalized, bootstrap_on_timeout=True, reward_scaling=0.1)
    rewards = np.random.default_rng(0).normal(size=(ENVS, T))
    value, time_out = np.full((ENVS, T), 50.0, np.float32), np.zeros((ENVS, T), np.float32)
    without = transition(rewards, None, None, value, time_out)
    time_out = time_out.copy()
    time_out[1, 3] = 1.0
    shape = shaping(1, None, settings)
    plain, credited = (
        shape(reward.init(ENVS, settings, limits()), data)[1].reward
        for data in (without, without._replace(time_out=time_out))
    )
    expected = np.zeros((ENVS, T))
    expected[1, 3] = DISCOUNT * 50.0 * (1.0 if normalized else 0.1)
    np.testing.assert_allclose(credited - plain, expected, atol=1e-4)


LIMITED = limits(outlier=2.0)
BOUND = 8.0  # 2 / (20 p), of one outlier among 80 rewards of 1


def unit_rewards(paid):
    """80 rewards of 1, one of which is replaced."""
    rewards = np.ones((ENVS, 20))
    rewards[1, 2] = paid
    return rewards


def test_rare_reward_is_clipped_before_it_enters_the_normalisation():
    rewards = unit_rewards(-65882.0)
    data = transition(rewards, value=np.zeros_like(rewards, np.float32))
    state, shaped, metrics = shaping(1, None, NORMALIZED, 2.0)(reward.init(ENVS, NORMALIZED, LIMITED), data)
    np.testing.assert_allclose(metrics["limiters/reward_outlier/active"], 1 / 80, rtol=1e-6)
    np.testing.assert_allclose(np.min(shaped.reward) / np.max(shaped.reward), -BOUND, rtol=1e-5)
    assert state.statistics.std < BOUND


@pytest.mark.parametrize(
    ("paid", "expected", "learned"),
    [(300.0, 0.0, BOUND), (300.0, 2.0, BOUND + 16.0), (300.0, 50.0, 300.0), (-300.0, 2.0, -BOUND),
     (-300.0, -2.0, -BOUND - 16.0)],
)  # fmt: skip
def test_rare_prize_counts_for_a_multiple_of_what_the_value_network_expects(paid, expected, learned):
    rewards, plain = unit_rewards(paid), config()
    value = np.zeros_like(rewards, np.float32)
    value[1, 2] = expected
    data = transition(rewards, value=value)
    _, shaped, _ = shaping(1, None, plain, 2.0)(reward.init(ENVS, plain, LIMITED), data)
    np.testing.assert_allclose(shaped.reward[1, 2], learned, rtol=1e-5)
    assert np.sum(shaped.reward != 1.0) == 1


def test_bad_expectation_and_bad_reward_do_not_spread():
    """A value network that is not finite widens no bound, and infinity stays for a guard to find."""
    rewards, plain = unit_rewards(300.0), config()
    rewards[2, 2] = np.inf
    data = transition(rewards, value=np.full_like(rewards, np.nan, np.float32))
    _, shaped, _ = shaping(1, None, plain, 2.0)(reward.init(ENVS, plain, LIMITED), data)
    np.testing.assert_allclose(shaped.reward[1, 2], BOUND, rtol=1e-5)
    assert shaped.reward[2, 2] == np.inf
