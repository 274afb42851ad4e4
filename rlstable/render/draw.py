"""Draws a film in a separate process: `python -m rlstable.render.draw <folder>`, called by `film`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rlstable.render.film_model import SHADOW_REACH, SUN, film_model
from rlstable.render.framing import Framing, frame_episode
from rlstable.render.scene import poses
from rlstable.render.shadow import SIZE, Shadow

_FRAMES_PER_SECOND = 30
_GIF_FRAMES_PER_SECOND = 10
_SECONDS_PER_LINE = 3.0  # of progress
# The colours of the page of episodes.
_INK, _FAINT, _LINE, _BAD, _PANEL = (28, 36, 48), (92, 107, 125), (10, 108, 214), (200, 50, 31), (255, 255, 255, 190)


def main(folder: Path) -> None:
    """Draws the model and the episode in a folder, and writes the film there."""
    model = mujoco.MjModel.from_binary_path(str(folder / "model.mjb"))
    with np.load(folder / "episode.npz") as saved:
        episode = dict(saved)
    (width, height), path = map(int, episode["size"]), folder / str(episode["film"])
    if path.suffix == ".gif":
        _write_gif(path, frames(model, episode, width, height, _GIF_FRAMES_PER_SECOND))
    else:
        _write_mp4(path, frames(model, episode, width, height), (width, height))


def _write_mp4(path: Path, pictures: Iterator[np.ndarray], size: tuple[int, int]) -> None:
    import imageio_ffmpeg

    writer = imageio_ffmpeg.write_frames(
        str(path), size, fps=_FRAMES_PER_SECOND, macro_block_size=2, quality=8, ffmpeg_log_level="error"
    )
    _encode(writer.send, None)
    shown = time.monotonic()
    for number, frame in enumerate(pictures, 1):
        _encode(writer.send, np.ascontiguousarray(frame))
        if time.monotonic() - shown > _SECONDS_PER_LINE:
            shown = time.monotonic()
            print(f"{number / _FRAMES_PER_SECOND:.1f} s of film", flush=True)
    _encode(writer.close)


def _write_gif(path: Path, pictures: Iterator[np.ndarray]) -> None:
    os.nice(10)  # a training run draws it, and comes first
    first = Image.fromarray(next(pictures)).quantize(128)
    rest = (Image.fromarray(frame).quantize(palette=first, dither=Image.Dither.NONE) for frame in pictures)
    first.save(path, save_all=True, append_images=rest, duration=1000 // _GIF_FRAMES_PER_SECOND, loop=0)


def _encode(step: Callable[..., Any], *args: Any) -> None:
    """Runs a step of encoding. Exits with `EX_IOERR` on an error, so that `film` knows that OpenGL works."""
    try:
        step(*args)
    except Exception as error:  # imageio-ffmpeg raises errors of several types
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(os.EX_IOERR)


def frames(
    model: Any, episode: dict[str, Any], width: int, height: int, rate: int = _FRAMES_PER_SECOND
) -> Iterator[np.ndarray]:
    """The frames of an episode in real time, `[height, width, 3]` each; the last frame repeats for a second.

    Args:
        model: The simulated `mujoco.MjModel`.
        episode: Arrays and values that `film.write_film` saves.
        width: Width in pixels.
        height: Height in pixels.
        rate: Frames per second.
    """
    rewards, seconds = episode["rewards"], float(episode["seconds"])
    bodies = poses(model, episode["positions"])
    framing = frame_episode(model, bodies, seconds)
    film = film_model(model, framing.floor, framing.size)
    count = int(np.ceil((len(bodies) - 1) * seconds * rate)) + 1
    steps = np.minimum((np.arange(count) / rate / seconds).astype(int), len(bodies) - 1)
    overlay = Overlay(str(episode["title"]), rewards, seconds, bool(episode["aborted"]), width, height)
    with contextlib.closing(Painter(film, framing, width, height)) as painter:
        frame = np.zeros((height, width, 3), np.uint8)
        for step in [*steps, len(bodies) - 1]:
            frame = overlay.draw(painter.paint(bodies[step], framing.targets[step]), int(step))
            yield frame
        for _ in range(rate):
            yield frame


class Painter:
    """Draws the states of an episode with MuJoCo's renderer.

    Args:
        model: The model of the film.
        framing: The camera.
        width: Width of a frame, in pixels.
        height: Height of a frame, in pixels.
    """

    def __init__(self, model: Any, framing: Framing, width: int, height: int):
        self._model, self._data, self._floor = model, mujoco.MjData(model), framing.floor.height
        half = SHADOW_REACH * framing.size
        self._shadow = Shadow(model, SUN, half)
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        self._camera, self._option = mujoco.MjvCamera(), mujoco.MjvOption()
        self._camera.azimuth, self._camera.elevation = framing.azimuth, framing.elevation
        self._camera.distance = framing.distance(width / height)
        self._opengl = mujoco.GLContext(width, height)
        self._opengl.make_current()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, model.ngeom + 10)
        self._picture = np.empty((height, width, 3), np.uint8)

    def paint(self, bodies: np.ndarray, target: np.ndarray) -> np.ndarray:
        """The frame of a state, `[height, width, 3]`.

        Args:
            bodies: Pose of every body, `[nbody, 7]`.
            target: Point to look at, `[3]`, metres.
        """
        model, data = self._model, self._data
        data.mocap_pos[:-1], data.mocap_quat[:-1] = bodies[1:, :3], bodies[1:, 3:]
        # Below the middle of the robot, where the sun's rays meet the floor.
        centre = (target - SUN / SUN[2] * max(target[2] - self._floor, 0.0))[:2]
        data.mocap_pos[-1, :2] = centre
        mujoco.mj_kinematics(model, data)
        mujoco.mj_camlight(model, data)
        opacity = model.tex_data[model.tex_adr[-1] :].reshape(SIZE, SIZE, 4)[..., 3]
        opacity[:] = self._shadow.picture(data, self._floor, centre)[
            ::-1
        ]  # the first row of a texture is the last in y
        mujoco.mjr_uploadTexture(model, self._context, model.ntex - 1)
        self._camera.lookat[:] = target
        every = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(model, data, self._option, None, self._camera, every, self._scene)
        view = mujoco.MjrRect(0, 0, self._picture.shape[1], self._picture.shape[0])
        mujoco.mjr_render(view, self._scene, self._context)
        mujoco.mjr_readPixels(self._picture, None, view, self._context)
        return self._picture[::-1]

    def close(self) -> None:
        """Releases OpenGL."""
        self._context.free()
        self._opengl.free()


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
        pen.rounded_rectangle((8, 8, 24 + text_width, 16 + line * len(texts)), 6, fill=_PANEL)
        for number, text in enumerate(texts):
            colour = _BAD if number == 2 else _INK if number == 0 else _FAINT
            pen.text((16, 11 + number * line), text, fill=colour, font=self._font)
        if len(self._rewards):
            self._plot(pen, step, width, height)
        return np.asarray(image)

    def _plot(self, pen: Any, step: int, width: int, height: int) -> None:
        low, high = float(self._rewards.min()), float(self._rewards.max())
        left, right, top, bottom = 8, width - 8, height * 0.92 - 12, height - 8
        pen.rounded_rectangle((left, top, right, bottom), 6, fill=_PANEL)
        across = left + np.arange(1, len(self._rewards) + 1) / len(self._rewards) * (right - left)
        share = (self._rewards - low) / (high - low) if high > low else np.full(len(across), 0.5)
        up = bottom - 4 - share * (bottom - top - 8)
        if step > 1:
            pen.line([(float(x), float(y)) for x, y in zip(across[:step], up[:step], strict=True)], fill=_LINE, width=2)
        now = float(across[step - 1]) if step else left
        pen.line([(now, top), (now, bottom)], fill=_INK, width=1)
        if self._aborted:
            pen.rectangle((right - 3, top, right, bottom), fill=_BAD)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
