"""Writes films with MuJoCo's renderer in a separate process, on the first OpenGL backend that works.

MuJoCo chooses its OpenGL backend at import, and a failing driver can crash its process. So a separate process draws.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import mujoco
import numpy as np

from rlstable.config import ConfigError
from rlstable.config.extras import install
from rlstable.io.run_folder import write_atomically
from rlstable.render.recording import RecordedEpisodes, Recording

_SILENT_SECONDS = 300.0  # after which a process that draws counts as hanging
_OPENGL_BACKENDS = ("egl", "osmesa")  # a driver without a display, then software
_NO_OPENGL = (
    "format: no OpenGL for films ({tried}); install libegl1 or libosmesa6 (apt-get install libosmesa6), or choose "
    "format=html, which needs none"
)
_NOT_ENCODED = (
    "format: ffmpeg could not encode the film ({why}); unset IMAGEIO_FFMPEG_EXE or set it to a working ffmpeg, or "
    "choose format=html"
)


def write_film(
    recorded: RecordedEpisodes,
    recording: Recording,
    path: Path,
    width: int,
    height: int,
    show: Callable[[str], None] = lambda line: None,
) -> None:
    """Draws an episode and writes it as a film in real time: mp4, or a GIF with fewer frames if the file is a `.gif`.

    Args:
        recorded: Model and title of the episodes.
        recording: The episode to draw.
        path: File to write. After an error it is not written at all.
        width: Even width in pixels.
        height: Even height in pixels.
        show: Called with a line of progress every few seconds.

    Raises:
        ConfigError: OpenGL or ffmpeg is missing or does not work.
    """
    require_packages("PIL") if path.suffix == ".gif" else require_ffmpeg()
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
            film=f"film{path.suffix}",
        )
        _draw(folder, show)
        write_atomically(path, (folder / f"film{path.suffix}").read_bytes())


def require_ffmpeg() -> None:
    """Checks that films can be encoded.

    Raises:
        ConfigError: ffmpeg or a Python package is not installed.
    """
    require_packages("imageio_ffmpeg", "PIL")
    import imageio_ffmpeg

    try:
        imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise ConfigError(
            "format: mp4 needs ffmpeg, and imageio-ffmpeg has none for this machine; apt-get install ffmpeg, or choose "
            "format=html"
        ) from error


def require_packages(*packages: str) -> None:
    """Checks that Python packages of the extra `render` are installed.

    Args:
        packages: Names of the packages.

    Raises:
        ConfigError: One of them is not installed.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"format: a film needs {package}, which is not installed; {install('render')}, or choose format=html"
            )


def _kill_later(process: subprocess.Popen[str]) -> threading.Timer:
    """Kills a process that prints no progress for too long, because a driver for OpenGL can hang."""
    timer = threading.Timer(_SILENT_SECONDS, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def _draw(folder: Path, show: Callable[[str], None]) -> None:
    configured = os.environ.get("MUJOCO_GL")
    errors = {}
    for backend in (configured,) if configured else _OPENGL_BACKENDS:
        command = [sys.executable, "-m", "rlstable.render.draw", str(folder)]
        env = {**os.environ, "MUJOCO_GL": backend}
        with (folder / "errors.txt").open("w+") as errors_of_process:
            with subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=errors_of_process, text=True
            ) as process:
                watchdog = _kill_later(process)
                try:
                    for line in process.stdout or ():
                        watchdog.cancel()
                        watchdog = _kill_later(process)
                        show(line.strip())
                except BaseException:
                    process.kill()
                    raise
                finally:
                    process.wait()
                    watchdog.cancel()
            errors_of_process.seek(0)
            printed = errors_of_process.read()
        if process.returncode == 0:
            return
        error = (printed.strip().splitlines() or [f"exit code {process.returncode}"])[-1][:200]
        if process.returncode == os.EX_IOERR:
            raise ConfigError(_NOT_ENCODED.format(why=error))
        errors[backend] = error
    raise ConfigError(_NO_OPENGL.format(tried="; ".join(f"{backend}: {error}" for backend, error in errors.items())))
