"""Snapshots of training states: kept, promoted, saved beside other states and loaded again."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from toys import assemble, assert_same, mesh, placed, tiny_config

from rlstable.ppo.state import TrainState
from rlstable.supervise import snapshots
from rlstable.supervise.snapshots import NAMES, SavedState, Snapshot, Snapshots

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def state() -> TrainState:
    return assemble(tiny_config())[1]


def moved(state: TrainState, by: float) -> TrainState:
    """The state with other parameters."""
    params = jax.tree.map(lambda x: x + np.float32(by), state.params)
    return TrainState(**{**snapshots._fields(state), "params": params})


def test_restored_state_keeps_its_environments_and_takes_the_rest(state: TrainState) -> None:
    own = Snapshot()
    own.keep(moved(state, 1.0), 1, 64)
    found = own.restored(placed(state), mesh())
    assert_same(found.params, moved(state, 1.0).params)
    assert_same(found.env_state, state.env_state)


@pytest.mark.parametrize("at", list(itertools.product([None, "itself", "other"], repeat=3)), ids=str)
def test_saved_snapshots_are_loaded_whether_or_not_they_are_the_state_itself(
    state: TrainState, at: tuple[str | None, ...]
) -> None:
    kept = Snapshots(mesh())
    for number, (name, where) in enumerate(zip(NAMES, at, strict=True), 1):
        own = getattr(kept, name)
        if where == "itself":
            own.keep(state, 9, 576)
        elif where == "other":
            own.keep(moved(state, float(number)), number, 64 * number)
    saved, origins = kept.save(state, 9)
    beside = {name for name in NAMES if getattr(saved, name, None) is not None}
    assert beside == {name for name, where in zip(NAMES, at, strict=True) if where == "other"}
    # A checkpoint without anything beside its state has the tree of a plain state.
    assert isinstance(saved, SavedState) == bool(beside)
    read = saved if isinstance(saved, SavedState) else SavedState(**snapshots._fields(saved))
    again = Snapshots(mesh())
    assert_same(again.load(read, 9, origins), state)
    for name in NAMES:
        ours, theirs = getattr(again, name), getattr(kept, name)
        assert (ours.iteration, ours.step, ours.empty) == (theirs.iteration, theirs.step, theirs.empty)
        assert_same(ours._parts, theirs._parts)


def test_numbers_typed_on_resume_change_the_snapshots_too(state: TrainState) -> None:
    kept = Snapshots(mesh())
    kept.best.keep(moved(state, 1.0), 1, 64)
    saved, origins = kept.save(state, 9)
    assert isinstance(saved, SavedState)
    again = Snapshots(mesh())
    found = again.load(saved, 9, origins, learning_rate=np.float32(0.5))
    assert float(found.tuning.learning_rate) == 0.5
    assert float(again.best._parts["tuning"].learning_rate) == 0.5
