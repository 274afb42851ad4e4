"""The facts that a task takes from a robot's model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from rlstable.config import ConfigError
from rlstable.config.robot import TaskConfig
from rlstable.robot import actuators, build, geometry
from rlstable.robot.terrain import Terrain

_FREE, _BALL = int(mujoco.mjtJoint.mjJNT_FREE), int(mujoco.mjtJoint.mjJNT_BALL)
_SLIDE, _HINGE = int(mujoco.mjtJoint.mjJNT_SLIDE), int(mujoco.mjtJoint.mjJNT_HINGE)
_SAMPLES = 2000  # random poses that say what the robot can reach
AT_FLOOR = 1e-3  # m; a lower root body is at the floor
_UPRIGHT = 0.9  # cosine of the angle of a z axis that is meant to point up; robots lean at home
_FIXED = 1e-4  # m; positions of a site within this range are one place


@dataclasses.dataclass(frozen=True)
class Joint:
    """A hinge or slide joint.

    Attributes:
        low: Lower limit; minus infinity without one.
        home: Position at home.
    """

    name: str
    index: int
    qpos: int
    dof: int
    turns: bool
    low: float
    high: float
    home: float


@dataclasses.dataclass(frozen=True)
class Actuator:
    """An actuator, in the order of the actions.

    Attributes:
        joint: Name of its joint; empty for another transmission.
        kind: Meaning of its control: `position`, `velocity` or `torque`.
        low: Least control; minus infinity without a limit.
        down: Change of the control by an action of -1 that reaches the lower limit, or half of the servo's range.
        up: The same of an action of 1 and the upper limit.
        home: Control at home.
        stiffness: Proportional gain; 0 for a torque.
        damping: Derivative gain.
        force: Largest force.
    """

    name: str
    joint: str
    kind: str
    low: float
    high: float
    down: float
    up: float
    home: float
    stiffness: float
    damping: float
    force: float


class Robot:
    """A robot's model and the facts that terms read. All numbers are of the model that is not randomised.

    Attributes:
        model: The compiled model, with added floor and sensors.
        home: Positions `[nq]` at home.
        root: Index of the root body.
        substeps: Physics steps of one action.
        control_dt: Seconds of one action.
        floating: Whether the root body has a free joint.
        moves: Whether a free joint or slide joints move the root body.
        joints: Hinges and slides that actuators move, and those that only swing with the robot, in the model's order;
            without the play of gears, doors and objects, and without those of a planar root body that nothing drives.
        actuators: In the order of the actions.
        activation: States of slow actuators and muscles at home, `[na]`.
        feet: Geoms of each foot that touch the floor at home; empty unless a term reads feet.
        floor: Height of the ground below the root body at home.
        terrain: Uneven ground; None for a floor.
        gravity: In m/s^2.
        down: Direction of gravity, `[3]`.
        weight: Mass of the robot times gravity, in newtons.
        up_axis: The direction up at home, in the frame of the root body, `[3]`; exporters of CAD programs turn frames.
    """

    def __init__(
        self,
        path: str,
        task: TaskConfig,
        touching: Mapping[str, str] = MappingProxyType({}),
        needs: Collection[str] = (),
        sites: Collection[str] = (),
    ):
        self.terrain = None if task.terrain is None else Terrain(task.terrain)
        self.model = model = build.load(path, task, touching, needs, sites, self.terrain)
        key = build.keyframe(model, task.keyframe)
        self.home = build.home_position(model, task)
        self.root = build.root_body(model, task.root)
        at_root = model.jnt_bodyid == self.root
        self.substeps = round(task.control_dt / model.opt.timestep)
        if task.control_dt < model.opt.timestep * (1 - 1e-6):
            raise ConfigError(
                f"env.task.control_dt: {task.control_dt} is less than a time step ({model.opt.timestep:g})"
            )
        self.control_dt = self.substeps * float(model.opt.timestep)
        self.floating = bool((model.jnt_type[at_root] == _FREE).any())
        self.moves = self.floating or bool((model.jnt_type[at_root] == _SLIDE).any())
        driven = actuators.driven(model)
        seen, _ = build.passive(model, self.root)
        planar = self.moves & at_root
        kept = {j for j in driven if model.jnt_type[j] in (_SLIDE, _HINGE)} | {j for j in seen if not planar[j]}
        self.joints = [_joint(model, j, self.home) for j in sorted(kept)]
        # The controls of a keyframe are of the file's actuators.
        given = key is not None and not task.home and task.actions.control == "auto"
        controls = model.key_ctrl[key] if given else np.zeros(model.nu)
        at_home = geometry.in_pose(model, self.home)
        mujoco.mj_tendon(model, at_home)
        mujoco.mj_transmission(model, at_home)
        lengths = at_home.actuator_length
        self.actuators = [_actuator(model, i, controls, lengths) for i in range(model.nu)]
        self.activation = actuators.activation(model, self.of_actuators("home"), lengths)
        self.feet = build.feet(model, self.home, self.root) if "feet" in needs else []
        self.floor = geometry.ground(model, at_home, self.root) or 0.0
        mass = np.where(build.own_bodies(model, self.root), model.body_mass, 0.0).sum()
        off = model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_GRAVITY
        self.gravity = 0.0 if off else float(np.linalg.norm(model.opt.gravity))
        self.down = np.array(model.opt.gravity / self.gravity if self.gravity else (0.0, 0.0, -1.0), np.float32)
        self.weight = float(mass * self.gravity) or 1.0
        self.home_height = float(at_home.xpos[self.root, 2]) - self.floor
        up = -self.down @ at_home.xmat[self.root].reshape(3, 3)
        self.up_axis = np.array((0.0, 0.0, 1.0) if up[2] > _UPRIGHT else up, np.float32)
        self._touching = {name: build.geoms_of(model, name) for name in touching}
        if self.terrain is not None:
            self.terrain.check(self.radius, self.floating)

    # --- arrays of facts

    @functools.cached_property
    def qpos_of_joints(self) -> np.ndarray:
        return np.array([joint.qpos for joint in self.joints], int)

    @functools.cached_property
    def dof_of_joints(self) -> np.ndarray:
        return np.array([joint.dof for joint in self.joints], int)

    @functools.cached_property
    def steerable(self) -> np.ndarray:
        """1 for each of forward, sideways and turning that joints allow the root body at home, else 0."""
        linear, angular = np.zeros((3, self.model.nv)), np.zeros((3, self.model.nv))
        at_home = geometry.in_pose(self.model, self.home)
        mujoco.mj_jacBody(self.model, at_home, linear, angular, self.root)
        own = at_home.xmat[self.root].reshape(3, 3).T
        moved = np.stack([*(own @ linear)[:2], (own @ angular)[2]])
        return (np.abs(moved).max(axis=1, initial=0.0) > 1e-6).astype(np.float32)

    def of_joints(self, field: str) -> np.ndarray:
        """A number of every joint."""
        return np.array([getattr(joint, field) for joint in self.joints], np.float32)

    def of_actuators(self, field: str) -> np.ndarray:
        """A number of every actuator."""
        return np.array([getattr(actuator, field) for actuator in self.actuators], np.float32)

    # --- what terms read of the physics; MJX and C MuJoCo have these arrays

    def rotation(self, data: Any) -> jax.Array:
        """Rotation matrix of the root body; its rows are the world's axes in the frame of the body."""
        return data.xmat[self.root]

    def upright(self, data: Any) -> jax.Array:
        """Cosine of the angle by which the root body leans from home."""
        return -(jnp.asarray(self.down) @ self.rotation(data) @ jnp.asarray(self.up_axis))

    def sensor(self, data: Any, name: str) -> jax.Array:
        """The numbers of a sensor."""
        return self.numbers(data, self.named("sensor", name, "name"))

    def root_sensor(self, kind: mujoco.mjtSensor) -> int:
        """The root body's first sensor of a kind. Sensors that a task adds are the last ones."""
        return build.at_root(self.model, kind, self.root)[0]

    def numbers(self, data: Any, sensor: int) -> jax.Array:
        """The numbers of the sensor with this index."""
        first = int(self.model.sensor_adr[sensor])
        return data.sensordata[first : first + int(self.model.sensor_dim[sensor])]

    def linear_velocity(self, data: Any) -> jax.Array:
        """Velocity of the root body in its own frame."""
        return self.sensor(data, build.LINEAR_VELOCITY)

    def angular_velocity(self, data: Any) -> jax.Array:
        """Angular velocity of the root body in its own frame."""
        return self.sensor(data, build.ANGULAR_VELOCITY)

    def height(self, data: Any) -> jax.Array:
        """Height of the root body above the ground."""
        return data.xpos[self.root, 2] - self.ground(data.xpos[self.root, :2])

    def ground(self, places: jax.Array) -> jax.Array:
        """Height of the ground at `[..., 2]`."""
        return self.floor + (jnp.zeros(places.shape[:-1]) if self.terrain is None else self.terrain.height(places))

    def scanned(self, data: Any, grid: np.ndarray) -> jax.Array:
        """Heights of the ground at points `[..., 2]` that turn with the root body's heading, `[n]`, 0 as at home."""
        turn = self.rotation(data)[:2, 0]
        cos, sin = turn / jnp.maximum(jnp.linalg.norm(turn), 1e-6)
        places = jnp.asarray(grid.reshape(-1, 2)) @ jnp.array([[cos, sin], [-sin, cos]]) + data.xpos[self.root, :2]
        return self.ground(places) - (data.xpos[self.root, 2] - self.home_height)

    def touches(self, data: Any, name: str) -> jax.Array:
        """Whether a geom of this name, or of the body of this name, touches anything; 0 or 1."""
        return self._any_contact(data, self._touching[name])

    def activations(self, data: Any) -> jax.Array:
        """State of each actuator, 0 for one without, `[actuators]`."""
        states = jnp.append(jnp.asarray(data.act), 0.0)  # the address of no state is -1
        return states[self.model.actuator_actadr]

    def foot_contacts(self, data: Any) -> jax.Array:
        """Whether each foot touches anything, 0 or 1, `[feet]`."""
        return jnp.array([self._any_contact(data, foot) for foot in self.feet], jnp.float32)

    def foot_positions(self, data: Any) -> jax.Array:
        """Mean position of each foot's geoms, `[feet, 3]`."""
        return jnp.array([data.geom_xpos[np.array(foot)].mean(axis=0) for foot in self.feet]).reshape(-1, 3)

    def _any_contact(self, data: Any, geoms: Collection[int]) -> jax.Array:
        found = [self.sensor(data, build.CONTACT + build.name_of(self.model, "geom", geom)) for geom in geoms]
        return (jnp.concatenate(found).max() > 0).astype(jnp.float32)

    def walked(self, data: Any, center: jax.Array) -> jax.Array:
        """Horizontal distance of the root body from home on the tile with this centre, in m."""
        home = jnp.asarray(self.home[self.free_joint : self.free_joint + 2], jnp.float32)
        return jnp.linalg.norm(data.qpos[self.free_joint : self.free_joint + 2] - home - center[:2])

    def moved(self, qpos: jax.Array, by: jax.Array) -> jax.Array:
        """Positions with the free root body elsewhere; `by` is `[3]`."""
        return qpos.at[self.free_joint : self.free_joint + 3].add(by)

    def pushed(self, qvel: jax.Array, push: jax.Array) -> jax.Array:
        """Velocities after a push of the root body; `push` is a horizontal velocity, `[2]`."""
        for joint in np.flatnonzero(self.model.jnt_bodyid == self.root):
            dof = int(self.model.jnt_dofadr[joint])
            if self.model.jnt_type[joint] == _FREE:
                qvel = qvel.at[dof : dof + 2].add(push)
            elif self.model.jnt_type[joint] == _SLIDE:
                qvel = qvel.at[dof].add(jnp.asarray(self.model.jnt_axis[joint][:2], jnp.float32) @ push)
        return qvel

    def forward(self, qpos: Any = None, qvel: Any = None, ctrl: Any = None) -> Any:
        """C MuJoCo's data of a state, with the shapes of MJX, to try terms on; None for home, rest, home controls."""
        data = mujoco.MjData(self.model)
        data.qpos[:] = self.home if qpos is None else qpos
        data.qvel[:] = 0.0 if qvel is None else qvel
        data.ctrl[:] = self.of_actuators("home") if ctrl is None else ctrl
        data.act[:] = self.activation
        mujoco.mj_forward(self.model, data)
        return _WithShapesOfMjx(data)

    def check_height(self, parameter: str) -> None:
        """Raises a ConfigError if the root body is at the floor at home, so that its height says nothing."""
        if self.floating and self.home_height < AT_FLOOR:
            name = self.model.body(self.root).name
            raise ConfigError(
                f"{parameter}: the root body {name} is {self.home_height:.3g} m above the floor at home, so that its "
                "height says nothing; move the frame of this body up, or set the term to null"
            )

    # --- what the robot can reach

    @property
    def free_joint(self) -> int:
        """Index in `qpos` of the root body's free joint."""
        return int(self.model.jnt_qposadr[self.model.body_jntadr[self.root]])

    @functools.cached_property
    def radius(self) -> float:
        """Distance from the root body to the farthest point of a colliding geom at home."""
        data, geoms = geometry.in_pose(self.model, self.home), build.own_geoms(self.model, self.root)
        apart = np.linalg.norm(data.geom_xpos[geoms] - data.xpos[self.root], axis=1) + self.model.geom_rbound[geoms]
        return float(apart.max(initial=0.0))

    def site(self, name: str | None) -> int:
        """The site, or body, of a name; else the one on the body farthest from the root, the last one of several.

        The site of a body is its centre of mass.
        """
        names = [str(self.model.site(i).name) for i in range(self.model.nsite)]
        if name is not None and build.LINK + name in names:
            return names.index(build.LINK + name)
        if name is not None:
            return self.named("site", name, "site")
        own = [i for i, each in enumerate(names) if not each.startswith("rlstable_")]
        own = own or [i for i, each in enumerate(names) if each.startswith(build.LINK)]
        if not own:
            raise ConfigError(
                "site: the model has no site; name the body that must reach, or add <site name='tip'/> to it"
            )
        return max(own, key=lambda i: (self._depth(int(self.model.site_bodyid[i])), i))

    @functools.lru_cache(maxsize=8)  # noqa: B019  (a robot lives as long as its program)
    def reachable(self, site: int) -> np.ndarray:
        """Positions of a site in random poses within the joints' ranges, `[samples, 3]`."""
        return np.array([data.site_xpos[site].copy() for data in self._random_poses()], np.float32)

    def reaches(self, site: int) -> bool:
        """Whether the joints move a site, without the root body's free joint."""
        return float(np.ptp(self.reachable(site), axis=0).max()) > _FIXED

    @functools.cached_property
    def mass_heights(self) -> tuple[float, float]:
        """Least and greatest height of the centre of mass over all poses of the joints."""
        heights = [float(data.subtree_com[0, 2]) for data in self._random_poses()]
        return min(heights), max(heights)

    def _random_poses(self) -> Any:
        random = np.random.default_rng(0)
        data = mujoco.MjData(self.model)
        low, high = self.ranges
        for _ in range(_SAMPLES):
            data.qpos[:] = self.home
            data.qpos[self.qpos_of_joints] = random.uniform(low, high)
            mujoco.mj_kinematics(self.model, data)
            mujoco.mj_comPos(self.model, data)
            yield data

    @property
    def ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """Limits of the joints' positions; a whole turn, or home, for a joint without limits."""
        low, high, home, turns = (self.of_joints(name) for name in ("low", "high", "home", "turns"))
        free = np.where(turns > 0, np.float32(np.pi), np.float32(0))
        return np.where(np.isfinite(low), low, home - free), np.where(np.isfinite(high), high, home + free)

    def _depth(self, body: int) -> int:
        return 0 if body == 0 else 1 + self._depth(int(self.model.body_parentid[body]))

    def named(self, kind: str, name: str, parameter: str) -> int:
        """Index of a named sensor, site or key; a ConfigError about the parameter without one."""
        size = getattr(self.model, f"n{kind}")
        names = [getattr(self.model, kind)(i).name for i in range(size)]
        if name not in names:
            own = [each for each in names if each and not each.startswith("rlstable_")]
            what = "keyframe" if kind == "key" else kind
            raise ConfigError(f"{parameter}: the model has no {what} {name!r}; it has {', '.join(own) or 'none'}")
        return names.index(name)


class _WithShapesOfMjx:
    """MuJoCo's data with matrices of 3 x 3, and float32."""

    def __init__(self, data: mujoco.MjData):
        self._data = data

    def __getattr__(self, name: str) -> np.ndarray:
        array = np.asarray(getattr(self._data, name))
        array = array.reshape(-1, 3, 3) if name.endswith("mat") else array
        return array.astype(np.float32) if np.issubdtype(array.dtype, np.floating) else array


def _joint(model: mujoco.MjModel, j: int, home: np.ndarray) -> Joint:
    limited, adr = bool(model.jnt_limited[j]), int(model.jnt_qposadr[j])
    low, high = model.jnt_range[j] if limited else (-np.inf, np.inf)
    turns = not limited and model.jnt_type[j] == _HINGE
    name, dof = build.name_of(model, "joint", j), int(model.jnt_dofadr[j])
    return Joint(name, j, adr, dof, turns, float(low), float(high), float(home[adr]))


def _actuator(model: mujoco.MjModel, i: int, controls: np.ndarray, lengths: np.ndarray) -> Actuator:
    kind = actuators.kind_of(model, i)
    joint = int(model.actuator_trnid[i, 0]) if actuators.drives_joint(model, i) else None
    low, high = model.actuator_ctrlrange[i] if model.actuator_ctrllimited[i] else (-np.inf, np.inf)
    half = (high - low) / 2
    center = float(controls[i])
    if kind == "position" and not controls.any():  # no keyframe, or one without controls
        center = float(lengths[i])
    if kind == "position" and joint is not None and not np.isfinite(half) and model.jnt_limited[joint]:
        half = abs(float(model.actuator_gear[i, 0])) * float(np.ptp(model.jnt_range[joint])) / 2
    if kind == "torque" and not np.isfinite(half):  # a motor whose only limit is one of force
        half = actuators.force_limit(model, i) / (abs(float(model.actuator_gainprm[i, 0])) or 1.0)
    home = float(np.clip(center, low, high))
    sides = [half, half] if kind == "position" or not model.actuator_ctrllimited[i] else [home - low, high - home]
    if kind == "position" and 0.0 < np.ptp([low, high]) < np.inf and min(home - low, high - home) < 1e-3 * half:
        sides = [home - low, high - home]  # it starts at its limit
    down, up = (float(side) if np.isfinite(side) else 1.0 for side in sides)
    gain, bias = float(model.actuator_gainprm[i, 0]), model.actuator_biasprm[i]
    name = str(model.actuator(i).name) or (str(model.joint(joint).name) if joint is not None else "") or f"actuator{i}"
    return Actuator(
        name=name,
        joint=build.name_of(model, "joint", joint) if joint is not None else "",
        kind=kind,
        low=float(low),
        high=float(high),
        down=down,
        up=up,
        home=home,
        stiffness=gain if kind == "position" else 0.0,
        damping=-float(bias[2]),
        force=actuators.force_limit(model, i),
    )
