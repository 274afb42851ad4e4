"""The guards of the state site, each at its boundary, and their patience."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from rlstable.config.guards import GuardsConfig
from rlstable.config.ppo import PPOConfig
from rlstable.guards.base import GuardState
from rlstable.guards.state import IterationStats, StateContext, ValueLossGuard
from rlstable.ppo.guards import guards_of

pytestmark = pytest.mark.usefixtures("quick_compile")

NAN, INF = float("nan"), float("inf")
GUARDS = guards_of(GuardsConfig(), PPOConfig(), {})["state"]
NUMBERS = dict(
    iterations=99, valid_share=1.0, greatest_reward=1.0, value_loss=0.5, distance=0.01, std=0.5, entropy=-0.3
)


def report(updated: bool = True, **numbers: float) -> IterationStats:
    reports: dict[str, Any] = {name: np.float32(x) for name, x in (NUMBERS | numbers).items()}
    return IterationStats(updated=np.bool_(updated), **reports)


@functools.cache
def judging(guard: Any) -> Any:
    def step(state: GuardState, reports: IterationStats) -> Any:
        verdict = guard.apply(StateContext((), reports), state)
        return verdict.state, (verdict.ok, verdict.state)

    return jax.jit(lambda reports: jax.lax.scan(step, guard.init(), reports)[1])


def judge(guard: Any, *reports: IterationStats) -> tuple[list[bool], dict[str, int], GuardState]:
    """Judges iterations in sequence: verdicts, final trips, and states."""
    longer = (*reports, *[reports[-1]] * (64 - len(reports)))  # one program for all lengths
    judged = judging(guard)(jax.tree.map(lambda *x: np.stack(x), *longer))
    ok, state = jax.tree.map(lambda x: np.asarray(x)[: len(reports)], judged)
    trips = {cause: n for cause, n in zip(guard.causes, state.trips[-1].tolist(), strict=True) if n}
    return ok.tolist(), trips, state


@pytest.mark.parametrize(
    ("min_entropy", "std", "entropy", "cause"),
    [
        (-20.0, 5.8, -45.0, "saturated"),
        (-20.0, 0.5, -45.0, "saturated"),  # a distant mean
        (-20.0, 1e-4, -45.0, "std_collapsed"),
        (-3.0, 0.0119, -3.1, "std_collapsed"),  # a Gaussian of 0.01204 has -3
        (-3.0, 0.0122, -3.1, "saturated"),
    ],
)
def test_small_entropy_is_blamed_on_the_noise_only_if_the_noise_is_too_small(
    min_entropy: float, std: float, entropy: float, cause: str
) -> None:
    guard = dataclasses.replace(GUARDS["policy"], min_entropy=min_entropy)
    assert judge(guard, report(std=std, entropy=entropy))[:2] == ([False], {cause: 1})


BAD = {"value_loss": report(value_loss=2e10), "policy": report(distance=1e3)}


def test_value_loss_limit_equals_the_formula():
    """A hundred times the square of the greatest return, times the loss coefficient."""
    guard = GUARDS["value_loss"]
    assert (guard.factor, guard.discount, guard.coefficient) == (100.0, 0.97, 0.25)
    for reward in (0.0, 1.0, 1000.0):
        limit = 100 * 0.25 * (1 + reward / 0.03) ** 2
        reports = [report(greatest_reward=reward, value_loss=share * limit) for share in (0.999, 1.001)]
        assert judge(guard, *reports)[0] == [True, False]


def test_value_network_that_overshoots_in_its_first_iterations_does_not_trip():
    reports = [report(iterations=n, value_loss=loss) for n, loss in ((0, 2e10), (19, 2e10), (19, INF), (20, 2e10))]
    assert judge(GUARDS["value_loss"], *reports)[0] == [True, True, False, False]


def test_value_loss_that_rises_with_a_sparse_reward_does_not_trip():
    """After that a loss of 2e10 trips."""
    nothing, paid = report(greatest_reward=0.0, value_loss=1e-12), report(greatest_reward=100.0, value_loss=1e4)
    after = report(greatest_reward=0.0, value_loss=1e4)
    exploded = report(greatest_reward=0.0, value_loss=2e10)
    ok, trips, state = judge(GUARDS["value_loss"], nothing, nothing, paid, after, exploded, after)
    assert ok == [True] * 4 + [False, True] and trips == {"exploded": 1}
    assert state.memory.own.tolist() == [0, 0, 100, 100, 100, 100]


@pytest.mark.parametrize(("discount", "greatest"), [(0.97, 1e15), (1.0, 3e38)])
def test_absurd_reward_does_not_disable_the_value_loss_guard(greatest, discount):
    """The square of such a reward overflows, so the limit is that of a reward of 1e9."""
    guard = ValueLossGuard(20, 100.0, discount, 0.25)
    losses = (1e4, 1e30, INF, NAN)
    ok, *_ = judge(guard, report(greatest_reward=greatest), *(report(value_loss=loss) for loss in losses))
    assert ok == [True, True, False, False, False]


@pytest.mark.parametrize("name", ["value_loss", "policy"])
def test_iteration_without_accepted_updates_does_not_trip_state_guards(name):
    """Means over no update are NaN. Such an iteration also resets the patience."""
    bad = NAN
    nothing = report(updated=False, value_loss=bad, distance=bad, std=bad, entropy=bad, greatest_reward=bad)
    ok, trips, state = judge(GUARDS[name], BAD[name], nothing, report())
    assert ok == [False, True, True] and sum(trips.values()) == 1
    assert state.memory.length.tolist() == [1, 0, 0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.memory))
