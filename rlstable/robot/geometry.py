"""Extent of a model's geoms in a pose, on the host."""

from __future__ import annotations

import mujoco
import numpy as np

_FLOORS = (int(mujoco.mjtGeom.mjGEOM_PLANE), int(mujoco.mjtGeom.mjGEOM_HFIELD))  # NumPy does not find the enums


def in_pose(model: mujoco.MjModel, qpos: np.ndarray) -> mujoco.MjData:
    """MuJoCo's data with all positions that follow from `qpos`."""
    data = mujoco.MjData(model)
    data.qpos[:] = qpos
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)
    return data


def is_static(model: mujoco.MjModel, body: int) -> bool:
    """Whether no joint moves a body."""
    return int(model.body_weldid[body]) == 0


def ground(model: mujoco.MjModel, data: mujoco.MjData, body: int) -> float | None:
    """Height of what stands still below a body, found by a ray; else that of a floor; None without ground.

    The base on which the body itself is mounted is no ground.
    """
    start, down = np.array(data.xpos[body]), np.array([0.0, 0.0, -1.0])
    base = model.body_rootid[model.geom_bodyid] == model.body_rootid[body]
    still = [geom for geom in _touched(model) if is_static(model, model.geom_bodyid[geom]) and not base[geom]]
    found = [_distance(model, data, geom, start, down) for geom in still]
    below = [distance for distance in found if distance >= 0]
    if below:
        return round(float(start[2]) - min(below), 9)
    kinds, bodies = model.geom_type, model.geom_bodyid
    planes = (geom for geom in range(model.ngeom) if kinds[geom] in _FLOORS and is_static(model, bodies[geom]))
    return next((float(data.geom_xpos[geom, 2]) for geom in planes), None)


def _distance(model: mujoco.MjModel, data: mujoco.MjData, geom: int, start: np.ndarray, along: np.ndarray) -> float:
    """Distance along a ray to a geom; negative if the ray misses it."""
    kind = int(model.geom_type[geom])
    if kind == mujoco.mjtGeom.mjGEOM_MESH:
        return float(mujoco.mj_rayMesh(model, data, geom, start, along))
    if kind == mujoco.mjtGeom.mjGEOM_HFIELD:
        return float(mujoco.mj_rayHfield(model, data, geom, start, along))
    place, turned, size = data.geom_xpos[geom], data.geom_xmat[geom], model.geom_size[geom]
    return float(mujoco.mju_rayGeom(place, turned, size, start, along, kind))


def colliding(model: mujoco.MjModel) -> list[int]:
    """Geoms of moving bodies that can collide."""
    return [geom for geom in _touched(model) if not is_static(model, model.geom_bodyid[geom])]


def _touched(model: mujoco.MjModel) -> list[int]:
    """Geoms that can collide, by their bits or by a contact pair."""
    bits = model.geom_contype | model.geom_conaffinity
    bits[model.pair_geom1] = bits[model.pair_geom2] = 1
    return np.flatnonzero(bits).tolist()


def lowest(model: mujoco.MjModel, data: mujoco.MjData, geom: int) -> float:
    """Height of the lowest point of a geom."""
    kind, size = mujoco.mjtGeom(model.geom_type[geom]), model.geom_size[geom]
    height, down = float(data.geom_xpos[geom, 2]), data.geom_xmat[geom].reshape(3, 3)[2]
    if kind == mujoco.mjtGeom.mjGEOM_SPHERE:
        return height - float(size[0])
    if kind == mujoco.mjtGeom.mjGEOM_CAPSULE:
        return height - float(size[0] + abs(down[2]) * size[1])
    if kind == mujoco.mjtGeom.mjGEOM_CYLINDER:
        return height - float(abs(down[2]) * size[1] + np.hypot(down[0], down[1]) * size[0])
    if kind == mujoco.mjtGeom.mjGEOM_ELLIPSOID:
        return height - float(np.linalg.norm(down * size))
    if kind == mujoco.mjtGeom.mjGEOM_MESH:
        mesh = model.geom_dataid[geom]
        first = model.mesh_vertadr[mesh]
        return height + float(np.min(model.mesh_vert[first : first + model.mesh_vertnum[mesh]] @ down))
    return height - float(np.abs(down) @ size)
