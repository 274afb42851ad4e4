"""Velocities to ask for that fit a robot's legs or wheels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import mujoco
import numpy as np

from rlstable.robot import build, geometry
from rlstable.robot.model import Robot

_FROUDE = 0.25  # v^2 / (g h) of a comfortable walk; animals begin to run at 0.5 (R. McN. Alexander, 1989)
_FASTEST, _TURN = 1.0, 0.7  # m/s and rad/s
_BACKWARD, _SIDEWAYS = 0.5, 0.3  # shares of the velocity forward
_WHEELS = 0.8  # share of a wheel's greatest velocity, so that the robot can also catch up
_ACROSS = 0.1  # a foot moves sideways if a joint moves it by this share of what joints move it forward
_WHEEL = 0.1  # of its radius, by which a wheel's joint is off its centre


def velocities(robot: Robot) -> np.ndarray:
    """Ranges of the velocities forward and sideways in m/s, and of turning in rad/s, that fit a robot, `[3, 2]`.

    The velocity forward is that of a walk with the Froude number 1/4, by the height of the centre of mass, or what
    servos can turn wheels with, and at most 1 m/s. Sideways it is 0 if no joint moves a foot or a wheel sideways.
    """
    data = geometry.in_pose(robot.model, robot.home)
    feet = [foot for foot in _feet(robot, data) if _greatest(foot.moves) > 0]
    wheels = [speed for foot in feet for speed in _speeds(robot, foot)]
    height = float(data.subtree_com[robot.root, 2]) - robot.floor
    walks = feet and height > 0 and robot.gravity and not wheels
    legs = [math.sqrt(_FROUDE * robot.gravity * height)] if walks else []
    forward = min([_FASTEST, *legs, *(_WHEELS * speed for speed in wheels)])
    across = not feet or any(_greatest(foot.moves[1]) > _ACROSS * _greatest(foot.moves[0]) for foot in feet)
    sideways = _SIDEWAYS * forward if across else 0.0
    return np.array([[-_BACKWARD * forward, forward], [-sideways, sideways], [-_TURN, _TURN]]).round(2)


class _Foot(NamedTuple):
    """A foot, or a wheel, at home.

    Attributes:
        moves: Velocity of its lowest points per velocity of each joint, in the frame of the root body, `[3, joints]`.
        wheels: Whether each joint turns it without moving its centre, `[joints]`.
    """

    moves: np.ndarray
    wheels: np.ndarray


def _feet(robot: Robot, data: mujoco.MjData) -> Iterator[_Foot]:
    model, own = robot.model, data.xmat[robot.root].reshape(3, 3).T
    for geoms in build.feet(model, robot.home, robot.root):
        body = int(model.geom_bodyid[geoms[0]])
        centers = np.array([data.geom_xpos[geom] for geom in geoms])
        center = centers.mean(axis=0)
        place = np.array([*center[:2], np.mean([geometry.lowest(model, data, geom) for geom in geoms])])
        at_bottom, at_center = (_jacobian(robot, data, body, point) for point in (place, center))
        arms, moved = np.linalg.norm(at_bottom, axis=0), np.linalg.norm(at_center, axis=0)
        yield _Foot(own @ at_bottom, (arms > 0) & (moved < _WHEEL * arms))


def _jacobian(robot: Robot, data: mujoco.MjData, body: int, point: np.ndarray) -> np.ndarray:
    linear = np.zeros((3, robot.model.nv))
    mujoco.mj_jac(robot.model, data, linear, None, point, body)
    return linear[:, robot.dof_of_joints]


def _speeds(robot: Robot, foot: _Foot) -> Iterator[float]:
    """Greatest velocities of a wheel; infinity for one that no servo of velocities turns."""
    radii = dict(zip((joint.name for joint in robot.joints), np.linalg.norm(foot.moves, axis=0), strict=True))
    for i in np.flatnonzero(foot.wheels):
        own = [one for one in robot.actuators if one.joint == robot.joints[i].name and one.kind == "velocity"]
        yield min((float(radii[one.joint]) * one.high for one in own), default=math.inf)


def _greatest(numbers: np.ndarray) -> float:
    return float(np.abs(numbers).max(initial=0.0))
