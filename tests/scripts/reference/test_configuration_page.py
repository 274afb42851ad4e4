"""The generated page of all keys is up to date, and the site builds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlstable.config import Config
from rlstable.config.schema import flat
from rlstable.supervise.diagnosis import SIGNS
from scripts.reference import __main__ as reference

ROOT = Path(__file__).resolve().parents[3]


def test_generated_pages_are_up_to_date() -> None:
    assert reference.PAGE.read_text() == reference.page(), "stale; say: make docs"
    assert reference.PAGE_OF_TERMS.read_text() == reference.terms.page(), "stale; say: make docs"


def test_page_about_nan_has_each_sign_with_its_remedy() -> None:
    page = (ROOT / "docs" / "nan.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    for sign in SIGNS:
        if not sign.name.startswith("limiter_saturated/"):
            assert rows[sign.name].endswith(f"| {sign.remedy} |".replace("={better_scaling:.1g}", ""))


def test_every_key_is_on_the_page_with_its_description() -> None:
    every = flat(Config.model_validate({"env": {"name": "ant"}}).model_dump())
    rows = {line.split("`")[1]: line for line in reference.page().splitlines() if line.startswith("| `")}
    assert set(every) <= set(rows)
    assert [key for key in every if rows[key].endswith("|  |")] == []
    assert not any("<class" in line or "typing." in line for line in rows.values())


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= pages  # all pages are in the menu
    text = (tmp_path / "site" / "nan.html").read_text()
    assert 'src="assets/iframe-worker.js"' in text and 'src="http' not in text  # works from disk
