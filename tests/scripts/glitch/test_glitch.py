"""The study of wrong but finite numbers: tasks, cells and table."""

from __future__ import annotations

import pytest

from rlstable.cli.compose import compose
from rlstable.config.faults import FaultConfig
from scripts.glitch import __main__ as glitch


@pytest.mark.parametrize("task", glitch.TASKS)
def test_every_task_is_a_valid_command(task: str) -> None:
    assert compose([*glitch.TASKS[task].overrides, "fault.site=reward"]).fault.site == "reward"


def test_every_glitch_is_a_fault_with_its_value() -> None:
    for wrong in glitch.GLITCHES.values():
        assert FaultConfig(site=wrong.site, value=wrong.value).number == wrong.value
