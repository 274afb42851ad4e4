"""Loads a model and adds what a task needs and the model lacks: floor, sensors, free base, other actuators."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence

import mujoco
import numpy as np

from rlstable.config import ConfigError
from rlstable.config.robot import TaskConfig
from rlstable.robot import actuators, files, geometry
from rlstable.robot.terrain import Terrain

# Names of what is added. The velocities are of the root body, in its own frame.
FLOOR, ROOT_SITE, BASE = "rlstable_floor", "rlstable_root", "rlstable_base"
LINEAR_VELOCITY, ANGULAR_VELOCITY, ACCELERATION = "rlstable_velocimeter", "rlstable_gyro", "rlstable_accelerometer"
CONTACT = "rlstable_contact_"  # and the name of the geom
LINK = "rlstable_link_"  # site of a body, and the body's name
_ROOT_SENSORS = {
    LINEAR_VELOCITY: mujoco.mjtSensor.mjSENS_VELOCIMETER,
    ANGULAR_VELOCITY: mujoco.mjtSensor.mjSENS_GYRO,
    ACCELERATION: mujoco.mjtSensor.mjSENS_ACCELEROMETER,
}
_SINGLE = (int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE))
_OF_JOINTS = (int(mujoco.mjtSensor.mjSENS_JOINTPOS), int(mujoco.mjtSensor.mjSENS_JOINTVEL))
_PLAY = (0.1, 0.005)  # rad and m; a joint without an actuator that moves less is the play of gears
_FOOT_HEIGHT = 0.1  # a foot is at most this share of the robot's height above the lowest point of all
_FINITE = (
    "qpos0", "body_pos", "body_mass", "body_inertia", "geom_pos", "geom_size", "geom_solref", "jnt_axis",
    "jnt_stiffness", "dof_damping", "dof_armature", "dof_frictionloss", "actuator_gear", "actuator_gainprm",
    "actuator_biasprm", "key_qpos", "key_qvel", "key_ctrl", "key_act", "opt.gravity",
)  # fmt: skip
_FOUND, _NEAREST = 1, 1  # data and reduction of MuJoCo's contact sensor


def compiled(spec: mujoco.MjSpec, path: str) -> mujoco.MjModel:
    """The compiled model; a ConfigError that names the file and the first mistake in it."""
    try:
        model = spec.compile()
    except ValueError as error:
        text = " ".join(str(error).split())
        hint = "; in a URDF: <mujoco><compiler balanceinertia='true'/></mujoco>" if "balanceinertia" in text else ""
        raise ConfigError(f"env.xml: {path} cannot be compiled: {text}{hint}") from None
    if model.nu == 0:
        raise ConfigError(
            f"env.xml: {path} has no actuator; add <actuator> with a motor or a position servo per joint, or set "
            "env.task.actions.control=position with stiffness and damping, for a servo per joint"
        )
    for name in _FINITE:
        if not np.isfinite(operator.attrgetter(name)(model)).all():
            raise ConfigError(f"env.xml: {path} has a NaN or an infinity in {name}; correct that number")
    if not any(not geometry.is_static(model, body) for body in range(model.nbody)):
        raise ConfigError(f"env.xml: {path} has no joint; nothing in it can move")
    return model


def keyframe(model: mujoco.MjModel, name: str | None) -> int | None:
    """Index of the keyframe that is home: the named one, else `home`; None for the model's `qpos0`."""
    names = [model.key(i).name for i in range(model.nkey)]
    if name is not None and name not in names:
        found = f"it has {', '.join(filter(None, names))}" if names else "it has none"
        raise ConfigError(f"env.task.keyframe: the model has no keyframe {name!r}; {found}, and null takes qpos0")
    name = "home" if name is None else name
    return names.index(name) if name in names else None


def home_position(model: mujoco.MjModel, task: TaskConfig) -> np.ndarray:
    """Positions at home: those of the keyframe, with the joints of `env.task.home`, and then on the model's floor."""
    key = keyframe(model, task.keyframe)
    qpos = np.array(_first_position(model) if key is None else model.key_qpos[key])
    if not task.home:
        return qpos
    single = [j for j in range(model.njnt) if model.jnt_type[j] in _SINGLE]
    addresses = {str(model.joint(j).name): int(model.jnt_qposadr[j]) for j in single}
    for name, position in actuators.by_joint("env.task.home", task.home, addresses).items():
        qpos[addresses[name]] = position
    root = root_body(model, task.root)
    own = model.body_rootid[model.jnt_bodyid] == model.body_rootid[root]
    free = np.flatnonzero(own & (model.jnt_type == mujoco.mjtJoint.mjJNT_FREE))
    data = geometry.in_pose(model, qpos)
    height = geometry.ground(model, data, root)
    if free.size and height is not None:
        qpos[model.jnt_qposadr[free[0]] + 2] += height - _bottom(model, data, root)
    return qpos


def _first_position(model: mujoco.MjModel) -> np.ndarray:
    """`qpos0`, or the numeric `init_qpos` in which Gymnasium's and Brax's files say how a robot starts."""
    for i in range(model.nnumeric):
        if model.numeric(i).name == "init_qpos" and model.numeric_size[i] == model.nq:
            return np.array(model.numeric(i).data)
    return np.array(model.qpos0)


def _bottom(model: mujoco.MjModel, data: mujoco.MjData, root: int) -> float:
    """Height of the robot's lowest point."""
    return min((geometry.lowest(model, data, geom) for geom in own_geoms(model, root)), default=0.0)


def own_bodies(model: mujoco.MjModel, root: int) -> np.ndarray:
    """Whether each body is one of the robot, `[nbody]`: of the root body's tree, or of a tree that actuators move.

    Other trees are loose objects.
    """
    trees = model.body_rootid
    return np.isin(trees, [trees[root], *trees[model.jnt_bodyid[actuators.driven(model)]]])


def own_geoms(model: mujoco.MjModel, root: int) -> list[int]:
    """Geoms of the robot's moving bodies that can collide."""
    own = own_bodies(model, root)
    return [geom for geom in geometry.colliding(model) if own[model.geom_bodyid[geom]]]


def root_body(model: mujoco.MjModel, name: str | None) -> int:
    """The named body; else, of the trees with actuators, the first body with a free joint, else with a joint."""
    names = [model.body(i).name for i in range(model.nbody)]
    if name is not None:
        if name not in names:
            raise ConfigError(f"env.task.root: the model has no body {name!r}; it has {', '.join(names[1:])}")
        return names.index(name)
    trees = model.body_rootid[model.jnt_bodyid]
    driven = {int(trees[joint]) for joint in actuators.driven(model)} or {int(tree) for tree in trees}
    own = [j for j in range(model.njnt) if int(trees[j]) in driven]
    free = [j for j in own if model.jnt_type[j] == mujoco.mjtJoint.mjJNT_FREE]
    if len(free) > 1:
        robots = [names[model.jnt_bodyid[j]] for j in free]
        raise ConfigError(
            f"env.task.root: the model has {len(free)} robots, {', '.join(robots)}; name the one that the terms are "
            f"about: env.task.root={robots[0]}"
        )
    return int(model.jnt_bodyid[(free or own)[0]])


def at_root(model: mujoco.MjModel, kind: mujoco.mjtSensor, root: int) -> list[int]:
    """Sensors of a kind at sites of the root body, or of a body that is welded to it."""
    sensors = np.flatnonzero((model.sensor_type == kind) & (model.sensor_objtype == mujoco.mjtObj.mjOBJ_SITE))
    bodies = model.site_bodyid[model.sensor_objid[sensors]]
    return [int(i) for i in sensors[model.body_weldid[bodies] == model.body_weldid[root]]]


def passive(model: mujoco.MjModel, root: int) -> tuple[list[int], list[int]]:
    """Hinges and slides that no actuator drives: those that the policy observes, and the others.

    The others are the play of gears, and joints of doors and objects, unless a sensor of the model measures them.
    """
    own, driven = own_bodies(model, root), set(actuators.driven(model))
    at_joint = model.sensor_objid[np.isin(model.sensor_type, _OF_JOINTS)]
    seen: list[int] = []
    unseen: list[int] = []
    for joint in range(model.njnt):
        kind, (low, high) = int(model.jnt_type[joint]), model.jnt_range[joint]
        if kind not in _SINGLE or joint in driven:
            continue
        is_play = model.jnt_limited[joint] and high - low < _PLAY[kind == mujoco.mjtJoint.mjJNT_SLIDE]
        measured = bool((at_joint == joint).any())
        (seen if measured or (own[model.jnt_bodyid[joint]] and not is_play) else unseen).append(joint)
    return seen, unseen


def feet(model: mujoco.MjModel, qpos: np.ndarray, root: int) -> list[list[int]]:
    """Geoms of each foot: those of a limb's last body that are hardly higher at home than the robot's lowest point."""
    data, geoms = geometry.in_pose(model, qpos), own_geoms(model, root)
    heights = {geom: geometry.lowest(model, data, geom) for geom in geoms}
    if not heights:
        return []
    bottom = min(heights.values())
    reach = _FOOT_HEIGHT * (max(float(data.geom_xpos[geom, 2]) for geom in geoms) - bottom)
    bodies = {int(model.geom_bodyid[geom]) for geom in geoms}
    last = bodies - {above for body in bodies for above in _above(model, body)}
    low = [geom for geom in geoms if heights[geom] - bottom <= reach]
    found = {body: on for body in last if (on := [geom for geom in low if model.geom_bodyid[geom] == body])}
    # A foot that is lifted at home: its body has the geoms of a foot on the floor.
    shapes = {_shape(model, geoms, body): (body, on) for body, on in found.items()}
    for body in last - set(found):
        if (like := shapes.get(_shape(model, geoms, body))) is not None:
            first, on = like
            offset = _on(geoms, model, body)[0] - _on(geoms, model, first)[0]
            found[body] = [geom + offset for geom in on]
    return sorted(found.values())


def _on(geoms: Sequence[int], model: mujoco.MjModel, body: int) -> list[int]:
    return [geom for geom in geoms if model.geom_bodyid[geom] == body]


def _shape(model: mujoco.MjModel, geoms: Sequence[int], body: int) -> tuple[float, ...]:
    """Number, kinds, sizes and distances of a body's geoms, which its mirror image has, too."""
    own = _on(geoms, model, body)
    apart = np.linalg.norm(model.geom_pos[own], axis=1)
    joints = int(model.body_dofnum[body]), sum(1 for _ in _above(model, body))
    return (*joints, *np.column_stack([model.geom_type[own], model.geom_size[own], apart]).round(6).ravel())


def _above(model: mujoco.MjModel, body: int) -> Iterator[int]:
    """The bodies between a body and the world."""
    while body := int(model.body_parentid[body]):
        yield body


def load(
    path: str,
    task: TaskConfig,
    touching: Mapping[str, str],
    needs: Collection[str],
    sites: Collection[str],
    terrain: Terrain | None,
) -> mujoco.MjModel:
    """The model of a task. Terms read contacts of the geoms or bodies `touching`, and places of `sites` or bodies."""
    with files.opened(path) as spec:
        _check_ranges(spec, path)
        if task.free_base:
            _free(spec)
        if not spec.actuators and task.actions.control != "auto":
            actuators.add_motors(spec, task.actions)
        named = (name for term in task.reset.values() for name in term.parameters.get("names", ()))
        used = {task.keyframe or "home", *named}
        # Lengths before compiling, which fills up a keyframe with too few numbers.
        sizes = [(key.name, len(key.qpos), len(key.ctrl)) for key in spec.keys if key.name in used]
        model = compiled(spec, path)
        _check_keyframes(model, sizes, path)
        qpos, root = home_position(model, task), root_body(model, task.root)
        bodies, geoms = ({x.id: x for x in elements} for elements in (spec.bodies, spec.geoms))  # before additions
        floating = bool((model.jnt_type == mujoco.mjtJoint.mjJNT_FREE).any())
        at_home = geometry.in_pose(model, qpos)
        ground = geometry.ground(model, at_home, root)
        if terrain is not None:
            terrain.add(spec, _bottom(model, at_home, root) if ground is None else ground)
        elif task.floor == "always" or (task.floor == "auto" and floating and ground is None):
            _add_floor(spec, model, qpos, root)
        actuators.convert(spec, model, task.actions)
        known = {element.name for element in spec.sites}
        wanted = {*sites} - known
        if "" in wanted and not known:  # the last link in the place of the site farthest from the root
            wanted.add(max(bodies.values(), key=lambda body: (sum(1 for _ in _above(model, body.id)), body.id)).name)
        for body in bodies.values():
            if body.name and body.name in wanted:
                body.add_site(name=LINK + body.name, pos=model.body_ipos[body.id])
        site = bodies[root].add_site(name=ROOT_SITE)
        for name, kind in _ROOT_SENSORS.items():
            if name != ACCELERATION or ("accelerometer" in needs and not at_root(model, kind, root)):
                spec.add_sensor(name=name, type=kind, objtype=mujoco.mjtObj.mjOBJ_SITE, objname=site.name)
        touched = {g for name in touching for g in geoms_of(model, name, touching[name])}
        standing = {g for foot in feet(model, qpos, root) for g in foot}
        for geom in sorted(touched | (standing if "feet" in needs else set())):
            _add_contact_sensor(spec, geoms[geom], name_of(model, "geom", geom))
        if task.physics.contacts == "feet":
            if not standing:
                raise ConfigError("env.task.physics.contacts: the robot has no feet that touch the floor; set null")
            for geom in {*own_geoms(model, root)} - standing - touched:
                geoms[geom].contype = geoms[geom].conaffinity = 0
        spec.option.timestep = task.physics.timestep or spec.option.timestep
        if task.physics.cone is not None:
            spec.option.cone = getattr(mujoco.mjtCone, f"mjCONE_{task.physics.cone.upper()}")
        return compiled(spec, path)


def _check_ranges(spec: mujoco.MjSpec, path: str) -> None:
    """Raises a ConfigError for a reversed range, which MuJoCo reads as no limit, and for NaN."""
    ranges = [("joint", joint.name, "range", joint.range) for joint in spec.joints]
    for actuator in spec.actuators:
        ranges += [("actuator", actuator.name, key, getattr(actuator, key)) for key in ("ctrlrange", "forcerange")]
    for kind, name, key, (low, high) in ranges:
        if not low <= high:  # also NaN
            raise ConfigError(
                f"env.xml: {path}: {key} of {kind} {name or 'without a name'} is reversed, [{low:g}, {high:g}]; write "
                "the lower number first"
            )


def _check_keyframes(model: mujoco.MjModel, sizes: Sequence[tuple[str, int, int]], path: str) -> None:
    """Raises a ConfigError for a keyframe with too few numbers, which MuJoCo fills up at the end."""
    for name, *given in sizes:
        for kind, size, needed in zip(("qpos", "ctrl"), given, (model.nq, model.nu), strict=True):
            if size not in (0, needed):
                raise ConfigError(
                    f"env.xml: {path}: {kind} of keyframe {name} has {size} numbers, and the model "
                    f"has {needed}; a free joint has 7 in qpos, also the one of env.task.free_base"
                )


def _free(spec: mujoco.MjSpec) -> None:
    """Gives the first body a free joint."""
    if any(joint.type == mujoco.mjtJoint.mjJNT_FREE for joint in spec.joints):
        raise ConfigError("env.task.free_base: the model has a free joint already; set env.task.free_base=false")
    body = spec.worldbody.first_body()
    if body is None or body.joints:
        found = "has no body" if body is None else f"moves its first body, {body.name}, by joints"
        raise ConfigError(f"env.task.free_base: the model {found}; set env.task.free_base=false")
    body.add_freejoint(name=BASE)


def geoms_of(model: mujoco.MjModel, name: str, key: str = "geoms") -> list[int]:
    """The colliding geoms of a geom's or a body's name; a ConfigError of a key without one."""
    names = {g: (name_of(model, "geom", g), model.body(model.geom_bodyid[g]).name) for g in geometry.colliding(model)}
    found = [geom for geom, own in names.items() if name in own]
    if not found:
        known = ", ".join(sorted({one for own in names.values() for one in own}))
        raise ConfigError(f"{key}: no geom or body {name!r} of the model can collide; choose of {known}")
    return found


def name_of(model: mujoco.MjModel, kind: str, index: int) -> str:
    """A name in the model, or kind and index of a part without a name."""
    return str(getattr(model, kind)(index).name) or f"{kind}{index}"


def _add_floor(spec: mujoco.MjSpec, model: mujoco.MjModel, qpos: np.ndarray, root: int) -> None:
    """A plane under the lowest point of the robot at home."""
    height = _bottom(model, geometry.in_pose(model, qpos), root)
    every = 2**31 - 1  # collides with every geom that collides with anything
    spec.worldbody.add_geom(
        name=FLOOR, type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0, 0, 0.05], pos=[0, 0, height], contype=every,
        conaffinity=every, rgba=[0.6, 0.65, 0.7, 1],
    )  # fmt: skip


def _add_contact_sensor(spec: mujoco.MjSpec, geom: mujoco.MjsGeom, name: str) -> None:
    geom.name = name
    sensor = spec.add_sensor(name=CONTACT + name, type=mujoco.mjtSensor.mjSENS_CONTACT)
    sensor.objtype, sensor.objname = mujoco.mjtObj.mjOBJ_GEOM, name
    sensor.intprm[:3] = [_FOUND, _NEAREST, 1]
