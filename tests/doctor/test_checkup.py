"""Findings, numbers of environments and verdict of the doctor, and the measured accuracy of matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models import arm, found
from toys import PointMass, tiny_config

from rlstable.config import ConfigError
from rlstable.doctor import arithmetic, checkup
from rlstable.doctor.arithmetic import Accuracy, measure, undelivered
from rlstable.doctor.checkup import Memory, Report, examine, machine_findings, memory_findings
from rlstable.doctor.lints import Finding
from rlstable.doctor.report import sections
from rlstable.envs.load import Loaded
from rlstable.supervise.memory import Footprint

MACHINE = {"device": "1 x gpu (NVIDIA H100)", "nvidia-smi": "NVIDIA H100"}
FLOAT32, TF32 = Accuracy(2.6e-7, 2.8e-8, 21.0), Accuracy(2e-4, 3e-5, 11.0)
FOOTPRINT = Footprint(arguments=10, outputs=12, aliased=10, temporary=88)


def usage(limit: int | None, allowed: tuple[int, ...] = (1, 2, 4, 8, 16)) -> Memory:
    return Memory(FOOTPRINT, 100, limit, per_environment=1, num_envs=8, allowed_envs=allowed)


def report(*findings: Finding, memory: Memory | None = None) -> Report:
    return Report("toy", "mjx", MACHINE, {"default": TF32}, memory, findings)


def finding(severity: Any) -> Finding:
    return Finding(severity, "solver", (), "what", "advice")


def test_verdict_names_the_number_of_findings() -> None:
    note, warning, error = map(finding, ("note", "warning", "error"))
    reports = report(), report(note), report(warning, warning), report(error, warning)
    verdicts = "ready", "ready", "ready, with 2 warnings", "not ready, with 1 error and 1 warning"
    assert [(one.verdict, one.exit_code) for one in reports] == list(zip(verdicts, (0, 0, 0, 1), strict=True))


@pytest.mark.parametrize(
    ("matmul", "products", "expected"),
    [
        ("default", {"default": FLOAT32, "highest": FLOAT32}, []),
        ("default", {"default": TF32, "highest": FLOAT32}, [("note", "matrix products are tf32, 11 bits")]),
        ("highest", {"default": TF32, "highest": FLOAT32}, []),
        ("highest", {"default": TF32, "highest": TF32}, [("warning", "precision.matmul=highest delivers")]),
        ("high", {"default": TF32, "high": TF32, "highest": TF32}, [("note", "precision.matmul=highest delivers")]),
    ],
)
def test_findings_about_the_precision_of_matrix_products(
    matmul: str, products: dict[str, Accuracy], expected: list[tuple[str, str]]
) -> None:
    findings = checkup.precision_findings(tiny_config(precision={"matmul": matmul}), products)
    assert [item.severity for item in findings] == [severity for severity, _ in expected]
    for item, (_, text) in zip(findings, expected, strict=True):
        assert item.what.startswith(text)


def test_gpu_that_jax_does_not_use_is_a_warning() -> None:
    assert machine_findings(MACHINE, False) == []
    blind = MACHINE | {"device": "1 x cpu"}
    assert found(machine_findings(blind, False)) == [("warning", "device", ("NVIDIA H100",))]


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
    assert report.findings[0].check == "stiffness"


def test_doctor_reports_a_program_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    report = examined(Bad(), monkeypatch, compiles=True, env={"source": "brax", "name": "fast"})
    assert report.exit_code == 1
    assert report.findings[0].what == "the training program cannot be built: ValueError: no such actuator"
    assert report.memory is None
    assert sections(report)


def test_doctor_raises_the_errors_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="devices: 99 requested"):
        examine(tiny_config(devices=99))
    with pytest.raises(ConfigError, match=r"step raises ValueError: no such actuator \(.*test_checkup\.py:\d+\)"):
        examined(Bad(), monkeypatch)
    with pytest.raises(ConfigError, match=r"network\.policy_obs_key: the observation has no 'pixels'"):
        examined(PointMass(named=True), monkeypatch, network={"policy_obs_key": "pixels"})


BFLOAT16 = Accuracy(1.5e-3, 2e-4, 8.0)


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.round(np.ldexp(fraction, bits)), exponent - bits).astype(np.float32)


def test_cpu_multiplies_in_float32_at_every_level() -> None:
    measured = measure()
    assert list(measured) == ["default", "high", "highest"]
    assert {accuracy.kind for accuracy in measured.values()} == {"float32"}
    assert all(accuracy.rms_error < 1e-7 for accuracy in measured.values())
    assert undelivered(measured) == {}


@pytest.mark.parametrize(("bits", "kind"), [(24, "float32"), (16, "bfloat16 x3"), (11, "tf32"), (8, "bfloat16")])
def test_arithmetic_of_a_product_is_recognised_by_its_error(
    bits: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor cores round the factors and sum in float32."""
    monkeypatch.setattr(arithmetic, "_multiply", lambda x, y, level: rounded(x, bits) @ rounded(y, bits))
    accuracy = measure()["default"]
    assert accuracy.kind == kind
    if bits < 20:  # with more bits the error of float32 sums dominates
        assert accuracy.bits == pytest.approx(bits, abs=0.1)


def test_precision_flag_that_the_device_ignores_is_reported() -> None:
    assert undelivered({"default": TF32, "high": TF32, "highest": TF32}) == {"highest": "tf32"}
    assert undelivered({"default": BFLOAT16, "high": BFLOAT16, "highest": FLOAT32}) == {"high": "bfloat16"}
