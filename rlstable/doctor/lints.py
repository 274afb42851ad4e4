"""Checks of a MuJoCo model before it is simulated: springs, dampers, overlaps and joints without limits.

The bounds of springs and dampers are those of one degree of freedom, x'' = -(k x + c x') / m with m the effective mass
at `qpos0`: a spring is stable if sqrt(k / m) dt < 2, and an explicit damper if c dt / m < 2. With RK4 both limits are
2.8. `implicitfast` takes dampers implicitly, `discrete` (MuJoCo 3.13 and later) springs too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

import mujoco
import numpy as np

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
_SINGLE = (int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE))

_UNSTABLE, _UNSTABLE_RK4 = 2.0, 2.8
_TEN_STEPS = 0.6  # sqrt(k / m) dt of an oscillation with ten steps per period: 2 pi / 10
_OVERSHOOT = 1.0  # from this c dt / m on an explicit damper changes the sign of the velocity in every step
_DEEP = 1e-3  # least reported overlap at the start, in metres


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding: a `note` is good to know, a `warning` costs quality or speed or can blow up, an `error` will fail."""

    severity: Severity
    check: str
    subject: tuple[str, ...]
    what: str
    advice: str


def lint(model: mujoco.MjModel, engine: str, home: np.ndarray | None = None) -> list[Finding]:
    """All findings about a model; `home` are the positions at the start, None for `qpos0`.

    Brax's own engines have other contacts, so only joints are checked.
    """
    physics = springs_and_dampers(model) + overlaps(model, home) if engine in ("mjx", "native") else []
    return unlimited_joints(model) + physics


def names(model: mujoco.MjModel, kind: str, indices: Iterable[int]) -> tuple[str, ...]:
    """Names of elements of a `kind` of MuJoCo; an element without a name is `<kind> <index>`."""
    object_type = getattr(mujoco.mjtObj, f"mjOBJ_{kind.upper()}")
    return tuple(mujoco.mj_id2name(model, object_type, int(i)) or f"{kind} {int(i)}" for i in indices)


def short(value: float) -> str:
    """A number with three digits and without large powers of ten: `0.0125`, `2.8`, `1,400`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def unlimited_joints(model: mujoco.MjModel) -> list[Finding]:
    """Finds hinges and slides without limits, except the joints that move a base in the plane."""
    single = np.isin(model.jnt_type, _SINGLE)
    base = (model.body_parentid[model.jnt_bodyid] == 0) & (model.body_jntnum[model.jnt_bodyid] > 1)
    free = np.flatnonzero(single & ~model.jnt_limited.astype(bool) & ~base)
    what = "no limit: the position and its observation can grow without bound"
    advice = "range, if the joint is not a wheel; for a wheel observe sine and cosine, or only the velocity"
    return [Finding("note", "unlimited joint", names(model, "joint", free), what, advice)] if free.size else []


def springs_and_dampers(model: mujoco.MjModel) -> list[Finding]:
    """Checks stiffness and damping of joints and of their servo actuators against the timestep."""
    kinds, flags = mujoco.mjtIntegrator, mujoco.mjtDisableBit
    integrator, dt = model.opt.integrator, model.opt.timestep
    inverse_mass = inverse_masses(model)
    stiffness = np.where(model.opt.disableflags & flags.mjDSBL_SPRING, 0.0, model.jnt_stiffness[model.dof_jntid])
    servo_stiffness, servo_damping = _servos(model)
    limit = _UNSTABLE_RK4 if integrator == kinds.mjINT_RK4 else _UNSTABLE
    phase = dt * np.sqrt(np.maximum(stiffness + servo_stiffness, 0.0) * inverse_mass)
    if integrator == getattr(kinds, "mjINT_DISCRETE", None):
        phase[:] = 0.0
    # Euler integrates joint damping implicitly unless `eulerdamp` is off, actuator damping explicitly. RK4 is explicit.
    explicit = np.zeros(model.nv)
    if integrator in (kinds.mjINT_EULER, kinds.mjINT_RK4):
        explicit += servo_damping
        if integrator == kinds.mjINT_RK4 or model.opt.disableflags & flags.mjDSBL_EULERDAMP:
            explicit += model.dof_damping
    found = []

    # Name, number, its size, its good and its power of 1 / m, and texts for an unstable and for a poor model.
    checks: tuple[tuple[str, str, np.ndarray, float, int, str, str, str], ...] = (
        ("stiffness", "sqrt(k/m) * timestep", phase, _TEN_STEPS, 2,
         "oscillates too fast for the timestep and will blow up", "oscillates with fewer than ten timesteps per period",
         "a shorter timestep, less stiffness or kp"),
        ("damping", "c * timestep / m", dt * explicit * inverse_mass, _OVERSHOOT, 1,
         "is damped too strongly for the timestep and will blow up", "is damped past zero within one timestep",
         "integrator=implicitfast (eulerdamp for joint damping), less damping or kv"),
    )  # fmt: skip
    for name, number, sizes, good, power, unstable, poor, advice in checks:
        levels: tuple[tuple[float, float, Severity, str], ...]
        levels = ((limit, np.inf, "error", unstable), (good, limit, "warning", poor))
        for least, most, severity, what in levels:
            bad = np.flatnonzero((sizes >= least) & (sizes < most))
            if bad.size:
                worst = float(sizes[bad].max())
                armature = float(np.max(((sizes[bad] / good) ** power - 1) / inverse_mass[bad]))
                joints = names(model, "joint", dict.fromkeys(model.dof_jntid[bad].tolist()))
                text = f"{what}: {number} is {short(worst)}; stable below {limit:g}, good below {good:g}"
                advised = f"{advice}, or armature {short(armature)} more"
                found.append(Finding(severity, name, joints, text, advised))
    return found


def inverse_masses(model: mujoco.MjModel) -> np.ndarray:
    """The acceleration of each degree of freedom under a unit force at `qpos0` with the others free, `[nv]`.

    MuJoCo's `dof_invweight0` leaves armature out (MuJoCo 4.0).
    """
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    matrix = np.zeros((model.nv, model.nv))
    # One column at a time, because MuJoCo 4 changed the arguments of `mj_fullM`.
    for unit, column in zip(np.eye(model.nv), matrix, strict=True):
        mujoco.mj_mulM(model, data, column, unit)
    return np.diag(np.linalg.pinv(matrix, hermitian=True))


def _servos(model: mujoco.MjModel) -> tuple[np.ndarray, np.ndarray]:
    """The stiffness and damping that actuators of hinges and slides add to each degree of freedom."""
    stiffness, damping = np.zeros(model.nv), np.zeros(model.nv)
    for i in range(model.nu):
        joint = model.actuator_trnid[i, 0]
        on_joint = model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT and model.jnt_type[joint] in _SINGLE
        if on_joint and model.actuator_biastype[i] == mujoco.mjtBias.mjBIAS_AFFINE:
            dof, gear = model.jnt_dofadr[joint], model.actuator_gear[i, 0] ** 2
            stiffness[dof] -= model.actuator_biasprm[i, 1] * gear
            damping[dof] -= model.actuator_biasprm[i, 2] * gear
    return stiffness, damping


def overlaps(model: mujoco.MjModel, home: np.ndarray | None = None) -> list[Finding]:
    """Finds geoms of moving bodies that overlap at the start, and so always rub."""
    data = mujoco.MjData(model)
    data.qpos[:] = model.qpos0 if home is None else home
    mujoco.mj_forward(model, data)
    moves = model.body_weldid[model.geom_bodyid] > 0
    deep = [one for one in data.contact if -one.dist > _DEEP and moves[one.geom].all()]
    if not deep:
        return []
    couples = dict.fromkeys("–".join(names(model, "geom", one.geom)) for one in deep)
    worst, start = -1000 * min(one.dist for one in deep), "qpos0" if home is None else "home"
    what = f"overlap each other by up to {worst:.1f} mm at {start}, and are pushed apart from the start"
    advice = "<exclude> for these two bodies, or thinner collision geoms"
    return [Finding("warning", "overlap at start", tuple(couples), what, advice)]
