"""Findings and verdict of the doctor."""

from __future__ import annotations

from typing import Any

import pytest
from models import arm
from toys import PointMass, tiny_config

from rlstable.config import ConfigError
from rlstable.doctor.checkup import Memory, Report, examine, machine_findings, memory_findings
from rlstable.doctor.lints import Finding
from rlstable.envs.load import Loaded
from rlstable.supervise.memory import Footprint

MACHINE = {"device": "1 x gpu (NVIDIA H100)"}
FOOTPRINT = Footprint(arguments=10, outputs=12, aliased=10, temporary=88)


def usage(limit: int | None) -> Memory:
    return Memory(FOOTPRINT, 100, limit, per_environment=1)


def report(*findings: Finding) -> Report:
    return Report("toy", "mjx", MACHINE, usage(None), findings)


def finding(severity: Any) -> Finding:
    return Finding(severity, "solver", (), "what", "advice")


def test_verdict_names_the_number_of_findings() -> None:
    note, warning, error = map(finding, ("note", "warning", "error"))
    reports = report(), report(note), report(warning, warning), report(error, warning)
    verdicts = "ready", "ready", "ready, with 2 warnings", "not ready, with 1 error and 1 warning"
    assert [(one.verdict, one.exit_code) for one in reports] == list(zip(verdicts, (0, 0, 0, 1), strict=True))


def test_robot_in_jax_on_an_nvidia_gpu_is_a_note() -> None:
    (finding,) = machine_findings(MACHINE, True)
    assert (finding.severity, finding.what) == ("note", "MJX in JAX is slow for robots on an NVIDIA GPU")
    assert finding.advice.startswith("MJX-Warp: pip install") and "[warp]" in finding.advice


@pytest.mark.parametrize(
    ("limit", "adapts", "severity", "divided"),
    [
        (None, False, None, False), (125, False, None, False), (124, False, "warning", False),
        (99, False, "error", False), (106, True, "warning", False), (105, True, "warning", True),
    ],
)  # fmt: skip
def test_memory_findings_depend_on_the_limit(
    limit: int | None, adapts: bool, severity: str | None, divided: bool
) -> None:
    findings = memory_findings(usage(limit), adapts)
    assert [item.severity for item in findings] == ([] if severity is None else [severity])
    assert any(item.what.endswith(", and will be divided") for item in findings) == divided


class Bad(PointMass):
    """An environment whose step cannot be traced."""

    def step(self, state, action):
        raise ValueError("no such actuator")


class Modelled(PointMass):
    """An environment with a MuJoCo model that blows up."""

    backend = "mjx"
    mj_model = arm(joint='stiffness="4.2e6"')


def examined(env: Any, /, monkeypatch: pytest.MonkeyPatch, compiles: bool = False, **sections: Any) -> Report:
    monkeypatch.setattr("rlstable.runner.setup.load", lambda *_: Loaded(env, "mjx"))
    return examine(tiny_config(devices=1, **sections), compiles)


def test_doctor_reports_physics_that_blows_up(monkeypatch: pytest.MonkeyPatch) -> None:
    report = examined(Modelled(), monkeypatch)
    assert (report.verdict, report.exit_code) == ("not ready, with 1 error", 1)
    assert report.findings[0].check == "time step"


def test_doctor_raises_the_errors_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="devices: 99 requested"):
        examine(tiny_config(devices=99))
    with pytest.raises(ConfigError, match=r"step raises ValueError: no such actuator \(.*test_checkup\.py:\d+\)"):
        examined(Bad(), monkeypatch)
    with pytest.raises(ConfigError, match=r"network\.policy_obs_key: the observation has no 'pixels'"):
        examined(PointMass(named=True), monkeypatch, network={"policy_obs_key": "pixels"})
