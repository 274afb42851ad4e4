"""Limiters: exact values, gradients that stay finite and lead back, and how often they are active."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstable.guards import limiters

NAN, INF = float("nan"), float("inf")
FLOATS = st.floats(-10, 10, width=32, allow_subnormal=False)  # XLA takes subnormal numbers for zero


def gradient(function: Callable[[jax.Array], jax.Array], *at: float) -> list[float]:
    return jax.grad(lambda x: jnp.sum(function(x)))(jnp.array(at, jnp.float32)).tolist()


# --- clip, beyond


def test_clip_is_exact():
    x = jnp.array([-INF, -3.5, -3.0, -1e-8, 0.0, 2.9999998, 3.0, 1e30, INF])
    expected = np.array([-3.0, -3.0, -3.0, -1e-8, 0.0, 2.9999998, 3.0, 3.0, 3.0], np.float32)
    np.testing.assert_array_equal(limiters.clip(x, 3.0), expected)


def test_clip_leaves_nan_to_a_guard():
    """A repair in silence would be none."""
    assert np.isnan(limiters.clip(jnp.array([NAN, 1.0]), 3.0)).tolist() == [True, False]


def test_clip_s_gradient_is_finite():
    assert gradient(lambda x: limiters.clip(x, 3.0), 1.0, 5.0, -1e30, INF) == [1.0, 0.0, 0.0, 0.0]
    assert np.isfinite(gradient(lambda x: jnp.exp(limiters.clip(x, 20.0)), 1e30, 19.0, -INF)).all()


def test_an_exponential_that_is_clipped_later_has_no_gradient():
    """The failure: the limiter stands on the exponential's input, never on its output."""
    assert np.isnan(gradient(lambda x: limiters.clip(jnp.exp(x), 1e8), 1000.0)).all()
    assert gradient(lambda x: jnp.exp(limiters.clip(x, 20.0)), 1000.0) == [0.0]


def test_beyond_says_where_clip_is_active():
    """What stands at the limit is not beyond it; NaN is."""
    x = jnp.array([0.0, 3.0, -3.0, 3.0000002, -4.0, INF, -INF, NAN])
    active = limiters.beyond(x, 3.0)
    assert active.tolist() == [0, 0, 0, 1, 1, 1, 1, 1] and active.dtype == jnp.float32
    moved = np.asarray(limiters.clip(x, 3.0)) != np.asarray(x)
    np.testing.assert_array_equal(active, moved)


# --- bounded, outside


@settings(max_examples=60, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=8), FLOATS, st.floats(0.125, 10, width=32))
def test_bounded_is_clip_and_inside_so_is_its_gradient(xs, low, width):
    """Strictly inside, the function is the identity."""
    low, high = np.float32(low), np.float32(low + width)
    x = np.array(xs, np.float32)
    np.testing.assert_array_equal(limiters.bounded(jnp.array(x), float(low), float(high)), np.clip(x, low, high))
    inside = (x > low) & (x < high)
    for sign in (1.0, -1.0):
        got = np.array(gradient(lambda y, s=sign: s * limiters.bounded(y, float(low), float(high)), *xs))
        assert (got[inside] == sign).all() and np.isin(got, (0.0, sign)).all()


@pytest.mark.parametrize(
    ("x", "slope", "passes"),
    [
        # Downhill from a value above the ceiling: down is back inside, up is further out.
        (5.0, 1.0, True), (5.0, -1.0, False), (-5.0, -1.0, True), (-5.0, 1.0, False),
        # At a bound alike.
        (2.0, 1.0, True), (2.0, -1.0, False), (-2.0, -1.0, True), (-2.0, 1.0, False),
        (0.5, 1.0, True), (0.5, -1.0, True),
    ],
)  # fmt: skip
def test_the_gradient_passes_back_inside_and_not_further_out(x, slope, passes):
    assert gradient(lambda y: slope * limiters.bounded(y, -2.0, 2.0), x) == [slope if passes else 0.0]


@pytest.mark.parametrize(("low", "high"), [(0.1, None), (None, 0.1)])
def test_one_bound_alone(low, high):
    x = jnp.array([-1e30, 0.0, 0.1, 0.3, 1e30])
    bounded = limiters.bounded(x, low, high)
    np.testing.assert_array_equal(bounded, np.clip(np.asarray(x), low, high))
    outside = limiters.outside(x, low, high)
    np.testing.assert_array_equal(outside, np.asarray(bounded) != np.asarray(x))


def descend(bound: Callable[[jax.Array], jax.Array], std: float, wanted: float, steps: int = 400) -> float:
    """Gradient descent on a parameter that is used only through its bound."""

    def step(std: jax.Array, _: None) -> tuple[jax.Array, None]:
        return std - 0.02 * jax.grad(lambda s: jnp.square(bound(s) - wanted))(std), None

    return float(jax.lax.scan(step, jnp.float32(std), None, length=steps)[0])


@pytest.mark.parametrize("std", [0.01, -0.5, 5.0])
def test_a_std_that_left_its_bounds_can_come_back(std):
    """The failure: clipped plainly it has no gradient and stays where it is for ever. The cure: it arrives."""
    assert descend(lambda s: jnp.clip(s, 0.1, 2.0), std, wanted=0.5) == pytest.approx(std, abs=1e-6)
    assert descend(lambda s: limiters.bounded(s, 0.1, 2.0), std, wanted=0.5) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(("wanted", "end"), [(0.0, 0.1), (3.0, 2.0)])
def test_a_std_is_not_driven_further_out(wanted, end):
    """Where the loss wants what the bounds forbid, the parameter stops near the bound and the way back stays short."""
    assert descend(lambda s: limiters.bounded(s, 0.1, 2.0), 0.5, wanted) == pytest.approx(end, abs=0.05)


def test_no_number_makes_bounded_s_gradient_bad():
    """Neither infinite nor NaN values; what comes from above is passed or left out, never multiplied."""
    for sign in (1.0, -1.0):
        slopes = gradient(lambda y, s=sign: s * limiters.bounded(y, 0.1, 2.0), NAN, INF, -INF, 1e30, 0.1)
        assert np.isfinite(slopes).all()


def test_bounded_leaves_nan_to_a_guard():
    bounded = limiters.bounded(jnp.array([NAN, -INF, INF]), 0.1, 2.0)
    np.testing.assert_array_equal(bounded, np.array([NAN, 0.1, 2.0], np.float32))


def test_outside_says_where_bounded_is_active():
    x = jnp.array([0.05, 0.1, 1.0, 2.0, 2.5, INF, -INF, NAN])
    active = limiters.outside(x, 0.1, 2.0)
    assert active.tolist() == [1, 0, 0, 0, 1, 1, 1, 1] and active.dtype == jnp.float32


# --- both


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_types_are_kept(dtype):
    """A half-precision network stays one, forward and backward."""
    x = jnp.array([0.5, 9.0], dtype)
    for limit in (
        lambda y: limiters.clip(y, 3.0),
        lambda y: limiters.bounded(y, 0.1, None),
        lambda y: limiters.bounded(y, None, 3.0),
    ):
        assert limit(x).dtype == dtype
        assert jax.grad(lambda y, limit=limit: jnp.sum(limit(y)))(x).dtype == dtype


def test_what_is_off_traces_nothing():
    """None is no bound at all, not an infinite one."""
    x = jnp.ones(3)
    assert limiters.clip(x, None) is x and limiters.bounded(x, None, None) is x
    assert jax.make_jaxpr(lambda y: limiters.clip(y, None))(x).eqns == []
    assert jax.make_jaxpr(lambda y: limiters.bounded(y, None, None))(x).eqns == []


def test_under_jit_vmap_and_scan():
    x = jnp.array([[0.05, 1.0], [5.0, NAN]])
    expected = limiters.bounded(x, 0.1, 2.0)
    for got in (
        jax.jit(lambda y: limiters.bounded(y, 0.1, 2.0))(x),
        jax.vmap(lambda y: limiters.bounded(y, 0.1, 2.0))(x),
        jax.lax.scan(lambda c, y: (c, limiters.bounded(y, 0.1, 2.0)), 0, x)[1],
    ):
        np.testing.assert_array_equal(got, expected)
