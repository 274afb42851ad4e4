"""Findings, numbers of environments and verdict of the doctor."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from models import arm, found
from toys import PointMass, tiny_config

from rlstable.config import ConfigError
from rlstable.doctor import checkup
from rlstable.doctor.checkup import Environments, Memory, Report, examine
from rlstable.doctor.finding import Finding
from rlstable.doctor.report import as_data, sections
from rlstable.doctor.surroundings import Surroundings
from rlstable.envs.load import Loaded
from rlstable.supervise.arithmetic import Accuracy
from rlstable.supervise.memory import Footprint

MACHINE = Surroundings("1 x gpu (NVIDIA H100)", "cuda 12090", ("NVIDIA H100",), "CPU, 2 cores", {"jax": "0.10"}, {})
FLOAT32, TF32 = Accuracy(2.6e-7, 2.8e-8, 21.0), Accuracy(2e-4, 3e-5, 11.0)
FOOTPRINT = Footprint(arguments=10, outputs=12, aliased=10, temporary=88, code=0)


def usage(limit: int | None, needed: int | None = 100) -> Memory:
    return Memory(FOOTPRINT, needed, limit, None, per_environment=1, rows=50)


def report(*findings: Finding, x64_error: float = 0.0) -> Report:
    return Report("toy", "mjx", MACHINE, {"default": TF32}, x64_error, None, None, findings)


def finding(severity: Any, check: str = "solver") -> Finding:
    return Finding(severity, check, (), "what", "advice", {"gap": math.inf})


@pytest.mark.parametrize(
    ("findings", "verdict", "code"),
    [
        ([], "ready", 0),
        ([finding("note")], "ready", 0),
        ([finding("warning")] * 2, "ready, with 2 warnings", 0),
        ([finding("error"), finding("warning")], "not ready, with 1 error and 1 warning", 1),
        ([finding("error", "memory"), finding("error"), finding("warning")],
         "will not fit, with 1 more error and 1 warning", 1),
        ([finding("warning", "memory")], "ready, with 1 warning", 0),
    ],
)  # fmt: skip
def test_verdict_names_the_number_of_findings(findings: list[Finding], verdict: str, code: int) -> None:
    assert (report(*findings).verdict, report(*findings).exit_code) == (verdict, code)


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
    findings = checkup._precision(tiny_config(precision={"matmul": matmul}), products, 0.0)
    assert [item.severity for item in findings] == [severity for severity, _ in expected]
    for item, (_, text) in zip(findings, expected, strict=True):
        assert item.what.startswith(text)


@pytest.mark.parametrize(("error", "text"), [(1e-8, "float64 has an error of 1e"), (math.inf, "float64 is rejected")])
def test_device_without_float64_is_a_note(error: float, text: str) -> None:
    (item,) = checkup._precision(tiny_config(), {"default": FLOAT32}, error)
    assert item.severity == "note"
    assert item.what.startswith(text)


def test_unused_gpu_and_overridden_precision_are_warnings() -> None:
    assert checkup._machine(MACHINE) == []
    blind = Surroundings("1 x cpu", "cpu", ("NVIDIA H100",), "", {}, {"JAX_DEFAULT_MATMUL_PRECISION": "highest"})
    assert found(checkup._machine(blind)) == [("warning", "device", ("NVIDIA H100",)), ("warning", "precision", ())]


@pytest.mark.parametrize(
    ("limit", "severity"), [(None, None), (125, None), (124, "warning"), (100, "warning"), (99, "error")]
)
def test_memory_findings_depend_on_the_limit(limit: int | None, severity: str | None) -> None:
    findings = checkup._fits(usage(limit), Environments(8, None, (8, 16)), adapts=False)
    assert [(item.severity, item.check) for item in findings] == ([] if severity is None else [(severity, "memory")])


@pytest.mark.parametrize(("limit", "divided"), [(106, False), (105, True)])
def test_memory_shortage_that_the_supervisor_can_divide_is_a_warning(limit: int, divided: bool) -> None:
    (item,) = checkup._fits(usage(limit), Environments(8, None, (8, 16)), adapts=True)
    assert item.severity == "warning"
    assert item.what.endswith(", and will be divided") == divided


def test_memory_advice_names_the_larger_consumer_first() -> None:
    (item,) = checkup._fits(usage(99), Environments(8, None, (8,)), adapts=True)
    assert item.advice.startswith("a smaller ppo.batch_size")
    (item,) = checkup._fits(usage(99), Environments(80, None, (80,)), adapts=True)
    assert item.advice.startswith("a smaller ppo.num_envs")


@pytest.mark.parametrize(
    ("limit", "devices", "most", "allowed"),
    [
        (None, 1, None, (1, 2, 4, 8, 16)),
        (10_000, 1, 16, (1, 2, 4, 8, 16)),
        (125, 1, 8, (1, 2, 4, 8, 16)),
        (99, 1, None, (1, 2, 4, 8, 16)),
        (10_000, 4, 16, (4, 8, 16)),
    ],
)
def test_doctor_recommends_a_number_of_environments(
    limit: int | None, devices: int, most: int | None, allowed: tuple[int, ...]
) -> None:
    config = tiny_config(ppo={"num_envs": 8, "batch_size": 8, "num_minibatches": 2})
    assert checkup._environments(config, usage(limit), devices) == Environments(8, most, allowed)


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
    monkeypatch.setattr(checkup, "surroundings", lambda: MACHINE)
    return examine(tiny_config(devices=1, **sections), compiles)


def test_doctor_examines_an_environment_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    report = examined(PointMass(), monkeypatch)
    assert (report.verdict, report.engine) == ("ready", "toy")
    assert found(report.findings) == [("note", "physics", ())]
    assert report.memory.footprint is None
    assert report.memory.limit > 0
    assert report.environments.most is None


def test_doctor_warns_of_iterations_that_take_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "long_iteration", lambda *_: "an iteration will take about 9 min")
    report = examined(PointMass(), monkeypatch)
    assert report.verdict == "ready, with 1 warning"
    [warning] = [finding for finding in report.findings if finding.severity == "warning"]
    assert (warning.check, warning.what, warning.advice) == (
        "iteration",
        "an iteration will take about 9 min",
        "ppo=cpu has iterations of seconds",
    )


def test_doctor_reports_physics_that_blows_up(monkeypatch: pytest.MonkeyPatch) -> None:
    report = examined(Modelled(), monkeypatch)
    assert (report.verdict, report.exit_code) == ("not ready, with 1 error", 1)
    assert report.findings[0].check == "stiffness"


def test_doctor_reports_a_program_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    report = examined(Bad(), monkeypatch, compiles=True, env={"source": "brax", "name": "fast"})
    assert report.exit_code == 1
    assert report.findings[0].what == "the training program cannot be built: ValueError: no such actuator"
    assert (report.memory, report.environments) == (None, None)
    assert sections(report)


def test_doctor_raises_the_errors_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="devices: 99 requested"):
        examine(tiny_config(devices=99))
    with pytest.raises(ConfigError, match=r"step raises ValueError: no such actuator \(.*test_checkup\.py:\d+\)"):
        examined(Bad(), monkeypatch)
    with pytest.raises(ConfigError, match=r"network\.policy_obs_key: the observation has no 'pixels'"):
        examined(PointMass(named=True), monkeypatch, network={"policy_obs_key": "pixels"})


def test_doctor_report_is_strict_json() -> None:
    data = as_data(report(finding("note"), x64_error=math.inf))
    assert data["x64_error"] is None
    assert data["findings"][0]["numbers"] == {"gap": None}
    assert data["matrix_products"]["default"]["kind"] == "tf32"
    assert data["verdict"] == "ready"
    json.dumps(data, allow_nan=False)
    whole = Report("toy", "mjx", MACHINE, {}, 0.0, usage(200), Environments(8, 16, (8, 16)), ())
    assert as_data(whole)["memory"]["footprint"]["peak"] == FOOTPRINT.peak
    assert as_data(whole)["environments"] == {"configured": 8, "most": 16, "allowed": [8, 16]}


def test_doctor_reports_an_unusable_compile_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(checkup, "enable_program_cache", lambda folder: f"{folder}: cannot be written")
    examine(tiny_config(compile_cache="there"), compiles=False, notify=told.append)
    assert told[0] == "compiled programs are not cached for training (compile_cache): there: cannot be written"


def test_doctor_rejects_devices_that_do_not_divide_the_seeds() -> None:
    with pytest.raises(ConfigError, match=r"^devices: 3 devices cannot train equally many of 8 seeds"):
        examine(tiny_config(seeds=8, devices=3), False, print)


def test_doctor_examines_one_seed_on_one_device_if_devices_share_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch of a seed need not divide among the devices."""
    meshes: list[int] = []

    class Stop(Exception):
        pass

    def setup(config: Any, mesh: Any) -> None:
        meshes.append(mesh.size)
        raise Stop

    monkeypatch.setattr(checkup, "TrainingSetup", setup)
    with pytest.raises(Stop):
        examine(tiny_config(seeds=8, ppo={"num_envs": 3, "batch_size": 3}), False, print)
    assert meshes == [1]
