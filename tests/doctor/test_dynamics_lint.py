"""Springs, dampers, constraints and solver against the timestep; errors are those models that blow up in MuJoCo."""

from __future__ import annotations

from pathlib import Path

import mujoco
import pytest
from models import arm, found, world

from rlstable.doctor.contact_lint import candidates
from rlstable.doctor.dynamics_lint import constraint_times, solver, springs_and_dampers

# The mass is 1 kg and the timestep 1 ms, so that sqrt(k/m) dt = 2 at k = 4e6 and c dt / m = 2 at c = 2e3.
EULER, FAST, RK4, DISCRETE = (f'integrator="{name}"' for name in ("Euler", "implicitfast", "RK4", "discrete"))
SERVO = '<actuator><position name="a" joint="j" kp="{}" kv="{}" gear="{}" ctrlrange="-1 1"/></actuator>'
needs_discrete = pytest.mark.skipif(not hasattr(mujoco.mjtIntegrator, "mjINT_DISCRETE"), reason="MuJoCo 3.13 has it")

SPRINGS = [
    (EULER, {"joint": 'stiffness="1e4"'}, []),
    (EULER, {"joint": 'stiffness="3.9e6"'}, ["warning"]),
    (EULER, {"joint": 'stiffness="4.2e6"'}, ["error"]),
    (RK4, {"joint": 'stiffness="4.2e6"'}, ["warning"]),
    (RK4, {"joint": 'stiffness="8.5e6"'}, ["error"]),
    (EULER, {"joint": 'stiffness="4.2e6" armature="100"'}, []),
    (EULER, {"joint": 'stiffness="4.2e6"', "flags": 'spring="disable"'}, []),
    (EULER, {"more": SERVO.format("4.2e4", 0, 10)}, ["error"]),
    (EULER, {"more": SERVO.format("1e4", 0, 1)}, []),
    pytest.param(DISCRETE, {"joint": 'stiffness="4.2e6"'}, [], marks=needs_discrete),
]
DAMPERS = [
    (EULER, {"joint": 'damping="5e3"'}, []),
    (EULER, {"joint": 'damping="0.9e3"', "flags": 'eulerdamp="disable"'}, []),
    (EULER, {"joint": 'damping="1.9e3"', "flags": 'eulerdamp="disable"'}, ["warning"]),
    (EULER, {"joint": 'damping="2.1e3"', "flags": 'eulerdamp="disable"'}, ["error"]),
    (EULER, {"more": SERVO.format(0, "21", 10)}, ["error"]),
    (FAST, {"more": SERVO.format(0, "2.1e3", 1)}, []),
    (RK4, {"joint": 'damping="2.1e3"'}, ["warning"]),
    (RK4, {"joint": 'damping="2.9e3"'}, ["error"]),
]


@pytest.mark.parametrize(("integrator", "kwargs", "severities"), SPRINGS + DAMPERS)
def test_only_models_with_an_error_of_stiffness_or_damping_blow_up(
    integrator: str, kwargs: dict[str, str], severities: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = "damping" if (integrator, kwargs, severities) in DAMPERS else "stiffness"
    found_here = found(springs_and_dampers(arm(option=integrator, **kwargs)))
    assert found_here == [(severity, check, ("j",)) for severity in severities]
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log file if a model blows up
    model = arm(option=f'{integrator} gravity="0 0 0"', **{"flags": "", **kwargs})
    model.jnt_limited[:] = False
    data = mujoco.MjData(model)
    data.qpos[0], data.qvel[0] = 1e-6, 1e-3
    farthest = 0.0
    for _ in range(2000):
        mujoco.mj_step(model, data)
        farthest = max(farthest, abs(data.qpos[0]))
    assert bool(farthest > 0.1) is ("error" in severities)


def test_advice_on_stiffness_suffices() -> None:
    (finding,) = springs_and_dampers(arm(joint='stiffness="4.2e6"'))
    assert finding.advice == "timestep 0.0003 s, or joint stiffness 11.7 times less, or armature 10.7 more"
    assert springs_and_dampers(arm(joint='stiffness="4.2e6" armature="10.7"')) == []
    model = arm(joint=f'stiffness="{4.2e6 / 11.7}"')
    assert springs_and_dampers(model) == []


def test_advice_on_damping_suffices() -> None:
    loose = 'eulerdamp="disable"'
    (finding,) = springs_and_dampers(arm(joint='damping="2.5e3"', flags=loose))
    assert finding.advice.endswith("or armature 1.5 more")
    assert springs_and_dampers(arm(joint='damping="2.5e3" armature="1.51"', flags=loose)) == []


BALL = """
<geom name="floor" type="plane" size="1 1 1" solref="{0}"/>
<body><freejoint/><geom name="ball" size="0.1" mass="1" solref="{0}" pos="0 0 1"/></body>"""


@pytest.mark.parametrize(
    ("solref", "timestep", "severity"),
    [
        ("0.02 1", 0.01, None),
        ("0.02 1", 0.02, "note"),
        ("0.005 1", 0.002, None),
        ("0.003 1", 0.002, "warning"),
        ("-1000 -100", 0.002, None),
        ("-1e5 -100", 0.002, "warning"),
        ("-1000 -1000", 0.002, "warning"),
    ],
)
def test_constraint_time_is_compared_with_the_timestep(solref: str, timestep: float, severity: str | None) -> None:
    model = world(BALL.format(solref))
    model.opt.timestep = timestep
    expected = [] if severity is None else [(severity, "constraint time", ("floor", "ball"))]
    assert found(constraint_times(model, candidates(model))) == expected


def test_constraint_times_of_joint_limits_and_equalities() -> None:
    equality = '<equality><joint name="mimic" joint1="j" solref="0.001 1"/></equality>'
    model = arm(joint='solreflimit="0.001 1"', more=equality)
    assert found(constraint_times(model, [])) == [
        ("warning", "constraint time", ("j",)),
        ("warning", "constraint time", ("mimic",)),
    ]


def test_geoms_that_never_touch_have_no_constraint_time() -> None:
    assert constraint_times(world(BALL.format("0.0001 1")), []) == []


def test_constraint_time_without_refsafe_says_that_the_model_blows_up() -> None:
    model = arm(joint='solreflimit="0.001 1"', flags='refsafe="disable"')
    (finding,) = constraint_times(model, [])
    assert "blow up (refsafe is off)" in finding.what


@needs_discrete
def test_discrete_integrator_accepts_any_constraint_time() -> None:
    assert constraint_times(arm(joint='solreflimit="0.001 1"', option=DISCRETE), []) == []


@pytest.mark.parametrize(
    ("option", "severities"),
    [
        ('iterations="4" ls_iterations="8"', []),
        ('iterations="100" ls_iterations="8"', ["note"]),
        ('iterations="4" ls_iterations="50"', ["note"]),
        ('iterations="2" ls_iterations="8" solver="CG"', ["warning"]),
        ('iterations="8" ls_iterations="8" solver="CG"', []),
        ('iterations="4" ls_iterations="8" solver="PGS"', ["error"]),
        ('iterations="4" ls_iterations="8" integrator="implicit"', ["error"]),
        ('iterations="4" ls_iterations="8" impratio="100"', ["warning"]),
        ('iterations="4" ls_iterations="8" impratio="100" cone="elliptic"', []),
    ],
)
def test_solver_settings_that_mjx_handles_badly_are_found(option: str, severities: list[str]) -> None:
    assert found(solver(arm(option=option), [])) == [(severity, "solver", ()) for severity in severities]


def test_model_without_constraints_has_no_solver_finding() -> None:
    model = arm(option='iterations="100"')
    model.jnt_limited[:] = False
    assert solver(model, []) == []
