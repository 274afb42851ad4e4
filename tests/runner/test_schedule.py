"""What is due when."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import tiny_config

from rlstable.runner.schedule import Schedule


def schedule(**sections: Any) -> Schedule:
    return Schedule(tiny_config(**sections))


@given(total=st.integers(1, 10**6), evals=st.integers(0, 50), step=st.integers(1, 10**5))
def test_there_are_as_many_evaluations_as_were_asked_for(total: int, evals: int, step: int) -> None:
    """One at most per iteration, the last one at the end."""
    own = schedule(total_steps=total, eval={"num_evals": evals})
    # Long runs of short iterations are cut: what matters is the last of them.
    first = max(0, total - 200 * step)
    ends = range(first, total + step, step)
    due = [own.evaluates(before, before + step) for before in ends if before < total]
    assert sum(due) <= evals
    assert not due or due[-1] == (evals > 0)
    if first == 0 and step * evals <= total:
        assert sum(due) == evals


def test_steps_beyond_the_end_are_none() -> None:
    own = schedule(total_steps=100, eval={"num_evals": 1})
    assert own.evaluates(60, 160)
    assert not own.evaluates(160, 260)


@pytest.mark.parametrize(
    ("evals", "resets", "due"), [(2, 0, []), (2, 1, [50, 100]), (0, 2, [50, 100]), (2, 2, [30, 50, 80, 100])]
)
def test_resets_are_counted_between_evaluations(evals: int, resets: int, due: list[int]) -> None:
    own = schedule(total_steps=100, eval={"num_evals": evals}, ppo={"num_resets_per_eval": resets})
    assert [after for after in range(10, 110, 10) if own.resets(after - 10, after)] == due


def test_the_pool_is_refilled_every_so_often_or_never() -> None:
    assert [n for n in range(1, 13) if schedule(env={"reset_pool_refresh": 5}).refills(n)] == [5, 10]
    assert not any(schedule(env={"reset_pool_refresh": 0}).refills(n) for n in range(1, 13))


def test_rows_come_every_so_often() -> None:
    assert [n for n in range(1, 10) if schedule(logging={"log_every": 4}).logs(n)] == [4, 8]
