"""Running statistics of observations: Brax's, NumPy's, and still right after 10^10 samples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brax.training.acme import running_statistics
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from toys import mesh, tiny_config

from rlstable import sharding
from rlstable.counter import WideCounter
from rlstable.ppo import normalizer
from rlstable.ppo.normalizer import Statistics

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS, T, SIZE = 3, 4, 2
R = sharding.REPLICATED


@functools.cache
def updating(**ppo):
    """The update under these settings, compiled once per kind of mask."""
    config = tiny_config(ppo=ppo).ppo
    return sharding.over_devices(lambda s, x, valid: normalizer.update(s, x, valid, config), mesh(), R, R)


def fresh(observation):
    return normalizer.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], jnp.float32), observation))


def batches(count, seed=0, shape=(ROWS, T, SIZE)):
    rng = np.random.default_rng(seed)
    return [np.float32(rng.normal(size=shape) * (1 + i) + 2 * i) for i in range(count)]


MODES = {
    "welford": {},
    "welford, epsilon": {"normalize_observations_std_eps": 0.1},
    "ema": {"normalize_observations_mode": "ema"},
    "ema, epsilon": {"normalize_observations_mode": "ema", "normalize_observations_std_eps": 0.1},
    "ema, until": {"normalize_observations_mode": "ema", "normalize_until_count": 3 * ROWS * T},
}


@pytest.mark.parametrize("mode", MODES)
def test_equals_brax_over_several_updates(mode):
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
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
                getattr(ours, name),
                getattr(theirs, name),
            )
        assert int(ours.count) == int(theirs.count.lo) == (index + 1) * ROWS * T
        if mode == "ema, until" and index >= 2:
            frozen = ours.mean if frozen is None else frozen
            jax.tree.map(np.testing.assert_array_equal, ours.mean, frozen)
    normalized = normalizer.normalize(data[0], ours)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        normalized,
        running_statistics.normalize(data[0], theirs),
    )


def test_statistics_of_nothing_leave_an_observation_as_it_is():
    x = batches(1)[0]
    np.testing.assert_array_equal(normalizer.normalize(x, fresh(x)), x)


numbers = hnp.arrays(np.float32, (3, ROWS, T, SIZE), elements=st.floats(-100, 100, width=32))
masks = hnp.arrays(bool, (3, ROWS, T), elements=st.booleans())


@pytest.mark.parametrize("mode", ["welford", "ema"])
def test_equals_numpy_on_all_valid_samples_together(mode):
    """However the samples are cut into batches and masked."""
    update = updating(**MODES[mode])

    @settings(deadline=None, max_examples=100)
    @given(numbers, masks)
    def check(data, valid):
        statistics = fresh(data[0])
        for batch, mask in zip(data, valid, strict=True):
            statistics = update(statistics, batch, mask)
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


@pytest.mark.parametrize("mode", ["welford", "ema"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_a_masked_sample_enters_nothing(mode, bad):
    """Bit for bit."""
    data = batches(2)
    valid = np.random.default_rng(1).random((ROWS, T)) > 0.4
    poisoned = np.where(valid[..., None], data[1], np.float32(bad))
    before = updating(**MODES[mode])(fresh(data[0]), data[0], np.ones((ROWS, T), bool))
    expected, found = (updating(**MODES[mode])(before, x, valid) for x in (data[1], poisoned))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    if np.isnan(bad):  # a weight of zero does not keep it out, which is why ours chooses
        theirs = running_statistics.init_state(fresh(data[0]).mean)
        theirs = running_statistics.update(theirs, poisoned, weights=jnp.float32(valid))
        assert np.isnan(theirs.mean).all()


def test_a_batch_without_a_valid_sample_changes_nothing():
    data = batches(2)
    update = updating()
    for before in (fresh(data[0]), update(fresh(data[0]), data[0], np.ones((ROWS, T), bool))):
        after = update(before, data[1] * np.nan, np.zeros((ROWS, T), bool))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), after, before)


# --- after 10^10 samples

MANY = 10**10
UPDATES, BATCH = 2000, 4096


@pytest.mark.parametrize("mode", ["welford", "ema"])
@pytest.mark.parametrize(
    ("mean", "std"), [(5.0, 2.0), (5.0, 200.0), (-500.0, 2.0)], ids=["the same world", "a wider one", "one that moved"]
)
def test_ten_thousand_million_samples_on(mode, mean, std):
    """8 million further samples against float64: the standard deviation neither freezes nor drifts."""
    config = tiny_config(ppo=MODES[mode]).ppo
    old_mean, old_std = 5.0, 2.0
    sample = np.random.default_rng(3).normal(size=(1, BATCH, 1))
    sample = np.float32((sample - sample.mean()) / sample.std() * std + mean)

    def run(statistics):
        step = lambda s, _: (normalizer.update(s, sample, None, config), None)  # noqa: E731
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
    if (mean, std) != (old_mean, old_std):  # and there was something to follow
        assert abs(np.sqrt(expected_variance) / old_std - 1) > 0.3
