"""Chooses the camera of an episode: its direction, its distance and the path of the point that it looks at."""

from __future__ import annotations

import dataclasses
import math

import mujoco
import numpy as np

from rlstable.render.scene import UNBOUNDED, Floor, floor_of, followed_body, kind_of, visible_geoms

VIEW_ANGLE = 45.0  # vertical angle of view in films and in the page, degrees
_MARGIN = 1.3  # half the picture's height by half the robot's, with room for the text above and the plot below
_SMOOTHING = 0.4  # seconds over which the camera averages the path of a robot
_LEFT_OUT = 2.0  # percent of the states that may reach out of the frame
_BACKGROUND = 2.0  # a fixed geom larger than the moving ones by this factor is not framed
# Elevation of the view, degrees. A robot that moves in a plane is seen along the plane's normal, but for a small turn.
_FREE, _FROM_SIDE, _FROM_ABOVE = -18.0, -10.0, -52.0
_FREE_AZIMUTH, _TURN = 125.0, 20.0  # degrees


@dataclasses.dataclass(frozen=True)
class Framing:
    """The camera of an episode."""

    azimuth: float  # of the view around the vertical, degrees, as in MuJoCo
    elevation: float  # angle of the view with the horizontal, degrees; a negative one looks down
    half: np.ndarray  # half the size of the robot to the right, upwards and towards the camera, [3], metres
    targets: np.ndarray  # points that the camera looks at, one per state, [T, 3], metres
    floor: Floor

    @property
    def size(self) -> float:
        return 2 * float(self.half.max())

    def distance(self, aspect: float) -> float:
        """Distance in metres at which the robot fits a picture whose width is `aspect` times its height."""
        right, up, back = self.half
        return float(max(right / aspect, up) * _MARGIN / math.tan(math.radians(VIEW_ANGLE / 2)) + back)


def frame_episode(model: mujoco.MjModel, poses: np.ndarray, seconds: float) -> Framing:
    """The camera of an episode. It follows a robot that travels, and stands still otherwise.

    `poses` are those of every body, `[T, nbody, 7]`, and `seconds` is the simulated time between two states.
    """
    followed = followed_body(model)
    azimuth, elevation = _direction(model, followed)
    axes = _axes(azimuth, elevation)
    points = _points(model, poses, followed)
    seen = points @ axes.T
    low, high = seen.min(axis=1), seen.max(axis=1)
    if followed is None:
        low = np.percentile(low, _LEFT_OUT, axis=0, keepdims=True)
        high = np.percentile(high, 100 - _LEFT_OUT, axis=0, keepdims=True)
    middle = _smoothed((low + high) / 2, _SMOOTHING / seconds)
    half = np.percentile(np.maximum(high - middle, middle - low), 100 - _LEFT_OUT, axis=0)
    floor = floor_of(model, float(points[..., 2].min()), 2 * float(half.max()))
    return Framing(azimuth, elevation, half, np.broadcast_to(middle @ axes, (len(poses), 3)), floor)


def _direction(model: mujoco.MjModel, followed: int | None) -> tuple[float, float]:
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    hinges = model.jnt_type == mujoco.mjtJoint.mjJNT_HINGE
    if followed is not None:
        hinges &= model.body_rootid[model.jnt_bodyid] == model.body_rootid[followed]
    axes = data.xaxis[hinges]
    free = {int(kind) for kind in model.jnt_type} & {mujoco.mjtJoint.mjJNT_FREE, mujoco.mjtJoint.mjJNT_BALL}
    if not len(axes) or free or (np.abs(axes @ axes[0]) < 0.99).any():
        return _FREE_AZIMUTH, _FREE
    x, y, z = axes[0]
    if abs(z) > 0.7:
        return 90.0 + _TURN, _FROM_ABOVE
    if (y, -x) < (0.0, 0.0):  # of the two sides, the one from which the x axis points to the right
        x, y = -x, -y
    return math.degrees(math.atan2(y, x)) + _TURN, _FROM_SIDE


def _axes(azimuth: float, elevation: float) -> np.ndarray:
    turn, tilt = math.radians(azimuth), math.radians(elevation)
    right = np.array([math.sin(turn), -math.cos(turn), 0.0])
    back = -np.array([math.cos(tilt) * math.cos(turn), math.cos(tilt) * math.sin(turn), math.sin(tilt)])
    return np.stack([right, np.cross(back, right), back])


def _points(model: mujoco.MjModel, poses: np.ndarray, followed: int | None) -> np.ndarray:
    """Corners of the boxes around the framed geoms, `[T, P, 3]`, metres.

    Of a robot that travels, only its own geoms are framed. Otherwise, all geoms but floors and backgrounds are.
    """
    geoms = [geom for geom, _ in visible_geoms(model) if kind_of(model, geom) not in UNBOUNDED]
    if followed is not None:
        root = model.body_rootid[followed]
        own = [geom for geom in geoms if model.body_rootid[model.geom_bodyid[geom]] == root]
        return _corners(model, poses, own or geoms)
    moving = [geom for geom in geoms if model.body_weldid[model.geom_bodyid[geom]] > 0]
    points = _corners(model, poses, moving or geoms)
    size = np.linalg.norm(np.ptp(points.reshape(-1, 3), axis=0))
    fixed = [geom for geom in geoms if geom not in moving and model.geom_rbound[geom] < _BACKGROUND * size]
    return np.concatenate([points, _corners(model, poses, fixed)], axis=1)


def _corners(model: mujoco.MjModel, poses: np.ndarray, geoms: list[int]) -> np.ndarray:
    """Corners of the boxes around geoms, `[T, 8 geoms, 3]`, metres; without a geom, the bodies' positions."""
    if not geoms:
        return poses[:, :, :3]
    signs = np.stack(np.meshgrid([-1, 1], [-1, 1], [-1, 1], indexing="ij"), axis=-1).reshape(8, 3)
    found = []
    for geom in geoms:
        centre, half = model.geom_aabb[geom].reshape(2, 3)
        local = (centre + signs * half) @ _matrix(model.geom_quat[geom]).T + model.geom_pos[geom]
        pose = poses[:, model.geom_bodyid[geom]].astype(float)
        found.append(np.einsum("tij,pj->tpi", _matrix(pose[:, 3:]), local) + pose[:, None, :3])
    return np.concatenate(found, axis=1)


def _matrix(quaternions: np.ndarray) -> np.ndarray:
    """Rotation matrices `[..., 3, 3]` of unit quaternions `[..., 4]`."""
    from scipy.spatial.transform import Rotation  # its import is slow, and only drawing needs it

    return np.asarray(Rotation.from_quat(quaternions, scalar_first=True).as_matrix())


def _smoothed(path: np.ndarray, width: float) -> np.ndarray:
    """Gaussian average of a path `[T, 3]` over `width` states to each side; its ends continue as they are."""
    from scipy.ndimage import gaussian_filter1d

    return np.asarray(gaussian_filter1d(path, width, axis=0, mode="nearest"))
