"""Checks of a model's contacts: how many MJX computes in every step, and which geoms overlap at the start."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from rlstable.doctor.finding import Finding, Severity, names

# A walking robot needs 4 to 16 contacts of its feet. MJX computes every candidate in every step, even without contact,
# with four solver rows each. Brax's tasks have 0 to 15 contacts.
_MANY, _TOO_MANY = 40, 150
# Least reported overlap at the start, in metres. The solver pushes overlapping geoms apart in the first step.
_DEEP = 1e-3
# Contacts that MJX reserves for a pair of shapes (`ncon` of its collision functions, MJX 3.17). Shapes are
# plane 0, height field 1, sphere 2, capsule 3, ellipsoid 4, cylinder 5, box 6, mesh 7 in `mjtGeom`.
_PER_PAIR = {
    (0, 3): 2, (0, 5): 3, (0, 6): 4, (0, 7): 4, (1, 2): 4, (1, 3): 4, (1, 6): 4, (1, 7): 4,
    (3, 5): 2, (3, 6): 2, (3, 7): 2, (5, 5): 4, (6, 6): 4, (6, 7): 4, (7, 7): 4,
}  # fmt: skip


def candidates(model: Any) -> list[tuple[int, int]]:
    """Returns the pairs of geoms that can touch, the lower shape type first, as MuJoCo filters them without positions.

    `contype` and `conaffinity` select pairs. Pairs within a body, between parent and child (except the world) and in
    `exclude` are left out. Every `pair` is added. MJX computes all of these pairs in every step.
    """
    import mujoco

    flags = mujoco.mjtDisableBit
    if model.opt.disableflags & flags.mjDSBL_CONTACT:
        return []
    found = {_ordered(model, a, b): None for a, b in zip(model.pair_geom1, model.pair_geom2, strict=True)}
    filters_parents = not model.opt.disableflags & flags.mjDSBL_FILTERPARENT
    excluded = set(model.exclude_signature.tolist())
    flat = (int(mujoco.mjtGeom.mjGEOM_PLANE), int(mujoco.mjtGeom.mjGEOM_HFIELD))
    able = np.flatnonzero(model.geom_contype | model.geom_conaffinity)
    for a, b in itertools.combinations(able.tolist(), 2):
        body_a, body_b = sorted((int(model.geom_bodyid[a]), int(model.geom_bodyid[b])))
        weld_a, weld_b = model.body_weldid[body_a], model.body_weldid[body_b]
        related = weld_a and weld_b and (_parent(model, weld_a) == weld_b or _parent(model, weld_b) == weld_a)
        met = model.geom_contype[a] & model.geom_conaffinity[b] or model.geom_contype[b] & model.geom_conaffinity[a]
        if (
            met
            and weld_a != weld_b
            and not (filters_parents and related)
            and (body_a << 16) + body_b not in excluded
            and not (model.geom_type[a] in flat and model.geom_type[b] in flat)
        ):
            found[_ordered(model, a, b)] = None
    return list(found)


def _ordered(model: Any, a: int, b: int) -> tuple[int, int]:
    return (int(b), int(a)) if model.geom_type[a] > model.geom_type[b] else (int(a), int(b))


def _parent(model: Any, weld: int) -> int:
    return int(model.body_weldid[model.body_parentid[weld]])


def contact_count(model: Any, pairs: list[tuple[int, int]]) -> int:
    """Returns the contacts that MJX reserves in every environment, with the model's cap (`max_contact_points`)."""
    import mujoco

    total = 0
    for a, b in pairs:
        types = int(model.geom_type[a]), int(model.geom_type[b])
        by_distance_field = int(mujoco.mjtGeom.mjGEOM_SDF) in types
        total += int(model.opt.sdf_initpoints) if by_distance_field else _PER_PAIR.get(types, 1)
    cap = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_NUMERIC, "max_contact_points")
    return total if cap < 0 else min(total, int(model.numeric_data[model.numeric_adr[cap]]))


def contacts(model: Any, pairs: list[tuple[int, int]]) -> list[Finding]:
    """Finds too many contacts, and geoms that overlap at the start.

    Args:
        model: A `mujoco.MjModel`.
        pairs: Its `candidates`.
    """
    count = contact_count(model, pairs)
    found = []
    if count > _MANY:
        among = [pair for pair in pairs if all(_moves(model, geom) for geom in pair)]
        advice = "let only feet and hands collide: contype and conaffinity 0 elsewhere, or <pair> for what must touch"
        found.append(
            Finding(
                "warning" if count > _TOO_MANY else "note",
                "contact count",
                (),
                f"{count} contacts from {len(pairs)} pairs of geoms, {len(among)} of them among moving bodies; "
                "MJX computes all of them in every step",
                advice + "; numeric max_contact_points caps them",
                {"contacts": count, "pairs": len(pairs), "pairs_among_moving": len(among)},
            )
        )
    return found + _overlaps(model)


def _moves(model: Any, geom: int) -> bool:
    return bool(model.body_weldid[model.geom_bodyid[geom]])


def _overlaps(model: Any) -> list[Finding]:
    """Finds geoms that overlap at `qpos0`: those within the robot always rub, those in the world are pushed out."""
    import mujoco

    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    inside: dict[tuple[int, int], float] = {}
    outside: dict[tuple[int, int], float] = {}
    for i in range(data.ncon):
        contact = data.contact[i]
        depth = -float(contact.dist)
        if depth > _DEEP:
            a, b = (int(geom) for geom in contact.geom)
            where = inside if _moves(model, a) and _moves(model, b) else outside
            where[a, b] = max(depth, where.get((a, b), 0.0))
    found = []
    kinds: tuple[tuple[dict[tuple[int, int], float], Severity, str, str], ...] = (
        (inside, "warning", "overlap each other", "<exclude> for these two bodies, or thinner collision geoms"),
        (outside, "note", "overlap in the world", "start higher, or raise the robot in the environment's reset"),
    )
    for overlap, severity, what, advice in kinds:
        if overlap:
            worst = max(overlap.values())
            couples = ["–".join(names(model, "geom", pair)) for pair in overlap]
            found.append(
                Finding(
                    severity,
                    "overlap at start",
                    tuple(couples),
                    f"{what} by up to {1000 * worst:.1f} mm at qpos0, and are pushed apart from the start",
                    advice,
                    {"depth": worst},
                )
            )
    return found
