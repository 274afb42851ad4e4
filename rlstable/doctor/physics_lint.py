"""Runs all checks of a model's physics without simulating it."""

from __future__ import annotations

from typing import Any

from rlstable.doctor import actuator_lint, contact_lint, dynamics_lint, structure_lint
from rlstable.doctor.finding import Finding

_SEVERITIES = ("error", "warning", "note")


def lint(model: Any, engine: str = "mjx") -> list[Finding]:
    """Returns all findings about a model, worst first.

    Args:
        model: A `mujoco.MjModel`; it is not changed.
        engine: Physics engine. Brax's engines (`spring`, `generalized`, `positional`) have other contacts and
            integrators than MuJoCo, so that for them only structure and actuators are checked.
    """
    found = [*structure_lint.joints(model), *structure_lint.masses(model), *actuator_lint.actuators(model)]
    if engine == "mjx":
        pairs = contact_lint.candidates(model)
        found += dynamics_lint.springs_and_dampers(model)
        found += dynamics_lint.constraint_times(model, pairs)
        found += dynamics_lint.solver(model, pairs)
        found += contact_lint.contacts(model, pairs)
        found += structure_lint.equalities(model)
    return sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity))
