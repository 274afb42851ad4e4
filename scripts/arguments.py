"""Argument parsing shared by the commands in scripts/."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def study_parser(doc: str | None, results: Path) -> argparse.ArgumentParser:
    """Returns the parser of a command that adds rows to a file of results and writes the page beside the file."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=results, help="file of the results; the page goes beside it")
    parser.add_argument("--page", action="store_true", help="write the page and train nothing")
    return parser


def add_choice(
    parser: argparse.ArgumentParser, name: str, choices: Iterable[str], default: str = "all", **more: Any
) -> None:
    """Adds an option that selects some of the choices. The option can be repeated; `default` describes its default."""
    parser.add_argument(name, action="append", choices=choices, help=f"can be repeated; default: {default}", **more)


def whole(least: int) -> Callable[[str], int]:
    """Returns the type of an option that is a whole number of at least `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, {least} or more")
        return int(text)

    return parse
