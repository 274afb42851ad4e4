"""The command `python -m rlstable.render run=runs/...`: draws episodes of a trained policy, or of random actions.

Exit code 0 means that everything was drawn, 2 means a user error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from rlstable.cli import command
from rlstable.cli.options import OutFolder, PlayOptions
from rlstable.config.schema import Count, Integer, Positive, Section, Seed

if TYPE_CHECKING:
    from rlstable.render.episode import RecordedEpisodes

_EPILOG = """
examples:
  python -m rlstable.render                             the newest run in runs
  python -m rlstable.render run=runs/ant/2026-01-31_22-00-00
  python -m rlstable.render run=runs/ant/2026-01-31_22-00-00 episodes=100 out=ant
  python -m rlstable.render run=runs/ant/2026-01-31_22-00-00 format=mp4 films=all seconds=null width=1280 height=720
  python -m rlstable.render env=robot env.xml=robot.xml       random actions, before any training
"""
_Side = Annotated[Integer, Field(ge=64, le=4096, multiple_of=2)]


class DrawingOptions(Section):
    """Arguments of the command: the episodes and the output."""

    episodes: Count = Field(10, description="how many are played; the best, the median and the worst are drawn")
    format: Literal["both", "mp4", "html"] = Field("html", description="html, an interactive 3D page; mp4, films; both")
    films: Literal["best", "all"] = Field("best", description="films of the best episode, or of all drawn episodes")
    seconds: Positive | None = Field(
        10.0, description="simulated seconds of a film from its start, null for the whole episode"
    )
    out: OutFolder | None = Field(
        None, description="folder to write to, null for <run>/episodes, or runs/random/<env> without a run"
    )
    width: _Side = Field(640, description="of a film, in pixels, even")
    height: _Side = Field(480, description="of a film, in pixels, even")


class RenderOptions(DrawingOptions, PlayOptions):
    """Arguments of the command for a policy of a run."""


class RandomOptions(DrawingOptions):
    """Arguments of the command for random actions."""

    seed: Seed = 0


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.key_parser(
        "render", "Draws the best, the median and the worst of some episodes.", RenderOptions, _EPILOG
    )
    args = parser.parse_intermixed_args(argv)
    with command.working():
        of_environment = any(_key(word) == "env" or _key(word).startswith("env.") for word in args.words)
        written = draw_random(args.words) if of_environment else draw(command.options(RenderOptions, args.words))
    if args.json:
        command.print_json(written)
    else:
        show(written)


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def draw(options: RenderOptions) -> list[dict[str, Any]]:
    """Plays and draws episodes of a policy, and returns one entry per written file.

    A film has `file`, `episode`, `return`, `steps` and `aborted`; the page has `file` and a list of the same facts.
    """
    from rlstable.io.files import subfolder
    from rlstable.policy.saved_run import open_run

    run = open_run(options.run, options.which, options.trust)
    _require_ffmpeg(options)
    from rlstable.render.recording import record

    command.note(f"playing {options.episodes:,} episodes of the {run.checkpoint}; compilation takes a while")
    recorded = record(run, options.episodes, options.deterministic, options.backend, options.seed)
    return _write(recorded, options.out or subfolder(options.run, "episodes"), options)


def draw_random(words: Sequence[str]) -> list[dict[str, Any]]:
    """Draws episodes of random actions in the environment that the overrides among the words choose, like `draw`."""
    own = [word for word in words if _key(word) in RandomOptions.model_fields]
    options = command.options(RandomOptions, own)
    _require_ffmpeg(options)
    from rlstable.render.recording import record_random

    command.note(f"playing {options.episodes:,} episodes of random actions; compilation takes a while")
    overrides = [word for word in words if word not in own]
    name, recorded = record_random(overrides, options.episodes, options.seed)
    return _write(recorded, options.out or Path("runs", "random", name.replace(":", ".")), options)


def _require_ffmpeg(options: DrawingOptions) -> None:
    """Fails before any episode is played."""
    if options.format != "html":
        from rlstable.render.film import require_ffmpeg

        require_ffmpeg()


def _write(recorded: RecordedEpisodes, folder: Path, options: DrawingOptions) -> list[dict[str, Any]]:
    from rlstable.io.files import require_replaceable, write_atomically

    films = [f"{one.name}.mp4" for one in recorded.recordings] if options.format != "html" else []
    require_replaceable(folder, ["episodes.html", *films], "out")
    about = [
        {"episode": one.name, "return": one.total, "steps": len(one.rewards), "aborted": one.aborted}
        for one in recorded.recordings
    ]
    written: list[dict[str, Any]] = []
    folder.mkdir(parents=True, exist_ok=True)
    if options.format in ("both", "html"):
        from rlstable.render.page import page

        write_atomically(folder / "episodes.html", page(recorded))
        written.append({"file": str(folder / "episodes.html"), "episodes": about})
    if options.format in ("both", "mp4"):
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
