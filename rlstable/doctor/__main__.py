"""The command: `python -m rlstable.doctor env=humanoid`, what this machine and this model are fit for.

It composes the configuration as `rlstable.train` does, trains nothing, and exits with 0 where training can begin, 1
where something would make it fail, 2 for a mistake in the configuration.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rlstable.cli import command
from rlstable.compilation import sources

_EPILOG = """
examples:
  python -m rlstable.doctor                                   the inverted pendulum
  python -m rlstable.doctor env=humanoid ppo.num_envs=512     any configuration that rlstable.train takes
  python -m rlstable.doctor env=ant --json > report.json
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Examines, prints, and exits with the report's code."""
    args = _arguments(argv)
    with command.working():
        from rlstable.cli.compose import compose

        config = compose(args.overrides)  # before jax and brax, for which a mistake need not wait
        from rlstable.doctor.checkup import examine

        report = examine(config, not args.no_compile, command.note)
    if args.json:
        from rlstable.doctor.report import as_data

        command.print_json(as_data(report))
    else:
        show(report)
    sys.exit(report.exit_code)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(
        "doctor",
        "Examines device, arithmetic, memory and physics before a run, and says what would go wrong.",
        _EPILOG,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="what to train, as for rlstable.train")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out what is compiled: memory estimate and random play"
    )
    return parser.parse_intermixed_args(argv)


def show(report: Any, terminal: Any = None) -> None:
    """Prints a report for people.

    Args:
        report: A `rlstable.doctor.checkup.Report`.
        terminal: A rich console; standard output if None.
    """
    from rich.text import Text

    from rlstable.doctor.report import sections

    terminal = command.console() if terminal is None else terminal
    for title, body in sections(report):
        terminal.print(Text(f"\n{title}", style="bold"))
        terminal.print(body)
    style = "bold red" if report.exit_code else "bold yellow" if report.count("warning") else "bold green"
    terminal.print(Text(f"\n{report.task}: {report.verdict}", style=style))


def process() -> None:
    """Runs the command as a process."""
    sources.mark_process_unmodified()
    main()


if __name__ == "__main__":
    process()
