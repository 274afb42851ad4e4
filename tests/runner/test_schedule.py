"""Evaluations, resets, refills and rows come at the configured intervals."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstable.runner.host_state import ROWS, HostState, Schedule


def schedule(host: HostState, **numbers: int) -> Schedule:
    usual = dict.fromkeys(field.name for field in dataclasses.fields(Schedule))
    return Schedule(**usual | {"host": host, "total_steps": 100, "evaluations": 0} | numbers)


def evaluates(total: int, evals: int, step: int, before: int) -> bool:
    """Whether an evaluation is due after the iteration of `step` steps that begins at `before`."""
    own = schedule(HostState(step=before), total_steps=total, evaluations=evals, iteration_steps=step)
    return own.evaluates_next


@given(total=st.integers(1, 10**6), evals=st.integers(0, 50), step=st.integers(1, 10**5))
def test_run_has_as_many_evaluations_as_configured(total: int, evals: int, step: int) -> None:
    """At most one per iteration, and one at the end."""
    # Long runs of short iterations are cut to their last 200 iterations.
    first = max(0, total - 200 * step)
    ends = range(first, total + step, step)
    due = [evaluates(total, evals, step, before) for before in ends if before < total]
    assert sum(due) <= evals
    assert not due or due[-1] == (evals > 0)
    if first == 0 and step * evals <= total:
        assert sum(due) == evals


def test_no_evaluation_is_due_beyond_the_end_of_the_run() -> None:
    assert evaluates(100, 1, 100, before=60)
    assert not evaluates(100, 1, 100, before=160)


@pytest.mark.parametrize(
    ("evals", "resets", "due"), [(2, 0, []), (2, 1, [50, 100]), (0, 2, [50, 100]), (2, 2, [30, 50, 80, 100])]
)
def test_num_resets_per_eval_spreads_resets_between_evaluations(evals: int, resets: int, due: list[int]) -> None:
    host = HostState()
    own = schedule(host, evaluations=evals, resets_per_evaluation=resets)
    found = []
    for host.step in range(10, 110, 10):
        found += [host.step] * own.resets(host.step - 10)
    assert found == due


@pytest.mark.parametrize(
    ("every", "step", "due"),
    [(0, 10, []), (1, 10, [30, 50, 80, 100]), (2, 10, [50, 100]), (3, 10, [80]), (2, 60, [60, 120])],
)
def test_recordings_come_after_every_nth_evaluation(every: int, step: int, due: list[int]) -> None:
    host = HostState()
    own = schedule(host, evaluations=4, recorded_every=every)
    found = []
    for host.step in range(step, 100 + step, step):
        found += [host.step] * own.records(host.step - step, host.step)
    assert found == due


@pytest.mark.parametrize(("every", "used", "due"), [(5, True, [5, 10]), (5, False, []), (0, True, [])])
def test_pool_is_refilled_at_intervals_if_it_was_drawn_from(every: int, used: bool, due: list[int]) -> None:
    hosts = [HostState(iteration=n, pool_used=used) for n in range(1, 13)]
    assert [host.iteration for host in hosts if schedule(host, refilled_every=every).refills] == due


def test_rows_are_logged_at_intervals() -> None:
    hosts = [HostState(iteration=n) for n in range(1, 10)]
    assert [host.iteration for host in hosts if schedule(host, logged_every=4).logs] == [4, 8]


def test_interval_of_rows_doubles_in_long_runs() -> None:
    host, found = HostState(), []
    own = schedule(host, logged_every=2)
    for host.iteration in range(1, 40 * ROWS):
        found += [host.iteration] * own.logs
    assert found[: ROWS + 2] == [*range(2, 2 * ROWS + 1, 2), 2 * ROWS + 4, 2 * ROWS + 8]
    assert found[-2:] == [40 * ROWS - 128, 40 * ROWS - 64]
    assert len(found) < 4 * ROWS
