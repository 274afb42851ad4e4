"""The inference guard on plain arrays: which rows it replaces, by what, and why it says it did."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.guards.inference import ActionContext, InferenceGuard

NAN, INF = float("nan"), float("inf")
BAD = pytest.mark.parametrize("bad", [NAN, INF, -INF])
GUARD = InferenceGuard((0.5, -0.25))
ACTIONS = np.float32([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
OBSERVATIONS = np.arange(12, dtype=np.float32).reshape(3, 4)


def context(actions: np.ndarray = ACTIONS, raw: np.ndarray = ACTIONS, obs: np.ndarray = OBSERVATIONS) -> ActionContext:
    return ActionContext(jnp.asarray(actions), jnp.asarray(raw), jnp.asarray(obs))


def put(x: np.ndarray, index: tuple[int, ...], value: float) -> np.ndarray:
    changed = x.copy()
    changed[index] = value
    return changed


def test_healthy_actions_pass_bit_for_bit() -> None:
    largest = np.finfo(np.float32).max
    healthy = np.float32([[-0.0, 1e-45], [largest, -largest], [0.0, 1.0]])
    verdict = GUARD.apply(context(healthy, healthy), GUARD.init((3,)))
    np.testing.assert_array_equal(np.asarray(verdict.value).view(np.uint32), healthy.view(np.uint32))
    np.testing.assert_array_equal(verdict.ok, [True] * 3)
    np.testing.assert_array_equal(verdict.state.trips, [0, 0])
    np.testing.assert_array_equal(verdict.state.memory, healthy)


@BAD
@pytest.mark.parametrize("element", [0, 1])
def test_one_bad_element_replaces_its_row_and_no_other(bad: float, element: int) -> None:
    actions = put(ACTIONS, (1, element), bad)
    verdict = GUARD.apply(context(actions, actions), GUARD.init((3,)))
    np.testing.assert_array_equal(verdict.value, np.float32([ACTIONS[0], [0.5, -0.25], ACTIONS[2]]))
    np.testing.assert_array_equal(verdict.ok, [True, False, True])
    np.testing.assert_array_equal(verdict.state.trips, [0, 1])


@BAD
def test_a_squashed_infinity_is_still_bad(bad: float) -> None:
    raw = put(ACTIONS, (0, 1), bad)
    verdict = GUARD.apply(context(raw=raw), GUARD.init((3,)))
    np.testing.assert_array_equal(verdict.value, np.float32([[0.5, -0.25], ACTIONS[1], ACTIONS[2]]))
    np.testing.assert_array_equal(verdict.state.trips, [0, 1])


@BAD
def test_a_bad_observation_is_the_first_cause(bad: float) -> None:
    """The action of row 2 is finite all the same; that of row 0 is not, and is counted once."""
    actions = put(ACTIONS, (0, 0), NAN)
    obs = put(put(OBSERVATIONS, (0, 3), bad), (2, 0), bad)
    verdict = GUARD.apply(context(actions, actions, obs), GUARD.init((3,)))
    np.testing.assert_array_equal(verdict.value, np.float32([[0.5, -0.25], ACTIONS[1], [0.5, -0.25]]))
    np.testing.assert_array_equal(verdict.state.trips, [2, 0])


def test_memory_is_the_last_good_action_of_each_row() -> None:
    state = GUARD.apply(context(put(ACTIONS, (0, 0), NAN)), GUARD.init((3,))).state
    verdict = GUARD.apply(context(np.full_like(ACTIONS, INF), obs=OBSERVATIONS), state)
    np.testing.assert_array_equal(verdict.value, np.float32([[0.5, -0.25], ACTIONS[1], ACTIONS[2]]))
    np.testing.assert_array_equal(verdict.state.trips, [0, 4])


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_any_leading_axes(shape: tuple[int, ...]) -> None:
    actions = np.full((*shape, 2), NAN, np.float32)
    verdict = GUARD.apply(context(actions, actions, np.zeros((*shape, 4), np.float32)), GUARD.init(shape))
    np.testing.assert_array_equal(verdict.value, np.broadcast_to(np.float32([0.5, -0.25]), (*shape, 2)))
    assert verdict.ok.shape == shape
    np.testing.assert_array_equal(verdict.state.trips, [0, np.prod(shape, dtype=int)])


def test_types_do_not_change() -> None:
    before = GUARD.init((3,))
    after = jax.eval_shape(GUARD.apply, context(), before).state
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.weak_type), before
    )
