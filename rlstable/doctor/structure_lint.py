"""Checks of what a model is made of: joint limits, loops, masses, and whether float32 is enough for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstable.doctor.finding import Finding, names
from rlstable.doctor.inertia import inverse_masses, mass_matrix

# Lighter moving bodies are mistakes of units more often than parts of a robot, in kg and kg m². Inertias are those of a
# 1 g sphere of 5 mm.
_LIGHT, _SMALL_INERTIA = 1e-3, 1e-8
# A body that carries another so many times its own mass makes the mass matrix ill-conditioned.
_LOAD, _HEAVY_LOAD = 1e3, 1e4
# float32 has 24 bits: solving with a matrix of condition number c loses a relative 6e-8 * c. Beyond 2e5 that is
# a percent of the acceleration, beyond 2e7 all of it.
_CONDITION, _SINGULAR = 2e5, 2e7
# How far an equality constraint may be from satisfied at the start, in metres or radians.
_OPEN = 1e-3


def joints(model: Any) -> list[Finding]:
    """Hinges and slides without limits, those that carry a base through the plane left out."""
    import mujoco

    kinds = mujoco.mjtJoint
    single = np.isin(model.jnt_type, (int(kinds.mjJNT_HINGE), int(kinds.mjJNT_SLIDE)))
    base = (model.body_parentid[model.jnt_bodyid] == 0) & (model.body_jntnum[model.jnt_bodyid] > 1)
    free = np.flatnonzero(single & ~model.jnt_limited.astype(bool) & ~base)
    if not free.size:
        return []
    return [
        Finding(
            "note",
            "unlimited joint",
            names(model, "joint", free),
            "no limit: the position can grow without bound, and an observation with it",
            "range, if it is not a wheel; for one that turns freely observe sine and cosine, or the velocity only",
        )
    ]


def equalities(model: Any) -> list[Finding]:
    """Loops closed by `connect` or `weld`, and constraints that do not hold where the model starts."""
    import mujoco

    closing = (int(mujoco.mjtEq.mjEQ_CONNECT), int(mujoco.mjtEq.mjEQ_WELD))
    active = np.flatnonzero(model.eq_active0).tolist()
    loops = [i for i in active if model.eq_type[i] in closing and not _follows_mocap(model, *_bodies(model, i))]
    found = []
    if loops:
        found.append(
            Finding(
                "note",
                "closed loop",
                names(model, "equality", loops),
                "a kinematic loop is closed by a soft constraint: hard pushes open it, few iterations leave it open",
                "4 solver iterations or more, a timestep of 4 ms or less; reset to poses that close the loop",
            )
        )
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    rows = np.asarray(data.efc_type) == mujoco.mjtConstraint.mjCNSTR_EQUALITY
    ids, gaps = np.asarray(data.efc_id)[rows], np.abs(np.asarray(data.efc_pos)[rows])
    open_ = {int(i): float(gaps[ids == i].max()) for i in np.unique(ids) if gaps[ids == i].max() > _OPEN}
    if open_:
        found.append(
            Finding(
                "warning",
                "open equality",
                names(model, "equality", open_),
                f"does not hold at qpos0, by up to {max(open_.values()):.2g} m or rad, and is pulled shut with force",
                "anchor and relpose that fit qpos0, or a keyframe in which it holds and a reset to that",
                {"gap": max(open_.values())},
            )
        )
    return found


def _bodies(model: Any, i: int) -> tuple[int, int]:
    import mujoco

    pair = int(model.eq_obj1id[i]), int(model.eq_obj2id[i])
    if model.eq_objtype[i] == mujoco.mjtObj.mjOBJ_SITE:
        return int(model.site_bodyid[pair[0]]), int(model.site_bodyid[pair[1]])
    return pair


def _follows_mocap(model: Any, a: int, b: int) -> bool:
    return bool(model.body_mocapid[a] >= 0 or model.body_mocapid[b] >= 0)


def masses(model: Any) -> list[Finding]:
    """Bodies that are very light, or carry much more than themselves, and the mass matrix that float32 has to solve."""
    found = []
    moving = np.flatnonzero(model.body_dofnum > 0)
    # A body may be a mere joint of the ones welded to it or of a chain of joints: what counts is what it carries.
    light = [
        i
        for i in moving.tolist()
        if model.body_subtreemass[i] < _LIGHT or (_turns(model, i) and model.body_inertia[i].max() < _SMALL_INERTIA)
        if not _rotor(model, i)
    ]
    if light:
        found.append(
            Finding(
                "warning",
                "small mass",
                names(model, "body", light),
                f"moves with less than {_LIGHT:g} kg or {_SMALL_INERTIA:g} kg m²: tiny forces make huge accelerations",
                "real masses (look for grams or millimetres), joint armature, or compiler boundmass and boundinertia",
                {"mass": float(model.body_mass[light].min()), "inertia": float(model.body_inertia[light].min())},
            )
        )
    return found + _loads(model, moving) + _condition(model)


def _turns(model: Any, body: int) -> bool:
    import mujoco

    start = model.body_jntadr[body]
    kinds = model.jnt_type[start : start + model.body_jntnum[body]]
    return bool((kinds != mujoco.mjtJoint.mjJNT_SLIDE).any()) and model.body_subtreemass[body] == model.body_mass[body]


def _rotor(model: Any, body: int) -> bool:
    """Whether armature makes up for a small inertia in all of a body's joints."""
    start = model.body_dofadr[body]
    return bool((model.dof_armature[start : start + model.body_dofnum[body]] > _SMALL_INERTIA).all())


def _loads(model: Any, moving: np.ndarray) -> list[Finding]:
    parents = model.body_parentid[moving]
    carried = moving[(parents > 0) & (model.body_mass[parents] > 0)]
    ratio = model.body_mass[carried] / model.body_mass[model.body_parentid[carried]]
    # Several joints in a row are often written as nested bodies of next to no mass, which armature makes sound.
    bare = np.array([not _rotor(model, model.body_parentid[i]) for i in carried], bool)
    bad = np.flatnonzero((ratio > _LOAD) & bare)
    if not bad.size:
        return []
    worst = float(ratio[bad].max())
    return [
        Finding(
            "warning" if worst > _HEAVY_LOAD else "note",
            "mass ratio",
            names(model, "body", carried[bad]),
            f"has up to {worst:,.0f} times the mass of the body that carries it",
            "more mass for the lighter one, armature for the joint between, or several joints in one body",
            {"ratio": worst},
        )
    ]


def _condition(model: Any) -> list[Finding]:
    """The mass matrix at `qpos0`, scaled to a unit diagonal, since factorising it does not depend on units."""
    if not model.nv:
        return []
    matrix = mass_matrix(model)
    scale = 1.0 / np.sqrt(np.diag(matrix))
    number = float(np.linalg.cond(matrix * scale[:, None] * scale))
    if not number > _CONDITION:
        return []
    # Where rounding hurts most: what the other joints' motion leaves next to no mass to, of all that it has.
    left = 1.0 / (inverse_masses(model) * np.diag(matrix))
    worst = np.flatnonzero(left < 10 * left.min())
    lost = min(1.0, 6e-8 * number)
    return [
        Finding(
            "error" if number > _SINGULAR else "warning",
            "mass matrix",
            names(model, "joint", dict.fromkeys(model.dof_jntid[worst].tolist())),
            f"condition number {number:.1g} at qpos0: float32 loses about {100 * lost:.0f} % of an acceleration",
            "armature for these joints, fewer joints in a row without mass between, or masses closer to each other",
            {"condition": number},
        )
    ]
