"""The return watch: false alarms, detection, paired comparison and its state, without JAX."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlstable.supervise.return_watch import FALSE_ALARM, SUSPICION, ReturnWatch, Track, WatchState

TOLERANCE = 0.2
LOOKS = 1000


def curve(looks: int = LOOKS, time: float = 100.0) -> np.ndarray:
    return 1.0 - np.exp(-np.arange(looks) / time)


def drift(rng: np.random.Generator) -> np.ndarray:
    """Noise of deviation 1 of which each look keeps half."""
    found, now = np.zeros(LOOKS), 0.0
    for n, step in enumerate(rng.normal(size=LOOKS)):
        found[n] = now = 0.5 * now + np.sqrt(0.75) * step
    return found


def rise(time: float, looks: int, rng: np.random.Generator) -> np.ndarray:
    """A return of 100 after a rise within some looks; an untrained policy returns less evenly than a trained one."""
    learned = curve(looks, time)
    return 100.0 * learned + (3.0 + 30.0 * (1.0 - learned)) * rng.normal(size=looks)


HEALTHY: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "noise around zero": lambda rng: rng.normal(size=LOOKS),
    "learning curve": lambda rng: 100.0 * curve() + 5.0 * rng.normal(size=LOOKS),
    "noisy learning curve": lambda rng: 100.0 * curve() + 20.0 * rng.normal(size=LOOKS),
    "noise that grows with the return": lambda rng: 1000.0 * curve() * (1.0 + 0.15 * rng.normal(size=LOOKS)),
    "Student's t of 3 degrees of freedom": lambda rng: rng.standard_t(3, size=LOOKS),
    "lognormal": lambda rng: rng.lognormal(0.0, 1.5, size=(LOOKS, 16)).mean(1),
    "lognormal losses": lambda rng: -rng.lognormal(0.0, 1.0, size=(LOOKS, 16)).mean(1),
    "sparse 0/1 return that is learnt": lambda rng: rng.binomial(16, 0.9 * curve()) / 16.0,
    "sparse 0/1 return that is rare": lambda rng: rng.binomial(16, 0.02, size=LOOKS) / 16.0,
    "negative returns": lambda rng: -200.0 - 1000.0 * (1.0 - curve()) + 30.0 * rng.normal(size=LOOKS),
    "drift": lambda rng: 100.0 * curve() + 5.0 * drift(rng),
    "rare return that is learnt": lambda rng: rng.binomial(16, 0.3 * curve()) / 16.0,
    "quick rise from noisy returns": lambda rng: rise(4, LOOKS, rng),
    "constant": lambda rng: np.full(LOOKS, rng.normal()),
    "zero": lambda rng: np.zeros(LOOKS),
}


def first_suspicion(looks: np.ndarray, track: Track | None = None) -> int | None:
    """Number of the look, from 1, that makes the policy suspected; None if none does."""
    own = Track() if track is None else track
    for n, look in enumerate(looks.tolist(), 1):
        own.look(look, TOLERANCE)
        if own.evidence >= SUSPICION:
            return n
    return None


def suspected(name: str, seeds: range) -> int:
    return sum(first_suspicion(HEALTHY[name](np.random.default_rng(seed))) is not None for seed in seeds)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_returns_are_not_suspected_in_20_runs_of_1000_looks(name: str) -> None:
    assert suspected(name, range(20)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_false_alarms_in_2000_healthy_runs_are_a_hundredth_of_what_is_stated(name: str) -> None:
    """`FALSE_ALARM` bounds them by 200."""
    assert suspected(name, range(2000)) <= 2000 * LOOKS * FALSE_ALARM / 100


def test_one_look_after_four_adds_at_most_a_quarter_of_a_suspicion() -> None:
    track = Track()
    assert first_suspicion(np.linspace(0.0, 100.0, 40), track) is None
    evidence = []
    for _ in range(4):
        track.look(-1e9, TOLERANCE)
        evidence.append(track.evidence / SUSPICION)
    np.testing.assert_allclose(evidence, [0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("fast", [5.0, 30.0])
@pytest.mark.parametrize(("noise", "within"), [(0.0, 4), (0.02, 4), (0.05, 6)])
def test_a_fall_by_half_is_suspected_within_as_many_looks_as_the_docs_state(
    fast: float, noise: float, within: int
) -> None:
    """docs/supervisor.md states 6 looks for noise of at most 5 % of the return."""
    for seed in range(50):
        at = int(4 * fast)
        looks = 100.0 * curve(at + 60, fast)
        looks[at:] *= 0.5
        looks += 100.0 * noise * np.random.default_rng(seed).normal(size=looks.size)
        found = first_suspicion(looks)
        assert found is not None and at < found <= at + within, seed


@pytest.mark.parametrize("time", [3.0, 8.0])
@pytest.mark.parametrize(("plateau", "within"), [(20, 24), (40, 4)])
def test_a_fall_after_a_quick_rise_from_noisy_returns_is_suspected(time: float, plateau: int, within: int) -> None:
    for seed in range(50):
        at = int(4 * time) + plateau
        looks = rise(time, at + within, np.random.default_rng(seed))
        looks[at:] -= 70.0
        found = first_suspicion(looks)
        assert found is not None and at < found, seed


def test_a_level_is_best_only_if_its_latest_look_is_no_fall() -> None:
    """The middle three of the last five still rise where the newest look has fallen to nothing."""
    track = Track()
    assert [track.look(float(x), TOLERANCE) for x in (0, 0, 10, 20, 30)] == [False] * 4 + [True]
    assert track.look(40.0, TOLERANCE)
    before = track.best
    assert not track.look(0.0, TOLERANCE)
    assert before is not None and track.best is not None and track.best >= before


def watch(start: float | None = 0.0, **fields: float) -> ReturnWatch:
    state = WatchState(training=Track(start=start))
    return ReturnWatch(**{"tolerance": TOLERANCE, "episodes": 16, **fields}, state=state)  # type: ignore[arg-type]


NOISE = np.random.default_rng(0).normal(size=64)


@pytest.mark.parametrize(
    ("best", "now", "worse"),
    [
        (100.0 + NOISE, 50.0 + NOISE[::-1], True),
        (100.0 + NOISE, 90.0 + NOISE[::-1], False),  # credible, but tolerated
        (100.0 + 200.0 * NOISE, 70.0 + 200.0 * NOISE[::-1], None),  # not credible
        (np.full(8, 100.0), np.full(8, 50.0), True),
        (np.full(3, 100.0), np.full(3, 50.0), None),
        (np.r_[np.full(3, 100.0), np.full(60, np.nan)], np.full(63, 50.0), None),
        # A policy that finishes hardly any episode has collapsed, whatever those few return.
        (np.full(63, 100.0), np.r_[np.full(3, 100.0), np.full(60, np.nan)], True),
        (np.full(63, 100.0), np.full(63, np.nan), True),
        # Four pairs need 10.2 standard errors, not the 3.1 of many: here are 6.
        (np.full(4, 100.0), 100.0 - np.array([30.0, 50.0, 50.0, 70.0]), None),
    ],
)
def test_a_policy_is_worse_only_if_the_fall_is_credible_and_not_tolerated(
    best: np.ndarray, now: np.ndarray, worse: bool | None
) -> None:
    assert watch().is_worse(best, now) is worse


def test_equally_good_policies_are_called_worse_once_in_1000_comparisons_at_most() -> None:
    rng = np.random.default_rng(0)
    for pairs in (4, 16, 128):
        best, now = rng.normal(size=(2, 5000, pairs))
        found = sum(watch(start=None).is_worse(b, n) is True for b, n in zip(best, now, strict=True))
        assert found <= 12, pairs  # 5 are expected


def test_little_is_tolerated_at_the_end_of_a_run() -> None:
    own = watch(tolerance=0.5)
    best, now = 100.0 + NOISE, 70.0 + NOISE[::-1]
    assert own.is_worse(best, now) is False
    assert own.is_worse(best, now, at_the_end=True) is True
    assert own.is_worse(best, 85.0 + NOISE[::-1], at_the_end=True) is False


@pytest.mark.parametrize(("start", "best"), [(-10.0, 0.0), (1e6, 1e6 + 10.0)])
def test_falls_are_measured_against_the_range_of_returns(start: float, best: float) -> None:
    own, noise = watch(start=start), 0.001 * (best - start) * np.arange(8.0)
    assert own.is_worse(best + noise, best - 0.3 * (best - start) + noise[::-1]) is True
    assert own.is_worse(best + noise, best - 0.1 * (best - start) + noise[::-1]) is False
    for value in (start, best, best):
        own.evaluate(value)
    assert own.ends_below(best - 0.3 * (best - start)) and not own.ends_below(best - 0.1 * (best - start))


def test_range_of_training_does_not_hide_a_fall_of_evaluations_at_the_end() -> None:
    """A curriculum pays -1,000 in training; evaluations rose from -1 to 20."""
    own = watch(start=-1000.0)
    for value in (-1.0, 20.0, 5.0):
        own.evaluate(value)
    assert own.is_worse(np.full(8, 20.0), np.full(8, -1.0)) is False
    assert own.is_worse(np.full(8, 20.0), np.full(8, -1.0), at_the_end=True) is True


def test_training_holds_while_its_level_is_near_the_best() -> None:
    track = Track()
    assert not track.holds  # nothing is known
    for value in np.linspace(-100.0, 0.0, 20):
        track.look(float(value), TOLERANCE)
    assert track.holds
    for _ in range(5):
        track.look(-50.0, TOLERANCE)
    assert not track.holds


def test_greatest_evaluation_is_reported_and_an_aborted_one_is_none() -> None:
    own = watch()
    values = (5.0, 4.0, None, 6.0, 6.0, float("nan"), 7.0)
    assert [own.evaluate(value) for value in values] == [True, False, False, True, False, False, True]
    # What is refuted is no fall of the policy: what counts from now on is what was measured then.
    own.refute(np.full(8, 5.0), np.full(8, 5.0))
    assert [own.evaluate(value) for value in (3.0, 5.5)] == [False, True]


@pytest.mark.parametrize("evaluated", [False, True])
def test_training_does_not_replace_an_evaluated_best_state(evaluated: bool) -> None:
    own = watch(episodes=1)
    if evaluated:
        own.evaluate(100.0)
    looks = [own.train(value, 1) for value in (90.0, 80.0, 40.0, 30.0, 20.0, 10.0, 95.0, 96.0, 97.0, 98.0, 99.0)]
    assert looks[4] is not evaluated
    assert looks[-1] is not evaluated  # however good training is


def test_two_low_evaluations_in_a_row_after_an_early_peak_are_suspected() -> None:
    """A dozen looks for the noise come too late for a policy that was best at its first evaluation."""
    own = watch(tolerance=0.5, start=60.0)  # of training, where an untrained policy may return more
    found = [(own.evaluate(value), own.suspects) for value in (74.0, 30.0, 70.0, 30.0, 7.0)]
    assert found == [(True, False), *[(False, False)] * 3, (False, True)]
    own.reset_test()
    found = [(own.evaluate(value), own.suspects) for value in (6.0, 90.0, 7.0, 6.0)]
    assert found == [(False, False), (True, False), (False, False), (False, True)]
    own.confirm()
    assert not own.suspects


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_evaluations_are_rarely_compared_and_never_a_collapse(name: str) -> None:
    """Both policies of a comparison are equally good; two low evaluations count only while the noise is unknown."""
    compared = 0
    for seed in range(5):
        own, rng = watch(tolerance=0.5, start=None), np.random.default_rng(seed)
        for value in HEALTHY[name](rng).tolist():
            own.evaluate(value)
            if own.suspects:
                compared += 1
                best, now = value + 0.1 * rng.normal(size=(2, 16))
                assert own.is_worse(best, now) is not True
                own.refute(best, now)
    assert compared <= 5 * 5


@pytest.mark.parametrize("start", [6.0, 99.0])
def test_evaluations_that_scatter_by_a_hundredth_after_an_early_peak_are_not_suspected(start: float) -> None:
    own = watch(tolerance=0.5, start=start)
    for value in 98.0 + np.random.default_rng(0).normal(scale=0.5, size=1000):
        own.evaluate(float(value))
        assert not own.suspects


def test_early_peak_before_any_level_is_compared_at_the_end() -> None:
    """A policy that was best at its first evaluation, and was lost before the level of five looks was known."""
    own = watch()
    for value in (61.0, 25.0, 9.0, 11.0, 23.0, 28.0, 38.0):
        own.evaluate(value)
    assert own.ends_below(37.0)


def test_a_last_evaluation_below_the_tolerated_level_is_compared_at_once() -> None:
    own = watch()
    assert not own.ends_below(-1.0) and not own.ends_below(None)
    for value in (0.0, 50.0):
        own.evaluate(value)
    assert not own.ends_below(-1.0)  # two evaluations say little
    for value in (100.0, 70.0):
        own.evaluate(value)
    assert not own.ends_below(81.0) and own.ends_below(79.0)
    assert own.ends_below(None)  # every episode was aborted: that is no return at all


def test_episodes_are_collected_until_there_are_enough_for_a_look() -> None:
    own = watch(start=None)
    assert own.train(1.0, 10) is None and own.train(float("nan"), 0) is None and own.train(2.0, 5) is None
    assert own.train(5.0, 1) is False
    assert own.state.training.recent == [pytest.approx((10.0 + 10.0 + 5.0) / 16.0)]
    assert (own.state.total, own.state.episodes) == (0.0, 0)
    own.evaluate(None), own.evaluate(float("nan"))
    assert own.state.evaluation.recent == []


def fallen(own: ReturnWatch) -> None:
    for value in [*np.linspace(0.0, 100.0, 20), *[100.0] * 10, *[40.0] * 4]:
        own.train(float(value), 16)
    assert own.suspects


def test_a_refuted_fall_lowers_the_level_and_is_not_suspected_again() -> None:
    own = watch(start=None)
    fallen(own)
    own.refute(40.0 + NOISE, 40.0 + NOISE[::-1])
    assert (own.state.collapses, own.suspects) == (0, False)
    assert own.state.training.best == pytest.approx(40.0)
    for _ in range(1000):
        own.train(40.0, 16)
    assert not own.suspects


def test_a_refuted_fall_that_is_credible_keeps_the_level() -> None:
    """Else falls that are tolerated one by one would add up to any fall."""
    own = watch(start=None)
    fallen(own)
    best = own.state.training.best
    own.refute(100.0 + NOISE, 90.0 + NOISE[::-1])
    assert (own.suspects, own.state.training.best) == (False, best)


def test_a_confirmed_collapse_forgets_the_looks_and_keeps_the_level() -> None:
    own = watch(start=None)
    fallen(own)
    best, noise = own.state.training.best, own.state.training.noise(own.state.training.earlier)
    own.train(40.0, 3)
    own.confirm()
    track = own.state.training
    assert (own.state.collapses, own.suspects, own.state.episodes, track.recent) == (1, False, 0, [])
    assert (track.best, track.noise(track.earlier)) == (best, noise)
    for _ in range(100):
        own.train(100.0, 16)
    assert not own.suspects
    for _ in range(4):
        own.train(40.0, 16)
    assert own.suspects
