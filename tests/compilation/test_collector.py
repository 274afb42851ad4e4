"""Python's garbage collector around traces and at the start of a process."""

import gc
from collections.abc import Iterator

import pytest

from rlstable.compilation import collector


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_paused_and_then_as_before(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(KeyError), collector.paused():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() is enabled


def test_objects_of_the_start_are_left_out_of_later_collections() -> None:
    gc.disable()
    collector.exclude_existing_objects()
    assert gc.isenabled() and gc.get_freeze_count() > 1000


def test_collector_that_runs_already_is_left_alone() -> None:
    """A second job of a sweep must not keep the arrays of the first."""
    gc.enable()
    collector.exclude_existing_objects()
    assert gc.isenabled() and gc.get_freeze_count() == 0
