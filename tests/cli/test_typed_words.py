"""Words of the training command before Hydra reads them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlstable.cli.compose import compose
from rlstable.cli.typed_words import prepared
from rlstable.config import ConfigError
from rlstable.config.overrides import literal


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--env", "ant"], "cannot read '--env ant': write env=ant"),
        (["--env=ant"], "cannot read '--env=ant': write env=ant"),
        (["-m", "env", "ant", "seed=1"], "cannot read 'env ant': write env=ant"),
        (["--seed"], "cannot read '--seed': write seed=<value>"),
        (["--learning-rate", "1e-3"], "cannot read '--learning-rate 1e-3': write ppo.learning_rate=1e-3"),
        (["--lr=1e-3"], "cannot read '--lr=1e-3': write ppo.learning_rate=1e-3"),
        (["--ppo.num_envs", "8"], "cannot read '--ppo.num_envs 8': write ppo.num_envs=8"),
        (["num_envs", "8"], "cannot read 'num_envs 8': write ppo.num_envs=8 or eval.num_envs=8"),
        (["--resume", "runs/x"], "cannot read '--resume runs/x': write resume=runs/x"),
    ],
)
def test_other_spelling_of_an_override_names_the_right_one(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(words)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["env=ant", "--cfg", "job"],
        ["-m", "seed=0,1"],
        ["--info", "config"],
        ["--multirun", "--run", "--resolve", "--package", "ppo", "--help", "--hydra-help", "--version"],
        ["-sc", "install=bash"],
        ["--config-name", "mine", "--config-dir", "here", "--config-path", "there"],
        ["resume=auto", "hydra.run.dir=new", "resume=null", "resume=nowhere"],
        ["+env.kwargs={a: 1}", "~env.kwargs"],
    ],
)
def test_words_of_hydra_do_not_change(words: list[str]) -> None:
    assert prepared(words) == words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--frobnicate"], "unknown flag '--frobnicate'; settings are written key=value, and the flags are --multirun"),
        (["env=ant", "-x"], "unknown flag '-x'; settings"),
        (["--cfg"], "--cfg/-c: expected one argument"),
        (["--cfg", "jobs"], "--cfg/-c: invalid choice: 'jobs' (choose from "),
    ],
)
def test_unknown_flag_is_named_instead_of_a_usage(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared(words)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("key", ["resume", "hydra.run.dir", "hydra.sweep.dir", "compile_cache"])
@pytest.mark.parametrize("typed", ["~/my runs/1", '"~/my runs/1"', "'~/my runs/1'"])
def test_tilde_after_a_key_of_a_folder_is_the_home_folder(
    key: str, typed: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(here))
    assert prepared([f"{key}={typed}"]) == [f"{key}={literal(here / 'my runs' / '1')}"]


def test_existing_folder_is_quoted_for_hydra_as_typed(here: Path) -> None:
    for name in ("läuf [1], a=b", "it's", "plain"):
        (here / name).mkdir()
    words = prepared(["resume=läuf [1], a=b", "hydra.run.dir=it's", "resume=plain", "env.name=plain"])
    assert words == ['resume="läuf [1], a=b"', 'hydra.run.dir="it\'s"', "resume=plain", "env.name=plain"]


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["resume=my", "own", "run", "seed=1"], "'resume=\"my own run\"'"),
        (["env=ant", "resume='my", "own", "run'"], "'resume=\"my own run\"'"),
        (["hydra.run.dir=my", "own", "run"], "'hydra.run.dir=\"my own run\"'"),
    ],
)
def test_folder_that_the_shell_split_is_suggested_in_quotes(words: list[str], typed: str, here: Path) -> None:
    (here / "my own run").mkdir()
    with pytest.raises(ConfigError) as caught:
        prepared(words)
    key = typed.strip("'").partition("=")[0]
    assert str(caught.value) == f"{key}: the shell split the folder at its spaces; write {typed}"


def test_resume_latest_is_the_newest_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, time in (("old", 1), ("new [1]", 3), ("middle", 2)):
        (here / "runs" / "ant" / name).mkdir(parents=True)
        (here / "runs" / "ant" / name / "config.yaml").touch()
        os.utime(here / "runs" / "ant" / name / "config.yaml", (time, time))
    assert prepared(["resume=latest"]) == ['resume="runs/ant/new [1]"']
    assert capsys.readouterr().err == "run: runs/ant/new [1], the newest run\n"


def test_resume_latest_without_a_run_says_how_to_make_one() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["resume=latest"])
    assert str(caught.value) == (
        "resume: there is no run in the folder runs yet; make one with rlstable train, or name a folder"
    )
