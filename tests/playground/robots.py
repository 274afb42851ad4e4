"""Robots of Playground without MuJoCo Menagerie: meshes under the asked names, each a small tetrahedron.

Playground's own XML has all bodies, inertias and joints; the meshes are only looks.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

GO1 = "Go1JoystickFlatTerrain"
_GO1_MESHES = ("trunk", "hip", "thigh_mirror", "calf", "thigh")
_CORNERS = ((0.0, 0.0, 0.0), (0.01, 0.0, 0.0), (0.0, 0.01, 0.0), (0.0, 0.0, 0.01))
_FACES = ((0, 2, 1), (0, 1, 3), (0, 3, 2), (1, 2, 3))


def use_dummy_meshes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Playground read the meshes of Go1 from a folder instead of MuJoCo Menagerie."""
    from mujoco_playground._src import mjx_env

    assets = folder / "unitree_go1" / "assets"
    assets.mkdir(parents=True)
    for name in _GO1_MESHES:
        (assets / f"{name}.stl").write_bytes(_tetrahedron())
    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", type(mjx_env.MENAGERIE_PATH)(folder))


def _tetrahedron() -> bytes:
    """A binary STL file."""
    faces = (struct.pack("<12fH", 0, 0, 0, *(x for corner in face for x in _CORNERS[corner]), 0) for face in _FACES)
    return bytes(80) + struct.pack("<I", len(_FACES)) + b"".join(faces)
