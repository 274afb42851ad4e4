"""Without MuJoCo Playground, `env=playground` is one line and nothing else changes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from commands import typed

from rlstable.cli import playground
from rlstable.config import ConfigError
from rlstable.config.extras import install
from rlstable.config.run import EnvConfig
from rlstable.config.schema import validate
from rlstable.envs.load import load
from rlstable.train import main

SAID = "env: MuJoCo Playground is not installed; "
WORDS = ["env=playground", "env.name=CartpoleBalance"]


@pytest.fixture(autouse=True)
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the package."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "mujoco_playground" else find(name, *rest)
    )
    playground._settings.cache_clear()


def test_command_is_one_line_and_leaves_no_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(main, *WORDS) == 2
    assert capsys.readouterr() == ("", f"rlstable: {SAID}{install('playground')}\n")
    assert not any(path.is_file() for path in here.rglob("*"))


def test_saved_run_without_the_package_is_one_line() -> None:
    config = validate(EnvConfig, {"source": "playground", "name": "CartpoleBalance"})
    for env in (config, config.model_copy(update={"randomize": True})):
        with pytest.raises(ConfigError, match=r"^env: MuJoCo Playground is not installed; pip install"):
            load(env)
