"""Checks of a model's dynamics: springs, dampers and constraints against the timestep, and the solver.

The bounds of stability are those of one degree of freedom, x'' = -(k x + c x') / m with m the effective mass at
`qpos0`. MuJoCo advances the velocity first and the position with the new velocity, so that a spring is stable if
sqrt(k / m) dt < 2, and an explicit damper if c dt / m < 2. With RK4 both limits are 2.8. `implicitfast` takes dampers
implicitly, `discrete` (MuJoCo 3.13 and later) springs too. See "Numerical integration" in MuJoCo's documentation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstable.doctor.actuator_lint import on_joints
from rlstable.doctor.finding import Finding, Severity, names, short
from rlstable.doctor.inertia import inverse_masses

# Bounds of sqrt(k/m) dt and c dt/m: 2 and 2.8 are the limits of stability (RK4's is 2.78 for a damper). A period of an
# oscillation should have at least ten steps: 2 pi / 10.
_UNSTABLE, _UNSTABLE_RK4 = 2.0, 2.8
_TEN_STEPS = 0.6
# From this bound on an explicit damper overshoots zero, so that the velocity changes its sign in every step.
_OVERSHOOT = 1.0
# MuJoCo's `refsafe`: least time constant of a constraint, in timesteps.
_REFSAFE = 2.0
_DEFAULT_SOLREF = (0.02, 1.0)
# Pyramidal cones mix normal and friction directions; MuJoCo's documentation advises against a high ratio for them.
_IMPRATIO = 10.0
# MJX advises few iterations (Newton 1 to 6 in the tasks of Brax and Playground); CG needs more of them than Newton.
_MANY_ITERATIONS, _MANY_LINE_SEARCHES, _FEW_CG = 20, 20, 4
# MuJoCo Warp raises the tolerance to this value, because float32 does not resolve less.
_FLOAT32_TOLERANCE = 1e-6


def springs_and_dampers(model: Any) -> list[Finding]:
    """Checks stiffness and damping of joints and of their servo actuators against the timestep."""
    import mujoco

    kinds, flags = mujoco.mjtIntegrator, mujoco.mjtDisableBit
    integrator, dt = model.opt.integrator, model.opt.timestep
    inverse_mass = inverse_masses(model)
    stiffness = np.where(model.opt.disableflags & flags.mjDSBL_SPRING, 0.0, model.jnt_stiffness[model.dof_jntid])
    servo_stiffness, servo_damping = _servos(model)
    limit = _UNSTABLE_RK4 if integrator == kinds.mjINT_RK4 else _UNSTABLE
    found = []
    if integrator != getattr(kinds, "mjINT_DISCRETE", None):
        phase = dt * np.sqrt(np.maximum(stiffness + servo_stiffness, 0.0) * inverse_mass)
        found += _springs(model, phase, servo_stiffness, inverse_mass, limit)
    # Euler integrates joint damping implicitly unless `eulerdamp` is off, actuator damping explicitly. RK4 is explicit.
    explicit = np.zeros(model.nv)
    if integrator in (kinds.mjINT_EULER, kinds.mjINT_RK4):
        explicit += servo_damping
        if integrator == kinds.mjINT_RK4 or model.opt.disableflags & flags.mjDSBL_EULERDAMP:
            explicit += model.dof_damping
    return found + _dampers(model, dt * explicit * inverse_mass, inverse_mass, limit)


def _springs(model: Any, phase: np.ndarray, servo: np.ndarray, inverse_mass: np.ndarray, limit: float) -> list[Finding]:
    found = []
    kinds: tuple[tuple[float, float, Severity, str], ...] = (
        (limit, np.inf, "error", "oscillates too fast for the timestep and will blow up"),
        (_TEN_STEPS, limit, "warning", "oscillates with fewer than ten timesteps per period"),
    )
    for least, most, severity, what in kinds:
        bad = np.flatnonzero((phase >= least) & (phase < most))
        if bad.size:
            worst = float(phase[bad].max())
            # Armature that would slow the oscillation to ten steps per period.
            excess = (phase[bad] / _TEN_STEPS) ** 2
            armature = float(np.max((excess - 1) / inverse_mass[bad]))
            slower = model.opt.timestep * _TEN_STEPS / worst
            cause = "the actuators' kp" if servo[bad].any() else "joint stiffness"
            found.append(
                Finding(
                    severity,
                    "stiffness",
                    _joints(model, bad),
                    f"{what}: sqrt(k/m) * timestep is {short(worst)}; stable below {limit:g}, good below "
                    f"{_TEN_STEPS:g}",
                    f"timestep {slower:.1g} s, or {cause} {short(excess.max())} times less, "
                    f"or armature {short(armature)} more",
                    {"phase_per_step": worst, "limit": limit},
                )
            )
    return found


def _dampers(model: Any, decay: np.ndarray, inverse_mass: np.ndarray, limit: float) -> list[Finding]:
    found = []
    kinds: tuple[tuple[float, float, Severity, str], ...] = (
        (limit, np.inf, "error", "is damped too strongly for the timestep and will blow up"),
        (_OVERSHOOT, limit, "warning", "is damped past zero within one timestep and trembles"),
    )
    for least, most, severity, what in kinds:
        bad = np.flatnonzero((decay >= least) & (decay < most))
        if bad.size:
            worst = float(decay[bad].max())
            armature = float(np.max((decay[bad] / _OVERSHOOT - 1) / inverse_mass[bad]))
            found.append(
                Finding(
                    severity,
                    "damping",
                    _joints(model, bad),
                    f"{what}: c * timestep / m is {short(worst)}; stable below {limit:g}, good below {_OVERSHOOT:g}",
                    "integrator=implicitfast (eulerdamp for joint damping), less damping or kv, "
                    f"or armature {short(armature)} more",
                    {"decay_per_step": worst, "limit": limit},
                )
            )
    return found


def _servos(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the stiffness and damping that actuators add to each degree of freedom."""
    import mujoco

    stiffness, damping = np.zeros(model.nv), np.zeros(model.nv)
    for i in on_joints(model):
        if model.actuator_biastype[i] == mujoco.mjtBias.mjBIAS_AFFINE:
            dof = model.jnt_dofadr[model.actuator_trnid[i, 0]]
            gear = model.actuator_gear[i, 0] ** 2
            stiffness[dof] -= model.actuator_biasprm[i, 1] * gear
            damping[dof] -= model.actuator_biasprm[i, 2] * gear
    return stiffness, damping


def constraint_times(model: Any, pairs: list[tuple[int, int]]) -> list[Finding]:
    """Checks time constants of contacts, joint limits and equalities (`solref`) against the timestep.

    Args:
        model: A `mujoco.MjModel`.
        pairs: Pairs of geoms that can touch.
    """
    import mujoco

    if model.opt.integrator == getattr(mujoco.mjtIntegrator, "mjINT_DISCRETE", None):
        return []  # stable at any time constant
    touching = sorted({geom for pair in pairs for geom in pair})
    limited = np.flatnonzero(model.jnt_limited)
    groups = (
        ("geom", "contacts", touching, model.geom_solref),
        ("joint", "joint limits", limited, model.jnt_solref),
        ("equality", "equality constraints", range(model.neq), model.eq_solref),
    )
    found = []
    for kind, what, indices, solref in groups:
        short = [int(i) for i in indices if _too_quick(solref[i], model.opt.timestep)]
        # The model's explicit values and MuJoCo's default are separate findings.
        for chosen in (True, False):
            some = [i for i in short if (tuple(solref[i]) != _DEFAULT_SOLREF) is chosen]
            if some:
                found.append(_too_short(model, names(model, kind, some), what, solref[some], chosen))
    return found


def _too_quick(solref: np.ndarray, dt: float) -> bool:
    time, ratio = solref
    if time > 0:
        # With a tolerance of 1 %, because options pass through float32.
        return bool(time < 0.99 * _REFSAFE * dt)
    # The form (-stiffness, -damping), with the same bounds for a critically damped constraint.
    return bool(np.sqrt(-time) * dt > 0.5 or -ratio * dt > 1.0)


def _too_short(model: Any, subject: tuple[str, ...], what: str, solref: np.ndarray, chosen: bool) -> Finding:
    import mujoco

    dt = model.opt.timestep
    direct = bool((solref[:, 0] <= 0).any())
    unsafe = direct or bool(model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_REFSAFE)
    numbers = {"timestep": float(dt), "solref": float(solref[:, 0].min())}
    if direct:
        text = f"stiffness or damping of {what} is too great for a timestep of {dt:g} s"
        advice = f"solref as a time constant of {_REFSAFE * dt:g} s or more, or a shorter timestep"
    else:
        time = float(solref[:, 0].min())
        outcome = "will ring or blow up (refsafe is off)" if unsafe else f"are softened to {_REFSAFE * dt:g} s"
        text = f"the time constant of {what} is {time:g} s, less than two timesteps of {dt:g} s: they {outcome}"
        advice = f"timestep {time / _REFSAFE:g} s or shorter, or solref of {_REFSAFE * dt:g} s or more"
    severity: Severity = "warning" if unsafe or chosen else "note"
    return Finding(severity, "constraint time", subject, text, advice, numbers)


def solver(model: Any, pairs: list[tuple[int, int]]) -> list[Finding]:
    """Checks the solver's iterations, tolerance and cones, and options that MJX lacks; see `constraint_times`."""
    import mujoco

    option, found = model.opt, []
    solvers, kinds = mujoco.mjtSolver, mujoco.mjtIntegrator

    def add(severity: Severity, what: str, advice: str, **numbers: float) -> None:
        found.append(Finding(severity, "solver", (), what, advice, numbers))

    if option.solver == solvers.mjSOL_PGS:
        add("error", "solver=PGS is not in MJX", "solver=Newton, or CG for very many degrees of freedom")
    if option.integrator == kinds.mjINT_IMPLICIT:
        add("error", "integrator=implicit is not in MJX", "integrator=implicitfast")
    constrained = bool(pairs or model.neq or model.jnt_limited.any() or model.tendon_limited.any())
    if constrained and (option.iterations > _MANY_ITERATIONS or option.ls_iterations > _MANY_LINE_SEARCHES):
        # float32 never reaches a finer tolerance, so that all iterations can run.
        fine = 0 < option.tolerance < _FLOAT32_TOLERANCE and option.iterations > _MANY_ITERATIONS
        add(
            "note",
            f"up to {option.iterations} solver iterations with {option.ls_iterations} line searches each; "
            "in a batch all environments wait for the slowest",
            "iterations 4 to 8 with Newton, ls_iterations 8"
            + (f", tolerance {_FLOAT32_TOLERANCE:g}" if fine else "")
            + ": faster on MJX; check that the motion stays the same",
            iterations=option.iterations,
            ls_iterations=option.ls_iterations,
            tolerance=option.tolerance,
        )
    if constrained and option.solver == solvers.mjSOL_CG and option.iterations < _FEW_CG:
        add(
            "warning",
            f"{option.iterations} iterations of the CG solver leave contacts soft and constraints open",
            "solver=Newton, which needs fewer iterations, or more iterations",
            iterations=option.iterations,
        )
    if option.cone == mujoco.mjtCone.mjCONE_PYRAMIDAL and option.impratio > _IMPRATIO:
        add(
            "warning",
            f"impratio {option.impratio:g} with pyramidal friction cones stiffens normal directions too",
            "cone=elliptic, which impratio is meant for, or an impratio near 1",
            impratio=option.impratio,
        )
    return found


def _joints(model: Any, dofs: np.ndarray) -> tuple[str, ...]:
    return names(model, "joint", dict.fromkeys(model.dof_jntid[dofs].tolist()))
