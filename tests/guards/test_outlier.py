"""Outlier guards: the usual level, rewards far beyond the level, and gradient norms far beyond the level."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.device import sharding
from rlstable.guards.base import GuardState, Verdict
from rlstable.guards.batch import BatchContext, RewardOutlierGuard
from rlstable.guards.update import SpikeGuard, UpdateContext
from rlstable.ppo.distributions import Normal
from rlstable.ppo.records import Collected

pytestmark = pytest.mark.usefixtures("quick_compile")

NAN, INF = float("nan"), float("inf")
F32 = np.float32
WIDEN = 1.05


def refusals(times: float) -> int:
    """How often a number of `times` the bound is rejected."""
    return math.ceil(math.log(times) / math.log(WIDEN) - 1e-9)


def padded(x: Any) -> np.ndarray:
    """Appends zeros up to one of a few lengths, so that few programs are compiled."""
    length = next(length for length in (64, 512, 2048, 4096) if length >= len(x))
    return np.concatenate([x, np.zeros((length - len(x), *np.shape(x)[1:]), np.asarray(x).dtype)])


# --- rewards

ROWS, T = 2, 4
REWARDS = RewardOutlierGuard(factor=5000.0)


def batch(reward: Any, valid: Any = None) -> BatchContext:
    """Rewards `[rows, T]` and nothing else."""
    shape = jnp.shape(reward)
    zeros, none = jnp.zeros(shape), jnp.zeros((*shape, 0))
    ended = zeros.at[0, 1].set(1.0)
    return BatchContext(
        Collected(none, none, zeros, Normal(none, none), None, reward, ended, ended, valid, None, none[:, 0])
    )


@functools.cache
def paying(guard: RewardOutlierGuard, devices: int = 1) -> Any:
    """Judges batches `[n, rows, T]` one after another; rows are split over devices."""

    def judge(state: GuardState, rewards: jax.Array, valid: jax.Array) -> Any:
        def step(state: GuardState, now: Any) -> Any:
            verdict = guard.apply(batch(*now), state)
            seen = (verdict.ok, verdict.value.reward, verdict.value.valid)
            return verdict.state, (*seen, jax.tree.map(lambda x: x[None], verdict.state))

        return jax.lax.scan(step, state, (rewards, valid))[1]

    split = jax.sharding.PartitionSpec(None, sharding.AXIS)
    return sharding.over_devices(
        judge, sharding.make_mesh(devices), (sharding.REPLICATED, split, split), (split, split, split, split)
    )


def pay(rewards: Any, valid: Any = None, guard: RewardOutlierGuard = REWARDS, devices: int = 1) -> Any:
    """Results of each batch: ok, reward, valid `[n, rows, T]`, and the state `[n, devices, ...]`."""
    rewards = np.asarray(rewards, F32)
    valid = np.ones(rewards.shape, bool) if valid is None else valid
    made = paying(guard, devices)(guard.init(), padded(rewards), padded(valid))
    return jax.tree.map(lambda x: np.asarray(x)[: len(rewards)], made)


def batches(*greatest: float) -> np.ndarray:
    """Batches of zeros with one reward each."""
    rewards = np.zeros((len(greatest), ROWS, T), F32)
    rewards[:, 1, 2] = greatest
    return rewards


def levels(state: GuardState) -> tuple[list[float], list[float]]:
    return state.memory.level[:, 0].tolist(), state.memory.allowance[:, 0].tolist()


def test_reward_of_minus_65882_among_unit_rewards_is_rejected():
    """The sample is left out with a reward of 0; its neighbours and the level do not change."""
    rewards = np.ones((3, ROWS, T), F32)
    rewards[1, 1, 2] = -65882.0
    ok, reward, valid, state = pay(rewards)
    expected = rewards != -65882.0
    np.testing.assert_array_equal(ok, expected)
    np.testing.assert_array_equal(valid, expected)
    np.testing.assert_array_equal(reward, expected.astype(F32))
    assert state.trips[:, 0].tolist() == [[0], [1], [1]]
    assert levels(state) == ([1, 1, 1], pytest.approx([1, WIDEN, WIDEN]))


@pytest.mark.parametrize(("zeros", "prize"), [(1, 100.0), (1000, -1e9)])
def test_sparse_reward_is_no_outlier(zeros, prize):
    """While every reward was 0, no reward is too large."""
    ok, reward, _, state = pay(batches(*[0.0] * zeros, prize, 0.0, prize))
    assert np.asarray(ok).all() and not state.trips.any()
    assert reward[-1, 1, 2] == prize
    assert levels(state)[0][-4:] == [0.0, abs(prize), abs(prize), abs(prize)]


def test_first_batch_with_rewards_is_compared_with_its_own_level():
    """Otherwise a glitch in that batch would set the scale for ever."""
    rewards = np.zeros((4, ROWS, T), F32)
    rewards[1:, :, :-1] = 1.0
    rewards[1:3, 1, 2] = -65882.0
    ok, reward, _, state = pay(rewards)
    np.testing.assert_array_equal(ok, rewards != -65882.0)
    np.testing.assert_array_equal(reward, np.where(rewards == -65882.0, 0.0, rewards))
    assert levels(state) == ([0, 1, 1, 1], pytest.approx([1, WIDEN, WIDEN**2, WIDEN**2]))


@pytest.mark.parametrize(("reward", "refused"), [(5000.0, 0), (5249.0, 1), (5251.0, 2), (1e9, 251)])
def test_reward_that_keeps_coming_is_accepted_in_the_end(reward, refused):
    """Every iteration that trips widens the bound by 5 %."""
    assert refused == refusals(reward / 5000.0)
    ok, learnt, _, state = pay(batches(1.0, *[reward] * (refused + 2)))
    assert np.asarray(ok)[:, 1, 2].tolist() == [True] + [False] * refused + [True] * 2
    assert np.asarray(learnt)[:, 1, 2].tolist() == [1.0] + [0.0] * refused + [reward] * 2
    level, allowance = levels(state)
    assert level == [1.0] * (refused + 1) + [reward] * 2
    np.testing.assert_allclose(allowance[: refused + 1], WIDEN ** np.arange(refused + 1), rtol=1e-4)
    assert allowance[refused:] == allowance[refused : refused + 1] * 3
    assert state.trips[-1].tolist() == [[refused]]


def test_rejected_rewards_never_move_the_level():
    """A sample that was invalid before is not counted again."""
    rewards, valid = batches(1.0, 1e6, INF, -1e7, NAN, 700.0, 2.0), np.ones((7, ROWS, T), bool)
    valid[5, 1, 2] = False
    ok, _, kept, state = pay(rewards, valid)
    assert levels(state)[0] == [1, 1, 1, 1, 1, 1, 2]
    assert state.trips[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 4, 4]
    assert np.asarray(ok)[5].all() and not kept[5, 1, 2]


def test_usual_level_is_the_same_on_all_devices():
    """The greatest reward and the widening of one device hold for all devices."""
    rewards = np.ones((4, 8, T), F32)
    rewards[1, 6, 3] = -40.0  # on the seventh device
    rewards[2, 2, 0] = 200_001.0  # on the third: just beyond 5,000 times 40
    rewards[3, 7, 1] = 200_001.0  # on the eighth, whose bound is 5 % wider by then
    ok, _, _, state = pay(rewards, devices=8)
    expected = np.ones(rewards.shape, bool)
    expected[2, 2, 0] = False
    np.testing.assert_array_equal(ok, expected)
    assert state.memory.level.tolist() == [[x] * 8 for x in (1, 40, 40, 200_001)]
    assert state.memory.allowance.tolist() == [[F32(x)] * 8 for x in (1, 1, WIDEN, WIDEN)]
    assert state.trips[-1, :, 0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


# --- gradient norms

SPIKES = SpikeGuard(factor=1000.0)


@functools.cache
def stepping(guard: SpikeGuard) -> Any:
    def step(state: GuardState, norm: jax.Array) -> tuple[GuardState, tuple[jax.Array, GuardState]]:
        verdict: Verdict = guard.apply(UpdateContext((), norm, jnp.float32(0), jnp.float32(1)), state)
        return verdict.state, (verdict.ok, verdict.state)

    return jax.jit(lambda norms: jax.lax.scan(step, guard.init(), norms)[1])


def steps(*norms: float, guard: SpikeGuard = SPIKES) -> tuple[list[bool], list[float], list[float], int]:
    """Verdicts, levels and allowances of norms in sequence, and the final trips."""
    ok, state = jax.tree.map(lambda x: np.asarray(x)[: len(norms)], stepping(guard)(padded(np.array(norms, F32))))
    return ok.tolist(), state.memory.level.tolist(), state.memory.allowance.tolist(), int(state.trips[-1, 0])


def test_spike_level_is_the_geometric_mean_of_accepted_norms():
    """Each new logarithm has a weight of 1/20; the first norm sets the level."""
    norms = np.random.default_rng(0).lognormal(1.0, 1.0, 50)
    seen = list(norms)
    seen[10:10] = [1e7, NAN, INF, 0.0, 5e6]
    ok, level, _, trips = steps(*seen)
    mean = np.log(norms[0])
    expected = [norms[0]]
    for norm in norms[1:]:
        mean = 0.95 * mean + 0.05 * np.log(norm)
        expected.append(np.exp(mean))
    expected[10:10] = [expected[9]] * 5
    np.testing.assert_allclose(level, expected, rtol=1e-5)
    assert [i for i, fine in enumerate(ok) if not fine] == [10, 11, 12, 14] and trips == 2
