"""Pairs of parts of a robot that are mirror images in the vertical x-z plane through its root body at home.

Pairs are found in the model itself: bodies by their place in the tree and at home, joints, geoms and sites by their
bodies, actuators by the joints that they move. So names need not follow a convention.
"""

from __future__ import annotations

import functools

import mujoco
import numpy as np

from rlstable.config import ConfigError
from rlstable.device.reflection import Reflection, joined
from rlstable.robot.model import Robot

VECTOR = Reflection.of_signs(1, -1, 1)  # a position, a velocity
AXIAL = Reflection.of_signs(-1, 1, -1)  # an angular velocity
_SHARE = 0.01  # largest error of axes, and of places of geoms and sites as a share of the robot's size
# Largest error of centres of mass. Files of robots differ by 2 to 4 % between left and right. Masses and all else that
# changes the motion are compared by mirrored steps (mirror.py).
_MEASURED = 0.05
_S = np.diag(VECTOR.sign)


def refused(what: str) -> ConfigError:
    return ConfigError(f"ppo.symmetry: {what}; mend the model or the task, or set ppo.symmetry=null")


class Pairs:
    """Mirror images of a robot's parts and states; raises ConfigError that names the first part without one.

    Attributes:
        bodies: Mirror image of each body; `joints`, `geoms` and `sites` likewise.
        dofs: Reflection of velocities, `[nv]`.
        actuators: Reflection of changes of the controls from home, and so of actions.
        images: Mirror images of parts by the number of their kind, `mjtObj`.
    """

    def __init__(self, robot: Robot):
        self.robot, self.model = robot, robot.model
        self._home = mujoco.MjData(self.model)
        self._home.qpos[:], self._home.ctrl[:] = robot.home, robot.of_actuators("home")
        self._home.act[:] = robot.activation
        mujoco.mj_forward(self.model, self._home)
        self._origin = np.array([0.0, self._home.xpos[robot.root, 1], 0.0])
        apart = np.linalg.norm(self._home.xipos[1:] - self._home.xpos[robot.root], axis=1)
        self._size = max(robot.radius, float(apart.max(initial=1e-3)))
        self.bodies = self._paired_bodies()
        self.geoms = self._paired_geoms()
        self.sites = self._paired_sites()
        self.joints, signs = self._paired_joints()
        self._qpos, self.dofs = self._of_state(signs)
        self.actuators = self._paired_actuators()
        kinds = {"BODY": self.bodies, "XBODY": self.bodies, "JOINT": self.joints, "GEOM": self.geoms}
        kinds |= {"SITE": self.sites, "ACTUATOR": self.actuators.order}
        self.images = {int(getattr(mujoco.mjtObj, f"mjOBJ_{kind}")): images for kind, images in kinds.items()}

    def named(self, kind: str, index: int) -> str:
        """A part in an error line, `joint left_knee`."""
        return f"{kind} {getattr(self.model, kind)(index).name or index}"

    def of_joints(self, limited: bool = False, turning: bool = False) -> Reflection:
        """Reflection of the robot's joints, of positions relative to home or velocities: all, or one kind of them."""
        kept = [
            joint for joint in self.robot.joints if not (limited and joint.turns) and not (turning and not joint.turns)
        ]
        place = {joint.index: i for i, joint in enumerate(kept)}
        order = [place[int(self.joints[joint.index])] for joint in kept]
        return Reflection(np.array(order, int), self.dofs.sign[[joint.dof for joint in kept]])

    @functools.cached_property
    def feet(self) -> np.ndarray:
        """Mirror image of each foot."""
        bodies = [int(self.model.geom_bodyid[foot[0]]) for foot in self.robot.feet]
        images = [int(self.bodies[body]) for body in bodies]
        if {*images} != {*bodies}:
            raise refused("a foot has no mirror image")
        return np.array([bodies.index(image) for image in images], int)

    def qpos(self, qpos: np.ndarray) -> np.ndarray:
        """The mirror image of positions `[nq]`."""
        base = self.robot.home.copy()
        for joint in np.flatnonzero(self.model.jnt_type == mujoco.mjtJoint.mjJNT_FREE):
            first = int(self.model.jnt_qposadr[joint])
            base[first + 1] = self._origin[1]
            base[first + 3 : first + 7] = 0.0  # a quaternion is reflected as a whole
        return np.asarray(base + self._qpos(qpos - base))

    # --- pairs

    def _mirrored(self, point: np.ndarray) -> np.ndarray:
        return np.asarray(self._origin + _S @ (point - self._origin))

    def _paired_bodies(self) -> np.ndarray:
        model, data = self.model, self._home
        children = {b: [c for c in range(1, model.nbody) if model.body_parentid[c] == b] for b in range(model.nbody)}
        image, queue = {0: 0}, [0]
        for body in queue:
            left = list(children[image[body]])
            for child in children[body]:
                target = self._mirrored(data.xipos[child])
                apart = {c: float(np.linalg.norm(data.xipos[c] - target)) for c in left}
                nearest = min(left, key=lambda c: (round(apart[c] / self._size, 6), c != child), default=None)
                if nearest is None or apart[nearest] > _MEASURED * self._size:
                    raise refused(f"{self.named('body', child)} has no mirror image at home")
                left.remove(nearest)
                image[child] = nearest
                queue.append(child)
        return np.array([image[b] for b in range(model.nbody)])

    def _paired_geoms(self) -> np.ndarray:
        """Mirror images of the geoms that can collide; a plane is its own."""
        model, image = self.model, np.arange(self.model.ngeom)
        for geom in np.flatnonzero(model.geom_contype | model.geom_conaffinity).tolist():
            kind, body = model.geom_type[geom], self.bodies[model.geom_bodyid[geom]]
            if kind != mujoco.mjtGeom.mjGEOM_PLANE:
                same = np.flatnonzero((model.geom_bodyid == body) & (model.geom_type == kind))
                found = self._at_image(self._home.geom_xpos, geom, same)
                if found is None or kind == mujoco.mjtGeom.mjGEOM_HFIELD:
                    what = f"{self.named('geom', geom)} of {self.named('body', int(body))}"
                    raise refused(f"{what} has no mirror image at home")
                image[geom] = found
        return image

    def _paired_sites(self) -> np.ndarray:
        """Mirror images of sites; a site without one, such as that of an IMU beside the plane, is its own."""
        model, image = self.model, np.arange(self.model.nsite)
        for site in range(model.nsite):
            same = np.flatnonzero(model.site_bodyid == self.bodies[model.site_bodyid[site]])
            found = self._at_image(self._home.site_xpos, site, same)
            image[site] = site if found is None else found
        return image

    def _at_image(self, places: np.ndarray, one: int, others: np.ndarray) -> int | None:
        """The other part that is at the mirror image of a place, itself before others; None without one."""
        apart = np.linalg.norm(places[others] - self._mirrored(places[one]), axis=1)
        near = others[apart <= _SHARE * self._size].tolist()
        return one if one in near else next(iter(near), None)

    def _paired_joints(self) -> tuple[np.ndarray, np.ndarray]:
        """Mirror images of joints, and the sign of each joint's position relative to home."""
        model, data = self.model, self._home
        order, signs = np.arange(model.njnt), np.ones(model.njnt)
        for joint in range(model.njnt):
            body, kind = int(model.jnt_bodyid[joint]), model.jnt_type[joint]
            image = self.bodies[body]
            place = joint - model.body_jntadr[body]
            if model.body_jntnum[image] <= place or model.jnt_type[model.body_jntadr[image] + place] != kind:
                raise refused(f"{self.named('joint', joint)} has no mirror image on {self.named('body', image)}")
            other = order[joint] = int(model.body_jntadr[image] + place)
            if kind == mujoco.mjtJoint.mjJNT_BALL or (kind == mujoco.mjtJoint.mjJNT_FREE and image != body):
                raise refused(f"{self.named('joint', joint)} is a ball joint or one of two free ones, without a mirror")
            if kind == mujoco.mjtJoint.mjJNT_FREE:
                continue
            hinge = kind == mujoco.mjtJoint.mjJNT_HINGE
            axis = (AXIAL if hinge else VECTOR).sign * data.xaxis[joint]
            along = float(axis @ data.xaxis[other])
            apart = self._mirrored(data.xanchor[joint]) - data.xanchor[other]
            # Only the part across the axis counts: a hinge may be anywhere on its axis.
            across = apart - (apart @ data.xaxis[other]) * data.xaxis[other]
            if abs(along) < 1 - _SHARE or (hinge and np.linalg.norm(across) > _SHARE * self._size):
                pair = f"{self.named('joint', joint)} and {self.named('joint', other)}"
                raise refused(f"the axes of {pair} are no mirror images at home")
            signs[joint] = np.sign(along)
        return order, signs

    def _of_state(self, signs: np.ndarray) -> tuple[Reflection, Reflection]:
        """The reflections of positions and of velocities."""
        model, parts = self.model, []
        for joint in range(model.njnt):
            if model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_FREE:
                parts.append((joined([VECTOR, Reflection.of_signs(1, -1, 1, -1)]), joined([VECTOR, AXIAL])))
            else:
                parts.append((Reflection.of_signs(signs[joint]),) * 2)
        result = []
        for k, (place, size) in enumerate(((model.jnt_qposadr, model.nq), (model.jnt_dofadr, model.nv))):
            order, sign = np.arange(size), np.ones(size, np.float32)
            for joint, part in enumerate(parts):
                at = slice(place[joint], place[joint] + len(part[k].order))
                order[at] = place[self.joints[joint]] + part[k].order
                sign[at] = parts[int(self.joints[joint])][k].sign
            result.append(Reflection(order, sign))
        return result[0], result[1]

    def _paired_actuators(self) -> Reflection:
        model, data, nu = self.model, self._home, self.model.nu
        moments = np.zeros((nu, model.nv))
        mujoco.mju_sparse2dense(
            moments, data.actuator_moment, data.moment_rownnz, data.moment_rowadr, data.moment_colind
        )
        order, signs = np.arange(nu), np.ones(nu, np.float32)
        for actuator in range(nu):
            images, force = self.dofs(moments[actuator]), np.linalg.norm(moments[actuator])
            found = {
                other: sign
                for sign in (-1.0, 1.0)
                for other in range(nu)
                if force and np.linalg.norm(sign * images - moments[other]) <= _SHARE * force
            }
            if not found:
                raise refused(f"{self.named('actuator', actuator)} has no mirror image that moves the mirrored joints")
            # Of several actuators that move a joint, the one with the same gains.
            other = order[actuator] = min(found, key=lambda one: self._apart(actuator, one))
            signs[actuator] = found[other]
        return Reflection(order, signs[order])

    def _apart(self, actuator: int, other: int) -> float:
        """The greatest difference of the gains of two actuators."""
        gains = (self.model.actuator_gainprm, self.model.actuator_biasprm, self.model.actuator_dynprm)
        return max(float(np.abs(gain[actuator] - gain[other]).max()) for gain in gains)
