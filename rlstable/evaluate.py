"""The command: `python -m rlstable.evaluate run=runs/...` evaluates a trained policy in many episodes.

The exit code is 0 if episodes were played, whatever their returns, and 2 for a configuration error.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from rlstable.cli import command
from rlstable.cli.options import PlayOptions
from rlstable.config.schema import Count

_EPILOG = """
examples:
  python -m rlstable.evaluate                             the newest run in runs
  python -m rlstable.evaluate run=runs/ant/2026-01-31_22-00-00
  python -m rlstable.evaluate run=runs/ant/2026-01-31_22-00-00 which=latest episodes=1000 deterministic=false
  python -m rlstable.evaluate run=runs/ant/2026-01-31_22-00-00 backend=mjx     trained on C MuJoCo, evaluated on MJX
  python -m rlstable.evaluate run=runs/ant/2026-01-31_22-00-00 --json > episodes.json
"""


class EvaluateOptions(PlayOptions):
    """Arguments: the policy, and how it is evaluated."""

    episodes: Count = Field(100, description="number of episodes; more episodes make the intervals narrower")


def main(argv: Sequence[str] | None = None) -> None:
    """Plays the episodes, prints, and exits."""
    parser = command.key_parser(
        "evaluate",
        "Plays many episodes with a trained policy and prints its returns with confidence intervals.",
        EvaluateOptions,
        _EPILOG,
    )
    args = parser.parse_intermixed_args(argv)
    with command.working():
        options = command.options(EvaluateOptions, args.words)
        from rlstable.policy.playback import evaluate_run
        from rlstable.policy.saved_run import open_run

        run = open_run(options.run, options.which, options.trust)
        command.note(f"playing {options.episodes:,} episodes; compilation may take a while")
        result = evaluate_run(run, options.episodes, options.deterministic, options.backend, options.seed)
    if args.json:
        return command.print_json(result.as_data())
    from rich.text import Text

    terminal = command.console()
    terminal.print(Text(f"\n{result.title}", style="bold"))
    terminal.print(result.table())
    for line in result.lines():
        terminal.print(Text(f"  {line}"))


if __name__ == "__main__":
    main()
