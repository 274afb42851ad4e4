"""The section `distributed`: which processes train one run together."""

from __future__ import annotations

import pytest

from rlstable.cli.compose import compose


@pytest.mark.parametrize("word", ["auto", "true", "false"])
def test_short_form_sets_whether_several_processes_train(word: str) -> None:
    assert compose(["env=fast", f"distributed={word}"]).distributed.enabled == word


def test_processes_are_not_saved_with_a_run() -> None:
    config = compose(["env=fast", "distributed.coordinator=node1:1234"])
    assert "distributed" not in config.model_dump(mode="json")
