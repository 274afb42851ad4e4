"""The command: `python -m rlstable.evaluate run=runs/...`, what a trained policy is worth.

It exits with 0 where episodes were played, whatever they are worth, and 2 for a mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from rlstable.cli import command
from rlstable.cli.options import PlayOptions
from rlstable.config.schema import Count

_EPILOG = """
examples:
  python -m rlstable.evaluate run=runs/ant/2026-01-31_22-00-00
  python -m rlstable.evaluate run=runs/ant/2026-01-31_22-00-00 which=latest episodes=1000 deterministic=false
  python -m rlstable.evaluate run=runs/ant/2026-01-31_22-00-00 backend=mjx     trained on C MuJoCo, judged on MJX
  python -m rlstable.evaluate run=runs/ant/2026-01-31_22-00-00 --json > episodes.json
"""


class EvaluateOptions(PlayOptions):
    """Arguments: the policy, and how it is evaluated."""

    episodes: Count = Field(100, description="how many are played; more make the intervals narrower")


def main(argv: Sequence[str] | None = None) -> None:
    """Plays the episodes, prints, and exits."""
    parser = command.key_parser(
        "evaluate", "Plays many episodes with a trained policy and says what it is worth.", EvaluateOptions, _EPILOG
    )
    args = parser.parse_intermixed_args(argv)
    with command.working():
        options = command.options(EvaluateOptions, args.words)
        from rlstable.policy.playback import evaluate_run
        from rlstable.policy.saved_run import open_run

        run = open_run(options.run, options.which, options.trust)
        command.note(f"playing {options.episodes:,} episodes; what has to be compiled takes a while")
        worth = evaluate_run(run, options.episodes, options.deterministic, options.backend, options.seed)
    if args.json:
        command.print_json(worth.as_data())
    else:
        show(worth)


def show(worth: Any, terminal: Any = None) -> None:
    """Prints it for people.

    Args:
        worth: A `rlstable.policy.playback.Worth`.
        terminal: A rich console; standard output if None.
    """
    from rich.text import Text

    terminal = command.console() if terminal is None else terminal
    terminal.print(Text(f"\n{worth.title}", style="bold"))
    terminal.print(worth.table())
    for line in worth.lines():
        terminal.print(Text(f"  {line}"))


if __name__ == "__main__":
    main()
