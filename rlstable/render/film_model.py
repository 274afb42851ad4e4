"""Builds the MuJoCo model of films: the geoms of an episode's model on a light floor, with a sky and a soft shadow."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np

from rlstable.render.framing import VIEW_ANGLE
from rlstable.render.scene import Floor, is_floor, kind_of, visible_geoms
from rlstable.render.shadow import SIZE

# Colours at the horizon, where the sky has the colour of the far floor, and above it.
_HAZE, _ZENITH = (0.905, 0.923, 0.942), (0.62, 0.75, 0.91)
_FLOOR, _CHECK, _LINE = (0.93, 0.945, 0.96), 0.978, 0.92  # colour, and factors for every other cell and for lines
_CELL, _THICK = 256, 2  # pixels of a cell of the floor's grid, and half the thickness of its lines
_SKY, _SKY_BEGINS, _SKY_ENDS = 64, 0.0, 0.35  # pixels of its sides; slopes between which it turns from haze to blue
SUN = np.array([-0.35, 0.25, -0.9])  # direction of its rays
SHADOW_REACH = 1.6  # half the side of the shadow's plane by the size of the robot
_AMBIENT, _HEADLIGHT, _SUNLIGHT = 0.60, 0.16, 0.40  # brightness; together about 1 on the floor


def film_model(model: Any, floor: Floor, size: float) -> Any:
    """The `mujoco.MjModel` of a film.

    Its bodies have the numbers of those in `model` and follow `data.mocap_pos`. One more body has the shadow.

    Args:
        model: The simulated `mujoco.MjModel`. Its lights, textures and floors are not taken over.
        floor: The floor to draw.
        size: Size of the robot, metres.
    """
    spec = mujoco.MjSpec()
    _set_view(spec, size)
    _add_surroundings(spec, floor, size)
    bodies = [spec.worldbody, *(spec.worldbody.add_body(mocap=True) for _ in range(1, model.nbody))]
    for geom, colour in visible_geoms(model):
        if not is_floor(model, geom):
            _add_geom(spec, bodies[model.geom_bodyid[geom]], model, geom, colour)
    _add_shadow(spec, floor, size)
    return spec.compile()


def _set_view(spec: Any, size: float) -> None:
    """Sets sizes, and light; MuJoCo multiplies the distances by the extent of the model."""
    spec.stat.extent, spec.stat.center, spec.stat.meansize = size, np.zeros(3), 0.1 * size
    view = spec.visual
    view.global_.fovy = VIEW_ANGLE
    view.map.znear, view.map.zfar = 0.02, 60.0
    view.rgba.haze = (*_HAZE, 1.0)
    view.headlight.ambient, view.headlight.diffuse = [_AMBIENT] * 3, [_HEADLIGHT] * 3
    view.headlight.specular = [0.0] * 3


def _add_surroundings(spec: Any, floor: Floor, size: float) -> None:
    kinds = mujoco.mjtTexture
    for name, kind, colours in (("sky", kinds.mjTEXTURE_SKYBOX, _sky()), ("grid", kinds.mjTEXTURE_2D, _grid())):
        _add_texture(spec, name, kind, np.round(255 * colours).astype(np.uint8))
    repeat = [0.5 / floor.cell] * 2
    material = spec.add_material(name="floor", texuniform=True, texrepeat=repeat, specular=0.0, reflectance=0.0)
    material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "grid"
    spec.add_material(name="body", specular=0.25, shininess=0.4, rgba=[0.5, 0.5, 0.5, 1.0])
    plane = mujoco.mjtGeom.mjGEOM_PLANE
    spec.worldbody.add_geom(type=plane, size=[0, 0, 1], pos=[0, 0, floor.height], material="floor", rgba=[1, 1, 1, 1])
    spec.worldbody.add_light(
        type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL, dir=SUN, castshadow=False,
        ambient=[0.0] * 3, diffuse=[_SUNLIGHT] * 3, specular=[0.3] * 3,
    )  # fmt: skip


def _add_shadow(spec: Any, floor: Floor, size: float) -> None:
    """Adds the plane of the shadow, on the last body; `draw` writes its texture."""
    _add_texture(spec, "shadow", mujoco.mjtTexture.mjTEXTURE_2D, np.zeros((SIZE, SIZE, 4), np.uint8))
    material = spec.add_material(name="shadow", specular=0.0)
    material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "shadow"
    body = spec.worldbody.add_body(mocap=True, pos=[0, 0, floor.height + 0.002 * size])
    half = SHADOW_REACH * size
    # MuJoCo blends geoms that are not quite opaque.
    body.add_geom(type=mujoco.mjtGeom.mjGEOM_PLANE, size=[half, half, 1], material="shadow", rgba=[1, 1, 1, 0.99])


def _add_texture(spec: Any, name: str, kind: Any, pixels: np.ndarray) -> None:
    height, width, channels = pixels.shape
    texture = spec.add_texture(name=name, type=kind, width=width, height=height, nchannel=channels)
    texture.data = pixels.tobytes()


def _add_geom(spec: Any, body: Any, model: Any, geom: int, colour: np.ndarray) -> None:
    kinds, number = mujoco.mjtGeom, int(model.geom_dataid[geom])
    kind = kinds.mjGEOM_MESH if kind_of(model, geom) == kinds.mjGEOM_SDF else kind_of(model, geom)
    more: dict[str, Any] = {}
    if kind == kinds.mjGEOM_MESH:
        more["meshname"] = name = f"mesh {number}"
        if spec.mesh(name) is None:
            vertices = model.mesh_vert[model.mesh_vertadr[number] :][: model.mesh_vertnum[number]]
            faces = model.mesh_face[model.mesh_faceadr[number] :][: model.mesh_facenum[number]]
            shell = mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL  # also for meshes that enclose no volume
            spec.add_mesh(name=name, uservert=vertices.ravel(), userface=faces.ravel(), inertia=shell)
    elif kind == kinds.mjGEOM_HFIELD:
        more["hfieldname"] = name = f"hills {number}"
        if spec.hfield(name) is None:
            rows, columns = int(model.hfield_nrow[number]), int(model.hfield_ncol[number])
            heights = model.hfield_data[model.hfield_adr[number] :][: rows * columns]
            spec.add_hfield(name=name, nrow=rows, ncol=columns, size=model.hfield_size[number], userdata=heights)
    body.add_geom(
        type=kind, size=model.geom_size[geom], pos=model.geom_pos[geom], quat=model.geom_quat[geom],
        rgba=colour, material="body", contype=0, conaffinity=0, mass=0.0, **more,
    )  # fmt: skip


def _grid() -> np.ndarray:
    """Two by two cells of the floor: a faint check and thin lines."""
    cells = np.ones((2 * _CELL, 2 * _CELL))
    cells[:_CELL, _CELL:] = cells[_CELL:, :_CELL] = _CHECK
    for line in (0, _CELL, 2 * _CELL):
        near = slice(max(0, line - _THICK), line + _THICK)
        cells[near] = cells[:, near] = _LINE
    return cells[..., None] * _FLOOR


def _sky() -> np.ndarray:
    """The six sides of the sky, right, left, up, down, front and back: haze at the horizon, blue above it."""
    across, down = np.meshgrid(*[(np.arange(_SKY) + 0.5) / _SKY * 2 - 1] * 2)
    side = -down / np.sqrt(1 + across**2 + down**2)
    up = 1 / np.sqrt(1 + across**2 + down**2)
    slopes = np.concatenate([side, side, up, -up, side, side])
    share = np.clip((slopes - _SKY_BEGINS) / (_SKY_ENDS - _SKY_BEGINS), 0, 1)[..., None]
    return np.array(_HAZE) * (1 - share) + np.array(_ZENITH) * share
