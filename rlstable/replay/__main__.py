"""The command `python -m rlstable.replay runs/.../incidents/<name>`: replays a bad step in three engines.

The exit code is 0 if the step was replayed, with any outcome, and 2 if it cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlstable.cli import command
from rlstable.config.schema import expand_home

_EPILOG = """
examples:
  python -m rlstable.replay runs/ant/2026-01-31_22-00-00/incidents/12-1
  python -m rlstable.replay runs/ant/2026-01-31_22-00-00/incidents/12-1 --json > step.json
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser(
        "replay", "Replays a bad step in float32, float64 and C MuJoCo, and reports what went bad first.", _EPILOG
    )
    parser.add_argument("incident", type=expand_home, help="folder of the incident")
    trust = "run the Python code that another user's incident names; read that code first"
    parser.add_argument("--trust", action="store_true", help=trust)
    args = parser.parse_args(argv)
    with command.working():
        from rlstable.io.private_folder import require_trust
        from rlstable.supervise.incident import FACTS, read

        incident = read(args.incident)
        require_trust(incident.folder / FACTS, incident.config.env, args.trust, "--trust")
        from rlstable.replay.engines import step_again
        from rlstable.replay.report import as_data, compare

        command.note("replaying the step; compilation takes a minute or two")
        report = compare(incident, step_again(incident))
    if args.json:
        command.print_json(as_data(report))
    else:
        show(report)


def show(report: Any, terminal: Any = None) -> None:
    """Prints a `rlstable.replay.report.Report` as text, to standard output if `terminal` is None."""
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
    terminal.print(Text(f"\n{report.conclusion}", style="bold"))


if __name__ == "__main__":
    main()
