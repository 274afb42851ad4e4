"""Run folders whose code may run: those that the user made or trusted, by path and content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from toys import tiny_config

from rlstable.config import Config, ConfigError
from rlstable.io.trusted_folders import code_named, remember, require_trust

FOREIGN = tiny_config()  # of toys:PointMass


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rlstable" / "trusted_folders"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "config.yaml"
    path.write_text("seed: 1\n")
    return path


def is_trusted(file: Path, config: Config = FOREIGN) -> bool:
    try:
        require_trust(file, config, trust=False)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({}, "env.name=toys:PointMass"),
        ({"env": {"name": "rlstable_evil:Env"}}, "env.name=rlstable_evil:Env"),
        ({"env": {"name": "brax.envs.fast:Fast"}}, None),
        ({"env": {"name": "mujoco_playground._src.cartpole:Balance"}}, None),
        ({"env": {"source": "brax", "name": "ant"}}, None),
        ({"env": {"source": "brax", "name": "ant"}, "compile_cache": None}, None),
        ({"env": {"source": "brax", "name": "ant"}, "compile_cache": "programs"}, "compile_cache=programs"),
    ],
)
def test_code_outside_rlstable_brax_and_playground_needs_trust(sections, named, file: Path) -> None:
    config = tiny_config(**sections)
    assert code_named(config) == named
    assert is_trusted(file, config) is (named is None)


def test_trusted_folder_is_remembered_by_path_and_content(
    file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_trusted(file)
    assert remember(file, FOREIGN) is None
    assert is_trusted(file)
    monkeypatch.chdir(file.parent)
    assert is_trusted(Path("config.yaml"))
    (tmp_path / "copy.yaml").write_bytes(file.read_bytes())
    assert not is_trusted(tmp_path / "copy.yaml")
    file.write_text("seed: 2\n")
    assert not is_trusted(file)
    file.write_text("seed: 1\n")
    assert is_trusted(file)
    assert cache.stat().st_mode & 0o777 == 0o600 and cache.parent.stat().st_mode & 0o777 == 0o700


def test_user_trusts_a_folder_once(file: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^run: {file} names code outside rlstable, Brax and Playground, env\.name=toys:PointMass, and is not "
        r"in this user's list of trusted run folders; read that code, then add trust=true once$",
    ):
        require_trust(file, FOREIGN, trust=False)
    require_trust(file, FOREIGN, trust=True)
    assert is_trusted(file)


def test_torn_line_in_the_list_of_trusted_folders_is_harmless(file: Path, cache: Path) -> None:
    remember(file, FOREIGN)
    whole = cache.read_text()
    cache.write_text(whole.rstrip()[:30])
    assert not is_trusted(file)
    remember(file, FOREIGN)
    assert is_trusted(file)


def test_path_with_a_line_break_cannot_forge_trust(file: Path, cache: Path, tmp_path: Path) -> None:
    remember(file, FOREIGN)
    entry = cache.read_text().strip()
    cache.unlink()
    forged = tmp_path / f"x\n{entry.split()[0]} "
    forged.mkdir()
    (forged / "config.yaml").write_text("")
    assert remember(forged / "config.yaml", FOREIGN) is None
    assert is_trusted(forged / "config.yaml") and not is_trusted(file)


def test_file_that_other_users_may_write_trusts_no_folder(file: Path, cache: Path) -> None:
    remember(file, FOREIGN)
    cache.chmod(0o606)
    with pytest.raises(ConfigError, match="trusted_folders: another user owns it or may write it"):
        require_trust(file, FOREIGN, trust=False)
    assert "another user owns it or may write it" in str(remember(file, FOREIGN))


def test_file_of_another_user_trusts_no_folder(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(file, FOREIGN)
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert not is_trusted(file)


def test_unwritable_list_of_trusted_folders_is_reported_and_harmless(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in the way").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "in the way"))
    assert "Not a directory" in str(remember(file, FOREIGN))
    require_trust(file, FOREIGN, trust=True)
    with pytest.raises(ConfigError, match=r"trusted run folders \(.*Not a directory.*\); read that code"):
        require_trust(file, FOREIGN, trust=False)
