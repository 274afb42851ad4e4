"""The command that installs an optional dependency of the project."""

from __future__ import annotations

from pathlib import Path


def install(extra: str) -> str:
    """The command that installs an extra, as a user types it in a shell.

    In a checkout it installs the checkout again. Elsewhere pip adds the extra to the installed package.

    Args:
        extra: Name of the extra in `pyproject.toml`, such as `playground`.
    """
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install 'rlstable[{extra}]'"
    return f'pip install -e "{"." if checkout == Path.cwd() else checkout}[{extra}]"'
