"""Checks of actuators: their limits, and how far they move a joint in one timestep."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstable.doctor.finding import Finding, names, short
from rlstable.doctor.inertia import inverse_masses

# Greatest plausible motion in one timestep, from rest and at full force, in radians or metres.
_JUMP = 0.5
_SMALL_REACH = 0.1  # share of ctrlrange


def on_joints(model: Any) -> list[int]:
    """Returns the actuators that drive a hinge or a slide."""
    import mujoco

    single = (int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE))
    return [
        i
        for i in range(model.nu)
        if model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT
        and model.jnt_type[model.actuator_trnid[i, 0]] in single
    ]


def actuators(model: Any) -> list[Finding]:
    """Finds actuators without limits, and actuators that move a joint too far within one timestep."""
    found = []
    unlimited = [i for i in range(model.nu) if not model.actuator_ctrllimited[i]]
    unbounded = [i for i in unlimited if not model.actuator_forcelimited[i]]
    if unbounded:
        found.append(
            Finding(
                "warning",
                "actuator limit",
                names(model, "actuator", unbounded),
                "neither the command nor the force is limited: one extreme action is one extreme force",
                "ctrlrange, and forcerange from the motor's data sheet",
            )
        )
    inverse_mass = inverse_masses(model)
    jumps = {i: jump for i in on_joints(model) if (jump := _jump(model, i, inverse_mass)) > _JUMP}
    if jumps:
        worst = max(jumps.values())
        found.append(
            Finding(
                "warning",
                "actuator strength",
                names(model, "actuator", jumps),
                f"full command moves the joint from rest by {short(worst)} rad or m within one timestep",
                "lower gear, kp or forcerange, a shorter timestep, or armature (rotor inertia times gear ratio²)",
                {"jump": worst},
            )
        )
    return found


def reach(model: Any, controls: Any) -> list[Finding]:
    """Finds actuators that the policy's actions can hardly command.

    Actions are in ±1. An environment that passes them to motors of ±40 uses 2.5 % of the motors' strength. A motor that
    no action moves may be locked on purpose, so it is no finding.

    Args:
        model: The model.
        controls: Commands under random and extreme actions, `[..., nu]`.
    """
    controls = np.asarray(controls, np.float64).reshape(-1, model.nu)
    controls = controls[np.isfinite(controls).all(axis=1)]
    if not len(controls):
        return []
    low, high = model.actuator_ctrlrange.T
    clipped = np.clip(controls, low, high)
    share = np.ptp(clipped, axis=0) / np.maximum(high - low, 1e-12)
    weak = [i for i in range(model.nu) if model.actuator_ctrllimited[i] and 0.0 < share[i] < _SMALL_REACH]
    if not weak:
        return []
    least = float(share[weak].min())
    return [
        Finding(
            "warning",
            "actuator reach",
            names(model, "actuator", weak),
            f"actions of -1 to 1 reach {short(100.0 * least)} % of ctrlrange: the policy cannot use the actuator",
            "scale the action in step: low + (action + 1) / 2 * (high - low), from actuator_ctrlrange",
            {"reach": least},
        )
    ]


def _jump(model: Any, i: int, inverse_mass: np.ndarray) -> float:
    """Returns how far an actuator moves its joint in one timestep, from rest at `qpos0` with full command."""
    joint = model.actuator_trnid[i, 0]
    dof = model.jnt_dofadr[joint]
    if model.actuator_ctrllimited[i]:
        force = abs(model.actuator_gainprm[i, 0]) * float(np.abs(model.actuator_ctrlrange[i]).max())
    else:
        force = abs(model.actuator_gainprm[i, 0])  # a command of 1
    if model.actuator_forcelimited[i]:
        force = min(force, float(np.abs(model.actuator_forcerange[i]).max()))
    if model.jnt_actfrclimited[joint]:
        force = min(force * abs(model.actuator_gear[i, 0]), float(np.abs(model.jnt_actfrcrange[joint]).max()))
    else:
        force *= abs(model.actuator_gear[i, 0])
    return float(force * inverse_mass[dof] * model.opt.timestep**2)
