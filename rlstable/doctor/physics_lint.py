"""Examines the physics of a model for what makes simulations blow up, drift or crawl. Nothing is simulated for it."""

from __future__ import annotations

from typing import Any

from rlstable.doctor import actuator_lint, contact_lint, dynamics_lint, structure_lint
from rlstable.doctor.finding import Finding

_SEVERITIES = ("error", "warning", "note")


def lint(model: Any, engine: str = "mjx") -> list[Finding]:
    """Everything found in a model, the worst first.

    Args:
        model: A `mujoco.MjModel`; it is not changed.
        engine: What will simulate it. Brax's own (`spring`, `generalized`, `positional`) have their own contacts and
            integrators, so that for them only structure and actuators are judged.
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
