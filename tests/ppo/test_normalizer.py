"""Running statistics of observations: equal to Brax and to NumPy, and exact after 10^10 samples."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brax.training.acme import running_statistics
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from toys import assert_close, mesh, tiny_config

from rlstable.device import sharding
from rlstable.device.counter import WideCounter
from rlstable.ppo import normalizer
from rlstable.ppo.normalizer import Statistics

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS, T, SIZE = 3, 4, 2
R = sharding.REPLICATED


@functools.cache
def updating(outlier=None, shift=None, **ppo):
    """The statistics after an update under these settings."""
    whole = whole_updating(outlier, shift, **ppo)
    return lambda s, x, valid: whole(s, x, valid).statistics


@functools.cache
def whole_updating(outlier, shift, **ppo):
    config = tiny_config(ppo=ppo).ppo
    update = lambda s, x, valid: normalizer.update(s, x, valid, config, outlier, shift=shift)  # noqa: E731
    return sharding.over_devices(update, mesh(), R, R)


def fresh(observation):
    return normalizer.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], jnp.float32), observation))


def batches(count):
    rng = np.random.default_rng(0)
    return [np.float32(rng.normal(size=(ROWS, T, SIZE)) * (1 + i) + 2 * i) for i in range(count)]


MODES = {
    "welford": {},
    "welford, epsilon": {"normalize_observations_std_eps": 0.1},
    "ema": {"normalize_observations_mode": "ema"},
    "ema, epsilon": {"normalize_observations_mode": "ema", "normalize_observations_std_eps": 0.1},
    "ema, until": {"normalize_observations_mode": "ema", "normalize_until_count": 3 * ROWS * T},
}


@pytest.mark.parametrize("mode", MODES)
def test_normalizer_equals_brax_over_several_updates(mode):
    config = tiny_config(ppo=MODES[mode]).ppo
    data = [{"state": x, "privileged_state": x[..., :1] ** 2} for x in batches(6)]
    ours = fresh(data[0])
    theirs = running_statistics.init_state(
        ours.mean, std_eps=config.normalize_observations_std_eps, mode=config.normalize_observations_mode
    )
    step = jax.jit(functools.partial(running_statistics.update, until_count=config.normalize_until_count))
    frozen = None
    for index, batch in enumerate(data):
        ours, theirs = updating(**MODES[mode])(ours, batch, None), step(theirs, batch)
        for name in ("mean", "std"):
            assert_close(getattr(ours, name), getattr(theirs, name))
        assert int(ours.count) == int(theirs.count.lo) == (index + 1) * ROWS * T
        if mode == "ema, until" and index >= 2:
            frozen = ours.mean if frozen is None else frozen
            jax.tree.map(np.testing.assert_array_equal, ours.mean, frozen)
    assert_close(normalizer.normalize(data[0], ours), running_statistics.normalize(data[0], theirs))


numbers = hnp.arrays(np.float32, (3, ROWS, T, SIZE), elements=st.floats(-100, 100, width=32))
masks = hnp.arrays(bool, (3, ROWS, T), elements=st.booleans())


@pytest.mark.parametrize("mode", ["welford", "ema"])
def test_normalizer_equals_numpy_on_all_valid_samples(mode):
    """For any batches and masks; masked samples are NaN."""
    update = updating(**MODES[mode])

    @settings(max_examples=100)
    @given(numbers, masks)
    def check(data, valid):
        statistics = fresh(data[0])
        for batch, mask in zip(data, valid, strict=True):
            statistics = update(statistics, np.where(mask[..., None], batch, np.nan), mask)
        kept = np.float64(data[valid])
        assert int(statistics.count) == len(kept)
        if not len(kept):
            np.testing.assert_array_equal(statistics.std, 1.0)
            return
        scale = 1 + np.max(np.abs(kept))
        np.testing.assert_allclose(statistics.mean, kept.mean(0), rtol=1e-5, atol=1e-6 * scale)
        np.testing.assert_allclose(statistics.variance, kept.var(0), rtol=1e-5, atol=1e-5 * scale**2)
        expected = np.clip(np.sqrt(np.float64(statistics.variance)), 1e-6, 1e6)
        np.testing.assert_allclose(statistics.std, expected, rtol=1e-6)

    check()


# --- outliers

OUTLIER = 100.0


def unit(count):
    """Batches of 8,192 unit normals per element."""
    return np.float32(np.random.default_rng(0).normal(size=(count, 64, 128, SIZE)))


# --- after 10^10 samples

MANY = 10**10
UPDATES, BATCH = 2000, 4096


@pytest.mark.parametrize(
    ("mode", "mean", "std"), [("welford", 5.0, 200.0), ("welford", -500.0, 2.0), ("ema", 5.0, 2.0)]
)
def test_statistics_stay_exact_after_ten_thousand_million_samples(mode, mean, std):
    """8 million further samples against float64: the deviation neither freezes nor drifts."""
    config = tiny_config(ppo=MODES[mode]).ppo
    old_mean, old_std = 5.0, 2.0
    sample = np.random.default_rng(3).normal(size=(1, BATCH, 1))
    sample = np.float32((sample - sample.mean()) / sample.std() * std + mean)

    def run(statistics):
        step = lambda s, _: (normalizer.update(s, sample, None, config).statistics, None)  # noqa: E731
        return jax.lax.scan(step, statistics, None, length=UPDATES)[0]

    start = Statistics(WideCounter.of(MANY), jnp.float32([old_mean]), jnp.float32([old_std**2]), jnp.float32([old_std]))
    found = sharding.over_devices(run, mesh(), R, R)(start)

    added = UPDATES * BATCH
    share = added / (MANY + added)
    exact = np.float64(sample)
    expected_mean = old_mean + share * (exact.mean() - old_mean)
    expected_variance = (
        (1 - share) * old_std**2 + share * exact.var() + share * (1 - share) * (exact.mean() - old_mean) ** 2
    )
    assert int(found.count) == MANY + added
    np.testing.assert_allclose(found.mean, expected_mean, rtol=1e-4)
    np.testing.assert_allclose(found.std, np.sqrt(expected_variance), rtol=1e-4)
    if (mean, std) != (old_mean, old_std):  # the statistics had to change
        assert abs(np.sqrt(expected_variance) / old_std - 1) > 0.3


# --- elements that are constant, and elements that change at once


@pytest.mark.parametrize(("constant", "divisor"), [(0.0, 1.0), (0.1, 1.0), (-3.0, 3.0), (1e5, 1e5)])
def test_constant_is_divided_by_its_size_but_at_least_by_1(constant, divisor):
    """Brax divides by 1e-6, so that a later change of 0.3 becomes 3e5."""
    batch = unit(1)[0]
    batch[..., 0] = constant
    ours, brax = (updating(OUTLIER, shift)(fresh(batch), batch, None) for shift in (4.0, None))
    np.testing.assert_allclose(ours.std[0], divisor, rtol=1e-4)
    assert brax.std[0] == pytest.approx(1e-6) or abs(constant) > 1.0  # a great constant varies by rounding
    np.testing.assert_array_equal(ours.std[1], brax.std[1])
    assert normalizer.constant(ours).tolist() == [True, False]


@pytest.mark.parametrize("mode", ["welford", "ema"])
@pytest.mark.parametrize("varying", [1.0, 0.1])
def test_constant_that_begins_to_vary_takes_the_statistics_of_the_batch_at_once(mode, varying):
    """After a hundred batches the ordinary update would take in a hundredth of the new variance.

    `varying` is the share of the environments whose element varies.
    """
    update, (old, new) = updating(OUTLIER, 4.0, **MODES[mode]), unit(2)
    old[..., 0] = 0.0
    new[..., 0] *= 0.3 * (np.arange(64) < varying * 64)[:, None]
    before = fresh(old)
    for _ in range(100):
        before = update(before, old, None)
    after = update(before, new, None)
    np.testing.assert_allclose(after.mean[0], new[..., 0].mean(), atol=1e-4)
    np.testing.assert_allclose(after.std[0], new[..., 0].std(), rtol=1e-3)
    assert after.std[1] == pytest.approx(1.0, rel=0.01)  # the other element is updated as before
    assert normalizer.constant(after).tolist() == [False, False]
    whole = whole_updating(OUTLIER, 4.0, **MODES[mode])
    assert [float(whole(before, batch, None).shifted) for batch in (old, new)] == [0.0, 0.5]


def test_single_huge_number_is_no_change_of_its_element():
    """It enters at the bound of the outlier limiter, which is a small part of the batch."""
    first, second = unit(2)
    second[3, 4, 0] = 1e6
    plain, ours = (updating(OUTLIER, shift) for shift in (None, 4.0))
    before = ours(fresh(first), first, None)
    jax.tree.map(np.testing.assert_array_equal, ours(before, second, None), plain(before, second, None))


def test_frozen_statistics_do_not_follow_a_change():
    update = updating(None, 4.0, **MODES["ema, until"])
    first, *later = batches(4)
    statistics = fresh(first)
    for _ in range(4):
        statistics = update(statistics, first, None)
    moved = update(statistics, later[-1] + 100.0, None)
    np.testing.assert_array_equal(moved.mean, statistics.mean)


def test_element_that_grows_steadily_stays_ahead_of_its_mean_and_one_that_is_learned_does_not():
    update, rng = whole_updating(10.0, 4.0), np.random.default_rng(0)
    statistics, away = None, []
    for batch in range(60):
        x = rng.normal(size=(ROWS, T, 3)).astype(np.float32)
        x[..., 1] = batch * T + np.arange(T)  # a clock, which no reset sets back
        x[..., 2] = 10.0 * (1.0 - 0.9**batch) + 2.0 * x[..., 2]  # a speed that the policy learns
        statistics = fresh(jnp.asarray(x)) if statistics is None else statistics
        found = update(statistics, jnp.asarray(x), None)
        statistics, away = found.statistics, [*away, np.asarray(found.away)]
    assert (away[0] == 0.0).all()
    _, clock, _ = np.min(away[10:], axis=0)
    assert abs(clock - math.sqrt(3.0)) < 0.2
    assert max(np.max(away[10:], axis=0)[::2]) < 1.5
