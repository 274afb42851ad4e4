"""An interactive 3D page of episodes, in one HTML file that loads nothing from a server."""

from __future__ import annotations

import base64
import functools
import html
import string
from pathlib import Path
from typing import Any

import numpy as np

from rlstable.io.page_data import embedded
from rlstable.render.recording import RecordedEpisodes, Recording
from rlstable.render.scene import Mesh, Part, Scene, make_scene, poses

_DIGITS = 5  # of a reward; the page only displays rewards


def page(recorded: RecordedEpisodes) -> str:
    """The page of episodes, as HTML."""
    scene = make_scene(recorded.model)
    data = {
        "title": recorded.title,
        "seconds": recorded.seconds,
        "bodies": int(recorded.model.nbody),
        "meshes": [_mesh(mesh) for mesh in scene.meshes],
        "parts": [_part(part) for part in scene.parts],
        "centre": scene.centre.tolist(),
        "extent": scene.extent,
        "followed": scene.followed,
        "floor": _floor(scene),
        "episodes": [_episode(recorded.model, recording) for recording in recorded.recordings],
    }
    return _template().substitute(title=html.escape(recorded.title), data=embedded(data))


@functools.cache
def _template() -> string.Template:
    return string.Template(Path(__file__).with_name("viewer.html").read_text(encoding="utf-8"))


def _floor(scene: Scene) -> float | None:
    """Height of the floor that receives shadows, in metres; None without a fixed, level floor."""
    heights = [
        part.position[2] for part in scene.parts if part.checkered and part.body == 0 and abs(part.turn[0]) > 0.999
    ]
    return float(heights[0]) if heights else None


def _episode(model: Any, recording: Recording) -> dict[str, Any]:
    return {
        "name": recording.name,
        "aborted": recording.aborted,
        "rewards": [float(f"{reward:.{_DIGITS}g}") for reward in recording.rewards],
        "poses": _text(poses(model, recording.positions)),
    }


def _mesh(mesh: Mesh) -> dict[str, str]:
    return {name: _text(values) for name, values in mesh._asdict().items()}


def _part(part: Part) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in part._asdict().items()}


def _text(values: np.ndarray) -> str:
    """Little-endian numbers in base64, the format that the page's script reads."""
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode("ascii")
