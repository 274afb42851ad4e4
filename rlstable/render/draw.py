"""Draws a film in a separate process: `python -m rlstable.render.draw <folder>`, called by `film`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import mujoco
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rlstable.render.scene import followed_body

_FRAMES_PER_SECOND = 30
_SECONDS_PER_LINE = 3.0  # of progress
_SHADOW_SIZE = 1024  # pixels of the shadow map to each side; MuJoCo's 4096 takes most of the time in software
_INK, _FAINT, _LINE, _BAD = (255, 255, 255), (200, 208, 218), (110, 190, 255), (255, 110, 90)


def main(folder: Path) -> None:
    """Draws the model and the episode in a folder, and writes `film.mp4` there."""
    model = mujoco.MjModel.from_binary_path(str(folder / "model.mjb"))
    with np.load(folder / "episode.npz") as episode:
        size = tuple(int(side) for side in episode["size"])
        writer = imageio_ffmpeg.write_frames(
            str(folder / "film.mp4"),
            size,
            fps=_FRAMES_PER_SECOND,
            macro_block_size=2,
            quality=8,
            ffmpeg_log_level="error",
        )
        _encode(writer.send, None)
        shown = time.monotonic()
        for number, frame in enumerate(frames(model, dict(episode), *size), 1):
            _encode(writer.send, np.ascontiguousarray(frame))
            if time.monotonic() - shown > _SECONDS_PER_LINE:
                shown = time.monotonic()
                print(f"{number / _FRAMES_PER_SECOND:.1f} s of film", flush=True)
        _encode(writer.close)


def _encode(step: Callable[..., Any], *args: Any) -> None:
    """Runs a step of encoding. Exits with `EX_IOERR` on an error, so that `film` knows that OpenGL works."""
    try:
        step(*args)
    except Exception as error:  # imageio-ffmpeg raises errors of several types
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(os.EX_IOERR)


def frames(model: Any, episode: dict[str, Any], width: int, height: int) -> Iterator[np.ndarray]:
    """The frames of an episode in real time, `[height, width, 3]` each; the last frame repeats for a second."""
    positions, rewards, seconds = episode["positions"], episode["rewards"], float(episode["seconds"])
    model.vis.global_.offwidth = max(model.vis.global_.offwidth, width)
    model.vis.global_.offheight = max(model.vis.global_.offheight, height)
    model.vis.quality.shadowsize = min(model.vis.quality.shadowsize, _SHADOW_SIZE)
    model.mat_reflectance[:] = 0.0  # a reflection draws the scene twice
    data, camera = mujoco.MjData(model), _camera(model)
    count = int(np.ceil((len(positions) - 1) * seconds * _FRAMES_PER_SECOND)) + 1
    steps = np.minimum((np.arange(count) / _FRAMES_PER_SECOND / seconds).astype(int), len(positions) - 1)
    overlay = Overlay(str(episode["title"]), rewards, seconds, bool(episode["aborted"]), width, height)
    with mujoco.Renderer(model, height, width) as renderer:
        frame = np.zeros((height, width, 3), np.uint8)
        for step in [*steps, len(positions) - 1]:
            data.qpos[:] = positions[step]
            mujoco.mj_forward(model, data)
            renderer.update_scene(data, camera)
            frame = overlay.draw(renderer.render(), int(step))
            yield frame
        for _ in range(_FRAMES_PER_SECOND):
            yield frame


def _camera(model: Any) -> Any:
    """A camera that follows a body that travels, else MuJoCo's default camera."""
    camera = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(model, camera)
    if (body := followed_body(model)) is not None:
        camera.type = mujoco.mjtCamera.mjCAMERA_TRACKING
        camera.trackbodyid = body
        camera.azimuth, camera.elevation = 120.0, -18.0
    return camera


class Overlay:
    """Overlay of the frames: title, time, reward, return, and a plot of the rewards so far.

    Args:
        title: Title of the episode.
        rewards: Reward of every action, `[T]`.
        seconds: Simulated time per action.
        aborted: Whether a guard tripped at the end.
        width: Width of a frame, in pixels.
        height: Height of a frame, in pixels.
    """

    def __init__(self, title: str, rewards: np.ndarray, seconds: float, aborted: bool, width: int, height: int):
        self._title, self._seconds, self._aborted = title, seconds, aborted
        self._rewards, self._sums = rewards, np.concatenate([[0.0], np.cumsum(rewards)])
        self._size = (width, height)
        self._font_size = max(11, height // 34)
        self._font = ImageFont.load_default(self._font_size)

    def draw(self, frame: np.ndarray, step: int) -> np.ndarray:
        """The frame of a step with the overlay."""
        image = Image.fromarray(frame)
        pen = ImageDraw.Draw(image, "RGBA")
        (width, height), line = self._size, self._font_size * 1.35
        reward = f"{self._rewards[step - 1]:,.2f}" if step else "-"
        texts = [self._title, f"time {step * self._seconds:.2f} s   reward {reward}   return {self._sums[step]:,.1f}"]
        last = step == len(self._rewards)
        if self._aborted and last:
            texts.append("a guard tripped: the simulation went bad here")
        text_width = max(pen.textlength(text, self._font) for text in texts)
        pen.rectangle((6, 6, 18 + text_width, 12 + line * len(texts)), fill=(0, 0, 0, 120))
        for number, text in enumerate(texts):
            colour = _BAD if number == 2 else _INK if number == 0 else _FAINT
            pen.text((12, 9 + number * line), text, fill=colour, font=self._font)
        if len(self._rewards):
            self._plot(pen, step, width, height)
        return np.asarray(image)

    def _plot(self, pen: Any, step: int, width: int, height: int) -> None:
        low, high = float(self._rewards.min()), float(self._rewards.max())
        span, tall = max(high - low, 1e-9), height * 0.12
        pen.rectangle((0, height - tall - 8, width, height), fill=(0, 0, 0, 110))
        across = np.arange(1, len(self._rewards) + 1) / len(self._rewards) * (width - 1)
        up = height - 4 - (self._rewards - low) / span * tall if high > low else np.full(len(across), height - tall / 2)
        if step > 1:
            pen.line([(float(x), float(y)) for x, y in zip(across[:step], up[:step], strict=True)], fill=_LINE, width=2)
        now = step / len(self._rewards) * (width - 1)
        pen.line([(now, height - tall - 8), (now, height)], fill=_INK, width=1)
        if self._aborted:
            pen.rectangle((width - 4, height - tall - 8, width, height), fill=_BAD)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
