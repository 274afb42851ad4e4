"""The look of films: geoms at their places, floor, sky, shadow, and a camera that keeps the robot in the picture."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import mujoco
import numpy as np
import pytest

from rlstable.render.film import write_film
from rlstable.render.film_model import SUN, film_model
from rlstable.render.framing import VIEW_ANGLE, Framing, frame_episode
from rlstable.render.recording import RecordedEpisodes, Recording
from rlstable.render.scene import Floor, floor_of, followed_body, is_floor, poses
from rlstable.render.shadow import SIZE, Shadow

SHAPES = """
<mujoco>
  <asset>
    <mesh name="wedge" vertex="0 0 0  1 0 0  0 2 0  0 0 1"/>
    <hfield name="hills" nrow="3" ncol="4" size="2 1 0.5 0.1"/>
  </asset>
  <worldbody>
    <geom type="plane" size="3 3 1" pos="0 0 -0.5"/>
    <geom type="plane" size="1 1 1" quat="0.7 0.7 0 0"/>
    <geom type="hfield" hfield="hills" pos="5 0 0"/>
    <body pos="0 0 1">
      <freejoint/>
      <geom type="box" size="0.1 0.2 0.3" rgba="1 0 0 1"/>
      <geom type="sphere" size="0.1" pos="1 0 0"/>
      <geom type="ellipsoid" size="0.1 0.2 0.3"/>
      <geom type="cylinder" size="0.1 0.2"/>
      <body pos="0 0.5 0">
        <joint axis="0 1 0"/>
        <geom type="capsule" size="0.1 0.2" quat="0.7 0.7 0 0"/>
        <geom type="mesh" mesh="wedge" pos="0 0 1"/>
        <geom type="mesh" mesh="wedge" pos="0 0 -1"/>
        <geom type="box" size="9 9 9" group="3"/>
      </body>
    </body>
  </worldbody>
</mujoco>
"""
CART = """
<mujoco>
  <worldbody>
    <geom type="capsule" size="0.02 1" quat="0.7 0 0.7 0"/>
    <body name="cart">
      <joint name="slide" type="slide" axis="1 0 0"/>
      <geom type="box" size="0.1 0.1 0.1"/>
      <body name="pole">
        <joint type="hinge" axis="0 1 0"/>
        <geom type="capsule" fromto="0 0 0 0 0 0.6" size="0.05"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="slide"/></actuator>
</mujoco>
"""
PUSHER = """
<mujoco>
  <worldbody>
    <body name="ball"><joint type="slide" axis="1 0 0"/><joint type="slide" axis="0 1 0"/><geom size="0.1"/></body>
    <body name="arm">
      <joint name="turn" type="hinge" axis="0 0 1"/>
      <geom type="capsule" fromto="0 0 0 1 0 0" size="0.1"/>
    </body>
  </worldbody>
  <actuator><motor joint="turn"/></actuator>
</mujoco>
"""
RUNNER = PUSHER.replace('<motor joint="turn"', '<motor joint="slide"').replace(
    "<joint type", '<joint name="slide" type', 1
)


def model_of(text: str) -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(text)


def in_picture(model: mujoco.MjModel, framing: Framing, moved: np.ndarray, aspect: float) -> np.ndarray:
    """Places of all bodies in the picture, `[T, nbody, 2]`; the edges are -1 and 1."""
    turn, tilt = math.radians(framing.azimuth), math.radians(framing.elevation)
    ahead = np.array([math.cos(tilt) * math.cos(turn), math.cos(tilt) * math.sin(turn), math.sin(tilt)])
    right = np.array([math.sin(turn), -math.cos(turn), 0.0])
    eyes = framing.targets - framing.distance(aspect) * ahead
    seen = moved[:, :, :3] - eyes[:, None]
    lens = math.tan(math.radians(VIEW_ANGLE / 2)) * (seen @ ahead)
    return np.stack([seen @ right / lens / aspect, seen @ np.cross(right, ahead) / lens], axis=-1)


def test_bodies_of_a_film_are_those_of_the_simulation() -> None:
    model = model_of(SHAPES)
    position = np.array([1.0, 2.0, 3.0, 0.5, 0.5, -0.5, 0.5, 0.7])
    moved = poses(model, position[None])[0]
    film = film_model(model, floor_of(model, 0.0, 2.0), 2.0)
    data, simulated = mujoco.MjData(film), mujoco.MjData(model)
    data.mocap_pos[:-1], data.mocap_quat[:-1] = moved[1:, :3], moved[1:, 3:]
    simulated.qpos[:] = position
    mujoco.mj_kinematics(film, data)
    mujoco.mj_kinematics(model, simulated)
    shown = [geom for geom in range(model.ngeom) if not is_floor(model, geom) and model.geom_group[geom] < 3]
    drawn = list(range(1, film.ngeom - 1))  # without the floor and the plane of the shadow
    # The compiler orders geoms by body, as in the simulated model.
    assert film.geom_bodyid[drawn].tolist() == model.geom_bodyid[shown].tolist()
    assert film.geom_type[drawn].tolist() == model.geom_type[shown].tolist()
    for one, other in zip(drawn, shown, strict=True):
        # The compiler may move the frame of a mesh, so the meshes are compared by their vertices.
        is_mesh = model.geom_type[other] == mujoco.mjtGeom.mjGEOM_MESH
        places = [
            (compiled.mesh_vert if is_mesh else np.zeros((1, 3))) @ state.geom_xmat[geom].reshape(3, 3).T
            + state.geom_xpos[geom]
            for compiled, state, geom in ((film, data, one), (model, simulated, other))
        ]
        np.testing.assert_allclose(*places, atol=1e-5)
    assert film.nmesh == 1 and film.geom_rgba[film.geom_type == mujoco.mjtGeom.mjGEOM_BOX][0].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("low", "size", "text", "expected"),
    [
        (0.0, 2.0, SHAPES, Floor(-0.5, 1.0)),  # the model's own floor
        (-0.1, 2.0, CART, Floor(-0.5, 1.0)),  # a floor below a scene that has none
        (-0.1, 0.5, CART, Floor(-0.2, 0.2)),
        (-0.1, 50.0, CART, Floor(-10.1, 20.0)),
    ],
)
def test_floor_lies_under_the_scene_with_cells_somewhat_smaller_than_the_robot(
    low: float, size: float, text: str, expected: Floor
) -> None:
    assert floor_of(model_of(text), low, size) == pytest.approx(expected)


def test_camera_follows_a_robot_but_not_an_object_that_a_robot_pushes() -> None:
    assert followed_body(model_of(PUSHER)) is None
    assert followed_body(model_of(RUNNER)) == 1
    assert followed_body(model_of(SHAPES)) == 1  # without motors, whatever travels is followed


def test_cart_is_seen_from_its_side_and_an_arm_on_a_table_from_above() -> None:
    cart, arm = (
        frame_episode(model, poses(model, np.zeros((3, model.nq))), 0.1) for model in (model_of(CART), model_of(PUSHER))
    )
    free = frame_episode(model_of(SHAPES), poses(model_of(SHAPES), np.array([[0, 0, 1, 1, 0, 0, 0, 0.0]])), 0.1)
    assert abs(cart.azimuth - 90) < 30 and -15 < cart.elevation < 0  # the positive x axis points to the right
    assert arm.elevation < -45
    assert -30 < free.elevation < -10


@pytest.mark.parametrize("aspect", [4 / 3, 16 / 9, 0.5])
@pytest.mark.parametrize("text", [CART, RUNNER, PUSHER])
def test_robot_stays_in_the_picture_and_fills_it(text: str, aspect: float) -> None:
    model = model_of(text)
    time = np.arange(200) * 0.05
    positions = np.stack([np.sin(time), *[0.4 * np.sin(3 * time)] * (model.nq - 1)], axis=1)
    if text is RUNNER:
        positions[:, 0] = 5 * time
    moved = poses(model, positions)
    framing = frame_episode(model, moved, 0.05)
    places = in_picture(model, framing, moved[:, 1:2] if text is RUNNER else moved[:, 1:], aspect)
    assert np.abs(places).max() < 0.9
    if text is RUNNER:
        steps = np.diff(framing.targets[:, 0])
        assert steps[50:150] == pytest.approx(0.25, abs=1e-6)  # as fast as the robot, without jerks
    else:
        assert np.ptp(framing.targets, axis=0).max() == 0.0  # the camera stands still
        assert np.ptp(places, axis=(0, 1)).max() > 0.3


def test_shadow_of_a_box_is_its_outline_along_the_rays() -> None:
    box = '<body pos="0 0 1"><freejoint/><geom type="box" size="0.5 0.25 0.1"/></body>'
    model = model_of(f"<mujoco><worldbody>{box}</worldbody></mujoco>")
    film = film_model(model, Floor(0.0, 1.0), 2.0)
    data = mujoco.MjData(film)
    data.mocap_pos[0], data.mocap_quat[0] = [0, 0, 1], [1, 0, 0, 0]
    mujoco.mj_kinematics(film, data)
    middle = -SUN[:2] / SUN[2]  # where the rays through the box meet the floor
    picture = Shadow(film, SUN, 2.0).picture(data, 0.0, middle)
    rows, columns = np.nonzero(picture > picture.max() / 2)
    metre = SIZE / 4.0
    assert rows.mean() == pytest.approx(SIZE / 2, abs=2) and columns.mean() == pytest.approx(SIZE / 2, abs=2)
    assert np.ptp(columns) / metre == pytest.approx(1.0 + 0.2 * 0.35 / 0.9, abs=0.1)
    assert np.ptp(rows) / metre == pytest.approx(0.5 + 0.2 * 0.25 / 0.9, abs=0.1)
    assert len(np.unique(picture)) > 10  # soft
    data.mocap_pos[0] = [0, 0, -1]
    mujoco.mj_kinematics(film, data)
    assert not Shadow(film, SUN, 2.0).picture(data, 0.0, middle).any()  # nothing below the floor has a shadow


@pytest.mark.parametrize("kind", ["sphere", "capsule", "cylinder", "ellipsoid", "mesh"])
def test_every_kind_of_geom_has_a_shadow_where_it_is(kind: str) -> None:
    size = {"sphere": "0.3", "capsule": "0.3 0.2", "cylinder": "0.3 0.2", "ellipsoid": "0.3 0.3 0.2", "mesh": "1"}[kind]
    asset = '<asset><mesh name="m" vertex="-.3 0 0  .3 0 0  0 .3 0  0 -.3 0  0 0 .3  0 0 -.3"/></asset>'
    mesh = 'mesh="m"' if kind == "mesh" else ""
    body = f'<body pos="0 0 1"><freejoint/><geom type="{kind}" size="{size}" {mesh}/></body>'
    film = film_model(model_of(f"<mujoco>{asset}<worldbody>{body}</worldbody></mujoco>"), Floor(0.0, 1.0), 2.0)
    data = mujoco.MjData(film)
    data.mocap_pos[0], data.mocap_quat[0] = [0, 0, 1], [1, 0, 0, 0]
    mujoco.mj_kinematics(film, data)
    picture = Shadow(film, SUN, 1.0).picture(data, 0.0, -SUN[:2] / SUN[2])
    rows, columns = np.nonzero(picture > picture.max() / 2)
    assert rows.mean() == pytest.approx(SIZE / 2, abs=2) and columns.mean() == pytest.approx(SIZE / 2, abs=2)
    assert 0.5 < np.ptp(columns) / (SIZE / 2) < 0.85


@pytest.mark.skipif(
    shutil.which("ldconfig") is None or "libOSMesa" not in os.popen("ldconfig -p").read(), reason="no libosmesa6 here"
)
def test_film_shows_every_shadow_on_the_light_floor_beneath_its_geom(tmp_path: Path) -> None:
    from PIL import Image

    geoms = '<geom type="box" size="0.1 0.1 0.1"/><geom size="0.1" pos="0.6 1 0"/>'
    plane = '<geom type="plane" size="1 1 1"/>'
    text = f'<mujoco><worldbody>{plane}<body pos="0 0 0.4"><freejoint/>{geoms}</body></worldbody></mujoco>'
    model = model_of(text)
    positions = np.tile([0, 0, 0.4, 1, 0, 0, 0], (3, 1))
    recorded = RecordedEpisodes("ball", model, 0.1, ())
    path = tmp_path / "film.gif"
    write_film(recorded, Recording("one", positions, np.ones(2), aborted=False), path, 320, 240)
    framing = frame_episode(model, poses(model, positions), 0.1)
    below = np.array([0.6, 1, 0.4]) - SUN / SUN[2] * 0.4  # on the floor, along the sun's rays
    points = np.array([[below, below - [0.4, 0, 0], below - [0, 1, 0]]])  # the last one: below the box's place in y
    places = in_picture(model, framing, points, 4 / 3)[0]
    picture = np.asarray(Image.open(path).convert("L"), int)
    shadow, *lit = (picture[round(120 * (1 - y)), round(160 * (1 + x))] for x, y in places)
    assert shadow < 190 and min(lit) > 200
    assert Image.open(path).size == (320, 240)
