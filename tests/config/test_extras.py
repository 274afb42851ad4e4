"""The command that installs an extra: the checkout again, or the extra of the installed package."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstable.config import extras

ROOT = Path(__file__).resolve().parents[2]


def test_extra_of_a_checkout_is_installed_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert extras.install("playground") == 'pip install -e ".[playground]"'
    monkeypatch.chdir(tmp_path)
    assert extras.install("playground") == f'pip install -e "{ROOT}[playground]"'


def test_extra_of_an_installed_package_is_added_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "rlstable" / "config" / "extras.py"))
    assert extras.install("render") == "pip install 'rlstable[render]'"
