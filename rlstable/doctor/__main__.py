"""The command: `python -m rlstable.doctor env=humanoid`, what this machine and this model are fit for.

It composes the configuration as `rlstable.train` does, trains nothing, and exits with 0 where training can begin, 1
where something would make it fail, 2 for a mistake in the configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

_EPILOG = """
examples:
  python -m rlstable.doctor                                   the inverted pendulum
  python -m rlstable.doctor env=humanoid ppo.num_envs=512     any configuration that rlstable.train takes
  python -m rlstable.doctor env=ant --json > report.json
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Examines, prints, and exits with the report's code."""
    args = _arguments(argv)
    # Whatever libraries print while they load is kept out of the report.
    with contextlib.redirect_stdout(sys.stderr):
        from rlstable.compose import compose
        from rlstable.endings import Ending
        from rlstable.schema import ConfigError

        try:
            config = compose(args.overrides)  # before jax and brax, for which a mistake need not wait
            from rlstable.doctor.checkup import examine

            report = examine(config, not args.no_compile, lambda text: print(f"{text} ...", file=sys.stderr))
        except ConfigError as error:
            print(f"rlstable: {error}", file=sys.stderr)
            sys.exit(Ending.config_error.exit_code)
    if args.json:
        from rlstable.doctor.report import as_data

        print(json.dumps(as_data(report), indent=2, allow_nan=False))
    else:
        show(report)
    sys.exit(report.exit_code)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rlstable.doctor",
        description="Examines device, arithmetic, memory and physics before a run, and says what would go wrong.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="what to train, as for rlstable.train")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out the memory estimate, for which training is compiled"
    )
    return parser.parse_intermixed_args(argv)


def show(report: Any, terminal: Any = None) -> None:
    """Prints a report for people.

    Args:
        report: A `rlstable.doctor.checkup.Report`.
        terminal: A rich console; standard output if None.
    """
    from rich.console import Console
    from rich.text import Text

    from rlstable.doctor.report import sections

    if terminal is None:
        # In a file or a pipe rich takes 80 columns, which break most lines.
        terminal = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for title, body in sections(report):
        terminal.print(Text(f"\n{title}", style="bold"))
        terminal.print(body)
    style = "bold red" if report.exit_code else "bold yellow" if report.count("warning") else "bold green"
    terminal.print(Text(f"\n{report.task}: {report.verdict}", style=style))


if __name__ == "__main__":
    main()
