"""Checks of a model: simulations that diverge, and overlaps."""

from __future__ import annotations

import pytest
from models import arm, found, world

from rlstable.config.run import EnvConfig
from rlstable.doctor import trial
from rlstable.doctor.lints import overlaps
from rlstable.envs.load import load_env
from rlstable.envs.mujoco_model import model_of

# The mass is 1 kg and the timestep 1 ms, so that sqrt(k/m) dt = 2 at k = 4e6 and c dt / m = 2 at c = 2e3.
EULER, FAST, RK4 = (f'integrator="{name}"' for name in ("Euler", "implicitfast", "RK4"))
SERVO = '<actuator><position name="a" joint="j" kp="{}" kv="{}" gear="{}" ctrlrange="-1 1"/></actuator>'


@pytest.mark.parametrize(
    ("integrator", "kwargs", "diverges"),
    [
        (EULER, {"joint": 'stiffness="1e4"'}, False),
        (EULER, {"joint": 'stiffness="4.2e6"'}, True),
        (RK4, {"joint": 'stiffness="4.2e6"'}, False),
        (EULER, {"joint": 'stiffness="4.2e6" armature="100"'}, False),
        (EULER, {"more": SERVO.format("4.2e4", 0, 10)}, True),
        (EULER, {"joint": 'damping="5e3"'}, False),
        (EULER, {"more": SERVO.format(0, "21", 10)}, True),
        (FAST, {"more": SERVO.format(0, "2.1e3", 1)}, False),
    ],
)
def test_model_that_diverges_is_an_error_that_names_the_joint_and_a_stable_time_step(
    integrator: str, kwargs: dict[str, str], diverges: bool
) -> None:
    model = arm(option=f'{integrator} gravity="0 0 0"', **kwargs)
    model.jnt_limited[:] = False
    start = trial.of_model(model)
    findings = trial.divergence(start, trial.trials(start))
    assert found(findings) == ([("error", "time step", ("j",))] if diverges else [])
    assert all(one.advice.startswith("timestep 0.0005 s, which is stable here") for one in findings)


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
def test_models_of_brax_do_not_diverge(name: str) -> None:
    env = load_env(EnvConfig(name=name, backend="mjx"))
    model = model_of(env)
    start = trial.of_model(model)
    assert trial.divergence(start, trial.trials(start)) == overlaps(model) == []


def test_overlap_of_geoms_at_the_start_is_found() -> None:
    assert overlaps(leg()) == []
    ((severity, check, (couple,)),) = found(overlaps(leg(reach=0.2)))
    assert (severity, check, set(couple.split("–"))) == ("warning", "overlap at start", {"lower", "torso"})
    assert overlaps(leg(height=1.0)) == []  # the floor is no part of the robot
