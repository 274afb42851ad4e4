"""OmegaConf resolvers are rejected in settings, so that no environment variable is saved with a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlstable.cli.compose import compose
from rlstable.cli.resolvers import reject_resolvers
from rlstable.config import ConfigError
from rlstable.io.run_folder import write_config
from rlstable.policy.saved_run import read_config
from rlstable.train import main

SECRET = "a-secret-that-must-not-be-printed"
TYPED = [
    "logging.wandb.name=${oc.env:RLSTABLE_TEST_SECRET}",
    "env.name=${oc.env:RLSTABLE_TEST_SECRET}",
    "+env.kwargs.token=${oc.env:RLSTABLE_TEST_SECRET}",
    "env.kwargs={inner: [1, {token: '${oc.env:RLSTABLE_TEST_SECRET}'}]}",
    "resume=${oc.env:RLSTABLE_TEST_SECRET}",
]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSTABLE_TEST_SECRET", SECRET)


@pytest.mark.parametrize("text", ["${oc.env:A}", "x ${oc.env:A} y", "${ oc.env : A}", "${${a}:b}", "${x}${now:%Y}"])
def test_resolver_is_found_wherever_it_is_in_nested_settings(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^env\.kwargs\.list\[1\]: the resolver '"):
        reject_resolvers({"seed": 1, "env": {"kwargs": {"list": [None, text]}}})


@pytest.mark.parametrize("text", ["", "toys:PointMass", "${ppo.num_envs}", "a: {b: c}", "$HOME:x"])
def test_other_text_is_no_resolver(text: str) -> None:
    assert reject_resolvers({"value": text}) is None


@pytest.mark.parametrize("word", TYPED)
def test_typed_resolver_is_one_line_and_leaves_no_secret_behind(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rlstable.train", "env=import", "env.name=toys:PointMass", word])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    key = word.lstrip("+").split("=")[0]
    assert line.startswith(f"rlstable: {key}") and "the resolver '${oc.env:RLSTABLE_TEST_SECRET}' is rejected" in line
    assert SECRET not in printed.out + printed.err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="is rejected"):
        compose(["env=import", "env.name=toys:PointMass", word])


def test_reference_to_another_key_is_resolved() -> None:
    assert compose(["env=fast", "ppo.num_envs=${ppo.batch_size}", "ppo.batch_size=32"]).ppo.num_envs == 32


def test_resolver_in_saved_settings_is_rejected_and_not_run(tmp_path: Path) -> None:
    saved = compose(["env=fast"]).model_dump(mode="json")
    saved["env"]["kwargs"] = {"token": "${oc.env:RLSTABLE_TEST_SECRET}"}
    write_config(tmp_path, saved)
    said = rf"^run: {tmp_path}/config\.yaml has the resolver .* at env\.kwargs\.token; write the value instead$"
    for read in (lambda: read_config(tmp_path), lambda: compose([f"resume={tmp_path}"])):
        with pytest.raises(ConfigError, match=said) as refused:
            read()
        assert SECRET not in str(refused.value)
