"""Checks of a model; models with an error of stiffness or damping are those that blow up in MuJoCo."""

from __future__ import annotations

from pathlib import Path

import mujoco
import pytest
from models import arm, found, world

from rlstable.config.run import EnvConfig
from rlstable.doctor.lints import lint, overlaps, springs_and_dampers, unlimited_joints
from rlstable.envs.load import load_env
from rlstable.envs.mujoco_model import model_of

# The mass is 1 kg and the timestep 1 ms, so that sqrt(k/m) dt = 2 at k = 4e6 and c dt / m = 2 at c = 2e3.
EULER, FAST, RK4, DISCRETE = (f'integrator="{name}"' for name in ("Euler", "implicitfast", "RK4", "discrete"))
SERVO = '<actuator><position name="a" joint="j" kp="{}" kv="{}" gear="{}" ctrlrange="-1 1"/></actuator>'
needs_discrete = pytest.mark.skipif(not hasattr(mujoco.mjtIntegrator, "mjINT_DISCRETE"), reason="MuJoCo 3.13 has it")

SPRINGS = [
    (EULER, {"joint": 'stiffness="1e4"'}, []),
    (EULER, {"joint": 'stiffness="3.9e6"'}, ["warning"]),
    (EULER, {"joint": 'stiffness="4.2e6"'}, ["error"]),
    (RK4, {"joint": 'stiffness="4.2e6"'}, ["warning"]),
    (EULER, {"joint": 'stiffness="4.2e6" armature="100"'}, []),
    (EULER, {"joint": 'stiffness="4.2e6"', "flags": 'spring="disable"'}, []),
    (EULER, {"more": SERVO.format("4.2e4", 0, 10)}, ["error"]),
    pytest.param(DISCRETE, {"joint": 'stiffness="4.2e6"'}, [], marks=needs_discrete),
]
DAMPERS = [
    (EULER, {"joint": 'damping="5e3"'}, []),
    (EULER, {"joint": 'damping="1.9e3"', "flags": 'eulerdamp="disable"'}, ["warning"]),
    (EULER, {"joint": 'damping="2.1e3"', "flags": 'eulerdamp="disable"'}, ["error"]),
    (EULER, {"more": SERVO.format(0, "21", 10)}, ["error"]),
    (FAST, {"more": SERVO.format(0, "2.1e3", 1)}, []),
    (RK4, {"joint": 'damping="2.1e3"'}, ["warning"]),
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


def test_advised_armature_suffices() -> None:
    loose = 'eulerdamp="disable"'
    (finding,) = springs_and_dampers(arm(joint='stiffness="4.2e6"'))
    assert finding.advice.endswith("less stiffness or kp, or armature 10.7 more")
    assert springs_and_dampers(arm(joint='stiffness="4.2e6" armature="10.7"')) == []
    (finding,) = springs_and_dampers(arm(joint='damping="2.5e3"', flags=loose))
    assert finding.advice.endswith("or armature 1.5 more")
    assert springs_and_dampers(arm(joint='damping="2.5e3" armature="1.51"', flags=loose)) == []


FLOOR = '<geom name="floor" type="plane" size="1 1 1"/>'
LEG = """
<body name="body" pos="0 0 {height}">
  <freejoint/><geom name="torso" type="box" size="0.2 0.2 0.2" mass="5"/>
  <body name="thigh" pos="0 0 -0.3">
    <joint name="hip" axis="0 1 0" range="-1 1" limited="true"/>
    <geom name="upper" type="capsule" size="0.05 0.2" pos="0 0 -0.2" mass="1"/>
    <body name="shin" pos="0 0 {reach}">
      <joint name="knee" axis="0 1 0" range="-1 1" limited="true"/>
      <geom name="lower" type="capsule" size="0.05 0.2" pos="0 0 -0.2" mass="1"/>
    </body>
  </body>
</body>"""


def leg(height: float = 2.0, reach: float = -0.5):
    return world(FLOOR + LEG.format(height=height, reach=reach))


@pytest.mark.parametrize("name", ["ant", "humanoid", "pusher", "walker2d"])
def test_tasks_of_brax_have_no_warning(name: str) -> None:
    env = load_env(EnvConfig(name=name, backend="mjx"))
    model = model_of(env)
    assert {finding.severity for finding in lint(model, env.backend)} <= {"note"}


def test_overlap_of_geoms_at_the_start_is_found() -> None:
    assert overlaps(leg()) == []
    ((severity, check, (couple,)),) = found(overlaps(leg(reach=0.2)))
    assert (severity, check, set(couple.split("–"))) == ("warning", "overlap at start", {"lower", "torso"})
    assert overlaps(leg(height=1.0)) == []  # the floor is no part of the robot


def test_unlimited_hinge_is_a_note() -> None:
    assert unlimited_joints(arm(kind="hinge")) == []
    wheel = arm(kind="hinge")
    wheel.jnt_limited[:] = False
    assert found(unlimited_joints(wheel)) == [("note", "unlimited joint", ("j",))]
    cart = '<body><joint type="slide" axis="1 0 0"/><joint type="hinge" axis="0 1 0"/><geom size="0.1"/></body>'
    assert unlimited_joints(world(cart)) == []
