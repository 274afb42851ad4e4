"""Moving pictures of trained policies for the pages.

python -m scripts.films RUN OUT.webp     # a film of at most 120 kB of the policy that a run folder hands over
"""

import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import imageio_ffmpeg
from PIL import Image

from rlstable.policy.saved_run import open_run
from rlstable.render.episode import RecordedEpisodes
from rlstable.render.film import write_film
from rlstable.render.recording import record

MOST = 120_000  # bytes of a film of the gallery
_RATE = 30  # frames per second of `write_film`
_SECONDS, _DRAWN, _SIZE, _EVERY = 6.0, (640, 480), (320, 240), 3
_QUALITIES = (45, 30, 18, 8, 1)


def save(frames: Iterable[Image.Image], path: Path, milliseconds: int, quality: int = 40) -> None:
    first, *others = frames
    path.parent.mkdir(exist_ok=True)
    first.save(path, save_all=True, append_images=others, duration=milliseconds, loop=0, quality=quality, method=6)


def frames(recorded: RecordedEpisodes, seconds: float, size: tuple[int, int], every: int) -> list[Image.Image]:
    """The first seconds of the best episode, with only each `every`th frame."""
    with tempfile.TemporaryDirectory() as folder:
        film = Path(folder, "film.mp4")
        write_film(recorded, recorded.recordings[0].start(seconds, recorded.seconds), film, *size)
        read = imageio_ffmpeg.read_frames(str(film))
        next(read)
        return [Image.frombytes("RGB", size, frame) for frame in list(read)[::every]]


def small(run: Path, path: Path) -> None:
    """Draws the policy of a run folder into a film of at most `MOST` bytes: of less quality, then shorter."""
    whole = frames(record(open_run(run), episodes=1), _SECONDS, _DRAWN, _EVERY)
    drawn = [frame.resize(_SIZE, Image.Resampling.LANCZOS) for frame in whole]
    while True:
        for quality in _QUALITIES:
            save(drawn, path, round(1000 * _EVERY / _RATE), quality)
            if path.stat().st_size <= MOST:
                return
        drawn = drawn[: len(drawn) * 3 // 4]


def main(argv: Sequence[str] | None = None) -> None:
    run, path = map(Path, sys.argv[1:] if argv is None else argv)
    small(run, path)


if __name__ == "__main__":
    main()
