"""Runs an exported policy of a robot in plain MuJoCo: `python play.py policy.onnx robot.xml`.

This file is complete: it needs NumPy, mujoco and onnxruntime, and nothing else of rlstable. The metadata of the policy
say what the policy sees and what its actions mean; docs/export.md explains their keys.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import mujoco
import numpy as np

_FRAMES_PER_SECOND, _WIDTH, _HEIGHT = 30, 640, 480
_PUSH_EVERY = 3.0  # seconds
_PATIENCE = 60.0  # seconds for reading a model
_MEMORY = 64 * 2**30  # bytes that a model may ask for
LATE, CRASHED = f"cannot be read within {_PATIENCE:.0f} s", "crashes MuJoCo"
_TRIAL = """
import resource, sys, mujoco
path, memory = sys.argv[1], int(sys.argv[2])
try:
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
except (ValueError, OSError):
    pass  # macOS has no such limit
mujoco.set_mju_user_warning(lambda _: None)  # MuJoCo would write a file
doing = "read"
try:
    if path.endswith(".mjb"):
        model = mujoco.MjModel.from_binary_path(path)
    else:
        text = sys.stdin.read()
        spec = mujoco.MjSpec.from_string(text) if text else mujoco.MjSpec.from_file(path)
        doing = "compiled"
        model = spec.compile()
    doing = "simulated"
    mujoco.mj_step(model, mujoco.MjData(model))
except Exception as error:
    print(f"cannot be {doing}:", " ".join(str(error).split())[:300] or type(error).__name__)
    sys.exit(3)
"""
_EXAMPLES = """
examples:
  rlstable play policy.onnx robot.xml --command "0.5 0 0" --video walk.mp4
  rlstable play policy.onnx robot.xml --delay 2 --friction 0.8 --push 0.5
  python play.py policy.onnx robot.xml --viewer       arrow keys, comma and full stop change a velocity command
"""
# Of films, in place of the model's own: light of the headlight (ambient, diffuse, specular), sun, floor and background.
_LIGHT, _SUN, _SUNLIGHT = (0.55, 0.15, 0.0), np.array([-0.35, 0.25, -0.9]), (0.0, 0.4, 0.2)
_BACKGROUND = np.array([0.93, 0.945, 0.96, 1], np.float32)
# Keys of the viewer, as GLFW numbers them: the number of the velocity command that changes, and its direction.
_KEYS = {265: (0, 1), 264: (0, -1), 263: (2, 1), 262: (2, -1), ord(","): (1, 1), ord("."): (1, -1)}


_TERRAIN = "rlstable_terrain"  # geom and height field of uneven ground
_COURSES = ("stairs", "stairs_down", "slope", "rough", "gaps")
_COURSE, _RUN_UP, _TREAD, _LANDING = 4.0, 1.0, 0.3, 1.0  # m: length of a course, before it, of a step, between gaps
_SEEN, _DEEP = 2.5, 1.0  # m around the robot, and below, that are drawn of uneven ground
_CLEAR, _BENT, _TURNED = 0.005, 0.05, 0.1  # m above the ground, and rad, of robots at the start of a course
_DIVERGED = [getattr(mujoco.mjtWarning, f"mjWARN_BAD{kind}") for kind in ("CTRL", "QPOS", "QVEL", "QACC")]


class Closed(Exception):
    """The user has closed the viewer."""


class Refused(Exception):
    """A mistake of the user, as one line."""


class Policy:
    """An exported policy, from an observation to an action; `memory` is the size of its recurrent state, or None."""

    def __init__(self, session: Any, memory: int | None):
        self._session, self._size = session, memory
        self.reset()

    def reset(self) -> None:
        """Starts an episode, with zeros as the memory of a recurrent policy."""
        self.memory = {} if self._size is None else {"memory": np.zeros((1, self._size), np.float32)}

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        inputs = {"observation": observation[None].astype(np.float32), **self.memory}
        action, *state = self._session.run(None, inputs)
        self.memory = dict(zip(self.memory, state, strict=True))
        return np.asarray(action[0])


def load_policy(path: Path) -> tuple[Policy, dict[str, Any]]:
    """A policy, from an observation to an action, and its contract."""
    try:
        import onnxruntime
    except ImportError:
        raise Refused("play needs onnxruntime, which is not installed; pip install onnxruntime") from None
    if not path.is_file():
        raise Refused(f"there is no file {path}; rlstable export writes policy.onnx")
    onnxruntime.set_default_logger_severity(4)  # errors are exceptions, which become one line
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    texts: Mapping[str, str] = session.get_modelmeta().custom_metadata_map
    if "model_hash" not in texts:
        raise Refused(f"{path} has no contract of a robot; play is for policies that were trained with env=robot")

    contract: dict[str, Any] = {key: _parsed(text) for key, text in texts.items()}
    contract["root_body"] = texts["root_body"]  # a name may look like a number
    return Policy(session, contract["memory"]["size"] if "memory" in contract else None), contract


def trial(path: Path, text: str = "") -> str:
    """Reads, compiles and steps a model in another process; returns why that fails, or an empty text.

    A damaged model, or one that attaches itself, ends the process. `text` takes the place of the file's.
    """
    command = [sys.executable, "-P", "-c", _TRIAL, str(path.absolute()), str(_MEMORY)]
    folder = tempfile.gettempdir()
    try:
        tried = subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return LATE
    if tried.returncode <= 0:
        return CRASHED if tried.returncode else ""
    return tried.stdout.strip() or f"cannot be read: {' '.join(tried.stderr.split())[-300:]}"


def load_model(path: Path, contract: Mapping[str, Any], any_model: bool = False) -> mujoco.MjModel:
    """The model as training has used it, from the user's own file or from the exported `robot.mjb`."""
    if not path.is_file():
        raise Refused(f"there is no file {path}; give the file that was trained on, or robot.mjb, which export writes")
    hint = "" if path.suffix == ".mjb" else "; try robot.mjb, which export writes"
    if wrong := trial(path):
        ends = {LATE: "", CRASHED: ": it is damaged, or attaches itself"}
        raise Refused(f"{path} {wrong}{ends.get(wrong, hint)}")
    own = mujoco.MjModel.from_binary_path(str(path)) if path.suffix == ".mjb" else _completed(path, contract)
    content = np.empty(mujoco.mj_sizeModel(own), np.uint8)
    mujoco.mj_saveModel(own, None, content)
    if hashlib.sha256(content.tobytes()).hexdigest() != contract["model_hash"] and not any_model:
        made, here = contract["versions"]["mujoco"], mujoco.__version__
        reason = f"MuJoCo {made} compiled it, this is {here}" if made != here else "the file or the additions differ"
        raise Refused(
            f"{path} is not the model that the policy was trained on ({reason}); give robot.mjb, which export writes, "
            "or add --any-model"
        )
    actuators = contract["actuators"]
    states = sum(one["activation"] is not None for one in actuators)
    has, needs = (own.nq, own.nu, own.na), (np.size(contract["default_qpos"]), len(actuators), states)
    if has != needs:
        raise Refused(f"{path}: {has} are its numbers of positions, actuators and their states, but {needs} are needed")
    own.vis.headlight.ambient[:], own.vis.headlight.diffuse[:] = 0.4, 0.6  # else films and the viewer are dark
    return own


def _completed(path: Path, contract: Mapping[str, Any]) -> mujoco.MjModel:
    """The model of a file, with the floor, the sensors and the actuators that training has added."""
    spec, added = mujoco.MjSpec.from_file(str(path)), contract["model_additions"]
    spec.compile()  # gives every element its number
    sensors, actuators = added["sensors"], list(spec.actuators)
    root = _found(spec.bodies, "body", contract["root_body"])
    touching = [sensor["objname"] for sensor in sensors if sensor["objtype"] == mujoco.mjtObj.mjOBJ_GEOM.value]
    for name in touching:
        _found(spec.geoms, "geom", name).name = name
    if added["floor"] is not None:
        kind = mujoco.mjtGeom(added["floor"]["type"])
        spec.worldbody.add_geom(**{**added["floor"], "type": kind})
    for actuator, fields in zip(actuators, added["actuators"] or (), strict=False):
        actuator.inheritrange = 0
        for field, value in fields.items():
            if isinstance(value, list):
                getattr(actuator, field)[:] = value
            else:
                setattr(actuator, field, value)
    for name, link in added["link_sites"].items():
        _found(spec.bodies, "body", link["body"]).add_site(name=name, pos=link["pos"])
    root.add_site(name=added["root_site"])
    for sensor in sensors:
        kinds = {"type": mujoco.mjtSensor(sensor["type"]), "objtype": mujoco.mjtObj(sensor["objtype"])}
        spec.add_sensor(name=sensor["name"], objname=sensor["objname"], **kinds).intprm[:] = sensor["intprm"]
    return spec.compile()


class Loop:
    """The control loop of training, in NumPy: observation, policy, delay, filter, controls and physics.

    Attributes:
        observation: What the policy sees next.
        command: All commands, in the order of their names.
        actions: The policy's actions, newest first.
        steps: Control steps since the reset.
        heights: Corner, spacing and heights of uneven ground; None on a floor.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        contract: Mapping[str, Any],
        policy: Policy,
        command: Sequence[float] | None = None,
        delay: int | None = None,
    ):
        self.model, self.data, self.policy = model, mujoco.MjData(model), policy
        self.contract, self._actuators = contract, contract["actuators"]
        self._delay = contract["action_delay"]["least"] if delay is None else delay
        self.command = _command(contract, command)
        self._terms = [(entry, measurement(model, contract, entry)) for entry in contract["observations"]]
        self._home, self._low, self._high = (self._of_actuators(key) for key in ("home", "low", "high"))
        self._activation = [one["activation"] for one in self._actuators if one["activation"] is not None]
        self._scales = [np.array(contract[key], np.float32) for key in ("action_scale_down", "action_scale")]
        self.root = _found(_all(model, "body"), "body", contract["root_body"]).id
        self.heights = _heights(model)
        self._feet = [np.concatenate([_numbers(model, one) for one in foot]) for foot in contract["foot_sensors"]]
        self.reset()

    def reset(self, qpos: np.ndarray | None = None, qvel: np.ndarray | None = None) -> None:
        """Starts from a state; None is home at rest."""
        self.policy.reset()
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = self.contract["default_qpos"] if qpos is None else qpos
        self.data.qvel[:] = 0.0 if qvel is None else qvel
        self.data.ctrl[:], self.data.act[:] = self._home, self._activation
        mujoco.mj_forward(self.model, self.data)
        kept = max(2, self._delay + 1)
        self.actions = collections.deque([np.zeros(self.model.nu, np.float32)] * kept, maxlen=kept)
        self._filtered, self.steps = self.actions[0], 0
        self._past: dict[str, collections.deque[np.ndarray]] = {}
        frame, stacked = self._frame(), self.contract["observation"]["history"]
        self._stack = collections.deque([frame] * stacked, maxlen=stacked)

    @property
    def contacts(self) -> list[bool]:
        """Whether each foot touches anything; empty if no term of the task reads feet."""
        return [bool(self.data.sensordata[foot].max() > 0) for foot in self._feet]

    @property
    def observation(self) -> np.ndarray:
        return np.concatenate(self._stack)

    def step(self) -> None:
        """One action of the policy."""
        action, clip = self.policy(self.observation), self.contract["action_clip"]
        action = action if clip is None else np.clip(action, -clip, clip)
        for _ in range(self.contract["action_repeat"]):
            self.actions.appendleft(action)
            stays = np.float32(self.contract["action_filter"])
            self._filtered = stays * self._filtered + (1 - stays) * self.actions[self._delay]
            scale = np.where(self._filtered < 0, *self._scales)
            self.data.ctrl[:] = np.clip(self._home + scale * self._filtered, self._low, self._high)
            mujoco.mj_step(self.model, self.data, nstep=self.contract["decimation"])
            self.steps += 1
            if any(self.data.warning[kind].number for kind in _DIVERGED):
                raise Refused(f"step {self.steps} is not finite: the policy is bad, or the simulation has diverged")
            self._stack.append(self._frame())
        self.data.xfrc_applied[self.root] = 0.0

    def _frame(self) -> np.ndarray:
        """The numbers of one control step, each term with its own scale, clip, delay and history, newest first."""
        shown: list[np.ndarray] = []
        for entry, measure in self._terms:
            value = np.float32(entry["scale"]) * np.asarray(measure(self), np.float32)
            value = value if entry["clip"] is None else np.clip(value, -entry["clip"], entry["clip"])
            lag, steps = entry["delay"]["least"], entry["history"]
            past = self._past.setdefault(entry["name"], collections.deque([value] * (lag + steps), lag + steps))
            past.appendleft(value)
            shown += list(past)[lag:]
        return np.concatenate(shown)

    def _of_actuators(self, key: str) -> np.ndarray:
        missing = {"low": -np.inf, "high": np.inf}.get(key)
        return np.array([missing if one[key] is None else one[key] for one in self._actuators], np.float32)

    # --- facts

    @property
    def height(self) -> float:
        """Height of the root body above the ground."""
        return float(self.data.xpos[self.root, 2] - self.ground(self.data.xpos[self.root, :2]))

    def ground(self, places: np.ndarray) -> np.ndarray:
        """Height of the ground at `[..., 2]`: of the floor, or of the nearest sample of the height field."""
        if self.heights is None:
            return np.full(places.shape[:-1], float(self.contract["floor_height"]))
        corner, spacing, heights = self.heights
        index = np.clip(np.rint((places - corner) / spacing).astype(int), 0, np.array(heights.shape) - 1)
        return np.asarray(heights[index[..., 0], index[..., 1]])

    @property
    def fallen(self) -> bool | None:
        """Whether an ending of the task, `fallen` or `too_low`, is true; None if the task has neither."""
        ends = []
        for ending in self.contract["endings"]:
            if ending["term"] == "fallen":
                up = (
                    -np.array(self.contract["down"])
                    @ self.data.xmat[self.root].reshape(3, 3)
                    @ self.contract["up_axis"]
                )
                ends.append(not up >= math.cos(math.radians(ending["parameters"]["angle"])))
            elif ending["term"] == "too_low":
                home = self.contract["default_height"]
                ends.append(not self.height >= home - (1 - ending["parameters"]["share"]) * abs(home))
        return any(ends) if ends else None

    @property
    def farthest(self) -> list[tuple[str, float]]:
        """The three joints farthest from home, in rad or m; of a hinge without limits whole turns do not count."""
        model, hinge = self.model, mujoco.mjtJoint.mjJNT_HINGE
        joints = np.flatnonzero((model.jnt_type == hinge) | (model.jnt_type == mujoco.mjtJoint.mjJNT_SLIDE))
        at = model.jnt_qposadr[joints]
        apart = self.data.qpos[at] - np.atleast_1d(self.contract["default_qpos"])[at]
        turns = (model.jnt_type[joints] == hinge) & (model.jnt_limited[joints] == 0)
        apart = np.abs(np.where(turns, np.remainder(apart + np.pi, 2 * np.pi) - np.pi, apart))
        names = [model.joint(int(joint)).name or f"joint{joint}" for joint in joints]
        return sorted(zip(names, apart.tolist(), strict=True), key=lambda one: -one[1])[:3]

    @property
    def missed(self) -> float | None:
        """Distance of a site from its commanded position; None if the policy is shown no target."""
        shown = [measure for entry, measure in self._terms if entry["term"] == "site_to_target"]
        return float(np.linalg.norm(shown[0](self))) if shown else None

    @property
    def velocity(self) -> np.ndarray:
        """Velocity forward and sideways, and turning rate, of the root body in its own frame."""
        linear, angular = (self.data.sensor(f"rlstable_{name}").data for name in ("velocimeter", "gyro"))
        return np.array([linear[0], linear[1], angular[2]])

    def push(self, velocity: np.ndarray) -> None:
        """Pushes the root body during the next action with the force that gives the robot a velocity `[2]`."""
        seconds = self.model.opt.timestep * self.contract["decimation"] * self.contract["action_repeat"]
        self.data.xfrc_applied[self.root, :2] = self.model.body_subtreemass[self.root] * velocity / seconds


def measurement(
    model: mujoco.MjModel, contract: Mapping[str, Any], entry: Mapping[str, Any]
) -> Callable[[Loop], np.ndarray]:
    """An observation term as a function of the loop."""
    joints = [_found(_all(model, "joint"), "joint", name).id for name in entry.get("joints", ())]
    qpos, dofs = model.jnt_qposadr[joints], model.jnt_dofadr[joints]
    groups = [np.concatenate([_numbers(model, name) for name in names]) for names in entry.get("sensors", ())]
    site = _found(_all(model, "site"), "site", entry["site"]).id if "site" in entry else -1
    root = _found(_all(model, "body"), "body", contract["root_body"]).id
    home = np.atleast_1d(contract["default_qpos"])[qpos]
    match entry["term"]:
        case "joint_positions":
            return lambda loop: loop.data.qpos[qpos] - home
        case "joint_directions":
            return lambda loop: np.concatenate([np.sin(loop.data.qpos[qpos]), np.cos(loop.data.qpos[qpos])])
        case "joint_velocities":
            return lambda loop: loop.data.qvel[dofs]
        case "projected_gravity":
            return lambda loop: contract["down"] @ loop.data.xmat[root].reshape(3, 3)
        case "gyro" | "accelerometer" | "linear_velocity" | "sensor":
            return lambda loop: loop.data.sensordata[groups[0]]
        case "activations":
            return lambda loop: np.append(loop.data.act, 0.0)[model.actuator_actadr]
        case "contact" | "foot_contacts":
            return lambda loop: np.array([loop.data.sensordata[group].max() > 0 for group in groups])
        case "height":
            return lambda loop: np.array([loop.height])
        case "height_scan":
            sides = (entry["parameters"][side] for side in ("length", "width"))
            spacing = entry["parameters"]["spacing"]
            axes = (spacing * (np.arange(n := round(side / spacing) + 1) - (n - 1) / 2) for side in sides)
            grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
            return lambda loop: _scanned(loop, grid)
        case "last_action":
            return lambda loop: loop.actions[0]
        case "command":
            return lambda loop: loop.command
        case "phase":
            turn = 2 * np.pi * entry["parameters"]["frequency"] * contract["control_dt"]
            return lambda loop: np.array([np.sin(turn * loop.steps), np.cos(turn * loop.steps)])
        case "site_position":
            return lambda loop: loop.data.site_xpos[site]
        case "site_to_target":
            target = _slices(contract)["pose"]
            return lambda loop: loop.command[target] - loop.data.site_xpos[site]
    own = "is a function of your own" if ":" in entry["term"] else "is unknown here"
    raise Refused(f"observation {entry['name']}: its term {entry['term']} {own}; play computes the terms of rlstable")


def _heights(model: mujoco.MjModel) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """First corner, spacing and heights `[nx, ny]` of the ground that training has added; None on a floor."""
    if _TERRAIN not in (model.hfield(i).name for i in range(model.nhfield)):
        return None
    field, geom = model.hfield(_TERRAIN).id, model.geom(_TERRAIN).id
    ny, nx, first = int(model.hfield_nrow[field]), int(model.hfield_ncol[field]), int(model.hfield_adr[field])
    place, size = model.geom_pos[geom], model.hfield_size[field]
    shares = model.hfield_data[first : first + nx * ny].reshape(ny, nx).T
    return place[:2] - size[:2], 2 * size[:2] / (nx - 1, ny - 1), place[2] + size[2] * shares


def lay(model: mujoco.MjModel, kind: str, height: float) -> float:
    """Lays a course ahead of the robot in place of the ground of training; returns how much higher the robot starts."""
    found = _heights(model)
    if found is None:
        raise Refused(
            "--terrain: this model stands on a floor; give the robot.mjb of a policy that env=robot_rough has trained, "
            "and --any-model for a policy of another task"
        )
    corner, spacing, heights = found
    along = np.clip(corner[0] + spacing[0] * np.arange(heights.shape[0]) - _RUN_UP, 0.0, _COURSE)
    steps = np.ceil(along / _TREAD - 1e-6)
    inside = (along > 0) & (along < _COURSE)
    profile = {
        "stairs": height * steps, "stairs_down": -height * steps, "slope": height * along,
        "gaps": -(inside & (along % (height + _LANDING) < height)).astype(float), "rough": 0.0 * along,
    }[kind]  # fmt: skip
    course = np.repeat(profile[:, None], heights.shape[1], axis=1)
    if kind == "rough":
        course[inside] = np.random.default_rng(0).uniform(-height, height, course[inside].shape)
    start, most = float(heights.min() - course.min()), float(np.ptp(heights))
    if np.ptp(course) > most:
        raise Refused(f"--height: this course rises by {np.ptp(course):.2g} m, and the ground by {most:.2g} m at most")
    field, geom = model.hfield(_TERRAIN).id, model.geom(_TERRAIN).id
    shares = (course + start - model.geom_pos[geom, 2]) / model.hfield_size[field, 2]
    first = int(model.hfield_adr[field])
    model.hfield_data[first : first + shares.size] = shares.T.ravel()
    return start - float(heights[tuple(np.rint(-corner / spacing).astype(int))])


def starts(loop: Loop, count: int, higher: float) -> Iterator[np.ndarray]:
    """Positions at home, so much higher, each turned and bent a little in another way."""
    random, model = np.random.default_rng(0), loop.model
    first = int(model.jnt_qposadr[model.body_jntadr[loop.root]])
    for _ in range(count):
        qpos, turn = np.array(loop.contract["default_qpos"]), np.zeros(4)
        qpos[first + 2] += higher + _CLEAR
        qpos[first + 7 :] += random.uniform(-_BENT, _BENT, qpos.size - first - 7)
        mujoco.mju_axisAngle2Quat(turn, np.array([0.0, 0.0, 1.0]), random.uniform(-_TURNED, _TURNED))
        mujoco.mju_mulQuat(qpos[first + 3 : first + 7], turn, qpos[first + 3 : first + 7].copy())
        yield qpos


def _scanned(loop: Loop, grid: np.ndarray) -> np.ndarray:
    """Heights of the ground at points `[n, 2]` that turn with the robot; 0 for ground as far below it as at home."""
    turn = loop.data.xmat[loop.root].reshape(3, 3)[:2, 0]
    cos, sin = turn / max(float(np.linalg.norm(turn)), 1e-6)
    place = loop.data.xpos[loop.root]
    ground = loop.ground(grid @ np.array([[cos, sin], [-sin, cos]]) + place[:2])
    return ground - (place[2] - loop.contract["default_height"])


def _command(contract: Mapping[str, Any], given: Sequence[float] | None) -> np.ndarray:
    """The numbers of all commands; None for the defaults, the middle of each range or a point that can be reached."""
    entries = contract["commands"]
    size = sum(entry["size"] for entry in entries)
    wanted = ", ".join(f"{entry['name']} ({entry['size']})" for entry in entries) or "none"
    if given is None:
        unknown = [entry["name"] for entry in entries if entry["default"] is None]
        if unknown:
            raise Refused(f"--command: {unknown[0]} has no default; give {size} numbers: {wanted}")
        return np.array([x for entry in entries for x in entry["default"]], np.float32)
    if len(given) != size:
        raise Refused(f"--command: has {len(given)} numbers; the policy's commands need {size}: {wanted}")
    return np.array(given, np.float32)


def _slices(contract: Mapping[str, Any]) -> dict[str, slice]:
    """Position of each command among the numbers of all commands."""
    ends = np.cumsum([0, *(entry["size"] for entry in contract["commands"])])
    return {entry["name"]: slice(ends[i], ends[i + 1]) for i, entry in enumerate(contract["commands"])}


def _numbers(model: mujoco.MjModel, name: str) -> np.ndarray:
    """Indices of a sensor's numbers in `sensordata`."""
    sensor = _found(_all(model, "sensor"), "sensor", name).id
    return np.arange(model.sensor_adr[sensor], model.sensor_adr[sensor] + model.sensor_dim[sensor])


def _all(model: mujoco.MjModel, kind: str) -> list[Any]:
    count = {"body": model.nbody, "joint": model.njnt, "sensor": model.nsensor, "site": model.nsite}[kind]
    return [getattr(model, kind)(i) for i in range(count)]


def _found(elements: Iterable[Any], kind: str, name: str) -> Any:
    """The element of a name; elements without a name are called by kind and number, such as `joint3`."""
    for element in elements:
        if (element.name or f"{kind}{element.id}") == name:
            return element
    raise Refused(f"the model has no {kind} {name!r}, which the policy needs; robot.mjb, which export writes, has it")


def _parsed(text: str) -> Any:
    """A value of the metadata: JSON, numbers that commas separate, or text."""
    for read in (json.loads, lambda text: [float(x) for x in text.split(",")]):
        with contextlib.suppress(ValueError):
            return read(text)
    return text


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


# --- the command


@contextlib.contextmanager
def film(path: Path, loop: Loop) -> Iterator[Callable[[], None]]:
    """A function that draws the state when the next frame of a film is due."""
    try:
        import imageio_ffmpeg
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        wanted = "imageio-ffmpeg and pillow"
        raise Refused(f"--video needs {wanted}, which are not installed; pip install {wanted}") from None
    if not path.absolute().parent.is_dir():
        raise Refused(f"--video: there is no folder {path.absolute().parent}")
    camera, drawn = mujoco.MjvCamera(), 0
    size, font = _follow(camera, loop), ImageFont.load_default(16)
    set_light(loop.model, size)
    loop.model.geom_group[_floors(loop.model)] = mujoco.mjNGROUP - 1  # hidden
    writer = imageio_ffmpeg.write_frames(str(path), (_WIDTH, _HEIGHT), fps=_FRAMES_PER_SECOND, macro_block_size=2)
    writer.send(None)
    with contextlib.closing(writer), contextlib.closing(mujoco.Renderer(loop.model, _HEIGHT, _WIDTH)) as renderer:

        def draw() -> None:
            nonlocal drawn
            while drawn <= loop.data.time * _FRAMES_PER_SECOND:
                renderer.update_scene(loop.data, camera)
                ground = loop.data.xpos[loop.root] - [0, 0, loop.height]
                if loop.heights is None:
                    add_surroundings(renderer.scene, ground, size)
                    add_grid(renderer.scene, ground, size / 3)
                else:
                    add_surroundings(renderer.scene, ground - [0, 0, 2 * _DEEP], size)
                    _add_ground(renderer.scene, ground, *loop.heights)
                image = Image.fromarray(renderer.render())
                text = f"{loop.data.time:.1f} s{_asked(loop)}"
                ImageDraw.Draw(image).text((12, 10), text, fill=(28, 36, 48), font=font)
                writer.send(np.ascontiguousarray(image))
                drawn += 1
                if sys.stderr.isatty() and drawn % _FRAMES_PER_SECOND == 0:
                    print(f"\rdrawing the film, {loop.data.time:.0f} s ", end="", file=sys.stderr, flush=True)

        yield draw


def _follow(camera: mujoco.MjvCamera, loop: Loop) -> float:
    """Points a camera at the robot and returns its size, without planes, which would make the robot a dot."""
    shown = (loop.model.geom_rbound > 0) & ~_floors(loop.model)
    places = loop.data.geom_xpos[shown]
    size = float(np.linalg.norm(np.ptp(places, axis=0)) + loop.model.geom_rbound[shown].max())
    camera.type, camera.trackbodyid = mujoco.mjtCamera.mjCAMERA_TRACKING, loop.root
    camera.distance, camera.azimuth, camera.elevation = 2 * size, 135, -20
    return size


def _floors(model: mujoco.MjModel) -> np.ndarray:
    """Whether each geom is a plane or a height field of the world, `[ngeom]`."""
    kinds = [int(kind) for kind in (mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_HFIELD)]
    return np.isin(model.geom_type, kinds) & (model.geom_bodyid == 0)


def _asked(loop: Loop) -> str:
    """The velocity command and the robot's velocity, as text; empty without such a command."""
    where = _slices(loop.contract).get("velocity")
    return "" if where is None else f"   command {_short(loop.command[where])}   velocity {_short(loop.velocity)}"


def set_light(model: mujoco.MjModel, size: float) -> None:
    """Sets light and depths of a film for a robot of this size."""
    depths, headlight = model.vis.map, model.vis.headlight
    model.stat.extent, depths.znear, depths.zfar, depths.shadowclip = size, 0.02, 100.0, 3.0
    headlight.ambient[:], headlight.diffuse[:], headlight.specular[:] = _LIGHT


def add_surroundings(scene: mujoco.MjvScene, ground: np.ndarray, size: float) -> None:
    """A floor, a wall behind everything and a sun, as a model's sky may be black and its lights may blind."""
    camera, far = scene.camera[0], 30 * size
    ahead, up = np.array(camera.forward, float), np.array(camera.up, float)
    wall = np.stack([np.cross(ahead, up), up, -ahead], axis=1)
    for turn, at, glow in ((np.eye(3), ground, 0.0), (wall, ground + 0.9 * far * ahead, 1.0)):
        geom, plane = scene.geoms[scene.ngeom], mujoco.mjtGeom.mjGEOM_PLANE
        mujoco.mjv_initGeom(geom, plane, np.array([far, far, 1.0]), at, turn.ravel(), _BACKGROUND)
        geom.emission = glow
        scene.ngeom += 1
    scene.nlight = 2  # the headlight, and the sun
    sun = scene.lights[1]
    sun.type, sun.headlight, sun.castshadow = mujoco.mjtLightType.mjLIGHT_DIRECTIONAL, 0, 1
    sun.pos[:], sun.dir[:] = ground - 2 * size * _SUN, _SUN
    sun.ambient[:], sun.diffuse[:], sun.specular[:] = np.array(_SUNLIGHT)[:, None]


def _add_ground(
    scene: mujoco.MjvScene, place: np.ndarray, corner: np.ndarray, spacing: np.ndarray, heights: np.ndarray
) -> None:
    """Boxes near a place in place of the height field: without a graphics card all of its triangles take seconds."""
    first, last = np.rint((place[:2] + np.array([[-_SEEN], [_SEEN]]) - corner) / spacing).astype(int)
    (x, y), (end_x, end_y) = np.maximum(first, 0), np.minimum(last + 1, heights.shape)
    for i in range(x, end_x):
        edges = [y, *(y + 1 + np.flatnonzero(np.diff(heights[i, y:end_y]))), end_y]
        for j, end in itertools.pairwise(edges):  # of equal heights
            top = heights[i, j]
            middle = np.array([*corner + spacing * (i, (j + end - 1) / 2), top - _DEEP])
            shade = np.float32(0.88 + 0.12 * ((top - place[2]) % 0.25) / 0.25)  # else steps look alike from above
            colour, half = np.array([*(_BACKGROUND[:3] * shade), 1.0], np.float32), spacing / 2 * (1, end - j)
            geom = scene.geoms[scene.ngeom]
            mujoco.mjv_initGeom(
                geom, mujoco.mjtGeom.mjGEOM_BOX, np.array([*half, _DEEP]), middle, np.eye(3).ravel(), colour
            )
            scene.ngeom += 1


def add_grid(scene: mujoco.MjvScene, at: np.ndarray, cell: float) -> None:
    """Lines on the floor around a point, which show how the robot moves."""
    line, reach, grey = mujoco.mjtGeom.mjGEOM_LINE, 15 * cell, np.array([0.5, 0.5, 0.5, 1], np.float32)
    middle = np.append(np.round(at[:2] / cell) * cell, at[2] + 0.006 * cell)
    for offset in cell * np.arange(-15, 16):
        for ends in ([[offset, -reach, 0], [offset, reach, 0]], [[-reach, offset, 0], [reach, offset, 0]]):
            geom = scene.geoms[scene.ngeom]
            mujoco.mjv_initGeom(geom, line, np.zeros(3), np.zeros(3), np.eye(3).ravel(), grey)
            mujoco.mjv_connector(geom, line, 1.0, *(middle + ends))
            scene.ngeom += 1


@contextlib.contextmanager
def viewer(loop: Loop) -> Iterator[Callable[[], None]]:
    """A function that shows the state in MuJoCo's viewer, in real time; raises `Closed` if the user closes it."""
    import glfw
    from mujoco.viewer import launch_passive

    with warnings.catch_warnings(action="ignore"):
        if not glfw.init():
            raise Refused("--viewer: there is no display to draw on; --video writes a film")
    start, steer = time.monotonic(), functools.partial(steered, loop)
    with launch_passive(loop.model, loop.data, key_callback=steer, show_left_ui=False, show_right_ui=False) as window:
        with window.lock():
            _follow(window.cam, loop)

        def show() -> None:
            if not window.is_running():
                raise Closed
            window.sync()
            time.sleep(max(0.0, start + loop.data.time - time.monotonic()))

        yield show


def steered(loop: Loop, key: int) -> None:
    """Changes the velocity command by a fifth of its greatest value, within the range of training, and prints it."""
    for entry in loop.contract["commands"]:
        if key in _KEYS and entry["term"] == "velocity":
            number, sign = _KEYS[key]
            low, high, where = entry["low"][number], entry["high"][number], _slices(loop.contract)[entry["name"]]
            wanted = loop.command[where][number] + sign * max(abs(low), abs(high)) / 5
            loop.command[where.start + number] = np.clip(wanted, low, high)
            print(f"command {_short(loop.command[where])}", flush=True)


class Played(NamedTuple):
    """One episode.

    Attributes:
        seconds: Simulated time.
        stood: Seconds until the robot fell; None if the task has no ending.
        height: Height of the root body at the end.
        farthest: The joints farthest from home at the end, with their distances in rad or m.
        missed: Distance of a site from its commanded position at the end; None without a target.
        moved: Velocity forward and sideways, and turning rate, in each step, `[steps, 3]`.
        wanted: The same, as commanded; None without a velocity command.
        contacts: Whether each foot touches anything after each step, `[steps, feet]`.
        went: Distance along the world's x axis, in m.
    """

    seconds: float
    stood: float | None
    height: float
    farthest: list[tuple[str, float]]
    missed: float | None
    moved: np.ndarray
    wanted: np.ndarray | None
    contacts: np.ndarray
    went: float

    @property
    def landings(self) -> float:
        """How often a foot lands in a second, mean of the feet; NaN without feet."""
        landed = self.contacts[1:] & ~self.contacts[:-1]
        return float(landed.sum(axis=0).mean()) / self.seconds if self.contacts.size else float("nan")

    @property
    def error(self) -> tuple[float, float]:
        """Mean distance from the command, in m/s and in rad/s."""
        off = self.moved - self.wanted
        return float(np.linalg.norm(off[:, :2], axis=1).mean()), float(np.abs(off[:, 2]).mean())


def play(loop: Loop, steps: int, push: float, watchers: Sequence[Callable[[], None]] = ()) -> Played:
    """Takes some actions, and calls the watchers after each of them."""
    random, commands = np.random.default_rng(0), _slices(loop.contract)
    moved, wanted, contacts, stood = [], [], [], 0.0
    standing, next_push, began = loop.fallen is False, _PUSH_EVERY, float(loop.data.xpos[loop.root, 0])
    for _ in range(steps):
        if push and loop.data.time >= next_push:
            angle, next_push = random.uniform(0, 2 * np.pi), next_push + _PUSH_EVERY
            loop.push(push * np.array([np.cos(angle), np.sin(angle)]))
        if "velocity" in commands:
            wanted.append(loop.command[commands["velocity"]].copy())
        loop.step()
        standing = standing and not loop.fallen
        stood = float(loop.data.time) if standing else stood
        moved.append(loop.velocity)
        contacts.append(loop.contacts)
        try:
            for watch in watchers:
                watch()
        except Closed:
            break
    stood_for = None if loop.fallen is None else stood
    ended = (loop.height, loop.farthest, loop.missed)
    return Played(
        float(loop.data.time),
        stood_for,
        *ended,
        np.array(moved),
        np.array(wanted) if wanted else None,
        np.array(contacts, bool),
        float(loop.data.xpos[loop.root, 0]) - began,
    )


def report(one: Played) -> list[str]:
    """Lines about one episode."""
    lines = [] if one.stood is None else [f"stood {one.stood:.2f} of {one.seconds:.2f} s"]
    lines.append(f"final height {one.height:.3f} m")
    if one.wanted is None and one.farthest:
        lines.append("joints farthest from home " + ", ".join(f"{name} {apart:.3f}" for name, apart in one.farthest))
    if one.missed is not None:
        lines.append(f"distance from the target {one.missed:.3f} m")
    if one.wanted is not None:
        lines.append(f"mean velocity {_short(one.moved.mean(axis=0))}, commanded {_short(one.wanted.mean(axis=0))}")
        lines.append("mean command error {:.3f} m/s and {:.3f} rad/s".format(*one.error))
    return lines + _landings([one])


def summary(episodes: Sequence[Played], commands: Sequence[Sequence[float]]) -> list[str]:
    """Lines about episodes with different velocity commands."""
    errors, stood = np.array([one.error for one in episodes]), sum(one.stood == one.seconds for one in episodes)
    worst = int(np.argmax(errors[:, 0]))
    standing = f"stood to the end in {stood} of {len(episodes)} episodes of {episodes[0].seconds:.2f} s"
    return [
        *([] if episodes[0].stood is None else [standing]),
        "mean command error {:.3f} m/s and {:.3f} rad/s".format(*errors.mean(axis=0)),
        f"greatest command error {errors[worst, 0]:.3f} m/s, at {_short(commands[worst])}",
        *_landings(episodes),
    ]


def crossing(episodes: Sequence[Played], kind: str, height: float) -> list[str]:
    """Lines about episodes over a course."""
    beyond = [one.went >= _RUN_UP + _COURSE for one in episodes]
    fell = sum(one.stood is not None and one.stood < one.seconds for one in episodes)
    ways = np.median([one.went for one in episodes])
    lines = [f"crossed {_COURSE:g} m of {kind}, {height:g} m: {sum(beyond)} of {len(episodes)}; fell: {fell}"]
    return [*lines, f"went {ways:.2f} m (median; the course begins after {_RUN_UP:g} m)"]


def _landings(episodes: Sequence[Played]) -> list[str]:
    found = float(np.mean([one.landings for one in episodes]))
    return [] if np.isnan(found) else [f"a foot lands {found:.1f} times a second"]


def _short(numbers: Iterable[float]) -> str:
    return " ".join(f"{x:.2f}" for x in numbers)


def random_commands(contract: Mapping[str, Any], count: int) -> list[list[float]]:
    """Random velocity commands from the range of training."""
    if [entry["term"] for entry in contract["commands"]] != ["velocity"]:
        raise Refused("--commands: is for policies with a velocity command and no other; leave it out")
    (entry,) = contract["commands"]
    return np.random.default_rng(0).uniform(entry["low"], entry["high"], (count, 3)).tolist()


def main(argv: Sequence[str] | None = None) -> None:
    try:
        args = _arguments(argv)
        if args.video and sys.platform == "linux" and "MUJOCO_GL" not in os.environ:
            _restart_offscreen()
        mujoco.set_mju_user_warning(lambda _: None)  # MuJoCo would write a file into the current folder
        policy, contract = load_policy(args.policy)
        model = load_model(args.model or args.policy.with_name("robot.mjb"), contract, args.any_model)
        model.geom_friction *= args.friction
        model.pair_friction *= args.friction
        period = contract["control_dt"] * contract["action_repeat"]
        steps = max(1, round(args.seconds / period) if args.steps is None else args.steps)
        higher = lay(model, args.terrain, args.height) if args.terrain else 0.0
        if args.tries:
            loop, episodes = Loop(model, contract, policy, args.command, args.delay), []
            for qpos in starts(loop, args.tries, higher):
                loop.reset(qpos)
                episodes.append(play(loop, steps, args.push))
            lines = crossing(episodes, args.terrain, args.height)
        elif args.commands:
            commands = random_commands(contract, args.commands)
            loops = (Loop(model, contract, policy, command, args.delay) for command in commands)
            lines = summary([play(loop, steps, args.push) for loop in loops], commands)
        else:
            loop = Loop(model, contract, policy, args.command, args.delay)
            if args.qpos is not None:
                if len(args.qpos) != model.nq or not np.isfinite(args.qpos).all():
                    raise Refused(f"--qpos: {_short(args.qpos)} must be the model's {model.nq} finite positions")
                loop.reset(np.array(args.qpos))
            elif args.terrain:
                loop.reset(next(starts(loop, 1, higher)))
            with contextlib.ExitStack() as open_now:
                watchers = [open_now.enter_context(film(args.video, loop))] if args.video else []
                watchers += [open_now.enter_context(viewer(loop))] if args.viewer else []
                lines = report(play(loop, steps, args.push, watchers))
    except Refused as error:
        print(f"rlstable: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:  # of MuJoCo, onnxruntime or a contract that something else has changed
        text = f"{type(error).__name__}: {_line(error)[:300]}"
        print(f"rlstable: the policy or the model is damaged, or not of this version of play: {text}", file=sys.stderr)
        sys.exit(2)
    print("\n".join(lines + ([f"film {args.video}"] if args.video else [])))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message}; --help explains the options")


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        description="Runs an exported policy of a robot in plain MuJoCo, and says what happened.",
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("policy", type=Path, help="policy.onnx of rlstable export")
    add("model", type=Path, nargs="?", help="file of the robot that was trained on [robot.mjb beside the policy]")
    add("--command", type=numbers, metavar="NUMBERS",
        help='all commands, for example "0.5 0 0": forward and sideways in m/s, turning in rad/s')  # fmt: skip
    add("--commands", type=int, default=0, metavar="NUMBER", help="play this many random velocity commands, in turn")
    add("--qpos", type=numbers, metavar="NUMBERS", help='positions at the start, for example "0 3.1" [home]')
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="number of actions")
    length.add_argument("--seconds", type=float, default=10.0, help="simulated time [10]")
    add("--delay", type=int, metavar="STEPS", help="of actions, in control steps [the least of training]")
    add("--friction", type=float, default=1.0, metavar="FACTOR", help="of all friction of contacts [1]")
    add("--push", type=float, default=0.0, metavar="SPEED", help="in m/s, in a random direction every 3 s [0]")
    add("--terrain", choices=_COURSES, help="walk over such a course, 4 m long, on the model of a robot_rough policy")
    add("--height", type=float, default=0.1, metavar="METRES",
        help="of a step or of roughness, rise over run of a slope, width of gaps [0.1]")  # fmt: skip
    add("--tries", type=int, default=0, metavar="NUMBER", help="cross the course this often, from various starts")
    add("--video", type=Path, metavar="FILE", help="film, an mp4 file; needs imageio-ffmpeg")
    add("--viewer", action="store_true", help="show it in MuJoCo's viewer")
    add("--any-model", action="store_true", help="play with a model that is not the one of training")
    args = parser.parse_args(argv)
    for name in ("steps", "seconds", "delay", "friction", "push", "commands", "height", "tries"):
        if not 0 <= (getattr(args, name) or 0) < math.inf:
            parser.error(f"argument --{name}: {getattr(args, name)} must be a number of at least 0")
    if args.commands and (args.command or args.qpos or args.video or args.viewer):
        parser.error("argument --commands: leave out --command, --qpos, --video and --viewer")
    if args.tries and (not args.terrain or args.commands or args.qpos or args.video or args.viewer):
        parser.error("argument --tries: needs --terrain; leave out --commands, --qpos, --video and --viewer")
    if args.terrain and args.commands:
        parser.error("argument --terrain: leave out --commands")
    return args


def _restart_offscreen() -> None:
    """Runs this command again on the first OpenGL that draws without a display; MuJoCo chooses it at its import."""
    for backend in ("egl", "osmesa"):
        environment = {**os.environ, "MUJOCO_GL": backend}
        works = [sys.executable, "-c", "import mujoco; mujoco.GLContext(8, 8).make_current()"]
        if subprocess.run(works, env=environment, capture_output=True).returncode == 0:
            sys.exit(subprocess.run([sys.executable, *sys.orig_argv[1:]], env=environment).returncode)
    raise Refused("--video: there is no OpenGL to draw with; install libegl1 or libosmesa6, or leave --video out")


if __name__ == "__main__":
    main()
