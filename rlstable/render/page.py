"""An interactive 3D page of episodes, in one HTML file that loads nothing from a server."""

from __future__ import annotations

import base64
import functools
import html
import json
import string
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rlstable.render.episode import RecordedEpisodes, Recording
from rlstable.render.framing import Framing, frame_episode
from rlstable.render.scene import Part, followed_body, make_scene, poses

_DIGITS = 5  # of a reward; the page only displays rewards


def page(recorded: RecordedEpisodes, others: Mapping[str, str] | None = None) -> str:
    """The page; `others` are addresses of other pages, by name, which it links."""
    model = recorded.model
    moved = [poses(model, recording.positions) for recording in recorded.recordings]
    followed = followed_body(model) or 0
    meshes, parts = make_scene(model, np.concatenate([bodies[:, followed, :3] for bodies in moved]))
    framings = [frame_episode(model, bodies, recorded.seconds) for bodies in moved]
    widest = max(framings, key=lambda framing: framing.size)
    data = {
        "title": recorded.title,
        "others": others or {},
        "seconds": recorded.seconds,
        "bodies": int(model.nbody),
        "meshes": [{name: _text(values) for name, values in mesh._asdict().items()} for mesh in meshes],
        "parts": [_part(part) for part in parts],
        "follows": followed_body(model),
        "azimuth": widest.azimuth,
        "elevation": widest.elevation,
        "half": widest.half.tolist(),
        "floor": widest.floor._asdict(),
        "episodes": [_episode(*one) for one in zip(recorded.recordings, moved, framings, strict=True)],
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # Unescaped, `</script>` would end the element and `<!--` would start a comment.
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return _template().substitute(title=html.escape(recorded.title), data=safe)


@functools.cache
def _template() -> string.Template:
    return string.Template(Path(__file__).with_name("viewer.html").read_text(encoding="utf-8"))


def _episode(recording: Recording, bodies: np.ndarray, framing: Framing) -> dict[str, object]:
    return {
        "name": recording.name,
        "aborted": recording.aborted,
        "motion": None if recording.motion is None else _text(recording.motion.astype(np.float32)),
        "rewards": [float(f"{reward:.{_DIGITS}g}") for reward in recording.rewards],
        "poses": _text(bodies),
        "targets": _text(framing.targets.astype(np.float32)),
    }


def _part(part: Part) -> dict[str, object]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in part._asdict().items()}


def _text(values: np.ndarray) -> str:
    """Little-endian numbers in base64, the format that the page's script reads."""
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode("ascii")
