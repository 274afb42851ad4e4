"""The contract of all guards: one row per guard, one line per kind of bad number.

Below are the own tests of `quarantine`, `finite_samples` and `finite_update`. Those of `spike` are in
test_outlier.py, those of the state site in test_state.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from toys import State, on_one_device

from rlstable.config.guards import GuardsConfig
from rlstable.config.ppo import PPOConfig
from rlstable.config.schema import ConfigError
from rlstable.device import sharding
from rlstable.device.mesh import make_mesh
from rlstable.guards import masked
from rlstable.guards.base import Guard, GuardState, Verdict, all_within, count_first, fold, norm_within, select
from rlstable.guards.batch import BatchContext
from rlstable.guards.env import EnvContext
from rlstable.guards.state import IterationStats, StateContext
from rlstable.guards.update import UpdateContext
from rlstable.ppo.distributions import Normal
from rlstable.ppo.guards import SITES, check_more, guards_of
from rlstable.ppo.records import Collected

pytestmark = pytest.mark.usefixtures("quick_compile")

NAN, INF, HUGE = float("nan"), float("inf"), 1e30
NOT_FINITE = (NAN, INF, -INF)
BAD = (*NOT_FINITE, HUGE, -HUGE)
PATIENCE, DEVICES = 3, 8

CONFIG = GuardsConfig(
    **{name: {"patience": PATIENCE} for name in ("finite_update", "finite_state", "storm", "value_loss", "policy")}
)


def by_name(config: GuardsConfig) -> dict[str, Any]:
    sites = guards_of(config, PPOConfig(), {})
    return {name: guard for site in SITES for name, guard in sites[site].items()}


GUARDS = by_name(CONFIG)
THOROUGH = dataclasses.replace(GUARDS["finite_update"], thorough=True)
# The return watch belongs to no site: it compares episodes on the host.
SWITCHES = [name for name in GuardsConfig.model_fields if name not in ("limiters", "return_watch")]


class Fault(NamedTuple):
    """One place where a number may go bad."""

    cause: str  # that the guard counts
    put: Callable[[Any, float], Any]  # puts a bad number into a context; at sites that judge samples, into `Row.at`
    values: tuple[float, ...] = BAD  # bad numbers that are rejected and counted
    lets: tuple[float, ...] = ()  # large numbers that are accepted
    unsaid: tuple[float, ...] = ()  # bad numbers that are rejected and counted by another guard


@dataclasses.dataclass(frozen=True)
class Row:
    """A guard, a healthy context, and its faults."""

    guard: Any  # with its default configuration
    healthy: Callable[[int], Any]  # makes a context from a seed
    faults: tuple[Fault, ...]
    at: tuple[int, ...]  # index of the faulty sample; () if the verdict is a scalar, the same on all devices
    used: Callable[[Verdict, Any], Any]  # the values that the caller uses, from the verdict and the previous values
    start: GuardState | None = None  # first state, if the state of `init` rejects nothing yet
    learns: bool = False  # whether healthy values change the memory

    @property
    def state(self) -> GuardState:
        return self.guard.init() if self.start is None else self.start


def draw(seed: int, *shape: int) -> jax.Array:
    """Normal numbers and one -0.0, whose sign most operations would change."""
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    x[(0,) * len(shape)] = -0.0
    return jnp.asarray(x)


def chosen(verdict: Verdict, before: Any) -> Any:
    return select(verdict.ok, verdict.value, before)


# --- env


@struct.dataclass
class Physics:
    q: jax.Array
    qd: jax.Array
    qacc_warmstart: jax.Array
    contact: jax.Array
    steps: jax.Array
    nothing: jax.Array
    absent: Any = None


@functools.cache
def env_context(seed: int) -> EnvContext:
    q, qd, contact = draw(seed, 4, 2), draw(seed + 1, 4, 2), draw(seed + 2, 4, 3, 3)
    physics = Physics(q, qd, 10 * qd, contact, jnp.arange(4), jnp.zeros((4, 0, 3)))
    state = State(
        physics, {"state": draw(seed + 3, 4, 3)}, draw(seed + 4, 4), jnp.array([0.0, 1.0, 0.0, 1.0]),
        {"speed": draw(seed + 5, 4)}, {"wind": draw(seed + 6, 4, 2), "key": jnp.ones((4, 2), jnp.uint32)},
    )  # fmt: skip
    return EnvContext(state, draw(seed + 7, 4, 2), jnp.ones(4, bool))


def in_env(change: Callable[[State, float], State]) -> Callable[[EnvContext, float], EnvContext]:
    return lambda ctx, bad: ctx._replace(value=change(ctx.value, bad))


def in_physics(name: str, index: tuple[int, ...]) -> Callable[[EnvContext, float], EnvContext]:
    def change(state: State, bad: float) -> State:
        leaf = getattr(state.pipeline_state, name).at[index].set(bad)
        return state.replace(pipeline_state=state.pipeline_state.replace(**{name: leaf}))

    return in_env(change)


ENV = Row(
    GUARDS["quarantine"],
    env_context,
    (
        Fault("action", lambda c, bad: c._replace(action=c.action.at[2, 1].set(bad)), (*BAD, 1.1e15), (-9e14,)),
        Fault("physics", in_physics("q", (2, 0)), (*BAD, 1.1e10), (9e9,)),
        Fault("physics", in_physics("qd", (2, 1)), (*BAD, -1.1e10), (-9e9,)),
        Fault("physics", in_physics("qacc_warmstart", (2, 1)), (*BAD, 1.1e10), (-9e9,)),
        Fault("physics", in_physics("contact", (2, 1, 1)), (*BAD, -1.1e15), (9e14,)),
        Fault(
            "observation",
            in_env(lambda s, bad: s.replace(obs={"state": s.obs["state"].at[2, 0].set(bad)})),
            (*BAD, 1.1e12),
            (-9e11,),
        ),
        Fault("reward", in_env(lambda s, bad: s.replace(reward=s.reward.at[2].set(bad))), (*BAD, -1.1e12), (9e11,)),
        Fault("done", in_env(lambda s, bad: s.replace(done=s.done.at[2].set(bad))), (*BAD, 2.0), (0.5,)),
        Fault(
            "metrics",
            in_env(lambda s, bad: s.replace(metrics={"speed": s.metrics["speed"].at[2].set(bad)})),
            (*BAD, 1.1e15),
            (-9e14,),
        ),
        Fault(
            "info",
            in_env(lambda s, bad: s.replace(info=s.info | {"wind": s.info["wind"].at[2, 1].set(bad)})),
            (*BAD, -1.1e15),
            (9e14,),
        ),
    ),
    (2,),
    chosen,
)


# --- batch


@functools.cache
def batch_context(seed: int) -> BatchContext:
    data = Collected(
        observation={"state": draw(seed, 3, 5, 2)},
        raw_action=draw(seed + 1, 3, 5, 2),
        log_prob=draw(seed + 2, 3, 5),
        distribution=Normal(draw(seed + 3, 3, 5, 2), jnp.ones((3, 5, 2))),
        value=draw(seed + 4, 3, 5),
        reward=draw(seed + 5, 3, 5),
        truncation=jnp.zeros((3, 5)).at[0, 1].set(1.0),
        termination=jnp.zeros((3, 5)).at[1, 2].set(1.0),
        valid=jnp.ones((3, 5), bool).at[0, 3].set(False),
        time_out=None,
        bootstrap_observation={"state": draw(seed + 6, 3, 1, 2)},
    )
    return BatchContext(data)


def in_batch(name: str, index: tuple[int, ...]) -> Callable[[BatchContext, float], BatchContext]:
    def put(ctx: BatchContext, bad: float) -> BatchContext:
        leaf = getattr(ctx.value, name)
        leaf = jax.tree.map(lambda x: x.at[index].set(bad), leaf)
        return ctx._replace(value=ctx.value._replace(**{name: leaf}))

    return put


def learnt_from(verdict: Verdict, _: Any) -> Any:
    """The values that the loss reads: every reward, finite observations, valid samples."""
    data = verdict.value
    sampled = (data.raw_action, data.log_prob, data.distribution, data.value)
    return (
        data.reward,
        masked.zero_invalid_nonfinite(data.observation, data.valid),
        masked.zero_invalid(sampled, data.valid),
    )


BATCH = Row(
    GUARDS["finite_samples"],
    batch_context,
    (
        Fault("observation", in_batch("observation", (2, 1, 0)), (*BAD, 1.1e15), (-9e14,)),
        Fault("policy", in_batch("raw_action", (2, 1, 1)), lets=(7e14,)),
        Fault("policy", in_batch("log_prob", (2, 1)), (*BAD, -1.1e15), (-9e14,)),
        Fault("policy", in_batch("distribution", (2, 1, 0)), lets=(7e14,)),
        Fault("value", in_batch("value", (2, 1)), (*BAD, 1.1e15), (-9e14,)),
        Fault("reward", in_batch("reward", (2, 1)), (*BAD, -1.1e15), (9e14,)),
    ),
    (2, 1),
    learnt_from,
)


# --- update and state


def training(seed: int) -> tuple[Any, Any]:
    params = {"policy": draw(seed, 3, 2), "value": [draw(seed + 1, 3)]}
    adam = optax.ScaleByAdamState(jnp.int32(seed), jax.tree.map(jnp.square, params), jax.tree.map(jnp.abs, params))
    return params, (adam, optax.EmptyState())


@functools.cache
def update_context(seed: int) -> UpdateContext:
    params, opt_state = training(seed)
    old, gradients, update = (jax.tree.map(lambda x, share=share: share * x, params) for share in (0.99, 0.1, 0.01))
    return UpdateContext((params, opt_state), *(optax.global_norm(x) for x in (gradients, update, old)))


def spoiled(tree: Any, bad: float) -> Any:
    """One element of the first float leaf that has axes."""
    leaves, structure = jax.tree.flatten(tree)
    place = next(i for i, x in enumerate(leaves) if x.ndim and jnp.issubdtype(x.dtype, jnp.floating))
    leaves[place] = leaves[place].at[(0,) * leaves[place].ndim].set(bad)
    return jax.tree.unflatten(structure, leaves)


def in_gradients(ctx: UpdateContext, bad: float) -> UpdateContext:
    """A bad gradient, which shows in its norm."""
    return ctx._replace(gradient_norm=optax.global_norm(spoiled(ctx.value[0], bad)))


def in_candidate(ctx: UpdateContext, bad: float) -> UpdateContext:
    """Bad new parameters, which show in the norm of the step."""
    params, opt_state = ctx.value
    new = spoiled(params, bad)
    step = optax.global_norm(jax.tree.map(jnp.subtract, new, params))
    return ctx._replace(value=(new, opt_state), update_norm=step)


def in_old_parameters(ctx: UpdateContext, bad: float) -> UpdateContext:
    """Bad old parameters, which show in their norm."""
    return ctx._replace(parameter_norm=optax.global_norm(spoiled(ctx.value[0], bad)))


def in_value(index: int) -> Callable[[Any, float], Any]:
    def put(ctx: Any, bad: float) -> Any:
        parts = list(ctx.value)
        parts[index] = spoiled(parts[index], bad)
        return ctx._replace(value=tuple(parts))

    return put


def of_norm(ctx: UpdateContext, bad: float) -> UpdateContext:
    return ctx._replace(gradient_norm=jnp.float32(bad))


# The square of 1e20 is not finite in float32 and would freeze Adam's second moment for good.
UPDATE = Row(
    GUARDS["finite_update"],
    update_context,
    (
        Fault("gradient", in_gradients, (*BAD, -1e20), (1e18,)),
        Fault("parameters", in_candidate, (*BAD, 1.1e6), (-9e5,)),
        Fault("parameters", in_old_parameters, (*BAD, -1.1e6), (9e5,)),
    ),
    (),
    chosen,
)

# Bad numbers of the candidate that show in no norm, as after a hardware error.
UPDATE_THOROUGH = Row(
    THOROUGH,
    update_context,
    (
        *UPDATE.faults,
        Fault("parameters", in_value(0), (*BAD, 1.1e6), (-9e5,)),
        Fault("optimizer", in_value(1), NOT_FINITE, (HUGE, -HUGE)),
    ),
    (),
    chosen,
)

# The level is 0.25. `finite_update` counts norms that are not finite.
SPIKE = Row(
    GUARDS["spike"],
    update_context,
    (Fault("spike", of_norm, (HUGE, 250.1), (250.0, 0.0), NOT_FINITE),),
    (),
    chosen,
    GuardState(jnp.zeros(1, jnp.int32), jnp.float32(0.25)),
    learns=True,
)


@functools.cache
def state_context(seed: int) -> StateContext:
    targets = {"mean": jnp.float32(0.5), "std": jnp.float32(2.0), "count": jnp.uint32(7)}
    statistics = {"mean": draw(seed + 2, 3), "std": jnp.ones(3), "count": jnp.uint32(7), "value": targets}
    value = (*training(seed), statistics)
    numbers = dict(
        iterations=99, valid_share=1.0, greatest_reward=1.0, value_loss=0.5 + seed, distance=0.01, std=0.5, entropy=-0.3
    )
    report = IterationStats(updated=jnp.array(True), **{name: jnp.float32(x) for name, x in numbers.items()})
    return StateContext(value, report)


def in_targets(ctx: StateContext, bad: float) -> StateContext:
    params, opt_state, statistics = ctx.value
    targets = statistics["value"] | {"mean": jnp.float32(bad)}
    return ctx._replace(value=(params, opt_state, statistics | {"value": targets}))


def in_report(name: str) -> Callable[[StateContext, float], StateContext]:
    return lambda ctx, bad: ctx._replace(report=ctx.report._replace(**{name: jnp.float32(bad)}))


STATE = Row(
    GUARDS["finite_state"],
    state_context,
    (
        Fault("parameters", in_value(0), (*BAD, 1.1e6), (-9e5,)),
        Fault("optimizer", in_value(1), (*BAD, -1.1e15), (9e14,)),
        Fault("normalizer", in_value(2), (*BAD, 1e25), (-8e24,)),
        Fault("normalizer", in_targets, (*BAD, -1e25), (8e24,)),
    ),
    (),
    chosen,
)

# Shares are at most 1, squares and divergences at least 0, so one bound is enough for each.
STORM = Row(
    GUARDS["storm"],
    state_context,
    (Fault("environments", in_report("valid_share"), (NAN, -INF, 0.0, 0.499), (0.5,)),),
    (),
    chosen,
)

VALUE_LOSS = Row(
    GUARDS["value_loss"],
    state_context,
    (
        Fault("exploded", in_report("value_loss"), (*NOT_FINITE, HUGE, 2e10), (2.9e4, 0.0)),
        Fault("exploded", in_report("greatest_reward"), (NAN,), (1000.0, -INF)),
    ),
    (),
    chosen,
    learns=True,
)

POLICY = Row(
    GUARDS["policy"],
    state_context,
    (
        Fault("kl", in_report("distance"), (*NOT_FINITE, HUGE, 5.01), (5.0, 0.0)),
        Fault("std_collapsed", in_report("std"), (-INF, 0.0, 1.9e-4), (2e-4,)),
        Fault("std_exploded", in_report("std"), (NAN, INF, HUGE, 9.1), (9.0,)),
        Fault("saturated", in_report("entropy"), (*NOT_FINITE, -HUGE, -20.1), (-20.0, 20.0)),
    ),
    (),
    chosen,
)


ROWS = {
    "quarantine": ENV, "finite_samples": BATCH, "finite_update": UPDATE,
    "thorough": UPDATE_THOROUGH, "spike": SPIKE, "finite_state": STATE, "storm": STORM, "value_loss": VALUE_LOSS,
    "policy": POLICY,
}  # fmt: skip
FAULTS = [
    pytest.param(name, i, id=f"{name}-{fault.cause}{i}")
    for name, row in ROWS.items()
    for i, fault in enumerate(row.faults)
]
EACH = pytest.mark.parametrize("name", ROWS)


@functools.cache
def apply(name: str) -> Any:
    return on_one_device(ROWS[name].guard.apply)


def same(one: Any, other: Any) -> None:
    """Equal numbers of equal types. NaN equals NaN."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def same_bits(one: Any, other: Any) -> None:
    same(one, other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def floats(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def expected_ok(row: Row, ok: Any) -> np.ndarray:
    """False in the faulted sample, True in every other."""
    expected = np.ones(np.shape(ok), bool)
    expected[row.at] = False
    return expected


def trips(row: Row, state: GuardState) -> dict[str, int]:
    return {cause: n for cause, n in zip(row.guard.causes, state.trips.tolist(), strict=True) if n}


# --- a guard


def test_every_guard_has_a_row_in_the_contract():
    """Adding a guard means adding a row, and a section of the configuration."""
    assert {*GUARDS, "thorough"} == ROWS.keys() and set(SWITCHES) == GUARDS.keys()
    for name, row in ROWS.items():
        # Only the thorough update guard reads the optimizer state.
        expected = set(row.guard.causes) - ({"optimizer"} if name == "finite_update" else set())
        assert {fault.cause for fault in row.faults} == expected, name


@pytest.mark.parametrize("name", SWITCHES)
def test_disabled_guard_is_absent_from_its_site(name):
    """The other guards stay."""
    config = CONFIG.model_copy(update={name: getattr(CONFIG, name).model_copy(update={"enabled": False})})
    assert by_name(config).keys() == GUARDS.keys() - {name}


@EACH
def test_healthy_values_pass_every_guard_unchanged(name):
    """Bit for bit, time after time."""
    row, state = ROWS[name], ROWS[name].state
    for seed in (0, 10, 20):
        ctx = row.healthy(seed)
        verdict = apply(name)(ctx, state)
        assert verdict.ok.dtype == bool and np.asarray(verdict.ok).all()
        same_bits(ctx.value, verdict.value)
        same(row.state.trips, verdict.state.trips)
        if not row.learns:
            same_bits(row.state, verdict.state)
        state = verdict.state


@pytest.mark.parametrize(("name", "index"), FAULTS)
def test_bad_number_is_rejected_and_counted_and_gradients_stay_finite(name, index):
    """Only its sample, once, under its cause. Nothing of the sample is used, and the next healthy call passes."""
    row = ROWS[name]
    fault = row.faults[index]
    for bad in (*fault.values, *fault.unsaid):
        verdict = apply(name)(fault.put(row.healthy(0), bad), row.state)
        np.testing.assert_array_equal(verdict.ok, expected_ok(row, verdict.ok), err_msg=str(bad))
        counted = {} if bad in fault.unsaid else {fault.cause: 1}
        assert trips(row, verdict.state) == counted, bad
        assert all_within(row.used(verdict, row.healthy(20).value), 1e4), bad
        assert all_within(verdict.state.memory, 1e4), bad

        by_weight, by_value = gradients(name)(verdict)
        assert jnp.isfinite(by_weight) and by_weight != 0, bad
        assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(by_value) if x.dtype != jax.dtypes.float0)

        following = apply(name)(row.healthy(10), verdict.state)
        assert np.asarray(following.ok).all(), bad
        assert trips(row, following.state) == counted, bad
        same_bits(row.healthy(10).value, following.value)


@EACH
def test_large_number_within_the_limit_passes(name):
    row = ROWS[name]
    for fault in row.faults:
        for large in fault.lets:
            verdict = apply(name)(fault.put(row.healthy(0), large), row.state)
            assert np.asarray(verdict.ok).all() and trips(row, verdict.state) == {}, (fault.cause, large)


@functools.cache
def gradients(name: str) -> Any:
    """Gradients of a loss on the used values, with respect to a weight and to the judged value."""
    row = ROWS[name]
    before = row.healthy(20).value  # outside of the traced function

    def loss(weight: float, value: Any, verdict: Verdict) -> jax.Array:
        used = floats(row.used(verdict._replace(value=value), before))
        return sum(jnp.sum(jnp.tanh(weight * x) + 1e-6 * jnp.square(x)) for x in used)

    return jax.jit(lambda verdict: jax.grad(loss, (0, 1), allow_int=True)(1.0, verdict.value, verdict))


@EACH
def test_sample_with_several_faults_is_counted_under_the_first_cause_only(name):
    """The number of trips is the number of samples."""
    row = ROWS[name]
    ctx = row.healthy(0)
    for fault in row.faults:
        ctx = fault.put(ctx, fault.values[0])
    assert trips(row, apply(name)(ctx, row.state).state) == {row.guard.causes[0]: 1}


# --- eight devices


@functools.cache
def on_eight(name: str) -> Any:
    """Every device judges its own context; at sites with a scalar verdict the devices average their contexts first."""
    row = ROWS[name]

    def judge(ctx: Any, state: GuardState) -> tuple[Verdict, jax.Array]:
        ctx = jax.tree.map(lambda x: x[0], ctx)
        if not row.at:
            ctx = jax.tree.map(lambda x: sharding.mean(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, ctx)
        verdict = row.guard.apply(ctx, state)
        return jax.tree.map(lambda x: x[None], verdict), sharding.total(verdict.state.trips)

    split, replicated = sharding.SPLIT, sharding.REPLICATED
    return sharding.over_devices(judge, make_mesh(DEVICES), (split, replicated), (split, replicated))


def spread(row: Row, fault: Fault, device: int, bad: float) -> Any:
    """A healthy context for each device, one of them with a bad number."""
    contexts = [row.healthy(i if row.at else 0) for i in range(DEVICES)]
    contexts[device] = fault.put(contexts[device], bad)
    return jax.tree.map(lambda *x: np.stack(x), *contexts)


@EACH
def test_fault_on_one_of_eight_devices_is_counted_once(name):
    """A sample is rejected on its device; a candidate or a state is rejected on all devices."""
    row = ROWS[name]
    for index, fault in enumerate(row.faults):
        # An average over eight keeps a number that is not finite, or huge, as bad as it was.
        for bad in (*fault.values[: 2 if row.at else 1], *fault.unsaid[:1]):
            device = (3 * index + 5) % DEVICES
            verdict, total = on_eight(name)(spread(row, fault, device, bad), row.state)
            own = [jax.tree.map(lambda x, i=i: np.asarray(x)[i], verdict) for i in range(DEVICES)]
            counted = {} if bad in fault.unsaid else {fault.cause: 1}
            for i, one in enumerate(own):
                hit = i == device or not row.at
                np.testing.assert_array_equal(one.ok, expected_ok(row, one.ok) if hit else np.ones_like(one.ok))
                assert trips(row, one.state) == (counted if hit else {})
                same_bits(own[0].state.memory, one.state.memory)
            assert total.sum() == len(counted) * (1 if row.at else DEVICES)


# --- single guards


@pytest.mark.parametrize("leaf", ["observation", "log_prob", "reward"])
def test_bad_sample_enters_no_return(leaf):
    """The sample becomes invalid, without reward and truncated; its neighbours keep rewards and masks."""
    ctx = in_batch(leaf, (2, 1))(batch_context(0), NAN)
    before, after = ctx.value, apply("finite_samples")(ctx, BATCH.state).value
    assert (after.valid[2, 1], after.reward[2, 1], after.truncation[2, 1], after.termination[2, 1]) == (False, 0, 1, 0)
    others = np.ones((3, 5), bool)
    others[2, 1] = False
    for name in ("reward", "valid"):
        np.testing.assert_array_equal(getattr(after, name)[others], getattr(before, name)[others])
    # The network might overflow in the loss too, so the observation is zeroed and the step before is truncated.
    np.testing.assert_array_equal(after.truncation[2, 0], float(leaf != "reward"))
    seen = np.asarray(jax.tree.leaves(after.observation)[0])
    assert (seen[2, 1] == 0).all() == (leaf != "reward")
    assert (seen[2, 0] != 0).all()


LIMITED = ("quarantine", "finite_samples", "finite_update", "thorough", "finite_state")


def limited(name: str, limit: float | None) -> Any:
    """The guard with one limit for everything."""
    guard = ROWS[name].guard
    limits = [field.name for field in dataclasses.fields(guard) if field.name.startswith("max_")]
    return jax.jit(dataclasses.replace(guard, **dict.fromkeys(limits, limit)).apply)


@pytest.mark.parametrize("limit", [1e20, 1e300])
@pytest.mark.parametrize("name", LIMITED)
def test_limit_beyond_float32_still_rejects_numbers_that_are_not_finite(name, limit):
    """As float32 1e300 is infinite, as is the square of 1e20, and infinity is not beyond infinity."""
    row, judge = ROWS[name], limited(name, limit)
    assert np.asarray(judge(row.healthy(0), row.state).ok).all()
    for fault in row.faults:
        for bad in NOT_FINITE:
            assert not judge(fault.put(row.healthy(0), bad), row.state).ok[row.at], (fault.cause, bad)


@pytest.mark.parametrize(("index", "bad"), [(0, NAN), (1, INF)])
def test_only_the_thorough_update_guard_reads_the_candidate(bad, index):
    """The default guard trusts the norms."""
    ctx = in_value(index)(update_context(0), bad)
    assert apply("finite_update")(ctx, UPDATE.state).ok and not apply("thorough")(ctx, UPDATE.state).ok
    sizes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ctx.value)
    blind = jax.eval_shape(lambda ctx: UPDATE.guard.apply(ctx._replace(value=sizes), UPDATE.state)[1:], ctx)
    assert blind[0].shape == ()


@pytest.mark.parametrize("name", ["finite_state", "storm", "value_loss", "policy"])
def test_patience_counts_consecutive_trips(name):
    """A good iteration resets the count of patience, but not the trips."""
    row, state = ROWS[name], ROWS[name].state
    assert row.guard.patience == PATIENCE
    fault, seen = row.faults[0], []
    assert not row.guard.exhausted(state)
    for bad in (1, 1, 0, 1, 1, 1, 1, 0, 1):
        ctx = fault.put(state_context(0), NAN) if bad else state_context(0)
        state = apply(name)(ctx, state).state
        seen.append(int(state.memory.length))
        assert row.guard.exhausted(state) == (seen[-1] >= PATIENCE)
    assert seen == [1, 2, 0, 1, 2, 3, 4, 0, 1]
    assert trips(row, state) == {fault.cause: 7}


# --- fold and select


@dataclasses.dataclass(frozen=True)
class Doubling(Guard):
    """A guard that doubles values and trips beyond a limit."""

    limit: float
    causes: ClassVar[tuple[str, ...]] = ("beyond",)

    def apply(self, ctx: Any, state: GuardState) -> Any:
        ok = ctx.value <= self.limit
        return Verdict(ctx.value * 2, ok, GuardState(state.trips + count_first(~ok[None])))


def test_guards_of_a_site_run_in_order():
    """Each guard sees the value after the one before; ok is the conjunction."""
    guards = {"first": Doubling(3.0), "second": Doubling(7.0)}
    states = {name: guard.init() for name, guard in guards.items()} | {"other": GuardState(jnp.int32(5))}
    verdict = jax.jit(lambda ctx, states: fold(guards, ctx, states))(BatchContext(jnp.array([1.0, 3.5, 4.0])), states)
    np.testing.assert_array_equal(verdict.value, [4.0, 14.0, 16.0])
    np.testing.assert_array_equal(verdict.ok, [True, False, False])
    assert (verdict.state["first"].trips.item(), verdict.state["second"].trips.item()) == (2, 1)
    assert verdict.state["other"].trips == 5


def test_select_lets_no_bad_number_of_the_rejected_value_through():
    new, old = {"a": jnp.full((2, 3), NAN), "b": jnp.full(2, INF)}, {"a": jnp.ones((2, 3)), "b": jnp.zeros(2)}
    same_bits(old, select(jnp.array(False), new, old))
    same_bits(old, select(jnp.array(True), old, new))
    mixed = select(jnp.array([True, False]), new, old)
    assert np.isnan(mixed["a"][0]).all() and (mixed["a"][1] == 1).all() and mixed["b"].tolist() == [INF, 0]
    keys = jax.random.split(jax.random.key(0), 2)
    assert (select(jnp.array([True, False]), keys, keys[::-1]) == keys[jnp.array([0, 0])]).all()


# --- helpers of guards


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_norm_is_taken_over_all_floats_together(dtype):
    """Per leading axis, over leaves and their other axes, without integers. Squares of float16 are float32."""
    tree = {"a": jnp.array([[3.0, 0.0], [300.0, 0.0]], dtype), "b": jnp.array([4.0, 400.0], dtype), "n": jnp.arange(2)}
    assert norm_within(tree, 5.0, 1).tolist() == [True, False] and norm_within(tree, 4.999, 1).tolist() == [False] * 2
    assert norm_within(tree, 500.0, 1).all() and not norm_within(tree, 500.0)
    # Leaves of one shape, and leaves without elements.
    twin = tree | {"c": jnp.array([[0.0, 12.0], [0.0, NAN]], dtype), "empty": jnp.zeros((2, 0), dtype)}
    assert norm_within(twin, 13.0, 1).tolist() == [True, False] and not norm_within(twin, 12.999, 1).any()
    assert norm_within(tree, 500.1) and norm_within({}, 1.0) and norm_within({"n": jnp.arange(2)}, 1.0, 1).all()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"reward": {"mine": Doubling(1.0)}}, "unknown site 'reward'; choose one of env, batch, update, state"),
        ({"env": {"storm": Doubling(1.0)}}, "another guard has the name 'storm'"),
        ({"env": {"mine": Doubling(1.0)}, "batch": {"mine": Doubling(1.0)}}, "another guard has the name 'mine'"),
    ],
)
def test_user_guard_needs_a_known_site_and_a_unique_name(more, said):
    """Memory and trips are stored by name, whatever the site."""
    with pytest.raises(ConfigError, match=said):
        check_more(more, ("storm", "state"))
    check_more({"env": {"mine": Doubling(1.0)}, "state": {"other": Doubling(1.0)}}, ("storm", "state"))
