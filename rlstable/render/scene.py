"""Converts a MuJoCo model into triangle meshes, and an episode into body poses, for the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import mujoco
import numpy as np
from numpy.typing import ArrayLike

_AROUND, _ALONG = 32, 16  # facets of round shapes
_SQUARE = np.array([[-1.0, -1.0, 1.0], [1.0, -1.0, 1.0], [1.0, 1.0, 1.0], [-1.0, 1.0, 1.0]])
_INFINITE_PLANE = 100.0  # metres to each side that are drawn of an infinite plane
UNBOUNDED = (mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_HFIELD)  # kinds of geoms that are ground
Key = str | tuple[str, int]  # of a mesh: a shape, or an asset of the model and its number
_LARGE, _NEAR = 10**6, 3.0  # numbers of a height field's triangles; m around a robot that are drawn of a larger one
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


def make_scene(model: mujoco.MjModel, places: np.ndarray) -> tuple[list[Mesh], list[Part]]:
    """Meshes and parts of a `mujoco.MjModel`, without floors (see `floor_of`), sites, tendons and textures.

    Of a large height field only what is near the `places` of the robot, `[N, 3]`.
    """
    meshes: dict[Key, Mesh] = {}
    parts = []
    for geom, colour in visible_geoms(model):
        if is_floor(model, geom):
            continue
        turn = np.array(model.geom_quat[geom])
        for key, scale, along in _shapes(model, geom):
            if key not in meshes:
                meshes[key] = _mesh_of(model, key, places - model.geom_pos[geom])
            shift = np.empty(3)
            mujoco.mju_rotVecQuat(shift, np.array([0.0, 0.0, along]), turn)
            body, position = int(model.geom_bodyid[geom]), model.geom_pos[geom] + shift
            parts.append(Part([*meshes].index(key), body, position, turn, np.array(scale), colour, key == "plane"))
    return list(meshes.values()), parts


def poses(model: mujoco.MjModel, positions: np.ndarray) -> np.ndarray:
    """Poses of every body, float32 `[T, nbody, 7]`: position and unit quaternion."""
    data = mujoco.MjData(model)
    result = np.empty((len(positions), model.nbody, 7), np.float32)
    for pose, position in zip(result, positions, strict=True):
        data.qpos[:] = position
        mujoco.mj_kinematics(model, data)
        pose[:, :3], pose[:, 3:] = data.xpos, data.xquat
    return result


def visible_geoms(model: mujoco.MjModel) -> Iterator[tuple[int, np.ndarray]]:
    """Number and colour `[4]` of every geom that is drawn."""
    for geom in range(model.ngeom):
        colour = _colour(model, geom)
        if model.geom_group[geom] < _GROUPS_SHOWN and colour[3] > 0:
            yield geom, colour


def kind_of(model: mujoco.MjModel, geom: int) -> mujoco.mjtGeom:
    return mujoco.mjtGeom(model.geom_type[geom])


def is_floor(model: mujoco.MjModel, geom: int) -> bool:
    """Whether a geom is a level plane of the world, which `floor_of` replaces."""
    level = abs(model.geom_quat[geom][0]) > 0.999
    return bool(kind_of(model, geom) == mujoco.mjtGeom.mjGEOM_PLANE and model.geom_bodyid[geom] == 0 and level)


def floor_of(model: mujoco.MjModel, low: float, size: float) -> Floor:
    """The highest floor of a model, or a floor below a scene without one.

    `low` is the height of the robot's lowest point, and `size` the robot's size, in metres; a cell is smaller than it.
    """
    fields = [geom for geom in range(model.ngeom) if kind_of(model, geom) == mujoco.mjtGeom.mjGEOM_HFIELD]
    floors = [geom for geom, _ in visible_geoms(model) if is_floor(model, geom)] or fields
    heights = [float(model.geom_pos[geom, 2]) for geom in floors]
    power = 10.0 ** np.floor(np.log10(0.8 * size))
    cell = max(step * power for step in (1, 2, 5) if step * power <= 0.8 * size)
    return Floor(max(heights, default=low - 0.2 * size), float(cell))


def followed_body(model: mujoco.MjModel) -> int | None:
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


def _shapes(model: mujoco.MjModel, geom: int) -> list[tuple[Key, list[float], float]]:
    """Key, scale and place along the geom's axis of the meshes that make up a geom."""
    kinds, data = mujoco.mjtGeom, int(model.geom_dataid[geom])
    a, b, c = model.geom_size[geom].tolist()
    shapes: dict[mujoco.mjtGeom, list[tuple[Key, list[float], float]]] = {
        kinds.mjGEOM_PLANE: [("plane", [a or _INFINITE_PLANE, b or _INFINITE_PLANE, 1.0], 0.0)],
        kinds.mjGEOM_BOX: [("box", [a, b, c], 0.0)],
        kinds.mjGEOM_SPHERE: [("sphere", [a, a, a], 0.0)],
        kinds.mjGEOM_ELLIPSOID: [("sphere", [a, b, c], 0.0)],
        kinds.mjGEOM_CYLINDER: [("cylinder", [a, a, b], 0.0)],
        kinds.mjGEOM_CAPSULE: [("tube", [a, a, b], 0.0), ("sphere", [a, a, a], b), ("sphere", [a, a, a], -b)],
        kinds.mjGEOM_MESH: [(("mesh", data), [1.0, 1.0, 1.0], 0.0)],
        kinds.mjGEOM_HFIELD: [(("hfield", data), [1.0, 1.0, 1.0], 0.0)],
    }
    return shapes.get(kind_of(model, geom), [])


def _colour(model: mujoco.MjModel, geom: int) -> np.ndarray:
    material = model.geom_matid[geom]
    # A geom's colour overrides the colour of its material, unless it is MuJoCo's default, 0.5 grey.
    colour = np.array(model.geom_rgba[geom])
    if material >= 0 and np.allclose(colour, [0.5, 0.5, 0.5, 1.0]):
        return np.array(model.mat_rgba[material])
    return colour


def _mesh_of(model: mujoco.MjModel, key: Key, places: np.ndarray) -> Mesh:
    match key:
        case ("mesh", number):
            return _model_mesh(model, number)
        case ("hfield", number):
            return _height_field(model, number, places)
        case "plane":
            return _flat(_SQUARE[[0, 1, 2, 0, 2, 3]].reshape(2, 3, 3) * [1, 1, 0])
        case "box":
            sides = [np.roll(side * _SQUARE, axis, axis=1) for axis in range(3) for side in (1, -1)]
            turned = [side[:: 1 if number % 2 == 0 else -1] for number, side in enumerate(sides)]
            return _flat(np.array(turned)[:, [0, 1, 2, 0, 2, 3]].reshape(12, 3, 3))
        case "sphere":
            angles = np.linspace(0, np.pi, _ALONG + 1)
            outline = np.stack([np.sin(angles), np.cos(angles)], axis=1)
            return _revolved(outline, outline)
        case "tube":
            return _revolved([[1, 1], [1, -1]], [[1, 0], [1, 0]])
    rims = [[0, 1], [1, 1], [1, 1], [1, -1], [1, -1], [0, -1]]
    return _revolved(rims, [[0, 1], [0, 1], [1, 0], [1, 0], [0, -1], [0, -1]])


def _revolved(outline: ArrayLike, normals: ArrayLike) -> Mesh:
    """The mesh of an outline around the third axis: radii and heights of its points, `[N, 2]`, and their normals."""
    turn = np.linspace(0, 2 * np.pi, _AROUND + 1)
    around = np.stack([np.cos(turn), np.sin(turn), np.ones_like(turn)], axis=1)
    vertices, directions = (
        (np.asarray(points, float)[:, None][..., [0, 0, 1]] * around).reshape(-1, 3) for points in (outline, normals)
    )
    ring, point = np.meshgrid(np.arange(len(np.asarray(outline)) - 1), np.arange(_AROUND), indexing="ij")
    a = ring * (_AROUND + 1) + point
    b, c, d = a + 1, a + _AROUND + 1, a + _AROUND + 2
    return _mesh(vertices, directions, np.stack([a, c, b, b, c, d], axis=-1).reshape(-1))


def _mesh(vertices: ArrayLike, normals: ArrayLike, indices: ArrayLike) -> Mesh:
    return Mesh(np.asarray(vertices, np.float32), np.asarray(normals, np.float32), np.asarray(indices, np.uint32))


def _model_mesh(model: mujoco.MjModel, number: int) -> Mesh:
    """A mesh asset with one normal per face, because MuJoCo indexes normals separately from vertices."""
    first, count = model.mesh_vertadr[number], model.mesh_vertnum[number]
    face, faces = model.mesh_faceadr[number], model.mesh_facenum[number]
    return _flat(model.mesh_vert[first : first + count][model.mesh_face[face : face + faces]])


def _height_field(model: mujoco.MjModel, number: int, places: np.ndarray) -> Mesh:
    rows, columns = model.hfield_nrow[number], model.hfield_ncol[number]
    x, y, top, _ = model.hfield_size[number]
    start = model.hfield_adr[number]
    heights = np.array(model.hfield_data[start : start + rows * columns]).reshape(rows, columns) * top
    grid = np.stack([*np.meshgrid(np.linspace(-x, x, columns), np.linspace(-y, y, rows)), heights], axis=-1)
    a, b, c, d = grid[:-1, :-1], grid[:-1, 1:], grid[1:, 1:], grid[1:, :-1]
    corners = np.stack([np.stack([a, b, c], axis=2), np.stack([a, c, d], axis=2)], axis=2)
    if corners.size > _LARGE:
        near = np.zeros(corners.shape[:2], bool)
        for place in np.unique(places[:, :2].round(), axis=0):
            i, j = (
                np.searchsorted(axis, (at - _NEAR, at + _NEAR))
                for axis, at in zip((grid[:-1, 0, 1], grid[0, :-1, 0]), place[::-1], strict=True)
            )
            near[slice(*i), slice(*j)] = True
        corners = corners[near]
    return _flat(corners.reshape(-1, 3, 3))


def _flat(corners: np.ndarray) -> Mesh:
    """A mesh of triangles `[F, 3, 3]` that share no vertices, with one normal per triangle."""
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    lengths = np.linalg.norm(normals, axis=1, keepdims=True)
    normals = np.divide(normals, lengths, out=np.zeros_like(normals), where=lengths > 0)
    points = corners.reshape(-1, 3)
    return _mesh(points, np.repeat(normals, 3, axis=0), np.arange(len(points)))
