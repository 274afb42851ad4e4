"""What the commands that print a report have in common: their frame, not what they say.

Kept free of heavy imports, since `--help` and a mistake need not wait for jax.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

_COLUMNS = 120


def parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """The parser of `python -m rlstable.<name>`, with `--json`; the epilog, its examples, stays as it is written."""
    made = argparse.ArgumentParser(
        prog=f"python -m rlstable.{name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return made


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Around everything before the report: standard output is kept for that, and a mistake ends with one line.

    Raises:
        SystemExit: A ConfigError, with the code of that ending.
    """
    # Whatever libraries print while they load is kept out of the report.
    with contextlib.redirect_stdout(sys.stderr):
        from rlstable.endings import Ending
        from rlstable.schema import ConfigError

        try:
            yield
        except ConfigError as error:
            print(f"rlstable: {error}", file=sys.stderr)
            sys.exit(Ending.config_error.exit_code)


def note(text: str) -> None:
    """Tells whoever waits what is being done, beside the report."""
    print(f"{text} ...", file=sys.stderr)


def print_json(data: Any) -> None:
    """Prints the report for programs; a number that JSON has no word for is an error."""
    print(json.dumps(data, indent=2, allow_nan=False))


def console() -> Any:
    """A rich console on standard output, for people."""
    from rich.console import Console

    # In a file or a pipe rich takes 80 columns, which break most lines.
    return Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS)
