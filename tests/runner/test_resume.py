"""Resuming: mistakes that are noticed before a state is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toys import tiny_config

from rlstable.config import ConfigError
from rlstable.device import hosts
from rlstable.io.checkpoint import Checkpoints
from rlstable.runner.resume import resume


def test_run_folder_that_a_process_does_not_see_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "is_writer", lambda: False)
    monkeypatch.setattr(hosts, "from_writer", lambda name, value: 7)
    monkeypatch.setattr(hosts, "gather", lambda name, value: [True, value])
    config = tiny_config()
    unused: Any = None
    with Checkpoints(tmp_path, config.checkpoint) as checkpoints, pytest.raises(ConfigError) as caught:
        resume(checkpoints, config, unused, unused, unused, unused, unused, unused)
    assert str(caught.value) == (
        f"resume: process 1 does not find checkpoint 7 in {tmp_path / 'checkpoints'}, which process 0 reads; resume in "
        "a folder that all hosts share"
    )
