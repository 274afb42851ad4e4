"""The section `distributed`: which processes train one run together."""

from __future__ import annotations

import pytest

from rlstable.cli.compose import compose
from rlstable.config import ConfigError


def mistake(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(["env=fast", *words])
    return str(caught.value)


@pytest.mark.parametrize("word", ["auto", "true", "false"])
def test_short_form_sets_whether_several_processes_train(word: str) -> None:
    assert compose(["env=fast", f"distributed={word}"]).distributed.enabled == word


def test_processes_are_not_saved_with_a_run() -> None:
    config = compose(["env=fast", "distributed.coordinator=node1:1234"])
    assert "distributed" not in config.model_dump(mode="json")


def test_number_of_a_process_must_be_less_than_the_number_of_processes() -> None:
    assert mistake("distributed.process_id=2", "distributed.num_processes=2") == (
        "distributed.process_id: 2 must be less than num_processes=2; the first process is 0"
    )


def test_settings_of_several_processes_are_rejected_in_a_run_of_one_process() -> None:
    assert mistake("distributed=false", "distributed.coordinator=node1:1234") == (
        "distributed.enabled: false trains in one process, so coordinator, process_id and num_processes must be null"
    )


def test_address_of_the_coordinator_needs_a_port() -> None:
    assert mistake("distributed.coordinator=node1") == (
        "distributed.coordinator: 'node1' must have the form <host of process 0>:<port>"
    )


def test_unknown_switch_names_what_is_allowed() -> None:
    assert mistake("distributed=sometimes") == (
        "distributed.enabled: input should be 'auto', 'true' or 'false', got 'sometimes'"
    )
