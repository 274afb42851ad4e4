"""The command `python -m rlstable.render run=runs/...`: draws episodes of a trained policy.

Exit code 0 means that everything was drawn, 2 means a user error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from rlstable.cli import command
from rlstable.cli.options import OutFolder, PlayOptions
from rlstable.config.schema import Count, Integer, Positive

_EPILOG = """
examples:
  python -m rlstable.render                             the newest run in runs
  python -m rlstable.render run=runs/ant/2026-01-31_22-00-00
  python -m rlstable.render run=runs/ant/2026-01-31_22-00-00 episodes=100 out=ant
  python -m rlstable.render run=runs/ant/2026-01-31_22-00-00 format=mp4 films=all seconds=null width=1280 height=720
"""
_Side = Annotated[Integer, Field(ge=64, le=4096, multiple_of=2)]


class RenderOptions(PlayOptions):
    """Arguments of the command: the policy, the episodes and the output."""

    episodes: Count = Field(10, description="how many are played; the best, the median and the worst are drawn")
    format: Literal["both", "mp4", "html"] = Field("html", description="html, an interactive 3D page; mp4, films; both")
    films: Literal["best", "all"] = Field("best", description="films of the best episode, or of all drawn episodes")
    seconds: Positive | None = Field(
        10.0, description="simulated seconds of a film from its start, null for the whole episode"
    )
    out: OutFolder | None = Field(None, description="folder to write to, null for <run>/episodes")
    width: _Side = Field(640, description="of a film, in pixels, even")
    height: _Side = Field(480, description="of a film, in pixels, even")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.key_parser(
        "render", "Draws the best, the median and the worst of some episodes.", RenderOptions, _EPILOG
    )
    args = parser.parse_intermixed_args(argv)
    with command.working():
        options = command.options(RenderOptions, args.words)
        written = draw(options)
    if args.json:
        command.print_json(written)
    else:
        show(written)


def draw(options: RenderOptions) -> list[dict[str, Any]]:
    """Plays and draws episodes, and returns one entry per written file.

    A film has `file`, `episode`, `return`, `steps` and `aborted`; the page has `file` and a list of the same facts.
    """
    from rlstable.io.files import subfolder, write_atomically
    from rlstable.policy.saved_run import open_run

    run = open_run(options.run, options.which, options.trust)
    films, pages = options.format in ("both", "mp4"), options.format in ("both", "html")
    if films:
        from rlstable.render.film import require_ffmpeg

        require_ffmpeg()  # fails before any episode is played
    from rlstable.render.page import page
    from rlstable.render.recording import record

    command.note(f"playing {options.episodes:,} episodes of the {run.checkpoint}; compilation takes a while")
    recorded = record(run, options.episodes, options.deterministic, options.backend, options.seed)
    folder = options.out or subfolder(options.run, "episodes")
    about = [
        {"episode": one.name, "return": one.total, "steps": len(one.rewards), "aborted": one.aborted}
        for one in recorded.recordings
    ]
    written: list[dict[str, Any]] = []
    folder.mkdir(parents=True, exist_ok=True)
    if pages:
        write_atomically(folder / "episodes.html", page(recorded))
        written.append({"file": str(folder / "episodes.html"), "episodes": about})
    if films:
        from rlstable.render.film import write_film

        most = 1 if options.films == "best" else None
        for recording, facts in list(zip(recorded.recordings, about, strict=True))[:most]:
            recording = recording.start(options.seconds, recorded.seconds)
            command.note(f"drawing {recording.name}, {len(recording.rewards):,} steps")
            path = folder / f"{recording.name}.mp4"
            write_film(recorded, recording, path, options.width, options.height)
            written.append({"file": str(path), **facts})
    return written


def show(written: Sequence[dict[str, Any]]) -> None:
    for entry in written:
        episodes = entry.get("episodes") or [entry]
        returns = ", ".join(
            f"{one['episode']} {one['return']:,.1f}" + (" (aborted)" if one["aborted"] else "") for one in episodes
        )
        print(f"{entry['file']}: {returns}")


if __name__ == "__main__":
    main()
