"""Limits of actuators, and the motion of a joint in one timestep."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import pytest
from ball import MODEL, Stick
from brax.envs.base import PipelineEnv
from brax.io import mjcf
from models import arm, found

from rlstable.doctor.actuator_lint import actuators, reach
from rlstable.doctor.playing import play
from rlstable.envs.mujoco_model import model_of
from rlstable.envs.native import with_native_physics


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


class Weak(Stick):
    """A stick whose motor takes ±40, commanded by `gain` times the action, at once or summed over the steps."""

    def __init__(self, gain: float, sums: bool = False):
        system = mjcf.loads(MODEL.format(gear=3.0).replace('ctrlrange="-1 1"', 'name="elbow" ctrlrange="-40 40"'))
        PipelineEnv.__init__(self, sys=system, backend="mjx", n_frames=1)
        self.reads, self.gain, self.sums = (), gain, sums

    def step(self, state: Any, action: Any) -> Any:
        before = state.pipeline_state.ctrl if self.sums else 0.0
        return super().step(state, before + self.gain * action)


@pytest.mark.parametrize(("gain", "sums", "share"), [(1.0, False, 2.5), (40.0, False, None), (1.0, True, None)])
def test_actions_that_hardly_reach_the_range_of_a_motor_are_found(gain: float, sums: bool, share: float | None) -> None:
    env = with_native_physics(Weak(gain, sums), 1)
    findings = reach(model_of(env), play(env).controls)
    if share is None:
        assert findings == []
    else:
        (finding,) = findings
        assert found(findings) == [("warning", "actuator reach", ("elbow",))]
        assert finding.what.startswith("actions of -1 to 1 reach 2.5 % of ctrlrange")


def test_motor_that_no_action_moves_is_no_finding() -> None:
    model = arm(more='<actuator><motor name="a" joint="j" ctrlrange="-2 2"/></actuator>')
    assert reach(model, np.zeros((3, 4, 1))) == []
    assert found(reach(model, np.array([[0.0], [0.1], [np.nan]]))) == [("warning", "actuator reach", ("a",))]
