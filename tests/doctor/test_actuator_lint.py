"""Limits of actuators, and the motion of a joint in one timestep."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import pytest
from models import arm, found

from rlstable.doctor.actuator_lint import actuators


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ('ctrlrange="-1 1" gear="100"', []),
        ('gear="100"', [("warning", "actuator limit", ("a",))]),
        ('gear="100" forcerange="-1 1"', []),
        ('ctrlrange="-1 1" gear="1e6"', [("warning", "actuator strength", ("a",))]),
        ('ctrlrange="-1 1" gear="1e3" forcerange="-1 1"', []),
    ],
)
def test_actuators_without_limit_or_with_too_much_strength_are_found(attributes: str, expected: list[Any]) -> None:
    more = f'<actuator><motor name="a" joint="j" {attributes}/></actuator>'
    assert found(actuators(arm(more=more, kind="hinge", mass="10"))) == expected


def test_force_limit_of_the_joint_limits_the_actuator() -> None:
    more = '<actuator><motor joint="j" ctrlrange="-1 1" gear="1e7"/></actuator>'
    assert found(actuators(arm(more=more))) == [("warning", "actuator strength", ("actuator 0",))]
    assert actuators(arm(joint='actuatorfrcrange="-10 10"', more=more)) == []


def test_actuator_strength_equals_the_motion_in_mujoco() -> None:
    model = arm(more='<actuator><motor name="a" joint="j" ctrlrange="-2 2" gear="1e6"/></actuator>')
    model.opt.gravity[:] = 0
    (finding,) = actuators(model)
    data = mujoco.MjData(model)
    data.ctrl[0] = 2
    mujoco.mj_step(model, data)
    np.testing.assert_allclose(finding.numbers["jump"], data.qpos[0])
