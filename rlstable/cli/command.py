"""Helpers for commands that print a report: arguments, errors and output.

Imports no JAX, so that `--help` and errors are quick.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlstable.config.schema import ConfigError, Model, Section, validate
from rlstable.io.console import Reminder, is_terminal

_COLUMNS = 120
_PATIENCE = 20.0  # seconds between two lines of a running stage
_stage = contextlib.ExitStack()  # shows the running stage


class OneLineParser(argparse.ArgumentParser):
    """Parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        if match := re.fullmatch(r"unrecognized arguments: -+([\w.-]+)=?(.*)", message):
            key, value = match.groups()
            message = f"cannot read --{key}: options are written {key.replace('-', '_')}={value or '<value>'}"
        self.exit(2, f"rlstable: {message}; --help lists what is allowed\n")


def parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """The parser of `python -m rlstable.<name>`, with the option `--json` and an unchanged epilog."""
    result = OneLineParser(
        prog=f"python -m rlstable.{name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return result


def key_parser(name: str, description: str, model: type[Section], epilog: str) -> argparse.ArgumentParser:
    """The parser of a command with `key=value` arguments, which `options` reads. `--help` explains each key."""
    result = parser(name, description, _keys(model) + epilog)
    result.add_argument("words", nargs="*", metavar="key=value", help="see keys below")
    return result


def options(model: type[Model], arguments: Sequence[str]) -> Model:
    """Parses and checks `key=value` arguments.

    The value of a path key is taken literally, except `null`; every other value is read as YAML. A key that takes
    several values may be repeated. Raises ConfigError with the first mistake.
    """
    data: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        kind = str(model.model_fields[key].annotation) if key in model.model_fields else ""
        if not equals:
            hint = f", {shlex.quote(f'run={argument}')}" if Path(argument).exists() else ""
            raise ConfigError(f"cannot read {argument!r}: write key=value{hint}; quote values with spaces")
        if not text:
            raise ConfigError(f"{key}: has no value; write {key}=<value>, or leave it out")
        try:
            value = _read(text, kind)
        except ValueError:
            raise ConfigError(f"{key}: cannot read {text!r}; put it in quotes") from None
        if "tuple" in kind:
            data.setdefault(key, []).append(value)
        elif key in data:
            raise ConfigError(f"{key}: is set twice; leave one out")
        else:
            data[key] = value
    return validate(model, data)


def _read(text: str, kind: str) -> object:
    import yaml

    if "Path" in kind:
        return None if text == "null" and "None" in kind else text
    if text.isdecimal():
        return int(text)  # also 010, which YAML reads as an octal number
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError from error


def _keys(model: type[Section]) -> str:
    rows = []
    for name, field in model.model_fields.items():
        value = field.get_default(call_default_factory=True)
        default = "" if field.is_required() or value == () else f" [{_plain(value)}]"
        rows.append((name, f"{field.description}{default}"))
    width = max(len(name) for name, _ in rows)
    return "\nkeys:\n" + "".join(f"  {name:<{width}}  {text}\n" for name, text in rows)


def _plain(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Context manager for all work before the report: standard output goes to standard error, an error is one line."""
    # Libraries print while they load, and standard output must contain only the report.
    with contextlib.redirect_stdout(sys.stderr):
        from rlstable.supervise.stop_reasons import StopReason

        try:
            with _stage:
                yield
        except (ConfigError, OSError) as error:
            if isinstance(error, OSError) and error.filename is None:
                raise  # not about a file
            message = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            print(f"rlstable: {message}", file=sys.stderr)
            sys.exit(StopReason.config_error.exit_code)


def note(text: str) -> None:
    """Starts a stage of a command: prints its name, and shows its time so far until the next stage starts."""
    _stage.close()
    print(f"{text} ...", file=sys.stderr)
    _stage.enter_context(_waiting(text))


@contextlib.contextmanager
def _waiting(text: str) -> Iterator[None]:
    """Context manager: on a terminal a clock, which is removed at the end; elsewhere a line every 20 seconds."""
    if not is_terminal(sys.stderr):
        with Reminder(_PATIENCE, lambda line: print(line, file=sys.stderr)).working(text):
            yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    with Progress(SpinnerColumn(), TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        progress.add_task(text, total=None)
        yield


def print_json(data: object) -> None:
    """Prints the report as JSON. Raises ValueError at a number that is not finite."""
    print(json.dumps(data, indent=2, allow_nan=False))


def console() -> Any:
    """A rich console on standard output."""
    from rich.console import Console

    # In a file or a pipe rich uses 80 columns, which would wrap most lines.
    return Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS)
