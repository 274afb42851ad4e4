"""The inference guard on plain arrays: the rows replaced, the actions used instead, and the counted causes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.guards.inference import ActionContext, InferenceGuard

NAN, INF = float("nan"), float("inf")
BAD = pytest.mark.parametrize("bad", [NAN, -INF])
GUARD = InferenceGuard((0.5, -0.25))
ACTIONS = np.float32([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
OBSERVATIONS = np.arange(12, dtype=np.float32).reshape(3, 4)


def context(actions: np.ndarray = ACTIONS, raw: np.ndarray = ACTIONS, obs: np.ndarray = OBSERVATIONS) -> ActionContext:
    return ActionContext(jnp.asarray(actions), jnp.asarray(raw), jnp.asarray(obs))


def put(x: np.ndarray, index: tuple[int, ...], value: float) -> np.ndarray:
    changed = x.copy()
    changed[index] = value
    return changed


@BAD
def test_bad_action_element_replaces_its_row_only(bad: float) -> None:
    actions = put(ACTIONS, (1, 1), bad)
    verdict = GUARD.apply(context(actions, actions), GUARD.init((3,)))
    np.testing.assert_array_equal(verdict.value, np.float32([ACTIONS[0], [0.5, -0.25], ACTIONS[2]]))
    np.testing.assert_array_equal(verdict.ok, [True, False, True])
    np.testing.assert_array_equal(verdict.state.trips, [0, 1])


@BAD
def test_bad_action_before_squashing_is_replaced(bad: float) -> None:
    raw = put(ACTIONS, (0, 1), bad)
    verdict = GUARD.apply(context(raw=raw), GUARD.init((3,)))
    np.testing.assert_array_equal(verdict.value, np.float32([[0.5, -0.25], ACTIONS[1], ACTIONS[2]]))
    np.testing.assert_array_equal(verdict.state.trips, [0, 1])


@BAD
def test_bad_observation_is_counted_before_a_bad_action(bad: float) -> None:
    """Each row is counted once."""
    actions = put(ACTIONS, (0, 0), NAN)
    obs = put(put(OBSERVATIONS, (0, 3), bad), (2, 0), bad)
    verdict = GUARD.apply(context(actions, actions, obs), GUARD.init((3,)))
    np.testing.assert_array_equal(verdict.value, np.float32([[0.5, -0.25], ACTIONS[1], [0.5, -0.25]]))
    np.testing.assert_array_equal(verdict.state.trips, [2, 0])


def test_inference_guard_repeats_the_last_good_action_of_each_row() -> None:
    state = GUARD.apply(context(put(ACTIONS, (0, 0), NAN)), GUARD.init((3,))).state
    verdict = GUARD.apply(context(np.full_like(ACTIONS, INF), obs=OBSERVATIONS), state)
    np.testing.assert_array_equal(verdict.value, np.float32([[0.5, -0.25], ACTIONS[1], ACTIONS[2]]))
    np.testing.assert_array_equal(verdict.state.trips, [0, 4])


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_inference_guard_accepts_any_leading_axes(shape: tuple[int, ...]) -> None:
    actions = np.full((*shape, 2), NAN, np.float32)
    verdict = GUARD.apply(context(actions, actions, np.zeros((*shape, 4), np.float32)), GUARD.init(shape))
    np.testing.assert_array_equal(verdict.value, np.broadcast_to(np.float32([0.5, -0.25]), (*shape, 2)))
    assert verdict.ok.shape == shape
    np.testing.assert_array_equal(verdict.state.trips, [0, np.prod(shape, dtype=int)])
