"""The contract of a robot's policy: keys, order and units, and how training has completed the model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
from commands import exit_code
from exported import TINY, exported, file_of, random_run
from moments import MODELS, config, environment

from rlstable import play
from rlstable.envs.load import load_env
from rlstable.export.__main__ import main as export
from rlstable.robot import build
from rlstable.robot.contract import contract

LEGS = [f"{end}_{side}" for end in ("front", "rear") for side in ("left", "right")]
JOINTS = [f"{leg}_{joint}" for leg in LEGS for joint in ("abduction", "hip", "knee")]
# Nothing has a name, and the foot needs one for its contact sensor.
NAMELESS = """
<mujoco>
  <worldbody>
    <body pos="0 0 0.3">
      <freejoint/>
      <geom type="sphere" size="0.1"/>
      <body>
        <joint axis="0 1 0"/>
        <geom type="capsule" size="0.03" fromto="0 0 0 0 0 -0.3"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="{joint}" ctrlrange="-1 1" gear="2"/></actuator>
</mujoco>
"""


def of(task: str, model: str, *words: str) -> dict[str, Any]:
    return contract(environment(task, model, *words))


def test_keys_of_mjlab_are_in_the_order_of_the_joints() -> None:
    found = of("robot_velocity", "quadruped")
    assert found["joint_names"] == JOINTS
    assert found["default_joint_pos"] == pytest.approx([0.0, 0.8, -1.6] * 4)
    assert found["joint_stiffness"] == [30.0] * 12 and found["joint_damping"] == [0.5] * 12
    assert found["action_scale"] == pytest.approx([0.4, 0.8, 0.5] * 4)  # 0.9 would ask the hip for more than its force
    assert found["command_names"] == ["velocity"]
    names = ["joint_positions", "joint_velocities", "projected_gravity", "gyro", "last_action", "command"]
    assert found["observation_names"] == names
    assert [entry["size"] for entry in found["observations"]] == [12, 12, 3, 3, 12, 3]


def test_gains_of_a_joint_are_those_of_all_its_servos_times_the_square_of_the_gear(tmp_path: Path) -> None:
    text = (MODELS / "arm.xml").read_text()
    servos = (
        '<position joint="{0}" kp="2" kv="0.1" gear="10"/><velocity joint="{0}" kv="3"/>',
        '<position joint="{1}" kp="40" kv="1"/>',
    )
    joints = re.findall('<joint name="([^"]*)"', text)
    new = "".join(servos).format(*joints)
    (tmp_path / "robot.xml").write_text(
        re.sub("<actuator>.*</actuator>", f"<actuator>{new}</actuator>", text, flags=re.DOTALL)
    )
    found = contract(environment("robot_reach", str(tmp_path / "robot")))
    assert found["joint_stiffness"][:2] == pytest.approx([200.0, 40.0])
    assert found["joint_damping"][:2] == pytest.approx([13.0, 1.0])


def test_exported_model_has_its_own_physics_and_not_the_cheaper_one_of_training(tmp_path: Path) -> None:
    cheap = "env.task.physics={timestep: 0.002, cone: elliptic, contacts: feet}"
    folder = exported(tmp_path, "robot_velocity", "quadruped", cheap).folder
    model = mujoco.MjModel.from_binary_path(str(folder / "robot.mjb"))
    assert (model.opt.timestep, model.opt.cone) == (0.004, mujoco.mjtCone.mjCONE_PYRAMIDAL)
    assert model.geom("trunk").contype[0] == 1
    _, found = play.load_policy(folder / "policy.onnx")
    assert (found["control_dt"], found["decimation"]) == (pytest.approx(0.02), 5)
    play.load_model(file_of("quadruped"), found)


def test_time_home_and_action_are_complete() -> None:
    words = ("env.task.actions.delay=[0, 2]", "env.task.actions.filter=0.3", "env.task.actions.clip=null")
    found = of("robot_velocity", "quadruped", *words)
    assert (found["control_dt"], found["decimation"]) == (pytest.approx(0.02), 5)
    assert (found["keyframe"], found["root_body"]) == ("home", "trunk")
    assert found["default_qpos"][:7] == [0, 0, 0.3007, 1, 0, 0, 0]
    assert (found["action_delay"], found["action_filter"]) == ({"least": 0, "most": 2}, 0.3)
    assert found["action_clip"] is None
    knee = found["actuators"][2]
    assert (knee["name"], knee["joint"], knee["kind"]) == ("front_left_knee", "front_left_knee", "position")
    assert [knee[key] for key in ("low", "high", "home", "force")] == pytest.approx([-2.7, -0.7, -1.6, 36.0])
    json.dumps(found, allow_nan=False)


def test_observation_names_the_parts_of_the_model_that_it_reads() -> None:
    words = ("+env.task.observations.foot_contacts={}", "+env.task.observations.gyro.history=4")
    entries = {entry["name"]: entry for entry in of("robot_velocity", "quadruped", *words)["observations"]}
    assert entries["joint_positions"]["joints"] == JOINTS
    assert entries["gyro"]["sensors"] == [["gyro"]]
    assert (entries["gyro"]["history"], entries["gyro"]["delay"]) == (4, {"least": 0, "most": 0})
    assert entries["foot_contacts"]["sensors"] == [[f"rlstable_contact_{leg}_foot"] for leg in LEGS]


def test_commands_have_ranges_and_a_default() -> None:
    (velocity,) = of("robot_velocity", "quadruped")["commands"]
    assert (velocity["low"], velocity["high"]) == ([-0.4, -0.24, -0.7], [0.8, 0.24, 0.7])
    assert velocity["default"] == pytest.approx([0.2, 0, 0])
    (pose,) = of("robot_reach", "arm")["commands"]
    assert pose["size"] == 3 and pose["low"] <= pose["default"]
    assert np.linalg.norm(np.array(pose["default"]) - [0, 0, 0.5]) <= 0.551  # the arm's length


def test_curriculum_is_its_end_in_the_contract() -> None:
    words = (
        "env.task.commands.velocity.forward=[[0,0.1],[-1,2],1000]",
        "+env.task.observations.gyro.noise=[0,0.2,1000]",
    )
    found = json.loads(json.dumps(of("robot_velocity", "quadruped", *words)))
    assert found["commands"][0]["low"][0] == -1 and found["commands"][0]["high"][0] == 2
    assert {entry["name"]: entry["noise"] for entry in found["observations"]}["gyro"] == 0.2


def test_planar_robot_is_commanded_forward_only() -> None:
    (command,) = of("robot_velocity", "hopper")["commands"]
    assert command["low"] == [-0.5, 0.0, 0.0] and command["high"] == [1.0, 0.0, 0.0]


def test_motors_have_no_gains_and_their_limits_are_null_without_a_range() -> None:
    found = of("robot", "hopper")
    assert found["joint_stiffness"] == [0.0] * len(found["joint_names"])
    velocity = of("robot_reach", "arm", "env.task.actions.control=velocity", "env.task.actions.damping=1")
    assert [velocity["actuators"][0][key] for key in ("kind", "low", "high")] == ["velocity", None, None]


@pytest.mark.parametrize(
    "task, model, words",
    [
        ("robot_velocity", "quadruped", ("env.task.floor=never", "+env.task.observations.foot_contacts={}")),
        ("robot", "quadruped", ("env.task.actions.control=torque",)),
        ("robot", "quadruped", ("env.task.actions.control=position", "env.task.actions.stiffness=50")),
        ("robot_reach", "arm", ("env.task.actions.control=velocity", "env.task.actions.damping=1")),
        ("robot", "hopper", ("env.task.floor=always", "+env.task.observations.accelerometer={}")),
        ("robot_swingup", "cart_pole", ()),
    ],
)
def test_plain_file_is_completed_to_the_model_of_training(task: str, model: str, words: tuple[str, ...]) -> None:
    completed = play.load_model(file_of(model), of(task, model, *words))  # compares the hashes
    assert completed.nsensor > mujoco.MjModel.from_xml_path(str(file_of(model))).nsensor


def test_parts_without_a_name_are_found_by_their_number(tmp_path: Path) -> None:
    named = NAMELESS.replace("<joint axis", '<joint name="swing" axis').format(joint="swing")
    (tmp_path / "nameless.xml").write_text(named)
    made = exported(
        tmp_path, "robot", str(Path("..", *[".."] * len(MODELS.parts), *tmp_path.parts[1:], "nameless")),
        "+env.task.observations.foot_contacts={}",
    )  # fmt: skip
    policy, found = play.load_policy(made.onnx)
    assert found["root_body"] == "body1"
    loop = play.Loop(play.load_model(tmp_path / "nameless.xml", found), found, policy)
    loop.step()
    assert loop.model.sensor(f"{build.CONTACT}geom1").id == loop.model.nsensor - 1


def test_metadata_separate_flat_lists_by_commas_and_are_json_otherwise(tmp_path: Path) -> None:
    import onnx

    made = exported(tmp_path, "robot_velocity", "quadruped")
    texts = {entry.key: entry.value for entry in onnx.load(made.onnx).metadata_props}
    assert texts["joint_names"].split(",") == JOINTS
    assert texts["action_scale"] == ",".join(["0.4,0.8,0.5"] * 4)
    assert json.loads(texts["observations"])[0]["size"] == 12
    assert json.loads(texts["config"])["env"]["xml"] == "quadruped.xml"
    assert str(MODELS).encode() not in made.onnx.read_bytes()  # no path of this machine


# --- the command


def lean(robot: Any, data: Any, past: Any, action: Any) -> Any:
    """A term of the user's own."""
    return robot.rotation(data)[2, :1]


OWN = "+env.task.observations.lean={term: 'test_robot_contract:lean'}"


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Makes the command export a random policy in the place of a run's."""
    from rlstable.policy import saved_run

    settings = config("robot_swingup", "cart_pole", *TINY, *words)
    found = random_run(load_env(settings.env), settings, folder)
    (folder / "config.yaml").touch()
    monkeypatch.setattr(
        saved_run, "open_run", lambda run, which, trust: dataclasses.replace(found, folder=run, trust=trust)
    )


def test_export_writes_policy_metadata_model_and_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(tmp_path, monkeypatch)
    assert exit_code(export, f"run={tmp_path}", "--json") == 0
    written = json.loads(capsys.readouterr().out)
    assert [Path(one["file"]).name for one in written] == ["policy.stablehlo", "policy.onnx", "robot.mjb", "play.py"]
    found = json.loads((tmp_path / "export" / "policy.json").read_text())
    model = (tmp_path / "export" / "robot.mjb").read_bytes()
    assert found["model_hash"] == hashlib.sha256(model).hexdigest()
    assert found["joint_names"] == ["slider", "hinge"] and found["observation"]["history"] == 1


def test_term_of_the_users_own_is_exported_and_refused_by_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(tmp_path, monkeypatch, OWN)
    assert exit_code(export, f"run={tmp_path}", "format=onnx") == 0
    assert exit_code(play.main, str(tmp_path / "export" / "policy.onnx")) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("rlstable: observation lean: its term test_robot_contract:lean is a function of your own")


def test_terms_that_a_strangers_folder_names_are_imported_only_with_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(tmp_path, monkeypatch, OWN)
    tmp_path.chmod(0o777)
    assert exit_code(export, f"run={tmp_path}") == 2
    assert "env.task=test_robot_contract:lean" in capsys.readouterr().err
    assert exit_code(export, f"run={tmp_path}", "trust=true", "format=onnx") == 0
