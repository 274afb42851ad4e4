"""Outliers: the bound on rare rewards, and gradient norms far beyond their running mean."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.device import sharding
from rlstable.device.mesh import make_mesh
from rlstable.guards import outlier
from rlstable.guards.base import GuardState, Verdict
from rlstable.guards.update import SpikeGuard, UpdateContext

pytestmark = pytest.mark.usefixtures("quick_compile")

NAN, INF = float("nan"), float("inf")
F32 = np.float32


# --- rewards

FACTOR = 2.0
SIZE = 1024  # rewards per batch, over all devices


@functools.cache
def observing(devices: int) -> Any:
    """The bound after each of some batches `[n, rows, T]` and masks, whose rows are split over devices."""

    def bounds(rewards: jax.Array, valid: jax.Array) -> jax.Array:
        def step(magnitudes: outlier.Magnitudes, batch: Any) -> Any:
            magnitudes = outlier.observe(magnitudes, *batch)
            return magnitudes, outlier.bound(magnitudes, FACTOR)[None]

        return jax.lax.scan(step, outlier.no_magnitudes(), (rewards, valid))[1]

    split = jax.sharding.PartitionSpec(None, sharding.AXIS)
    return sharding.over_devices(bounds, make_mesh(devices), (split, split), split)


def bounds_of(batches: list[np.ndarray], valid: np.ndarray | None = None, devices: int = 1) -> np.ndarray:
    """The bounds `[n]`; they must be the same on all devices."""
    rewards = np.stack(batches).astype(F32).reshape(len(batches), 16, -1)
    padding = ((0, 128 - len(batches)), (0, 0), (0, 0))  # one program for all tests
    valid = np.ones(rewards.shape, bool) if valid is None else valid.reshape(rewards.shape)
    found = np.asarray(observing(devices)(np.pad(rewards, padding), np.pad(valid, padding)))[: len(batches)]
    assert (found == found[:, :1]).all()
    return found[:, 0]


def units(unit: float, *outliers: float) -> np.ndarray:
    """A batch of rewards of 0.9 units, the last ones replaced."""
    rewards = np.full(SIZE, 0.9 * unit, F32)
    rewards[SIZE - len(outliers) :] = outliers
    return rewards


@pytest.mark.parametrize("glitch", [9.0, -30.0, 4e4, -65882.0, 1e12])
@pytest.mark.parametrize("unit", [2.0**-10, 1.0, 2.0**20])
def test_bound_of_rare_rewards_depends_on_their_share_and_not_on_their_size(glitch: float, unit: float) -> None:
    """At most 64 units for one glitch in 1,024 rewards, 32 for each of four, and 12.8 for each of eight."""
    found = [bounds_of([units(unit, *[glitch * unit] * count)])[0] / unit for count in (1, 4, 8)]
    assert found == pytest.approx([64.0, 25.6, 12.8], rel=1e-6)


def test_rare_rewards_together_add_at_most_the_factor() -> None:
    """Below a share of 2 %: a root mean square of two usual rewards, and a mean of a tenth of one."""
    for count in (1, 3, 10):
        rewards = units(1.0, *[4e4] * count)
        (bound,) = bounds_of([rewards])
        clipped = np.minimum(rewards, bound)[-count:]
        assert np.sqrt(np.square(clipped).sum() / SIZE) <= FACTOR * (1 + 1e-6)
        assert clipped.sum() / SIZE <= FACTOR / 20.0 * (1 + 1e-6)


def test_single_glitch_has_the_bound_of_one_in_4096() -> None:
    """One glitch in 20 batches of 1,024 rewards counts for no more than one glitch in four batches."""
    assert bounds_of([units(1.0)] * 19 + [units(1.0, 4e4)])[-1] == 128.0


def test_rewards_that_become_frequent_become_usual() -> None:
    """A phase with rewards 1,000 times larger is accepted at once: 1 of 35 numbers in the histogram is new."""
    bounds = bounds_of([units(1.0)] * 60 + [units(1000.0)])
    assert bounds[59] < 400.0
    assert bounds[60] > 1000.0


def test_glitch_that_keeps_coming_is_never_accepted() -> None:
    """One reward in 1,024, over 120 iterations."""
    bounds = bounds_of([units(1.0, -65882.0)] * 120)
    np.testing.assert_allclose(bounds, 64.0, rtol=1e-5)


def test_sparse_rewards_are_not_bounded_by_zeros() -> None:
    """Three rewards of 1 in 1,024 are the usual ones; a larger one among them is an outlier."""
    sparse = np.zeros(SIZE, F32)
    sparse[:3] = 0.9
    glitch = sparse.copy()
    glitch[3] = 4e4
    share = 1.0 / (SIZE * (1.0 + 0.98 + 0.98**2))
    expected = [INF, 128.0, FACTOR / share**0.5]
    np.testing.assert_allclose(bounds_of([np.zeros(SIZE), sparse, glitch]), expected, rtol=1e-5)


def test_invalid_rewards_and_rewards_that_are_not_finite_do_not_count() -> None:
    valid = np.ones(SIZE, bool)
    valid[-3:] = False
    (plain,) = bounds_of([units(1.0, 1e6)[3:].tolist() + [0.9] * 3])  # type: ignore[list-item]
    rewards = units(1.0, 1e6, NAN, INF, 1e9, 1e9, 1e9)
    (masked,) = bounds_of([rewards], valid)
    np.testing.assert_allclose(masked, plain, rtol=2e-3)  # of 1,024 and 1,021 rewards


def test_bound_is_the_same_on_all_devices() -> None:
    batches = [units(1.0), units(1.0, 50.0, -4e4, 1e9), units(0.1)]
    np.testing.assert_array_equal(bounds_of(batches, devices=8), bounds_of(batches))


# --- gradient norms

SPIKES = SpikeGuard(factor=1000.0)


def padded(x: Any) -> np.ndarray:
    """Appends zeros up to one of a few lengths, so that few programs are compiled."""
    length = next(length for length in (64, 512, 4096) if length >= len(x))
    return np.concatenate([x, np.zeros(length - len(x), np.asarray(x).dtype)])


@functools.cache
def stepping(guard: SpikeGuard) -> Any:
    def step(state: GuardState, norm: jax.Array) -> tuple[GuardState, tuple[jax.Array, GuardState]]:
        verdict: Verdict = guard.apply(UpdateContext((), norm, jnp.float32(0), jnp.float32(1)), state)
        return verdict.state, (verdict.ok, verdict.state)

    return jax.jit(lambda norms: jax.lax.scan(step, guard.init(), norms)[1])


def steps(*norms: float, guard: SpikeGuard = SPIKES) -> tuple[list[bool], list[float], int]:
    """Verdicts and levels of norms in sequence, and the final trips."""
    ok, state = jax.tree.map(lambda x: np.asarray(x)[: len(norms)], stepping(guard)(padded(np.array(norms, F32))))
    return ok.tolist(), state.memory.tolist(), int(state.trips[-1, 0])


def test_spike_level_is_the_geometric_mean_of_norms() -> None:
    """Each new logarithm has a weight of 1/20; the first norm sets the level, and a spike raises it by 5 %."""
    norms = np.random.default_rng(0).lognormal(1.0, 1.0, 50)
    seen = list(norms)
    seen[10:10] = [1e7, NAN, INF, 0.0, 5e6]
    ok, level, trips = steps(*seen)
    mean, expected = np.log(norms[0]), []
    for norm in seen:
        if np.isfinite(norm) and norm > 0:
            mean += 0.05 * min(np.log(norm) - mean, 1.0 if norm > 1e6 else INF)
        expected.append(np.exp(mean))
    np.testing.assert_allclose(level, expected, rtol=1e-5)
    assert [i for i, fine in enumerate(ok) if not fine] == [10, 11, 12, 14] and trips == 2


def test_rare_spike_is_never_accepted() -> None:
    """One norm in twenty, a thousand times in a row: the level stays within a factor of three."""
    ok, level, trips = steps(*([1.0] * 19 + [1e7]) * 200)
    assert trips == 200 and not any(ok[19::20])
    assert max(level) < 3.0


def test_norms_that_have_grown_for_good_are_followed() -> None:
    ok, _, trips = steps(1.0, *[1e6] * 200)
    assert trips == 139 and not any(ok[1:140]) and all(ok[140:])


def test_gradients_before_the_first_reward_may_grow() -> None:
    ok, _, trips = steps(*[1e-8] * 30, 99.0)
    assert all(ok) and trips == 0
