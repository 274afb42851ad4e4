"""Films: MuJoCo's renderer in a separate process, on the OpenGL that works.

MuJoCo decides at its import how it draws, and a driver that fails takes its process with it; so another process draws.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import mujoco
import numpy as np

from rlstable.config import ConfigError
from rlstable.io.run_folder import write_atomically
from rlstable.render.recording import RecordedEpisodes, Recording

# On a GPU's driver or Mesa's, without a display; then in software.
_WAYS = ("egl", "osmesa")
_NO_OPENGL = (
    "format: no OpenGL to draw films with ({tried}); install one of libegl1 and libosmesa6 "
    "(apt-get install libosmesa6), or choose format=html, which needs none"
)
_NOT_ENCODED = (
    "format: ffmpeg could not encode the film ({why}); unset IMAGEIO_FFMPEG_EXE or let it name one that works, or "
    "choose format=html"
)


def write_film(recorded: RecordedEpisodes, recording: Recording, path: Path, width: int, height: int) -> None:
    """Draws an episode and writes it as mp4, in real time.

    Args:
        recorded: Of which it is one.
        recording: The episode.
        path: The file; it is there whole or not at all.
        width: In pixels, even.
        height: In pixels, even.

    Raises:
        ConfigError: There is no OpenGL, or no ffmpeg.
    """
    require_ffmpeg()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mujoco.mj_saveModel(recorded.model, str(folder / "model.mjb"))
        np.savez(
            folder / "episode.npz",
            positions=recording.positions,
            rewards=recording.rewards,
            seconds=recorded.seconds,
            aborted=recording.aborted,
            title=f"{recorded.title}, {recording.name}",
            size=(width, height),
        )
        _draw(folder)
        write_atomically(path, (folder / "film.mp4").read_bytes())


def require_ffmpeg() -> None:
    """Checks that films can be encoded.

    Raises:
        ConfigError: What encodes them is not installed.
    """
    for package in ("imageio_ffmpeg", "PIL"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"format: mp4 needs {package}, which is not installed; pip install 'rlstable[render]', or choose "
                "format=html"
            )
    import imageio_ffmpeg

    try:
        imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise ConfigError(
            "format: mp4 needs ffmpeg, and imageio-ffmpeg has none for this machine; apt-get install ffmpeg, or choose "
            "format=html"
        ) from error


def _draw(folder: Path) -> None:
    told = os.environ.get("MUJOCO_GL")
    tried = {}
    for way in (told,) if told else _WAYS:
        command = [sys.executable, "-m", "rlstable.render.draw", str(folder)]
        env = {**os.environ, "MUJOCO_GL": way}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode == 0:
            return
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        if done.returncode == os.EX_IOERR:
            raise ConfigError(_NOT_ENCODED.format(why=last[:200]))
        tried[way] = last[:200]
    raise ConfigError(_NO_OPENGL.format(tried="; ".join(f"{way}: {why}" for way, why in tried.items())))
