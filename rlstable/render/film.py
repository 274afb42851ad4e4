"""Writes films with MuJoCo's renderer in a separate process, on the first OpenGL backend that works.

MuJoCo chooses its OpenGL backend at import, and a failing driver can crash its process. So a separate process draws.
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
from rlstable.config.extras import install
from rlstable.io.files import write_atomically
from rlstable.render.episode import RecordedEpisodes, Recording

_PATIENCE = 3600.0  # seconds; a driver that draws longer counts as hanging
_OPENGL_BACKENDS = ("egl", "osmesa")  # a driver without a display, then software


def write_film(recorded: RecordedEpisodes, recording: Recording, path: Path, width: int, height: int) -> None:
    """Draws an episode and writes it as an mp4 film in real time.

    `width` and `height` are even numbers of pixels. Raises `ConfigError`, and writes no file, if OpenGL or ffmpeg is
    missing or does not work.
    """
    require_ffmpeg()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mujoco.mj_saveModel(recorded.model, str(folder / "model.mjb"))
        none = np.zeros((0, len(recording.positions), 3))
        np.savez(
            folder / "episode.npz", positions=recording.positions, rewards=recording.rewards, aborted=recording.aborted,
            motion=none if recording.motion is None else recording.motion,
            title=f"{recorded.title}, {recording.name}", seconds=recorded.seconds, size=(width, height),
        )  # fmt: skip
        _draw_with_opengl(folder)
        write_atomically(path, (folder / "film.mp4").read_bytes())


def require_ffmpeg() -> None:
    """Raises `ConfigError` if films cannot be encoded."""
    for package in ("imageio_ffmpeg", "PIL"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"format: a film needs {package}, which is not installed; {install('render')}, or choose format=html"
            )


def _draw_with_opengl(folder: Path) -> None:
    """Runs `rlstable.render.draw` with one OpenGL backend after another, until one draws.

    Raises `ConfigError` if no backend draws, or if ffmpeg fails, with all errors and the remedy.
    """
    configured, errors = os.environ.get("MUJOCO_GL"), []
    for backend in (configured,) if configured else _OPENGL_BACKENDS:
        command = [sys.executable, "-m", "rlstable.render.draw", str(folder)]
        env = {**os.environ, "MUJOCO_GL": backend}
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            errors.append(f"{backend}: nothing drawn after {_PATIENCE:.0f} s")
            continue
        if done.returncode == 0:
            return
        error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]
        errors.append(f"{backend}: {error}")
    raise ConfigError(
        f"format: no film was drawn ({'; '.join(errors)}); it needs ffmpeg and OpenGL "
        "(apt-get install ffmpeg libosmesa6), or choose format=html, which needs neither"
    )
