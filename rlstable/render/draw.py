"""Draws a film in a separate process: `python -m rlstable.render.draw <folder>`, called by `film`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import imageio_ffmpeg
import mujoco
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rlstable import play
from rlstable.render.framing import VIEW_ANGLE, Framing, frame_episode
from rlstable.render.scene import followed_body, is_floor, poses

_FRAMES_PER_SECOND = 30
_INK, _FAINT, _BAD, _PANEL = (28, 36, 48), (92, 107, 125), (200, 50, 31), (255, 255, 255, 190)
_MOTIONS = {"asked": (10, 108, 214), "moves": (217, 131, 10)}  # colours of arrows and texts


def main(folder: Path) -> None:
    model = mujoco.MjModel.from_binary_path(str(folder / "model.mjb"))
    with np.load(folder / "episode.npz") as saved:
        episode = dict(saved)
    width, height = map(int, episode["size"])
    encoding = {"fps": _FRAMES_PER_SECOND, "macro_block_size": 2, "quality": 8, "ffmpeg_log_level": "error"}
    writer = imageio_ffmpeg.write_frames(str(folder / "film.mp4"), (width, height), **encoding)
    writer.send(None)
    for frame in frames(model, episode, width, height):
        writer.send(np.ascontiguousarray(frame))
    writer.close()


def frames(model: mujoco.MjModel, episode: dict[str, np.ndarray], width: int, height: int) -> Iterator[np.ndarray]:
    """The frames of an episode in real time, `[height, width, 3]` each; the last frame repeats for a second."""
    rewards, seconds = episode["rewards"], float(episode["seconds"])
    bodies = poses(model, episode["positions"])
    framing = frame_episode(model, bodies, seconds)
    count = int(np.ceil((len(bodies) - 1) * seconds * _FRAMES_PER_SECOND)) + 1
    steps = np.minimum((np.arange(count) / _FRAMES_PER_SECOND / seconds).astype(int), len(bodies) - 1)
    motion = episode["motion"]
    fastest = max((float(np.linalg.norm(one[:2])) for one in motion[:1].reshape(-1, 3)), default=0.0) or 1.0
    overlay = Overlay(str(episode["title"]), rewards, seconds, bool(episode["aborted"]), height, motion)
    with contextlib.closing(Painter(model, framing, width, height)) as painter:
        frame = np.zeros((height, width, 3), np.uint8)
        for step in [*steps, len(bodies) - 1]:
            painted = painter.paint(episode["positions"][step], framing.targets[step], motion[:, step, :2] / fastest)
            frame = overlay.draw(painted, int(step))
            yield frame
        for _ in range(_FRAMES_PER_SECOND):
            yield frame


class Painter:
    """Draws the states of an episode with MuJoCo's renderer, on a light floor in front of a wall of the same colour.

    The floor replaces the model's own, and a sun the model's own lights, so that films of all models look alike.
    """

    def __init__(self, model: mujoco.MjModel, framing: Framing, width: int, height: int):
        for geom in range(model.ngeom):
            if is_floor(model, geom):
                model.geom_group[geom] = mujoco.mjNGROUP - 1  # hidden
        play.set_light(model, framing.size)
        model.vis.global_.fovy, model.vis.quality.shadowsize = VIEW_ANGLE, 1024
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        self._data, self._framing, self._option = mujoco.MjData(model), framing, mujoco.MjvOption()
        self._option.sitegroup[:] = 0
        self._camera = mujoco.MjvCamera()
        self._camera.azimuth, self._camera.elevation = framing.azimuth, framing.elevation
        self._camera.distance = framing.distance(width / height)
        self._model, self._renderer = model, mujoco.Renderer(model, height, width)

    def paint(self, position: np.ndarray, target: np.ndarray, arrows: Iterable[np.ndarray]) -> np.ndarray:
        """The frame of generalized positions `[nq]` with a point `[3]` in its middle, `[height, width, 3]`.

        `arrows` are directions forward and sideways, `[2]` each, of arrows on the floor from the robot.
        """
        self._data.qpos[:] = position
        mujoco.mj_kinematics(self._model, self._data)
        self._camera.lookat[:] = target
        self._renderer.update_scene(self._data, self._camera, self._option)
        ground = np.array([*target[:2], self._framing.floor.height])
        play.add_surroundings(self._renderer.scene, ground, self._framing.size)
        play.add_grid(self._renderer.scene, ground, self._framing.floor.cell)
        for colour, direction in zip(_MOTIONS.values(), arrows, strict=False):
            self._add_arrow(self._renderer.scene, direction, colour)
        return self._renderer.render()

    def close(self) -> None:
        self._renderer.close()

    def _add_arrow(self, scene: mujoco.MjvScene, direction: np.ndarray, colour: tuple[int, ...]) -> None:
        body, size = followed_body(self._model), self._framing.size
        length = size * float(np.linalg.norm(direction))
        if body is None or length < 0.02 * size:
            return
        forward = self._data.xmat[body].reshape(3, 3)[:2, 0]
        forward /= max(float(np.linalg.norm(forward)), 1e-6)
        along = direction[0] * forward + direction[1] * np.array([-forward[1], forward[0]])
        start = np.array([*self._data.xpos[body][:2], self._framing.floor.height + 0.02 * size])
        arrow, painted = mujoco.mjtGeom.mjGEOM_ARROW, np.array([*colour, 255], np.float32) / 255
        geom = scene.geoms[scene.ngeom]
        mujoco.mjv_initGeom(geom, arrow, np.zeros(3), start, np.eye(3).ravel(), painted)
        mujoco.mjv_connector(geom, arrow, 0.012 * size, start, start + 0.7 * size * np.array([*along, 0.0]))
        scene.ngeom += 1


class Overlay:
    """Overlay of the frames: title, time, reward and return."""

    def __init__(self, title: str, rewards: np.ndarray, seconds: float, aborted: bool, height: int, motion: np.ndarray):
        self._motion = motion
        self._title, self._seconds, self._aborted = title, seconds, aborted
        self._rewards, self._sums = rewards, np.concatenate([[0.0], np.cumsum(rewards)])
        self._font_size = max(11, height // 34)
        self._font = ImageFont.load_default(self._font_size)

    def draw(self, frame: np.ndarray, step: int) -> np.ndarray:
        image = Image.fromarray(frame)
        pen = ImageDraw.Draw(image, "RGBA")
        line = self._font_size * 1.35
        reward = f"{self._rewards[step - 1]:,.2f}" if step else "-"
        lines = {self._title: _INK}
        lines[f"time {step * self._seconds:.2f} s   reward {reward}   return {self._sums[step]:,.1f}"] = _FAINT
        for (name, colour), (ahead, aside, turn) in zip(_MOTIONS.items(), self._motion[:, step], strict=False):
            lines[f"{name} {ahead:.2f} m/s forward, {aside:.2f} m/s sideways, {turn:.2f} rad/s"] = colour
        if self._aborted and step == len(self._rewards):
            lines["a guard tripped: the simulation went bad here"] = _BAD
        text_width = max(pen.textlength(text, self._font) for text in lines)
        pen.rounded_rectangle((8, 8, 24 + text_width, 16 + line * len(lines)), 6, fill=_PANEL)
        for number, (text, colour) in enumerate(lines.items()):
            pen.text((16, 11 + number * line), text, fill=colour, font=self._font)
        return np.asarray(image)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
