"""The command `python -m rlstable.replay runs/.../incidents/<name>`: replays a bad step in three engines.

The exit code is 0 if the step was replayed, with any outcome, and 2 if it cannot be replayed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rlstable.cli import command
from rlstable.config.schema import expand_home

_EPILOG = """
examples:
  python -m rlstable.replay runs/ant/2026-01-31_22-00-00/incidents/12-1
  python -m rlstable.replay runs/ant/2026-01-31_22-00-00/incidents/12-1 --json > step.json
  python -m rlstable.replay runs/ant/2026-01-31_22-00-00/incidents/12-1 --history       also the 100 steps before
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Replays the step and prints the report."""
    args = _arguments(argv)
    with command.working():
        from rlstable.io.trusted_folders import require_trust
        from rlstable.supervise.incident import read

        incident = read(args.incident)
        require_trust(incident.facts_file, incident.config, args.trust, "--trust")
        from rlstable.replay.engines import step_again
        from rlstable.replay.report import as_data, compare

        command.note("replaying the step; compilation takes a minute or two")
        report = compare(incident, step_again(incident))
        history = None
        if args.history is not None:
            from rlstable.replay.history import make

            history = make(incident, args.history, command.note)
    if args.json:
        data = as_data(report)
        if history is not None:
            from rlstable.replay import trend

            data["history"] = trend.as_data(history)
        command.print_json(data)
    else:
        show(report, history)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(
        "replay",
        "Replays a bad step in float32, float64 and C MuJoCo, and reports what went bad first.",
        _EPILOG,
    )
    parser.add_argument("incident", type=expand_home, help="folder of the incident")
    parser.add_argument(
        "--history",
        type=_steps,
        nargs="?",
        const=100,
        metavar="N",
        help="also retrain up to the incident, and save the N steps before it (default: 100) in its history.npz",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="trust an incident of another user that names Python code; needed once; read that code first",
    )
    return parser.parse_args(argv)


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps; put the incident before --history N")
    return int(text)


def show(report: Any, history: Any = None, terminal: Any = None) -> None:
    """Prints a report as text.

    Args:
        report: A `rlstable.replay.report.Report`.
        history: A `rlstable.replay.history.History`, or None.
        terminal: A rich console; standard output if None.
    """
    from rich.text import Text

    from rlstable.replay.report import table

    terminal = command.console() if terminal is None else terminal
    facts = report.incident.facts
    where = f"iteration {facts['iteration']}, unroll {facts['unroll']}, step {facts['step']}"
    terminal.print(Text(f"\n{report.incident.config.env.name}: {where}, environment {facts['environment']}", "bold"))
    terminal.print(Text(f"  tripped: {', '.join(facts['causes'])}"))
    if facts["fault"] is not None:
        terminal.print(Text(f"  the run injected fault.site={facts['fault']}; the replay leaves it out"))
    terminal.print()
    terminal.print(table(report))
    terminal.print(Text(f"\n  first: {report.first}"))
    terminal.print(Text(f"  {report.same}"))
    for engine, note in report.notes.items():
        terminal.print(Text(f"  {engine}: {note}"))
    if history is not None:
        from rlstable.replay import trend

        terminal.print()
        terminal.print(trend.table(history))
        terminal.print()
        for line in trend.lines(history):
            terminal.print(line)
    terminal.print(Text(f"\n{report.conclusion}", style="bold"))


if __name__ == "__main__":
    main()
