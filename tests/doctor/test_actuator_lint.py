"""What bounds actuators, and what they do to a joint in one timestep."""

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
def test_actuators(attributes: str, expected: list[Any]) -> None:
    more = f'<actuator><motor name="a" joint="j" {attributes}/></actuator>'
    assert found(actuators(arm(more=more, kind="hinge", mass="10"))) == expected


def test_a_limit_on_the_joints_force_counts() -> None:
    more = '<actuator><motor joint="j" ctrlrange="-1 1" gear="1e7"/></actuator>'
    assert found(actuators(arm(more=more))) == [("warning", "actuator strength", ("actuator 0",))]
    assert actuators(arm(joint='actuatorfrcrange="-10 10"', more=more)) == []


def test_strength_is_what_a_step_really_does() -> None:
    model = arm(more='<actuator><motor name="a" joint="j" ctrlrange="-2 2" gear="1e6"/></actuator>')
    model.opt.gravity[:] = 0
    (finding,) = actuators(model)
    data = mujoco.MjData(model)
    data.ctrl[0] = 2
    mujoco.mj_step(model, data)
    np.testing.assert_allclose(finding.numbers["jump"], data.qpos[0])
