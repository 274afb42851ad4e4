"""docs/metrics.md has every logged metric and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GROUPS = "training|episode|eval|guards|limiters|supervise|memory|seeds|events"


def in_the_code() -> set[str]:
    """Every metric key in the package; names in braces become names in angle brackets."""
    source = "".join(path.read_text() for path in (ROOT / "rlstable").rglob("*.py"))
    keys = re.findall(rf'"((?:{GROUPS})/[\w{{}}/]*[\w}}])"', source)
    return {re.sub(r"\{(\w+)\}", r"<\1>", key) for key in keys}


def on_the_page() -> set[str]:
    return set(re.findall(rf"`((?:{GROUPS})/[\w<>/]+)`", (ROOT / "docs" / "metrics.md").read_text()))


def general(key: str) -> str:
    """A key with its placeholder names removed, since the page may name them differently."""
    key = re.sub(r"<\w+>", "<>", key)
    return "limiters/<>/active" if key.startswith("limiters/") else key


def test_metrics_page_has_every_metric_and_no_other() -> None:
    code, page = ({general(key) for key in keys} for keys in (in_the_code(), on_the_page()))
    assert len(code) > 40
    assert code - page - {"eval/episode_<>_std"} == set()
    assert page - code == set()
