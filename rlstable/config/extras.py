"""The command that installs an optional dependency of the project."""

from __future__ import annotations

from pathlib import Path


def install(extra: str) -> str:
    """The command that installs an extra of `pyproject.toml`, such as `playground`, as a user types it in a shell."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install 'rlstable[{extra}]'"
    return f'pip install -e "{"." if checkout == Path.cwd() else checkout}[{extra}]"'
