"""Checks of a model's structure: joint limits, loops, masses, and the condition of the mass matrix in float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstable.doctor.finding import Finding, names
from rlstable.doctor.inertia import inverse_masses, mass_matrix

# Bounds in kg and kg m² of a 1 g sphere of 5 mm. Lighter moving bodies are more often errors of units than parts of a
# robot.
_LIGHT, _SMALL_INERTIA = 1e-3, 1e-8
# Mass ratios of a body to its parent from which the mass matrix is ill-conditioned.
_LOAD, _HEAVY_LOAD = 1e3, 1e4
# float32 has 24 bits: solving with a matrix of condition number c has a relative error of 6e-8 * c. Beyond 2e5 the
# error is 1 % of the acceleration, beyond 2e7 the whole acceleration.
_CONDITION, _SINGULAR = 2e5, 2e7
# Greatest gap of an equality constraint at the start, in metres or radians.
_OPEN = 1e-3


def joints(model: Any) -> list[Finding]:
    """Finds hinges and slides without limits, except the joints that move a base in the plane."""
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
            "no limit: the position and its observation can grow without bound",
            "range, if the joint is not a wheel; for a wheel observe sine and cosine, or only the velocity",
        )
    ]


def equalities(model: Any) -> list[Finding]:
    """Finds loops closed by `connect` or `weld`, and equality constraints that do not hold at the start."""
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
                "a soft constraint closes a kinematic loop: hard pushes open it, few solver iterations leave it open",
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
                f"does not hold at qpos0, by up to {max(open_.values()):.2g} m or rad; the solver forces it shut",
                "anchor and relpose that fit qpos0, or a keyframe in which the constraint holds and a reset to it",
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
    """Finds very light bodies, great mass ratios, and a mass matrix that float32 cannot solve accurately."""
    found = []
    moving = np.flatnonzero(model.body_dofnum > 0)
    # A body can exist only for a joint of its children, so that the mass of its subtree counts.
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
    """Returns whether all joints of a body have armature, which compensates a small inertia."""
    start = model.body_dofadr[body]
    return bool((model.dof_armature[start : start + model.body_dofnum[body]] > _SMALL_INERTIA).all())


def _loads(model: Any, moving: np.ndarray) -> list[Finding]:
    parents = model.body_parentid[moving]
    carried = moving[(parents > 0) & (model.body_mass[parents] > 0)]
    ratio = model.body_mass[carried] / model.body_mass[model.body_parentid[carried]]
    # Several joints in a row are often written as nested bodies of almost no mass, which is sound with armature.
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
            "more mass for the lighter body, armature for the joint between them, or several joints in one body",
            {"ratio": worst},
        )
    ]


def _condition(model: Any) -> list[Finding]:
    """Checks the mass matrix at `qpos0`, scaled to a unit diagonal, because units do not affect its factorisation."""
    if not model.nv:
        return []
    matrix = mass_matrix(model)
    scale = 1.0 / np.sqrt(np.diag(matrix))
    number = float(np.linalg.cond(matrix * scale[:, None] * scale))
    if not number > _CONDITION:
        return []
    # Rounding hurts most where the free motion of other joints leaves the smallest share of a joint's mass.
    left = 1.0 / (inverse_masses(model) * np.diag(matrix))
    worst = np.flatnonzero(left < 10 * left.min())
    lost = min(1.0, 6e-8 * number)
    return [
        Finding(
            "error" if number > _SINGULAR else "warning",
            "mass matrix",
            names(model, "joint", dict.fromkeys(model.dof_jntid[worst].tolist())),
            f"condition number {number:.1g} at qpos0: float32 loses about {100 * lost:.0f} % of an acceleration",
            "armature for these joints, fewer joints in a row without mass between them, or masses of similar size",
            {"condition": number},
        )
    ]
