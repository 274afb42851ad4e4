"""The look of films: floor, wall, shadow, and a camera that keeps the robot in the picture."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import mujoco
import numpy as np
import pytest

from rlstable.render.draw import SUN
from rlstable.render.film import write_film
from rlstable.render.framing import VIEW_ANGLE, Framing, frame_episode
from rlstable.render.recording import RecordedEpisodes, Recording
from rlstable.render.scene import Floor, floor_of, followed_body, poses

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


@pytest.mark.skipif(
    shutil.which("ldconfig") is None or "libOSMesa" not in os.popen("ldconfig -p").read(), reason="no libosmesa6 here"
)
def test_film_shows_a_light_wall_a_light_floor_and_a_shadow_beneath_the_geom(tmp_path: Path) -> None:
    from PIL import Image

    plane = '<geom type="plane" size="1 1 1" rgba="0 0 0 1"/>'
    ball = '<body pos="0 0 0.4"><freejoint/><geom size="0.1" rgba="1 0 0 1"/></body>'
    model = model_of(f"<mujoco><worldbody>{plane}{ball}</worldbody></mujoco>")
    positions = np.tile([0, 0, 0.4, 1, 0, 0, 0], (3, 1))
    recorded = RecordedEpisodes("ball", model, 0.1, ())
    path = tmp_path / "film.gif"
    write_film(recorded, Recording("one", positions, np.ones(2), aborted=False), path, 320, 240)
    framing = frame_episode(model, poses(model, positions), 0.1)
    below = np.array([0, 0, 0.4]) - SUN / SUN[2] * 0.4  # on the floor, along the sun's rays
    points = np.array([[[0, 0, 0.4], below, below - [0.3, 0.02, 0]]])
    places = in_picture(model, framing, points, 4 / 3)[0]
    picture = np.asarray(Image.open(path).convert("RGB"), int)
    body, shadow, lit = (picture[round(120 * (1 - y)), round(160 * (1 + x))] for x, y in places)
    assert body[0] > 2 * body[2]
    assert shadow.max() < 190 < 200 < lit.min()
    assert picture[60, 310].min() > 200  # the wall
    assert Image.open(path).size == (320, 240)
