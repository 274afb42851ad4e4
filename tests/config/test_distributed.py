"""The section `distributed`: which processes train one run together."""

from __future__ import annotations

import pytest

from rlstable.cli.compose import compose
from rlstable.config import ConfigError


@pytest.mark.parametrize("word", ["auto", "true", "false"])
def test_short_form_sets_whether_several_processes_train(word: str) -> None:
    assert compose(["env=fast", f"distributed={word}"]).distributed.enabled == word


def test_processes_are_not_saved_with_a_run() -> None:
    config = compose(["env=fast", "distributed.coordinator=node1:1234"])
    assert "distributed" not in config.model_dump(mode="json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("process_id=2 num_processes=2", "process_id: 2 must be less than num_processes=2; the first process is 0"),
        ("enabled=false coordinator=node1:1", "enabled: false trains in one process, so coordinator, process_id and "),
        ("coordinator=node1", "coordinator: 'node1' must have the form <host of process 0>:<port>"),
        ("enabled=sometimes", "enabled: input should be 'auto', 'true' or 'false', got 'sometimes'"),
    ],
)
def test_mistake_about_processes_is_one_line(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["env=fast", *(f"distributed.{word}" for word in words.split())])
    assert str(caught.value).startswith(f"distributed.{message}")
