"""Draws the soft shadow of films: the outline of every geom along the sun's rays, filled and blurred.

A shadow map would be hard and jagged, and would take half of the time of a frame in software.
"""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from rlstable.render.scene import UNBOUNDED, kind_of

SIZE = 192  # pixels of the picture to each side
_BLUR = 2.2  # pixels
_DARKNESS = 70  # opacity of the shadow, of 255
_OUTLINE = 24  # points of the outline of a geom


class Shadow:
    """The picture of the shadow on the floor, around a point that moves with the robot.

    Args:
        model: The model of the film.
        sun: Direction of the sun's rays, `[3]`.
        half: Half the side of the picture, metres.
    """

    def __init__(self, model: Any, sun: np.ndarray, half: float):
        self._model, self._sun, self._half = model, sun, half
        across = np.cross(sun, [1.0, 0.0, 0.0])
        angles = np.linspace(0, 2 * np.pi, _OUTLINE, endpoint=False)[:, None]
        unit = across / np.linalg.norm(across)
        # Directions across the rays. The outermost points of a geom in these directions are the outline of its shadow.
        self._directions = np.cos(angles) * unit + np.sin(angles) * np.cross(sun, unit) / np.linalg.norm(sun)
        self._geoms = {geom: kind for geom in range(model.ngeom) if (kind := kind_of(model, geom)) not in UNBOUNDED}
        meshes = [geom for geom, kind in self._geoms.items() if kind == mujoco.mjtGeom.mjGEOM_MESH]
        self._vertices = {geom: _vertices(model, geom) for geom in meshes}

    def picture(self, data: Any, height: float, centre: np.ndarray) -> np.ndarray:
        """Opacity of the shadow on the floor, uint8 `[SIZE, SIZE]`; rows run along y and columns along x.

        Args:
            data: State of the film's model.
            height: Height of the floor, metres.
            centre: Middle of the picture, `[2]`, metres.
        """
        image = Image.new("L", (SIZE, SIZE))
        pen = ImageDraw.Draw(image)
        for geom in self._geoms:
            points = self._outline(data, geom)
            above = points[:, 2:] - height
            if (above > 0).any():
                flat = (points - self._sun / self._sun[2] * np.maximum(above, 0))[:, :2]
                pixels = ((flat - centre) / self._half + 1) * SIZE / 2
                pen.polygon([(float(x), float(y)) for x, y in pixels], fill=_DARKNESS)
        return np.asarray(image.filter(ImageFilter.GaussianBlur(_BLUR)))

    def _outline(self, data: Any, geom: int) -> np.ndarray:
        """Points of a geom on the outline of its shadow, `[_OUTLINE, 3]`, metres."""
        turn = data.geom_xmat[geom].reshape(3, 3)
        local, size = self._directions @ turn, self._model.geom_size[geom]
        kinds = mujoco.mjtGeom
        match self._geoms[geom]:
            case kinds.mjGEOM_BOX:
                points = np.sign(local) * size
            case kinds.mjGEOM_CAPSULE:
                points = size[0] * local + np.sign(local[:, 2:]) * [0.0, 0.0, size[1]]
            case kinds.mjGEOM_CYLINDER:
                around = local * [1.0, 1.0, 0.0]
                around = around / np.maximum(np.linalg.norm(around, axis=1, keepdims=True), 1e-9)
                points = size[0] * around + np.sign(local[:, 2:]) * [0.0, 0.0, size[1]]
            case kinds.mjGEOM_MESH:
                vertices = self._vertices[geom]
                points = vertices[np.argmax(local @ vertices.T, axis=1)]
            case _:  # spheres and ellipsoids
                size = size if self._geoms[geom] == kinds.mjGEOM_ELLIPSOID else size[[0, 0, 0]]
                points = size**2 * local / np.linalg.norm(size * local, axis=1, keepdims=True)
        return points @ turn.T + data.geom_xpos[geom]


def _vertices(model: Any, geom: int) -> np.ndarray:
    """The outermost vertices of a mesh in many directions, `[V, 3]`, metres."""
    number = model.geom_dataid[geom]
    first, count = model.mesh_vertadr[number], model.mesh_vertnum[number]
    vertices = model.mesh_vert[first : first + count]
    directions = np.random.default_rng(0).normal(size=(100, 3))
    return np.unique(vertices[np.argmax(directions @ vertices.T, axis=1)], axis=0)
