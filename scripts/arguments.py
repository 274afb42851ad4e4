"""Argument parsing shared by the commands in scripts/."""

import argparse
from collections.abc import Callable, Collection
from pathlib import Path


def study_parser(doc: str | None, results: Path, **choices: Collection[str]) -> argparse.ArgumentParser:
    """Returns the parser of a command that adds rows to a file of results and writes the page beside the file.

    Each keyword is an option that selects some of its choices, by default all. The option can be repeated.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=results, help="file of the results; the page goes beside it")
    parser.add_argument("--page", action="store_true", help="write the page and train nothing")
    for name, allowed in choices.items():
        shown = None if len(allowed) < 6 else name.upper()
        parser.add_argument(f"--{name}", action="append", choices=allowed, metavar=shown, help="default: all")
    return parser


def whole(least: int) -> Callable[[str], int]:
    """Returns the type of an option that is a whole number of at least `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, {least} or more")
        return int(text)

    return parse
