"""Checks of who can write a folder whose files are executed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from toys import tiny_config

from rlstable.config import ConfigError
from rlstable.io.private_folder import code_named, make_private, require_trust, writable_by_others


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "above" / "programs"
    make_private(made)
    return made


@pytest.mark.parametrize(("mode", "above", "passes"), [
    (0o770, False, False), (0o1777, False, False), (0o707, True, False), (0o1777, True, True), (0o755, True, True),
])  # fmt: skip
def test_folder_that_others_may_write_or_replace_is_rejected_with_the_command_to_fix_it(
    folder: Path, mode: int, above: bool, passes: bool
) -> None:
    """A parent may be written by all, such as /tmp, if it has the sticky bit."""
    changed = folder.parent if above else folder
    changed.chmod(mode)
    expected = f"{changed} can be written by other users (mode {mode:04o}); chmod go-w {changed}"
    assert writable_by_others(folder) == (None if passes else expected)


def test_private_folder_of_another_user_is_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert writable_by_others(folder) == f"{folder} belongs to another user (uid {owner})"


@pytest.mark.parametrize(("own_group", "passes"), [(True, True), (False, False)])
def test_only_this_users_own_group_may_write_to_a_parent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, own_group: bool, passes: bool
) -> None:
    folder.parent.chmod(0o775)
    group = folder.parent.stat().st_gid
    monkeypatch.setattr(os, "getgid", lambda: group if own_group else group + 1)
    assert passes == (writable_by_others(folder) is None)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_parent_folder_of_another_user_is_rejected(folder: Path) -> None:
    os.chown(folder.parent, 12345, -1)
    assert writable_by_others(folder) == f"{folder.parent} belongs to another user (uid 12345)"


def test_symbolic_link_is_as_private_as_the_folder_that_it_names(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert writable_by_others(link) is None
    folder.chmod(0o777)
    assert f"{folder} can be written by other users" in str(writable_by_others(link))


def test_missing_parents_are_made_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]
    assert writable_by_others(tmp_path / "a" / "b") is None


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({}, {"toys:PointMass": "env.name"}),
        ({"env": {"source": "brax", "name": "ant"}}, {}),
        ({"env": {"name": "brax.envs.ant:Ant"}}, {}),
        (
            {"env": {"name": "brax.envs.ant:Ant", "randomization_fn": "mine:vary"}},
            {"mine:vary": "env.randomization_fn"},
        ),
    ],
)
def test_code_outside_rlstable_brax_and_playground_is_named(sections: Any, named: dict[str, str]) -> None:
    assert code_named(tiny_config(**sections).env) == named


@pytest.mark.parametrize("exposed", ["folder", "file", "owner"])
def test_settings_that_another_user_may_write_need_trust(
    tmp_path: Path, exposed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.touch(0o644)
    tmp_path.chmod(0o755)
    require_trust(file, tiny_config().env, trust=False)
    if exposed == "owner":
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    else:
        (tmp_path if exposed == "folder" else file).chmod(0o775)
    with pytest.raises(ConfigError, match=rf"^run: {file} names code .*, env\.name=toys:PointMass, and another user"):
        require_trust(file, tiny_config().env, trust=False)
    require_trust(file, tiny_config().env, trust=False, typed=["toys:PointMass"])
    require_trust(file, tiny_config().env, trust=True)
