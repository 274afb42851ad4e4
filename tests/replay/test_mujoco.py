"""Replay of physics that explodes in MJX, in both precisions, and in C MuJoCo."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brax.envs.inverted_pendulum import InvertedPendulum
from brax.io import mjcf
from short_runs import trained

from rlstable.replay.engines import step_again
from rlstable.replay.report import compare
from rlstable.supervise.incident import read


@pytest.mark.slow
def test_replay_of_exploding_physics_agrees_in_all_engines(tmp_path: Path) -> None:
    """All three engines give about the same huge numbers; MuJoCo does not substitute a clean state."""
    without = {"checkpoint": {"enabled": False}, "supervise": {"recovery": {"enabled": False}}}
    trained(tmp_path, env={"name": "test_mujoco:WildPendulum"}, total_steps=1, **without)
    found = read(tmp_path / "incidents" / "1-1")
    assert found.facts["causes"][0] == "quarantine/physics"
    report = compare(found, step_again(found))
    engines = ("float32", "float64", "C MuJoCo")
    assert tuple(report.columns)[2:] == engines
    for engine in engines:
        bad = {one.array: one for one in report.bad[engine]}
        assert bad["pipeline_state/qacc"].why == "beyond 1e+10"
        assert bad["pipeline_state/qvel"].why == "beyond 1e+06"
    qpos = [report.columns[engine]["pipeline_state/qpos"] for engine in engines]
    np.testing.assert_allclose(qpos[0], qpos[1], rtol=0.05)
    np.testing.assert_allclose(qpos[1], qpos[2], rtol=0.05)
    assert report.columns["float64"]["pipeline_state/qpos"].dtype == np.float64
    assert report.first.endswith("in float32, float64 and C MuJoCo")
    assert report.notes["C MuJoCo"].startswith("first in physics step 1 of 2: pipeline_state/qvel[0]")
    assert report.conclusion == "bad in all three: the model itself; see python -m rlstable.doctor."


class WildPendulum(InvertedPendulum):
    """An inverted pendulum in MJX whose motor is `gain` times too strong for its integrator."""

    def __init__(self, gain: float = 1e7, backend: str = "mjx", **kwargs: Any):
        super().__init__(backend=backend, **kwargs)
        model = copy.copy(self.sys.mj_model)
        model.actuator_gainprm[:, 0] *= gain
        self.sys = mjcf.load_model(model)
