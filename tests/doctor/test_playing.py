"""Check that plays an environment: the reach of its actuators."""

from __future__ import annotations

from typing import Any

import pytest
from ball import MODEL, Stick
from brax.envs.base import PipelineEnv
from brax.io import mjcf
from models import found

from rlstable.doctor.playing import actuator_reach
from rlstable.envs.mujoco_model import model_of
from rlstable.envs.native import with_native_physics

pytestmark = pytest.mark.usefixtures("quick_compile")


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
    findings = actuator_reach(env, model_of(env))
    if share is None:
        assert findings == []
    else:
        (finding,) = findings
        assert found(findings) == [("warning", "actuator reach", ("elbow",))]
        assert finding.what.startswith("actions of -1 to 1 reach 2.5 % of ctrlrange")
