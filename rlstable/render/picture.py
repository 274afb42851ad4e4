"""Draws one position of a model as a PNG file, in a separate process: `python -m rlstable.render.picture <folder>`."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
from pathlib import Path

import mujoco
import numpy as np

from rlstable.config import ConfigError
from rlstable.config.extras import install
from rlstable.io.files import write_atomically
from rlstable.render.film import draw_with_opengl
from rlstable.render.framing import frame_episode
from rlstable.render.scene import poses

_WIDTH, _HEIGHT = 960, 720
_MOST_SECONDS = 120.0


def write_picture(model: mujoco.MjModel, position: np.ndarray, path: Path) -> None:
    """Draws generalized positions `[nq]`. Raises `ConfigError` if OpenGL or a package is missing."""
    for package in ("imageio_ffmpeg", "PIL"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"picture: {package} is not installed; {install('render')}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mujoco.mj_saveModel(model, str(folder / "model.mjb"))
        np.save(folder / "position.npy", position)
        draw_with_opengl(__name__, folder, _MOST_SECONDS, "picture: no OpenGL for a picture")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (folder / "picture.png").read_bytes())


def main(folder: Path) -> None:
    from PIL import Image

    from rlstable.render.draw import Painter

    model = mujoco.MjModel.from_binary_path(str(folder / "model.mjb"))
    position = np.load(folder / "position.npy")
    framing = frame_episode(model, poses(model, position[None]), 1.0)
    with contextlib.closing(Painter(model, framing, _WIDTH, _HEIGHT)) as painter:
        Image.fromarray(painter.paint(position, framing.targets[0])).save(folder / "picture.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
