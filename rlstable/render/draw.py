"""Draws a film in a separate process: `python -m rlstable.render.draw <folder>`, called by `film`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
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
    """The frames of an episode in real time, `[height, width, 3]` each; the last frame repeats for a second.

    A light floor in front of a wall of the same colour replaces the model's own, and a sun the model's lights, so that
    films of all models look alike.
    """
    seconds, motion = float(episode["seconds"]), episode["motion"]
    bodies = poses(model, episode["positions"])
    framing = frame_episode(model, bodies, seconds)
    count = int(np.ceil((len(bodies) - 1) * seconds * _FRAMES_PER_SECOND)) + 1
    steps = np.minimum((np.arange(count) / _FRAMES_PER_SECOND / seconds).astype(int), len(bodies) - 1)
    fastest = max((float(np.linalg.norm(one[:2])) for one in motion[:1].reshape(-1, 3)), default=0.0) or 1.0
    for geom in range(model.ngeom):
        if is_floor(model, geom):
            model.geom_group[geom] = mujoco.mjNGROUP - 1  # hidden
    play.set_light(model, framing.size)
    model.vis.global_.fovy, model.vis.quality.shadowsize = VIEW_ANGLE, 1024
    model.vis.global_.offwidth, model.vis.global_.offheight = width, height
    data, camera, option, frame = mujoco.MjData(model), mujoco.MjvCamera(), mujoco.MjvOption(), np.empty(0)
    option.sitegroup[:] = 0
    camera.azimuth, camera.elevation, camera.distance = (
        framing.azimuth,
        framing.elevation,
        framing.distance(width / height),
    )
    with contextlib.closing(mujoco.Renderer(model, height, width)) as renderer:
        for step in [*steps.tolist(), len(bodies) - 1]:
            data.qpos[:], camera.lookat[:] = episode["positions"][step], framing.targets[step]
            mujoco.mj_kinematics(model, data)
            renderer.update_scene(data, camera, option)
            ground = np.array([*camera.lookat[:2], framing.floor.height])
            play.add_surroundings(renderer.scene, ground, framing.size)
            play.add_grid(renderer.scene, ground, framing.floor.cell)
            for colour, direction in zip(_MOTIONS.values(), motion[:, step, :2] / fastest, strict=False):
                _add_arrow(renderer.scene, model, data, framing, direction, colour)
            frame = _labelled(renderer.render(), episode, step)
            yield frame
        for _ in range(_FRAMES_PER_SECOND):
            yield frame


def _add_arrow(
    scene: mujoco.MjvScene,
    model: mujoco.MjModel,
    data: mujoco.MjData,
    framing: Framing,
    direction: np.ndarray,
    colour: tuple[int, ...],
) -> None:
    """An arrow on the floor from the robot, in a direction forward and sideways, `[2]`."""
    body, size = followed_body(model), framing.size
    length = size * float(np.linalg.norm(direction))
    if body is None or length < 0.02 * size:
        return
    forward = data.xmat[body].reshape(3, 3)[:2, 0]
    forward /= max(float(np.linalg.norm(forward)), 1e-6)
    along = direction[0] * forward + direction[1] * np.array([-forward[1], forward[0]])
    start = np.array([*data.xpos[body][:2], framing.floor.height + 0.02 * size])
    arrow, painted = mujoco.mjtGeom.mjGEOM_ARROW, np.array([*colour, 255], np.float32) / 255
    geom = scene.geoms[scene.ngeom]
    mujoco.mjv_initGeom(geom, arrow, np.zeros(3), start, np.eye(3).ravel(), painted)
    mujoco.mjv_connector(geom, arrow, 0.012 * size, start, start + 0.7 * size * np.array([*along, 0.0]))
    scene.ngeom += 1


def _labelled(frame: np.ndarray, episode: dict[str, np.ndarray], step: int) -> np.ndarray:
    """The frame with title, time, reward and return."""
    image, rewards, size = Image.fromarray(frame), episode["rewards"], max(11, len(frame) // 34)
    pen, font, line = ImageDraw.Draw(image, "RGBA"), ImageFont.load_default(size), 1.35 * size
    reward = f"{rewards[step - 1]:,.2f}" if step else "-"
    lines = {str(episode["title"]): _INK}
    lines[f"time {step * episode['seconds']:.2f} s   reward {reward}   return {rewards[:step].sum():,.1f}"] = _FAINT
    for (name, colour), (ahead, aside, turn) in zip(_MOTIONS.items(), episode["motion"][:, step], strict=False):
        lines[f"{name} {ahead:.2f} m/s forward, {aside:.2f} m/s sideways, {turn:.2f} rad/s"] = colour
    if episode["aborted"] and step == len(rewards):
        lines["a guard tripped: the simulation went bad here"] = _BAD
    text_width = max(pen.textlength(text, font) for text in lines)
    pen.rounded_rectangle((8, 8, 24 + text_width, 16 + line * len(lines)), 6, fill=_PANEL)
    for number, (text, colour) in enumerate(lines.items()):
        pen.text((16, 11 + number * line), text, fill=colour, font=font)
    return np.asarray(image)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
