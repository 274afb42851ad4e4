"""The contract, over every guard: one row per guard, one line per kind of bad number."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

from rlstable.config import QuarantineConfig, StateConfig, TransitionConfig, UpdateConfig
from rlstable.guards.base import Guard, GuardState, all_finite, all_within, count_first, fold, select
from rlstable.guards.batch import BatchContext, batch_guards
from rlstable.guards.env import EnvContext, env_guards
from rlstable.guards.state import StateContext, state_guards
from rlstable.guards.update import UpdateContext, update_guards
from rlstable.ppo.distributions import Normal
from rlstable.ppo.state import Transition

NAN, INF, HUGE = float("nan"), float("inf"), 1e30
NOT_FINITE = (NAN, INF, -INF)
PATIENCE = 3


class Fault(NamedTuple):
    """One place where a number may go bad.

    Attributes:
        cause: What the guard calls it.
        put: The context with a bad number there; at sites that judge samples in sample `at`.
        values: The bad numbers that this place knows.
        lets: Numbers that it leaves to others, on purpose.
    """

    cause: str
    put: Callable[[Any, float], Any]
    values: tuple[float, ...] = NOT_FINITE
    lets: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """A guard, a healthy context, and what may go wrong.

    Attributes:
        guard: Under its configured default.
        healthy: Makes a context from a number, so that two differ.
        faults: Where.
        at: The sample that a fault is put into; () where the verdict is a scalar.
    """

    guard: Guard
    healthy: Callable[[int], Any]
    faults: tuple[Fault, ...]
    at: tuple[int, ...]


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.PRNGKey(seed), shape)


# --- env


@struct.dataclass
class Physics:
    q: jax.Array
    qd: jax.Array
    contact: jax.Array
    steps: jax.Array
    nothing: jax.Array
    absent: Any = None


@struct.dataclass
class EnvState:
    pipeline_state: Physics
    obs: Any
    reward: jax.Array
    done: jax.Array
    metrics: dict[str, jax.Array]
    info: dict[str, Any]


def env_context(seed: int) -> EnvContext:
    q, qd, contact = draw(seed, 4, 2), draw(seed + 1, 4, 2), draw(seed + 2, 4, 3, 3)
    physics = Physics(q, qd, contact, jnp.arange(4), jnp.zeros((4, 0, 3)))
    state = EnvState(
        physics, {"state": draw(seed + 3, 4, 3)}, draw(seed + 4, 4), jnp.array([0.0, 1.0, 0.0, 1.0]),
        {"speed": draw(seed + 5, 4)}, {"wind": draw(seed + 6, 4, 2), "key": jnp.ones((4, 2), jnp.uint32)},
    )  # fmt: skip
    return EnvContext(state, draw(seed + 7, 4, 2), jnp.ones(4, bool))


def in_env(change: Callable[[EnvState, float], EnvState]) -> Callable[[EnvContext, float], EnvContext]:
    return lambda ctx, bad: ctx._replace(value=change(ctx.value, bad))


def in_physics(name: str, index: tuple[int, ...]) -> Callable[[EnvContext, float], EnvContext]:
    def change(state: EnvState, bad: float) -> EnvState:
        leaf = getattr(state.pipeline_state, name).at[index].set(bad)
        return state.replace(pipeline_state=state.pipeline_state.replace(**{name: leaf}))

    return in_env(change)


ENV = Row(
    env_guards(QuarantineConfig())["quarantine"],
    env_context,
    (
        Fault("action", lambda c, bad: c._replace(action=c.action.at[2, 1].set(bad)), lets=(HUGE,)),
        Fault("physics", in_physics("q", (2, 0)), (*NOT_FINITE, HUGE, -HUGE, 1.1e6)),
        Fault("physics", in_physics("qd", (2, 1)), (*NOT_FINITE, HUGE, -HUGE)),
        Fault("physics", in_physics("contact", (2, 1, 1)), lets=(HUGE,)),
        Fault(
            "observation",
            in_env(lambda s, bad: s.replace(obs={"state": s.obs["state"].at[2, 0].set(bad)})),
            (*NOT_FINITE, HUGE, -HUGE),
        ),
        Fault("reward", in_env(lambda s, bad: s.replace(reward=s.reward.at[2].set(bad))), (*NOT_FINITE, HUGE, -1e7)),
        Fault("done", in_env(lambda s, bad: s.replace(done=s.done.at[2].set(bad))), (*NOT_FINITE, HUGE, 2.0)),
        Fault(
            "metrics",
            in_env(lambda s, bad: s.replace(metrics={"speed": s.metrics["speed"].at[2].set(bad)})),
            lets=(HUGE,),
        ),
        Fault(
            "info",
            in_env(lambda s, bad: s.replace(info=s.info | {"wind": s.info["wind"].at[2, 1].set(bad)})),
            lets=(HUGE,),
        ),
    ),
    (2,),
)


# --- batch


def batch_context(seed: int) -> BatchContext:
    data = Transition(
        observation={"state": draw(seed, 3, 5, 2)},
        raw_action=draw(seed + 1, 3, 5, 2),
        log_prob=draw(seed + 2, 3, 5),
        distribution=Normal(draw(seed + 3, 3, 5, 2), jnp.ones((3, 5, 2))),
        value=draw(seed + 4, 3, 5),
        reward=draw(seed + 5, 3, 5),
        truncation=jnp.zeros((3, 5)).at[0, 1].set(1.0),
        termination=jnp.zeros((3, 5)).at[1, 2].set(1.0),
        valid=jnp.ones((3, 5), bool).at[0, 3].set(False),
        bootstrap_observation={"state": draw(seed + 6, 3, 2)},
    )
    return BatchContext(data)


def in_batch(name: str, index: tuple[int, ...]) -> Callable[[BatchContext, float], BatchContext]:
    def put(ctx: BatchContext, bad: float) -> BatchContext:
        leaf = getattr(ctx.value, name)
        leaf = jax.tree.map(lambda x: x.at[index].set(bad), leaf)
        return ctx._replace(value=ctx.value._replace(**{name: leaf}))

    return put


BATCH = Row(
    batch_guards(TransitionConfig())["transition"],
    batch_context,
    (
        # How large an observation or a reward may be is said where it is born, at the env site.
        Fault("observation", in_batch("observation", (2, 1, 0)), lets=(HUGE,)),
        Fault("policy", in_batch("raw_action", (2, 1, 1))),
        Fault("policy", in_batch("log_prob", (2, 1))),
        Fault("policy", in_batch("distribution", (2, 1, 0))),
        Fault("value", in_batch("value", (2, 1)), lets=(HUGE,)),
        Fault("reward", in_batch("reward", (2, 1)), lets=(HUGE,)),
    ),
    (2, 1),
)


# --- update and state


def training(seed: int) -> tuple[Any, Any]:
    params = {"policy": draw(seed, 3, 2), "value": [draw(seed + 1, 3)]}
    adam = optax.ScaleByAdamState(jnp.int32(seed), jax.tree.map(jnp.square, params), jax.tree.map(jnp.abs, params))
    return params, (adam, optax.EmptyState())


def update_context(seed: int) -> UpdateContext:
    params, opt_state = training(seed)
    gradients = jax.tree.map(lambda x: 0.1 * x, params)
    return UpdateContext((params, opt_state), gradients, optax.global_norm(gradients))


def spoiled(tree: Any, bad: float) -> Any:
    """One element of the first float leaf that has axes."""
    leaves, structure = jax.tree.flatten(tree)
    place = next(i for i, x in enumerate(leaves) if x.ndim and jnp.issubdtype(x.dtype, jnp.floating))
    leaves[place] = leaves[place].at[(0,) * leaves[place].ndim].set(bad)
    return jax.tree.unflatten(structure, leaves)


def in_gradients(ctx: UpdateContext, bad: float) -> UpdateContext:
    gradients = spoiled(ctx.gradients, bad)
    return ctx._replace(gradients=gradients, gradient_norm=optax.global_norm(gradients))


def in_value(index: int) -> Callable[[Any, float], Any]:
    def put(ctx: Any, bad: float) -> Any:
        parts = list(ctx.value)
        parts[index] = spoiled(parts[index], bad)
        return ctx._replace(value=tuple(parts))

    return put


UPDATE = Row(
    update_guards(UpdateConfig())["update"],
    update_context,
    (
        # Whose square is not finite in float32 freezes Adam's second moment for good.
        Fault("gradient", in_gradients, (*NOT_FINITE, HUGE, -1e20)),
        Fault("parameters", in_value(0), lets=(HUGE,)),
        Fault("optimizer", in_value(1), lets=(HUGE,)),
    ),
    (),
)


def state_context(seed: int) -> StateContext:
    return StateContext((*training(seed), {"mean": draw(seed + 2, 3), "std": jnp.ones(3), "count": jnp.uint32(7)}))


STATE = Row(
    state_guards(StateConfig(patience=PATIENCE))["state"],
    state_context,
    (
        Fault("parameters", in_value(0), lets=(HUGE,)),
        Fault("optimizer", in_value(1), lets=(HUGE,)),
        Fault("normalizer", in_value(2), lets=(HUGE,)),
    ),
    (),
)

ROWS = {"quarantine": ENV, "transition": BATCH, "update": UPDATE, "state": STATE}
FAULTS = [
    pytest.param(name, i, bad, id=f"{name}-{fault.cause}{i}-{bad:g}")
    for name, row in ROWS.items()
    for i, fault in enumerate(row.faults)
    for bad in fault.values
]
EACH = pytest.mark.parametrize("name", ROWS)


@functools.cache
def apply(name: str) -> Any:
    return jax.jit(ROWS[name].guard.apply)


def same_bits(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def expected_ok(row: Row, ok: Any) -> np.ndarray:
    """False in the faulted sample, True in every other."""
    expected = np.ones(np.shape(ok), bool)
    expected[row.at] = False
    return expected


def trips(row: Row, state: GuardState) -> dict[str, int]:
    return {cause: n for cause, n in zip(row.guard.causes, state.trips.tolist(), strict=True) if n}


# --- a guard


def test_every_guard_has_a_row():
    """Adding a guard means adding a row."""
    sites: tuple[tuple[Any, Any], ...] = (
        (env_guards, QuarantineConfig),
        (batch_guards, TransitionConfig),
        (update_guards, UpdateConfig),
        (state_guards, StateConfig),
    )
    assert {name for make, config in sites for name in make(config())} == ROWS.keys()
    for name, row in ROWS.items():
        assert {fault.cause for fault in row.faults} == set(row.guard.causes), name
    for make, config in sites:
        assert make(config(enabled=False)) == {}


@EACH
def test_a_guard_is_a_frozen_value(name):
    """It may be a static argument, and owns nothing that changes."""
    guard = ROWS[name].guard
    assert hash(guard) == hash(dataclasses.replace(guard)) and guard == dataclasses.replace(guard)
    with pytest.raises(dataclasses.FrozenInstanceError):
        guard.anything = 1
    assert len(set(guard.causes)) == len(guard.causes) > 0


@EACH
def test_its_first_state_has_no_trips(name):
    state = ROWS[name].guard.init()
    assert state.trips.shape == (len(ROWS[name].guard.causes),) and state.trips.dtype == jnp.int32
    assert not state.trips.any()


@EACH
def test_healthy_values_pass_untouched(name):
    row = ROWS[name]
    ctx = row.healthy(0)
    verdict = apply(name)(ctx, row.guard.init())
    assert verdict.ok.dtype == bool and np.asarray(verdict.ok).all()
    same_bits(ctx.value, verdict.value)
    same_bits(row.guard.init(), verdict.state)


@pytest.mark.parametrize(("name", "index", "bad"), FAULTS)
def test_a_bad_number_is_refused_and_counted(name, index, bad):
    """Only its sample, once, under its cause; the next healthy call is as if nothing had been."""
    row = ROWS[name]
    fault = row.faults[index]
    verdict = apply(name)(fault.put(row.healthy(0), bad), row.guard.init())
    np.testing.assert_array_equal(verdict.ok, expected_ok(row, verdict.ok))
    assert trips(row, verdict.state) == {fault.cause: 1}

    following = apply(name)(row.healthy(10), verdict.state)
    assert np.asarray(following.ok).all()
    assert trips(row, following.state) == {fault.cause: 1}
    same_bits(row.healthy(10).value, following.value)


@pytest.mark.parametrize(
    ("name", "index", "large"),
    [(name, i, large) for name, row in ROWS.items() for i, fault in enumerate(row.faults) for large in fault.lets],
)
def test_a_large_number_that_is_another_s_to_judge_passes(name, index, large):
    row = ROWS[name]
    verdict = apply(name)(row.faults[index].put(row.healthy(0), large), row.guard.init())
    assert np.asarray(verdict.ok).all() and trips(row, verdict.state) == {}


@EACH
def test_the_first_cause_alone_is_counted(name):
    """With everything bad at once the trips are still as many as the samples."""
    row = ROWS[name]
    ctx = row.healthy(0)
    for fault in row.faults:
        ctx = fault.put(ctx, NAN)
    assert trips(row, apply(name)(ctx, row.guard.init()).state) == {row.guard.causes[0]: 1}


@EACH
def test_trips_add_up(name):
    """Call after call, cause by cause."""
    row, state = ROWS[name], ROWS[name].guard.init()
    expected = dict.fromkeys(row.guard.causes, 0)
    for repeat in range(2):
        for fault in row.faults:
            state = apply(name)(fault.put(row.healthy(repeat), NAN), state).state
            expected[fault.cause] += 1
    assert trips(row, state) == expected


@EACH
def test_one_verdict_however_it_is_compiled(name):
    """Eager, scanned and batched as compiled alone."""
    row = ROWS[name]
    bad = [fault.put(row.healthy(1), NOT_FINITE[i % 3]) for i, fault in enumerate(row.faults)]
    contexts = [row.healthy(0), *bad, row.healthy(2)]
    alone, state = [], row.guard.init()
    for ctx in contexts:
        alone.append(apply(name)(ctx, state))
        state = alone[-1].state
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *contexts)
    expected = jax.tree.map(lambda *x: np.stack(x), *alone)

    def step(state: GuardState, ctx: Any) -> tuple[GuardState, Any]:
        verdict = row.guard.apply(ctx, state)
        return verdict.state, verdict

    final, scanned = jax.lax.scan(step, row.guard.init(), stacked)
    same_bits(expected, scanned)
    same_bits(state, final)

    mapped = jax.vmap(row.guard.apply, in_axes=(0, None))(stacked, row.guard.init())
    same_bits((expected.value, expected.ok), (mapped.value, mapped.ok))
    np.testing.assert_array_equal(np.diff(expected.state.trips, axis=0, prepend=0), mapped.state.trips)

    with jax.disable_jit():
        same_bits(alone[1], row.guard.apply(contexts[1], alone[0].state))


# --- what is particular to one


@pytest.mark.parametrize("leaf", ["observation", "raw_action", "log_prob", "distribution", "value", "reward"])
def test_a_bad_transition_reaches_no_return(leaf):
    """Invalid, worth nothing and cut; its neighbours keep their rewards and their masks."""
    ctx = in_batch(leaf, (2, 1))(batch_context(0), NAN)
    before, after = ctx.value, apply("transition")(ctx, BATCH.guard.init()).value
    assert (after.valid[2, 1], after.reward[2, 1], after.truncation[2, 1], after.termination[2, 1]) == (False, 0, 1, 0)
    others = np.ones((3, 5), bool)
    others[2, 1] = False
    for name in ("reward", "valid"):
        np.testing.assert_array_equal(getattr(after, name)[others], getattr(before, name)[others])
    # A network that overflowed here would do so in the loss: what it saw is put away, and the step before is cut.
    np.testing.assert_array_equal(after.truncation[2, 0], float(leaf != "reward"))
    seen = np.asarray(jax.tree.leaves(after.observation)[0])
    assert (seen[2, 1] == 0).all() == (leaf != "reward")
    assert (seen[2, 0] != 0).all()


def test_the_step_before_a_bad_observation_is_cut():
    """It is a good sample whose successor cannot be valued, be it the unroll's last or not."""
    middle = apply("transition")(in_batch("observation", (1, 3))(batch_context(0), NAN), BATCH.guard.init())
    assert middle.value.valid[1, 2] and not middle.value.valid[1, 3]
    assert (middle.value.truncation[1, 2], middle.value.termination[1, 2]) == (1, 0)
    last = apply("transition")(in_batch("bootstrap_observation", (1,))(batch_context(0), INF), BATCH.guard.init())
    assert last.value.valid[1, 4] and last.value.truncation[1, 4] == 1
    assert np.asarray(last.ok).all() and trips(BATCH, last.state) == {}


def test_a_transition_that_was_invalid_is_not_counted_again():
    """The env guard has counted it."""
    verdict = apply("transition")(in_batch("observation", (0, 3))(batch_context(0), NAN), BATCH.guard.init())
    assert not verdict.value.valid[0, 3] and trips(BATCH, verdict.state) == {}


def test_transitions_need_no_mask_nor_value():
    """Where nothing was judged before, and where no value was kept."""
    ctx = batch_context(0)
    ctx = ctx._replace(value=ctx.value._replace(valid=None, value=None))
    verdict = BATCH.guard.apply(in_batch("reward", (2, 1))(ctx, NAN), BATCH.guard.init())
    np.testing.assert_array_equal(verdict.value.valid, expected_ok(BATCH, verdict.ok))
    assert verdict.value.value is None and trips(BATCH, verdict.state) == {"reward": 1}


def test_an_environment_that_was_bad_already_is_not_counted_again():
    """An earlier repeat of the same action was counted; the verdict stays."""
    ctx = ENV.faults[1].put(env_context(0), NAN)
    verdict = apply("quarantine")(ctx._replace(alive=ctx.alive.at[2].set(False)), ENV.guard.init())
    assert not verdict.ok[2] and trips(ENV, verdict.state) == {}


@pytest.mark.parametrize("bad", [*NOT_FINITE, HUGE])
def test_a_limit_beyond_the_type_still_stops_what_is_not_finite(bad):
    """As float32 1e300 is infinite, and infinity is not beyond infinity."""
    guard = dataclasses.replace(ENV.guard, max_abs_state=1e300, max_abs_observation=1e300, max_abs_reward=1e300)
    for fault in ENV.faults[1:6]:
        assert guard.apply(fault.put(env_context(0), bad), guard.init()).ok[2] == (bad == HUGE)


UNLIMITED = dataclasses.replace(ENV.guard, max_abs_state=None, max_abs_observation=None, max_abs_reward=None)


@pytest.mark.parametrize("bad", [*NOT_FINITE, HUGE])
def test_without_limits_what_is_not_finite_is_still_refused(bad):
    """And 1e30 is not, save as a truth value."""
    judge = jax.jit(UNLIMITED.apply)
    for fault in ENV.faults:
        ok = judge(fault.put(env_context(0), bad), UNLIMITED.init()).ok
        assert ok[2] == (bad == HUGE and fault.cause != "done"), fault.cause


def test_the_quarantine_with_nothing_to_judge():
    """Empty metrics and info, no coordinates, an integer observation."""
    guard = UNLIMITED
    state = EnvState(jnp.zeros((4, 2)), jnp.arange(4), jnp.zeros(4), jnp.zeros(4, bool), {}, {})
    verdict = guard.apply(EnvContext(state, jnp.zeros((4, 1)), jnp.ones(4, bool)), guard.init())
    assert verdict.ok.shape == (4,) and verdict.ok.all()
    limited = ENV.guard.apply(EnvContext(state, jnp.zeros((4, 1)), jnp.ones(4, bool)), guard.init())
    assert limited.ok.shape == (4,) and limited.ok.all()


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_an_overflow_in_the_loss_scale_s_search_is_refused_but_nothing_is_wrong(bad):
    """It is the search's ordinary course; once that is at its floor the same gradient trips."""
    ctx = in_gradients(update_context(0), bad)
    for searching in (True, False):
        verdict = apply("update")(ctx._replace(searching=jnp.array(searching)), UPDATE.guard.init())
        assert not verdict.ok
        assert trips(UPDATE, verdict.state) == ({} if searching else {"gradient": 1})


def test_patience_counts_in_a_row():
    """A good iteration in between begins anew; the trips go on counting."""
    guard, state = STATE.guard, STATE.guard.init()
    seen = []
    for bad in (1, 1, 0, 1, 1, 1, 1, 0, 1):
        ctx = STATE.faults[1].put(state_context(0), NAN) if bad else state_context(0)
        state = apply("state")(ctx, state).state
        seen.append(int(state.memory))
        assert guard.exhausted(state) == (seen[-1] >= PATIENCE)
    assert seen == [1, 2, 0, 1, 2, 3, 4, 0, 1]
    assert trips(STATE, state) == {"optimizer": 7}


# --- fold and select


def test_no_guard_traces_nothing():
    """Neither a verdict nor an operation; Python's own True says so."""
    ctx = env_context(0)
    verdict = fold({}, ctx, {})
    assert verdict.ok is True and verdict.value is ctx.value and verdict.state == {}
    assert jax.make_jaxpr(lambda ctx: fold({}, ctx, {}).value)(ctx).eqns == []
    assert jax.make_jaxpr(lambda new, old: select(True, new, old))(ctx, ctx).eqns == []


def test_no_guard_keeps_the_others_states():
    """Of a site without guards the states come back as they were."""
    states = {"elsewhere": GuardState(jnp.ones(2, jnp.int32))}
    verdict = fold({}, BatchContext(3), states)
    assert verdict.state == states and verdict.value == 3


@dataclasses.dataclass(frozen=True)
class Doubling:
    """A guard that repairs by doubling and trips on what it saw beyond a limit."""

    limit: float
    causes: tuple[str, ...] = ("beyond",)

    def init(self) -> GuardState:
        return GuardState(jnp.zeros(1, jnp.int32))

    def apply(self, ctx: Any, state: GuardState) -> Any:
        ok = ctx.value <= self.limit
        return type(fold({}, ctx, {}))(ctx.value * 2, ok, GuardState(state.trips + count_first(~ok[None])))


def test_guards_of_a_site_follow_each_other():
    """Each sees what the one before made of the value; ok only where all are; every state under its name."""
    guards = {"first": Doubling(3.0), "second": Doubling(7.0)}
    states = {name: guard.init() for name, guard in guards.items()} | {"other": GuardState(jnp.int32(5))}
    verdict = jax.jit(lambda ctx, states: fold(guards, ctx, states))(BatchContext(jnp.array([1.0, 3.5, 4.0])), states)
    np.testing.assert_array_equal(verdict.value, [4.0, 14.0, 16.0])
    np.testing.assert_array_equal(verdict.ok, [True, False, False])
    assert (verdict.state["first"].trips.item(), verdict.state["second"].trips.item()) == (2, 1)
    assert verdict.state["other"].trips == 5


def test_select_chooses_and_never_multiplies():
    """Bad numbers of what is not chosen do not come through, by sample or as a whole."""
    new, old = {"a": jnp.full((2, 3), NAN), "b": jnp.full(2, INF)}, {"a": jnp.ones((2, 3)), "b": jnp.zeros(2)}
    same_bits(old, select(jnp.array(False), new, old))
    same_bits(old, select(jnp.array(True), old, new))
    mixed = select(jnp.array([True, False]), new, old)
    assert np.isnan(mixed["a"][0]).all() and (mixed["a"][1] == 1).all() and mixed["b"].tolist() == [INF, 0]
    keys = jax.random.split(jax.random.key(0), 2)
    assert (select(jnp.array([True, False]), keys, keys[::-1]) == keys[jnp.array([0, 0])]).all()


# --- what guards are made of


def test_finiteness_by_leading_axes():
    a, b = jnp.ones((2, 3, 4)).at[1, 2, 0].set(NAN), jnp.ones((2, 3)).at[0, 0].set(-INF)
    tree = {"a": a, "b": b, "n": jnp.ones((2, 3), int)}
    assert not all_finite(tree)
    assert all_finite(tree, 1).tolist() == [False, False]
    assert all_finite(tree, 2).tolist() == [[False, True, True], [True, True, False]]
    assert all_finite({"n": tree["n"]}, 2).all() and all_finite({}).shape == ()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_a_limit_stops_nan_and_infinity_in_every_type(dtype):
    """Also a limit that the type does not hold."""
    x = jnp.array([1.0, -2.0, NAN, INF, -INF], dtype)
    for limit in (2.0, 1e6, 1e39, 1e300):
        assert all_within(x, limit, 1).tolist() == [True, True, False, False, False]
    assert all_within(x, 1.5, 1).tolist() == [True, False, False, False, False]


def test_counting_by_first_cause():
    """The causes add up to the samples, whatever their shape."""
    bad = jax.random.bernoulli(jax.random.PRNGKey(0), 0.4, (3, 5, 7))
    counts = count_first(bad)
    assert counts.dtype == jnp.int32 and counts.sum() == bad.any(axis=0).sum()
    assert counts[0] == bad[0].sum() and counts[1] == (bad[1] & ~bad[0]).sum()
    assert count_first(jnp.array([False, True, True])).tolist() == [0, 1, 0]
