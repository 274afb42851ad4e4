"""The wording of docstrings: they start with the thing, and name actors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rlstable"
FILES = sorted(PACKAGE.rglob("*.py"))
FIRST = re.compile(r"(What|Who|Where|Whose|That|Of)\b")
RIDDLES = re.compile(r"\b(nobody|somebody|whoever|anew|goes round|one's own)\b", re.IGNORECASE)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield f"{path.relative_to(PACKAGE)}: {getattr(node, 'name', 'module')}", text


@pytest.mark.parametrize("pattern", [FIRST.match, RIDDLES.search], ids=["first word", "actors"])
def test_docstrings_start_with_the_thing_and_name_actors(pattern) -> None:
    assert [name for file in FILES for name, text in docstrings(file) if pattern(text)] == []
