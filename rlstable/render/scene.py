"""Converts a MuJoCo model into triangle meshes, and an episode into body poses, for the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import mujoco
import numpy as np

_AROUND, _ALONG = 32, 16  # facets of round shapes
_INFINITE_PLANE = 100.0  # metres to each side that are drawn of an infinite plane
UNBOUNDED = (mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_HFIELD)  # kinds of geoms that are ground
_GROUPS_SHOWN = 3  # MuJoCo's viewers show geoms of groups 0 to 2 by default


class Mesh(NamedTuple):
    """A triangle mesh."""

    vertices: np.ndarray  # [V, 3], float32
    normals: np.ndarray  # of length 1, [V, 3], float32
    indices: np.ndarray  # of the triangles' corners, [3 F], uint32


class Part(NamedTuple):
    """A mesh on a body."""

    mesh: int
    body: int
    position: np.ndarray  # in the body's frame, [3], metres
    turn: np.ndarray  # in the body's frame, a unit quaternion, [4]
    scale: np.ndarray  # along the axes of the mesh, [3]
    colour: np.ndarray  # red, green, blue and opacity, [4]
    checkered: bool  # a plane


class Floor(NamedTuple):
    """The floor that is drawn, without an end."""

    height: float  # metres
    cell: float  # side of a cell of its grid, metres


@dataclasses.dataclass(frozen=True)
class Scene:
    """Geometry of a scene, without the floors that `floor_of` replaces."""

    meshes: tuple[Mesh, ...]
    parts: tuple[Part, ...]


def make_scene(model: Any) -> Scene:
    """The scene of a `mujoco.MjModel`, without sites, tendons and textures."""
    builder = _Builder(model)
    geoms = [(geom, colour) for geom, colour in visible_geoms(model) if not is_floor(model, geom)]
    parts = tuple(part for geom, colour in geoms for part in builder.parts_of(geom, colour))
    return Scene(tuple(builder.meshes), parts)


def poses(model: Any, positions: np.ndarray) -> np.ndarray:
    """Poses of every body, float32 `[T, nbody, 7]`: position and unit quaternion."""
    data = mujoco.MjData(model)
    result = np.empty((len(positions), model.nbody, 7), np.float32)
    for pose, position in zip(result, positions, strict=True):
        data.qpos[:] = position
        mujoco.mj_kinematics(model, data)
        pose[:, :3], pose[:, 3:] = data.xpos, data.xquat
    return result


def visible_geoms(model: Any) -> Iterator[tuple[int, np.ndarray]]:
    """Number and colour `[4]` of every geom that is drawn."""
    for geom in range(model.ngeom):
        colour = _colour(model, geom)
        if model.geom_group[geom] < _GROUPS_SHOWN and colour[3] > 0:
            yield geom, colour


def kind_of(model: Any, geom: int) -> Any:
    return mujoco.mjtGeom(model.geom_type[geom])


def is_floor(model: Any, geom: int) -> bool:
    """Whether a geom is a level plane of the world, which `floor_of` replaces."""
    level = abs(model.geom_quat[geom][0]) > 0.999
    return bool(model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_PLANE and model.geom_bodyid[geom] == 0 and level)


def floor_of(model: Any, low: float, size: float) -> Floor:
    """The highest floor of a model, or a floor below a scene without one.

    `low` is the height of the robot's lowest point, and `size` the robot's size, in metres; a cell is smaller than it.
    """
    heights = [float(model.geom_pos[geom, 2]) for geom, _ in visible_geoms(model) if is_floor(model, geom)]
    power = 10.0 ** np.floor(np.log10(0.8 * size))
    cell = max(step * power for step in (1, 2, 5) if step * power <= 0.8 * size)
    return Floor(max(heights, default=low - 0.2 * size), float(cell))


def followed_body(model: Any) -> int | None:
    """The robot that travels: the first body with a free joint or two slide joints; None without such a body.

    A body without a motor, such as an object that a fixed robot pushes, is not followed.
    """
    in_joints = model.actuator_trntype == mujoco.mjtTrn.mjTRN_JOINT
    driven = {int(model.body_rootid[model.jnt_bodyid[joint]]) for joint in model.actuator_trnid[in_joints, 0]}
    for body in range(1, model.nbody):
        first, count = model.body_jntadr[body], model.body_jntnum[body]
        kinds = model.jnt_type[first : first + count].tolist()
        travels = mujoco.mjtJoint.mjJNT_FREE in kinds or kinds.count(mujoco.mjtJoint.mjJNT_SLIDE) >= 2
        if travels and (not driven or int(model.body_rootid[body]) in driven):
            return body
    return None


class _Builder:
    """Makes parts, and each mesh only once."""

    def __init__(self, model: Any):
        self.meshes: list[Mesh] = []
        self._model = model
        self._numbers: dict[Any, int] = {}

    def parts_of(self, geom: int, colour: np.ndarray) -> Iterator[Part]:
        """The parts of a geom."""
        model, kinds = self._model, mujoco.mjtGeom
        kind = model.geom_type[geom]
        size = np.array(model.geom_size[geom])
        shapes: list[tuple[Any, np.ndarray, np.ndarray]] = []  # key of the mesh, scale, shift along the geom's axis
        no_shift = np.zeros(3)
        if kind == kinds.mjGEOM_PLANE:
            half = np.where(size[:2] > 0, size[:2], _INFINITE_PLANE)
            shapes.append(("plane", np.array([*half, 1.0]), no_shift))
        elif kind == kinds.mjGEOM_BOX:
            shapes.append(("box", size, no_shift))
        elif kind == kinds.mjGEOM_SPHERE:
            shapes.append(("sphere", np.full(3, size[0]), no_shift))
        elif kind == kinds.mjGEOM_ELLIPSOID:
            shapes.append(("sphere", size, no_shift))
        elif kind == kinds.mjGEOM_CYLINDER:
            shapes.append(("cylinder", np.array([size[0], size[0], size[1]]), no_shift))
        elif kind == kinds.mjGEOM_CAPSULE:
            end = np.array([0.0, 0.0, size[1]])
            shapes.append(("tube", np.array([size[0], size[0], size[1]]), no_shift))
            shapes += [("sphere", np.full(3, size[0]), end), ("sphere", np.full(3, size[0]), -end)]
        elif kind == kinds.mjGEOM_MESH:
            shapes.append((("mesh", int(model.geom_dataid[geom])), np.ones(3), no_shift))
        elif kind == kinds.mjGEOM_HFIELD:
            shapes.append((("hfield", int(model.geom_dataid[geom])), np.ones(3), no_shift))
        turn = np.array(model.geom_quat[geom])
        for key, scale, shift in shapes:
            position = model.geom_pos[geom] + _rotated(turn, shift)
            plane = kind == kinds.mjGEOM_PLANE
            yield Part(self._mesh(key), int(model.geom_bodyid[geom]), position, turn, scale, colour, plane)

    def _mesh(self, key: Any) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.meshes)
            self.meshes.append(_shape(self._model, key))
        return self._numbers[key]


def _colour(model: Any, geom: int) -> np.ndarray:
    material = model.geom_matid[geom]
    # A geom's colour overrides the colour of its material, unless it is MuJoCo's default, 0.5 grey.
    colour = np.array(model.geom_rgba[geom])
    if material >= 0 and np.allclose(colour, [0.5, 0.5, 0.5, 1.0]):
        return np.array(model.mat_rgba[material])
    return colour


def _rotated(quaternion: np.ndarray, vector: np.ndarray) -> np.ndarray:
    result = np.empty(3)
    mujoco.mju_rotVecQuat(result, vector, quaternion)
    return result


def _shape(model: Any, key: Any) -> Mesh:
    if isinstance(key, tuple):
        kind, number = key
        return _model_mesh(model, number) if kind == "mesh" else _height_field(model, number)
    if key == "plane":
        corners = np.array([[-1, -1, 0], [1, -1, 0], [1, 1, 0], [-1, 1, 0]], float)
        return _mesh(corners, np.tile([0.0, 0.0, 1.0], (4, 1)), [0, 1, 2, 0, 2, 3])
    if key == "box":
        return _box()
    if key == "sphere":
        angles = np.linspace(0, np.pi, _ALONG + 1)
        points = _revolved(np.sin(angles), np.cos(angles))
        return _mesh(points, points, _strips(_ALONG + 1))
    tube = _revolved(np.ones(2), np.array([1.0, -1.0]))
    sides = _mesh(tube, tube * [1, 1, 0], _strips(2))
    if key == "tube":
        return sides
    lids = [_lid(1.0), _lid(-1.0)]
    return _joined([sides, *lids])


def _mesh(vertices: Any, normals: Any, indices: Any) -> Mesh:
    return Mesh(np.asarray(vertices, np.float32), np.asarray(normals, np.float32), np.asarray(indices, np.uint32))


def _joined(meshes: list[Mesh]) -> Mesh:
    starts = np.cumsum([0, *(len(mesh.vertices) for mesh in meshes[:-1])])
    indices = np.concatenate([mesh.indices + start for mesh, start in zip(meshes, starts, strict=True)])
    return _mesh(
        np.concatenate([mesh.vertices for mesh in meshes]), np.concatenate([mesh.normals for mesh in meshes]), indices
    )


def _revolved(radii: np.ndarray, heights: np.ndarray) -> np.ndarray:
    """Rings of points, `[rings * (_AROUND + 1), 3]`."""
    angles = np.linspace(0, 2 * np.pi, _AROUND + 1)
    ring = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    flat = radii[:, None, None] * ring
    tall = np.broadcast_to(heights[:, None, None], (*flat.shape[:2], 1))
    return np.concatenate([flat, tall], axis=2).reshape(-1, 3)


def _strips(rings: int) -> np.ndarray:
    """Vertex numbers of the triangles between neighbouring rings, with normals outwards."""
    ring, point = np.meshgrid(np.arange(rings - 1), np.arange(_AROUND), indexing="ij")
    a = ring * (_AROUND + 1) + point
    b, c, d = a + 1, a + _AROUND + 1, a + _AROUND + 2
    return np.stack([a, c, b, b, c, d], axis=-1).reshape(-1)


def _lid(height: float) -> Mesh:
    rim = _revolved(np.ones(1), np.array([height]))
    points = np.concatenate([rim, [[0.0, 0.0, height]]])
    first = np.arange(_AROUND)
    middle = np.full(_AROUND, len(rim))
    corners = [first, first + 1, middle] if height > 0 else [first + 1, first, middle]
    return _mesh(points, np.tile([0.0, 0.0, np.sign(height)], (len(points), 1)), np.stack(corners, axis=1).reshape(-1))


def _box() -> Mesh:
    faces = []
    for axis in range(3):
        for side in (1.0, -1.0):
            normal = side * np.eye(3)[axis]
            u = np.eye(3)[(axis + 1) % 3] * side
            v = np.eye(3)[(axis + 2) % 3]
            corners = np.array([normal - u - v, normal + u - v, normal + u + v, normal - u + v])
            faces.append(_mesh(corners, np.tile(normal, (4, 1)), [0, 1, 2, 0, 2, 3]))
    return _joined(faces)


def _model_mesh(model: Any, number: int) -> Mesh:
    """A mesh asset with one normal per face, because MuJoCo indexes normals separately from vertices."""
    first, count = model.mesh_vertadr[number], model.mesh_vertnum[number]
    face, faces = model.mesh_faceadr[number], model.mesh_facenum[number]
    vertices = np.array(model.mesh_vert[first : first + count])
    corners = vertices[np.array(model.mesh_face[face : face + faces])]
    return _flat(corners)


def _height_field(model: Any, number: int) -> Mesh:
    rows, columns = model.hfield_nrow[number], model.hfield_ncol[number]
    x, y, top, _ = model.hfield_size[number]
    start = model.hfield_adr[number]
    heights = np.array(model.hfield_data[start : start + rows * columns]).reshape(rows, columns) * top
    grid = np.stack([*np.meshgrid(np.linspace(-x, x, columns), np.linspace(-y, y, rows)), heights], axis=-1)
    a, b, c, d = grid[:-1, :-1], grid[:-1, 1:], grid[1:, 1:], grid[1:, :-1]
    corners = np.stack([np.stack([a, b, c], axis=2), np.stack([a, c, d], axis=2)], axis=2)
    return _flat(corners.reshape(-1, 3, 3))


def _flat(corners: np.ndarray) -> Mesh:
    """A mesh of triangles `[F, 3, 3]` that share no vertices, with one normal per triangle."""
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    lengths = np.linalg.norm(normals, axis=1, keepdims=True)
    normals = np.divide(normals, lengths, out=np.zeros_like(normals), where=lengths > 0)
    points = corners.reshape(-1, 3)
    return _mesh(points, np.repeat(normals, 3, axis=0), np.arange(len(points)))
