"""The guards of the state site, each at its boundary, and the patience that they share."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.config.guards import GuardsConfig
from rlstable.config.ppo import PPOConfig
from rlstable.device import sharding
from rlstable.guards.base import GuardState
from rlstable.guards.state import PolicyGuard, Report, StateContext, StormGuard, ValueLossGuard, state_guards

pytestmark = pytest.mark.usefixtures("quick_compile")

NAN, INF = float("nan"), float("inf")
GUARDS = state_guards(GuardsConfig(), PPOConfig())
NUMBERS = dict(valid_share=1.0, greatest_reward=1.0, value_loss=0.5, distance=0.01, std=0.5, entropy=-0.3)


def report(updated: bool = True, **numbers: float) -> Report:
    told: dict[str, Any] = {name: np.float32(x) for name, x in (NUMBERS | numbers).items()}
    return Report(updated=np.bool_(updated), **told)


@functools.cache
def judging(guard: Any) -> Any:
    def step(state: GuardState, told: Report) -> Any:
        verdict = guard.apply(StateContext((), told), state)
        return verdict.state, (verdict.ok, verdict.state, guard.exhausted(verdict.state))

    return jax.jit(lambda told: jax.lax.scan(step, guard.init(), told)[1])


def judge(guard: Any, *told: Report) -> tuple[list[bool], dict[str, int], GuardState, list[bool]]:
    """Iterations one after another: verdicts, trips in the end, states, and whether patience had ended."""
    longer = (*told, *[told[-1]] * (64 - len(told)))  # one program for all lengths
    judged = judging(guard)(jax.tree.map(lambda *x: np.stack(x), *longer))
    ok, state, exhausted = jax.tree.map(lambda x: np.asarray(x)[: len(told)], judged)
    trips = {cause: n for cause, n in zip(guard.causes, state.trips[-1].tolist(), strict=True) if n}
    return ok.tolist(), trips, state, exhausted.tolist()


# --- patience

BAD = {
    "storm": report(valid_share=0.0),
    "value_loss": report(value_loss=2e10),
    "policy": report(distance=1e3),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("patience", [1, 20])
def test_patience_ends_with_the_last_of_its_trips_in_a_row(name, patience):
    """One fewer is forgiven; it goes on being exhausted until something is well."""
    make = {"storm": StormGuard, "value_loss": ValueLossGuard, "policy": PolicyGuard}[name]
    fields = {field: getattr(GUARDS[name], field) for field in make.__dataclass_fields__} | {"patience": patience}
    bad = [BAD[name]]
    told = bad * (patience - 1) + [report()] + bad * (patience + 1) + [report()]
    ok, trips, state, exhausted = judge(make(**fields), *told)
    assert exhausted == [False] * (2 * patience - 1) + [True, True, False]
    assert list(trips.values()) == [2 * patience] == [len(ok) - sum(ok)]
    assert state.memory.length[-1] == 0


def test_every_guard_has_its_own_patience():
    """As configured: three for the state, whose trips cannot be waited out, and twenty for what may pass."""
    assert {name: guard.patience for name, guard in GUARDS.items()} == {
        "finite_state": 3, "storm": 20, "value_loss": 20, "policy": 5,
    }  # fmt: skip


def test_a_verdict_repairs_nothing():
    """The value of a bad state comes back as it is; it is the supervisor's to go back to an older one."""
    value = ({"w": jnp.array([1.0, NAN])}, (), ())
    verdict = GUARDS["finite_state"].apply(StateContext(value, report()), GUARDS["finite_state"].init())
    assert verdict.value is value and not verdict.ok


# --- storm


@pytest.mark.parametrize(("share", "fine"), [(1.0, True), (0.5, True), (0.49999997, False), (0.0, False), (NAN, False)])
def test_a_storm_begins_beyond_its_share(share, fine):
    ok, trips, *_ = judge(GUARDS["storm"], report(valid_share=share))
    assert ok == [fine] and trips == ({} if fine else {"environments": 1})


@pytest.mark.parametrize(("max_share", "share", "fine"), [
    (1.0, 0.0, True), (1.0, NAN, False), (0.0, 1.0, True), (0.0, 0.99999994, False),
])  # fmt: skip
def test_the_widest_and_the_narrowest_share(max_share, share, fine):
    """With 1 no storm ends a run, with 0 every sample that was left out is one."""
    assert judge(StormGuard(3, max_share), report(valid_share=share))[0] == [fine]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("tenths", [1, 3, 5, 7, 9])
def test_exactly_the_share_is_no_storm(tenths, devices):
    """A share as the iteration computes it, with all its rounding; one sample more is a storm."""
    samples = 20 * devices
    measure = sharding.over_devices(
        lambda valid: sharding.mean(jnp.mean(valid.astype(jnp.float32))),
        sharding.make_mesh(devices), sharding.SPLIT, sharding.REPLICATED,
    )  # fmt: skip
    shares = [float(measure(np.arange(samples) >= left_out)) for left_out in (2 * tenths * devices + n for n in (0, 1))]
    assert judge(StormGuard(3, tenths / 10), *(report(valid_share=x) for x in shares))[0] == [True, False]


# --- value loss


def test_the_value_loss_s_limit_by_hand():
    """A hundred times the square of the greatest return, times what the loss is multiplied by."""
    guard = GUARDS["value_loss"]
    assert (guard.factor, guard.discount, guard.coefficient) == (100.0, 0.97, 0.25)
    for reward in (0.0, 1.0, 1000.0):
        limit = 100 * 0.25 * (1 + reward / 0.03) ** 2
        told = [report(greatest_reward=reward, value_loss=share * limit) for share in (0.999, 1.001)]
        assert judge(guard, *told)[0] == [True, False]


def test_a_jump_from_sparse_rewards_is_no_trip():
    """Nothing, nothing, a reward of 100 and the loss with it; then 2e10 is a trip all the same."""
    nothing, paid = report(greatest_reward=0.0, value_loss=1e-12), report(greatest_reward=100.0, value_loss=1e4)
    after = report(greatest_reward=0.0, value_loss=1e4)
    exploded = report(greatest_reward=0.0, value_loss=2e10)
    ok, trips, state, _ = judge(GUARDS["value_loss"], nothing, nothing, paid, after, exploded, after)
    assert ok == [True] * 4 + [False, True] and trips == {"exploded": 1}
    assert state.memory.scale.tolist() == [0, 0, 100, 100, 100, 100]


@pytest.mark.parametrize("reward", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("loss", [2e10, 1e30, INF, -INF, NAN])
def test_an_exploded_value_loss(loss, reward):
    assert judge(GUARDS["value_loss"], report(greatest_reward=reward, value_loss=loss))[1] == {"exploded": 1}


@pytest.mark.parametrize("discount", [0.97, 1.0])
@pytest.mark.parametrize("greatest", [1e15, 3e38])
def test_a_reward_that_is_absurd_does_not_blind(greatest, discount):
    """What is finite in itself has a square that is not; the limit is then that of a reward of a billion."""
    guard = ValueLossGuard(20, 100.0, discount, 0.25)
    losses = (1e4, 1e30, INF, NAN)
    ok, *_ = judge(guard, report(greatest_reward=greatest), *(report(value_loss=loss) for loss in losses))
    assert ok == [True, True, False, False, False]


@pytest.mark.parametrize("discount", [1.0, 0.99999])
def test_a_long_horizon_is_taken_for_ten_thousand_steps(discount):
    guard = ValueLossGuard(20, 100.0, discount, 0.25)
    limit = 25 * (1 + 1e4) ** 2
    assert judge(guard, report(value_loss=0.999 * limit), report(value_loss=1.001 * limit))[0] == [True, False]


@pytest.mark.parametrize("greatest", [NAN, INF, -INF])
def test_no_bad_reward_is_remembered(greatest):
    """-inf is what a batch without a valid sample says."""
    told = [report(greatest_reward=3.0), report(greatest_reward=greatest), report(greatest_reward=1.0)]
    ok, _, state, _ = judge(GUARDS["value_loss"], *told)
    assert state.memory.scale.tolist() == [3, 3, 3]
    assert ok == [True, not np.isnan(greatest), True]


# --- policy


@pytest.mark.parametrize(("name", "fine", "bad", "cause"), [
    ("distance", 5.0, 5.00001, "kl"), ("distance", 0.0, INF, "kl"),
    ("std", 2e-4, 1.999e-4, "std_collapsed"), ("std", 9.0, 9.000001, "std_exploded"), ("std", 0.1, 1e6, "std_exploded"),
    ("entropy", -20.0, -20.00001, "entropy_collapsed"), ("entropy", 50.0, -INF, "entropy_collapsed"),
])  # fmt: skip
def test_each_cause_at_its_boundary(name, fine, bad, cause):
    ok, trips, *_ = judge(GUARDS["policy"], report(**{name: fine}), report(**{name: bad}))
    assert ok == [True, False] and trips == {cause: 1}


@pytest.mark.parametrize(
    ("name", "cause"), [("distance", "kl"), ("std", "std_exploded"), ("entropy", "entropy_collapsed")]
)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_policy_that_is_not_finite_trips_where_it_was_updated(name, cause, bad):
    """With every limit as with none."""
    for guard in (GUARDS["policy"], PolicyGuard(20, None, None, None, None)):
        below = name == "std" and bad < 0 and guard.min_std is not None
        assert judge(guard, report(**{name: bad}))[1] == {"std_collapsed" if below else cause: 1}
        assert judge(guard, report(updated=False, **{name: bad}))[1] == {}


LIMITS = {
    "max_kl": ("distance", 5.01),
    "min_std": ("std", 1e-5),
    "max_std": ("std", 10.0),
    "min_entropy": ("entropy", -21.0),
}


@pytest.mark.parametrize("without", LIMITS)
def test_a_limit_of_none_asks_nothing(without):
    """And leaves the others."""
    fields = {name: getattr(GUARDS["policy"], name) for name in LIMITS}
    guard = PolicyGuard(20, **fields | {without: None})
    for limit, (name, bad) in LIMITS.items():
        assert judge(guard, report(**{name: bad}))[0] == [limit == without], limit


def test_a_policy_guard_without_limits():
    """It asks for numbers, and no more."""
    guard = PolicyGuard(20, None, None, None, None)
    told = (
        report(),
        report(distance=1e9, std=1e9),
        report(distance=-1e9, std=0.0, entropy=-1e9),
        report(distance=NAN, std=NAN),
    )
    assert judge(guard, *told)[0] == [True] * 3 + [False]


# --- nothing updated


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("name", ["value_loss", "policy"])
def test_where_nothing_was_updated_there_is_nothing_to_judge(name, bad):
    """Means over no update are NaN; that none was accepted is the update guard's affair. It ends a row, too."""
    nothing = report(updated=False, value_loss=bad, distance=bad, std=bad, entropy=bad, greatest_reward=bad)
    ok, trips, state, _ = judge(GUARDS[name], BAD[name], nothing, report())
    assert ok == [False, True, True] and sum(trips.values()) == 1
    assert state.memory.length.tolist() == [1, 0, 0]
    assert np.isfinite(state.memory.scale).all()
