"""The first look at a robot: its tables, and one finding for each fault that is put into a good model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import SIZES, exit_code

from rlstable.cli.compose import compose
from rlstable.config.robot import TaskConfig
from rlstable.doctor import robot as look
from rlstable.doctor.__main__ import main
from rlstable.robot.model import Robot

MODELS = Path(__file__).parents[1] / "robot" / "models"
QUADRUPED = (MODELS / "quadruped.xml").read_text()
SIDES = ("front_left", "front_right", "rear_left", "rear_right")


def robot(folder: Path, text: str, *words: str, task: str = "robot_stand") -> tuple[Robot, TaskConfig]:
    path = folder / "robot.xml"
    path.write_text(text)
    env = compose([f"env={task}", f"env.xml={path}", *words]).env
    assert env.xml is not None and env.task is not None
    return Robot(env.xml, env.task), env.task


def found(folder: Path, text: str, *words: str, **task: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Severity, check and subject of each finding."""
    return [(one.severity, one.check, one.subject) for one in look.findings(*robot(folder, text, *words, **task))]


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


# --- findings


@pytest.mark.parametrize("model", ["quadruped", "arm", "cart_pole"])
def test_good_model_has_no_finding(model: str, tmp_path: Path) -> None:
    assert found(tmp_path, (MODELS / f"{model}.xml").read_text()) == []


def test_joint_that_is_out_of_its_range_at_home_is_named(tmp_path: Path) -> None:
    text = replaced(QUADRUPED, ('range="-2.7 -0.7"', 'range="-2.7 -1.8"'))
    knees = tuple(f"{side}_knee" for side in SIDES)
    assert ("warning", "home", knees) in found(tmp_path, text)


def test_actuator_without_a_control_range_is_named(tmp_path: Path) -> None:
    text = re.sub(r'ctrl(range|limited)="[^"]*"', "", (MODELS / "cart_pole.xml").read_text())
    names = [check for _, check, _ in found(tmp_path, text)]
    assert names == ["control range"]


def test_free_robot_without_a_floor_falls_for_ever(tmp_path: Path) -> None:
    checks = [(severity, check) for severity, check, _ in found(tmp_path, QUADRUPED, "env.task.floor=never")]
    assert ("warning", "floor") in checks


def test_robot_above_the_floor_at_home_falls(tmp_path: Path) -> None:
    floor = '<geom type="plane" size="0 0 1" pos="0 0 -0.2"/><body name="trunk"'
    text = replaced(QUADRUPED, ('<body name="trunk"', floor))
    (finding, *_) = look.findings(*robot(tmp_path, text))
    assert finding.what == "the robot is 0.2 m above the floor at home, and falls"


def test_robot_that_cannot_touch_the_floor_is_named_and_one_without_gravity_does_not_fall(tmp_path: Path) -> None:
    floor = '<geom type="plane" size="0 0 1" pos="0 0 -0.2"/><body name="trunk"'
    text = replaced(QUADRUPED, ('<body name="trunk"', floor))
    no_contact = replaced(text, ('<geom friction="0.8"/>', '<geom friction="0.8" contype="0" conaffinity="0"/>'))
    messages = [finding.what for finding in look.findings(*robot(tmp_path, no_contact))]
    assert "no geom of the robot can collide, and it falls through the floor" in messages
    floats = replaced(text, ('cone="pyramidal"/>', 'cone="pyramidal"><flag gravity="disable"/></option>'))
    assert found(tmp_path, floats) == []


def test_doctor_names_the_keyframes_of_a_model_without_the_keyframe_home(tmp_path: Path) -> None:
    text = replaced(QUADRUPED, ('<key name="home"', '<key name="standing"'))
    findings = look.findings(*robot(tmp_path, text))
    (named,) = (finding for finding in findings if "keyframe" in finding.what)
    assert named.what == "the model has no keyframe home, so that home is qpos0; it has standing"
    assert named.advice == "env.task.keyframe=standing, if the robot starts there"
    assert look.findings(*robot(tmp_path, text, "env.task.keyframe=standing")) == []


def test_robot_whose_servos_are_too_weak_does_not_stand(tmp_path: Path) -> None:
    text = replaced(QUADRUPED, ('kp="30"', 'kp="3"'))
    (finding,) = look.findings(*robot(tmp_path, text))
    assert (finding.severity, finding.check) == ("warning", "standing")
    assert "with zero actions the robot does not stay at home" in finding.what


def test_time_step_at_which_the_simulation_diverges_is_an_error_with_a_stable_one(tmp_path: Path) -> None:
    text = replaced(re.sub('forcerange="[^"]*"', "", QUADRUPED), ('kp="30" kv="0.5"', 'kp="300" kv="20"'))
    (finding,) = look.findings(*robot(tmp_path, text))
    assert (finding.severity, finding.check) == ("error", "time step")
    assert finding.what.startswith("zero actions from the start make the simulation diverge after 0.0")
    assert finding.advice.startswith("timestep 0.002 s, which is stable here")


def test_longer_time_step_is_a_note_only_if_it_is_stable(tmp_path: Path) -> None:
    fine = replaced(QUADRUPED, ('timestep="0.004"', 'timestep="0.001"'))
    (note,) = look.findings(*robot(tmp_path, fine))
    assert (note.severity, note.check) == ("note", "time step")
    assert note.advice.startswith("env.task.physics.timestep=0.004;")
    assert found(tmp_path, fine, "env.task.physics.timestep=0.004") == []
    stiff = replaced(re.sub('forcerange="[^"]*"', "", fine), ('kp="30" kv="0.5"', 'kp="300" kv="20"'))
    assert "time step" not in [check for _, check, _ in found(tmp_path, stiff)]


# --- tables


def test_tables_have_each_joint_and_actuator_with_the_numbers_of_the_task(tmp_path: Path) -> None:
    facts = look.facts(*robot(tmp_path, QUADRUPED), "robot.xml", Path("home.html"))
    knee = {row["joint"]: row for row in facts.joints}["rear_left_knee"]
    assert list(knee.values()) == ["rear_left_knee", "hinge", -2.7, -0.7, -1.6, 0.3, 0.01]
    servo = {row["actuator"]: row for row in facts.actuators}["rear_left_knee"]
    assert (servo["kind"], servo["stiffness"], servo["damping"], servo["force"]) == ("position", 30.0, 0.5, 36.0)
    assert servo["scale"] == pytest.approx(0.5)
    assert facts.model["mass"] == "12.2 kg in 13 moving bodies"
    assert facts.task["home"] == "keyframe home"
    assert facts.task["feet"] == "front_left_foot, front_right_foot, rear_left_foot, rear_right_foot"
    assert facts.task["floor"].endswith(", added")
    assert facts.task["reaching site"] == "none that the joints move"


def test_sensors_of_a_kind_are_counted_if_they_are_many(tmp_path: Path) -> None:
    more = "".join(f'<jointpos name="q{i}" joint="front_left_knee"/>' for i in range(5))
    text = QUADRUPED.replace("<sensor>", f"<sensor>{more}")
    sensors = look.facts(*robot(tmp_path, text), "robot.xml", Path("home.html")).model["sensors"]
    assert sensors.startswith("5 jointpos, ") and "q0" not in sensors and "(gyro)" in sensors


def test_doctor_shows_a_robot_and_its_json_has_the_same_facts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["env=robot_swingup", f"env.xml={MODELS / 'cart_pole.xml'}", *SIZES, "devices=1", "--no-compile"]
    assert exit_code(main, *words, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["joint"] for row in data["robot"]["joints"]] == ["slider", "hinge"]
    assert data["robot"]["joints"][1]["low"] is None
    assert data["robot"]["task"]["home"] == "the model's first position"
    assert (here / data["robot"]["model"]["page"]).is_file()
    assert exit_code(main, *words) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line in ("Model", "Joints", "Actuators", "Task")] == [
        "Model", "Joints", "Actuators", "Task",
    ]  # fmt: skip
    assert max(map(len, lines)) <= 120
