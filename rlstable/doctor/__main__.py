"""The command `python -m rlstable.doctor env=humanoid`: checks this machine and this model before a run.

It composes the configuration as `rlstable.train` does, and trains nothing. The exit code is 0 if training can begin, 1
if training would fail, 2 for an error in the configuration.
"""

from __future__ import annotations

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
    parser = command.parser(
        "doctor", "Examines device, memory and physics before a run, and reports problems.", _EPILOG
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for rlstable.train")
    parser.add_argument("--no-compile", action="store_true", help="skip the memory estimate, which compiles")
    args = parser.parse_intermixed_args(argv)
    with command.working():
        from rlstable.cli.compose import compose

        config = compose(args.overrides)  # before importing JAX and Brax, so that errors appear at once
        from rlstable.doctor.checkup import examine

        report = examine(config, not args.no_compile, command.note)
    if args.json:
        from rlstable.doctor.report import as_data

        command.print_json(as_data(report))
    else:
        show(report)
    sys.exit(report.exit_code)


def show(report: Any) -> None:
    from rich.text import Text

    from rlstable.doctor.report import sections

    terminal = command.console()
    for title, body in sections(report):
        terminal.print(Text(f"\n{title}", style="bold"))
        terminal.print(body)
    style = "bold red" if report.exit_code else "bold yellow" if report.count("warning") else "bold green"
    terminal.print(Text(f"\n{report.task}: {report.verdict}", style=style))


def process() -> None:
    sources.mark_process_unmodified()
    main()


if __name__ == "__main__":
    process()
