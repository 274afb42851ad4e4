"""Retries after a failed save: soon at first, later while saves keep failing."""

from __future__ import annotations

import pytest

from rlstable.io.retry import Retry


@pytest.mark.parametrize("every", [1, 3])
def test_saves_without_failures_are_due_once_per_period(every):
    retry = Retry(every)
    assert [i for i in range(1, 301) if retry.due(i)] == list(range(every, 301, every))


def test_failed_saves_are_retried_after_1_2_4_iterations_up_to_the_period():
    retry, tried = Retry(10), []
    for iteration in range(1, 61):
        if retry.due(iteration):
            tried.append(iteration)
            retry.failed(iteration)
    # 10 by the clock; then 1, 2, 4, 8 later, and every set time as well.
    assert tried == [10, 11, 13, 17, 20, 30, 40, 50, 60]


def test_failure_noticed_late_is_retried_at_once():
    retry = Retry(100)
    retry.failed(100)
    assert [i for i in range(101, 104) if retry.due(i)] == [101, 102, 103]


def test_successful_save_resets_the_retries_and_returns_their_number():
    retry = Retry(10)
    assert retry.saved() == 0
    retry.failed(10)
    retry.failed(11)
    assert retry.saved() == 2
    assert retry.saved() == 0
    assert [i for i in range(11, 31) if retry.due(i)] == [20, 30]
    retry.failed(20)
    assert retry.due(21)  # the first failure after a success counts as the first


def test_retry_delay_does_not_overflow():
    retry = Retry(7)
    for iteration in range(5000):
        retry.failed(iteration)
    assert retry.due(5000 - 1 + 7)
    assert not retry.due(5000)
