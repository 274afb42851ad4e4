"""Resuming: mistakes that are noticed before a state is read."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toys import tiny_config

from rlstable.config import ConfigError
from rlstable.io.checkpoint import Checkpoints
from rlstable.runner.host_state import HostState
from rlstable.runner.resume import resume


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda saved: saved.update(more=1), "HostState differs in more"),
        (lambda saved: saved.pop("episodes"), "HostState differs in episodes"),
        (lambda saved: saved["tally"].pop("void"), "Tally differs in void"),
        (lambda saved: saved["watch"].update(more=1), "more"),
        (lambda saved: saved.update(plan=[]), "list"),
    ],
)
def test_host_state_of_another_version_is_one_line(change: Any, why: str) -> None:
    saved = copy.deepcopy(dataclasses.asdict(HostState()))
    assert HostState.of(saved) == HostState()
    change(saved)
    with pytest.raises(ConfigError, match=rf"^resume: another version of rlstable saved the host state \(.*{why}"):
        HostState.of(saved)


def test_run_folder_that_a_process_does_not_see_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = SimpleNamespace(
        is_writer=lambda: False, from_writer=lambda name, value: 7, gather=lambda name, value: [True, value]
    )
    monkeypatch.setattr("rlstable.runner.resume.hosts", second)
    config = tiny_config()
    unused: Any = None
    saving: Any = SimpleNamespace(config=config, host=None, programs=None)
    with Checkpoints(tmp_path, config.checkpoint) as saving.checkpoints, pytest.raises(ConfigError) as caught:
        resume(saving, unused, unused)
    assert str(caught.value) == (
        f"resume: process 1 does not find checkpoint 7 in {tmp_path / 'checkpoints'}, which process 0 reads; resume in "
        "a folder that all hosts share"
    )
