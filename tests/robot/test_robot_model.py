"""The facts that a task takes from a model that it has never seen, and one line for what is missing."""

from __future__ import annotations

import re
from pathlib import Path

import brax
import jax
import mujoco
import numpy as np
import pytest
from moments import (
    ACROBOT,
    GROUND,
    HOME_HEIGHT,
    LEG,
    LINK,
    MODELS,
    SERVOS,
    SHIN,
    built,
    config,
    environment,
    moment,
    robot,
    saved,
    walker,
)

from rlstable.config import ConfigError
from rlstable.robot import actions, build, endings, geometry, observations
from rlstable.robot.model import Robot
from rlstable.robot.symmetry.mirror import mirror_of

KEY = jax.random.PRNGKey(0)
FEET = ["front_left_foot", "front_right_foot", "rear_left_foot", "rear_right_foot"]


def text_of(model: str) -> str:
    return (MODELS / f"{model}.xml").read_text()


# --- what is found


def test_quadruped_has_a_free_root_four_feet_and_its_keyframe() -> None:
    found = robot("quadruped", "feet")
    assert found.floating and found.moves
    assert found.model.body(found.root).name == "trunk"
    assert [found.model.geom(geom).name for (geom,) in found.feet] == FEET
    assert [joint.home for joint in found.joints] == pytest.approx([0.0, 0.8, -1.6] * 4)
    np.testing.assert_allclose(found.home_height, HOME_HEIGHT, atol=1e-6)


def test_actuators_are_in_the_models_order_with_gains_ranges_and_home() -> None:
    knee = robot("quadruped").actuators[2]
    assert (knee.name, knee.joint, knee.kind) == ("front_left_knee", "front_left_knee", "position")
    assert (knee.stiffness, knee.damping, knee.force) == (30.0, 0.5, 36.0)
    assert (knee.low, knee.high, knee.home) == pytest.approx((-2.7, -0.7, -1.6))
    assert knee.up == knee.down == pytest.approx(1.0)
    motor = robot("hopper").actuators[0]
    assert (motor.kind, motor.home, motor.up, motor.stiffness) == ("torque", 0.0, 1.0, 0.0)


def test_model_without_a_keyframe_is_at_home_in_its_first_position() -> None:
    found = robot("hopper", "feet")
    np.testing.assert_array_equal(found.home, found.model.qpos0)
    assert [found.model.geom(geom).name for (geom,) in found.feet] == ["foot"]


@pytest.mark.parametrize(
    "model, names",
    [
        ("ant", ["left_foot_geom", "right_foot_geom", "third_foot_geom", "fourth_foot_geom"]),
        ("half_cheetah", ["bfoot", "ffoot"]),
        ("humanoid", ["right_foot", "left_foot"]),
        ("walker2d", ["foot_geom", "foot_left_geom"]),
    ],
)
def test_feet_of_well_known_models_are_the_last_geoms_of_their_legs(model: str, names: list[str]) -> None:
    found = robot(str(Path(brax.__file__).parent / "envs" / "assets" / model), "feet")
    assert [found.model.geom(geom).name for (geom,) in found.feet] == names


def test_foot_of_several_geoms_touches_with_any_of_them(tmp_path: Path) -> None:
    text = text_of("quadruped")
    for side, y in (("left", 0.01), ("right", -0.01)):  # a second geom, lower at home
        heel = f'<geom name="front_{side}_foot" type="sphere" pos="0 0 -0.2" size="0.022" mass="0.05"/>'
        toe = f'<geom name="front_{side}_toe" type="sphere" pos="-0.01 {y} -0.2" size="0.022" mass="0"/>'
        assert heel in text
        text = text.replace(heel, heel + toe)
    path = saved(tmp_path, text)
    env = environment("robot_velocity", str(path.with_suffix("")), "+env.task.rewards.slip={weight: -0.1}")
    found, model = env.robot, env.robot.model
    names = [[model.geom(geom).name for geom in foot] for foot in found.feet]
    assert names == [[FEET[0], "front_left_toe"], [FEET[1], "front_right_toe"], [FEET[2]], [FEET[3]]]
    data, qpos = geometry.in_pose(model, found.home), found.home.copy()
    heel = found.feet[0][0]
    qpos[2] -= geometry.lowest(model, data, heel) - found.floor - 1e-4  # the heel is just above the floor
    assert found.foot_contacts(found.forward(qpos)).tolist()[:2] == [1, 1]
    np.testing.assert_allclose(
        found.foot_positions(data)[0], (data.geom_xpos[heel] + data.geom_xpos[heel + 1]) / 2, atol=1e-6
    )
    assert mirror_of(env).observations  # a foot's mirror image has its geoms in another order


def test_joints_are_all_but_the_unactuated_ones_of_the_root() -> None:
    assert [joint.name for joint in robot("hopper").joints] == ["hip", "knee", "ankle"]
    assert [joint.name for joint in robot("cart_pole").joints] == ["slider", "hinge"]
    assert [joint.turns for joint in robot("cart_pole").joints] == [False, True]
    assert robot("hopper").moves and not robot("arm").moves


def test_undriven_joint_of_a_fixed_root_is_a_joint_of_the_robot(tmp_path: Path) -> None:
    found = built("robot_swingup", saved(tmp_path, ACROBOT))
    assert [joint.name for joint in found.joints] == ["shoulder", "elbow"]
    # Both links hang: their centres of mass are 0.5 and 1.5 m below the shoulder. Upright they are as far above.
    np.testing.assert_allclose(found.mass_heights, [1.0, 3.0], atol=0.02)


def with_a_ball(first: bool) -> str:
    text = text_of("quadruped")
    ball = '<body name="ball" pos="5 0 0.1"><freejoint/><geom size="0.1" mass="3"/></body>'
    qpos = re.findall(r'key name="home"[^>]*qpos="([^"]*)"', text)[0]
    at = "5 0 0.1 1 0 0 0"
    text = text.replace(qpos, f"{at} {qpos}" if first else f"{qpos} {at}")
    place = '<body name="trunk"' if first else "</worldbody>"
    return text.replace(place, ball + place, 1)


@pytest.mark.parametrize("first", [True, False])
def test_loose_ball_is_no_part_of_the_robot(first: bool, tmp_path: Path) -> None:
    found = built("robot_velocity", saved(tmp_path, with_a_ball(first)), needs={"feet"})
    alone = robot("quadruped", "feet")
    assert [found.model.geom(geom).name for (geom,) in found.feet] == FEET
    assert (found.radius, found.weight) == pytest.approx((alone.radius, alone.weight))
    assert found.model.body(found.root).name == "trunk"


def test_home_of_the_task_moves_the_robot_to_the_floor_and_not_the_ball(tmp_path: Path) -> None:
    floor = '<geom name="ground" type="plane" size="0 0 1"/><body name="ball"'
    path = saved(tmp_path, with_a_ball(first=True).replace('<body name="ball"', floor))
    found = built("robot_velocity", path, "env.task.home={*_knee: -2.3}")
    data = geometry.in_pose(found.model, found.home)
    geoms = build.own_geoms(found.model, found.root)
    lowest = min(geometry.lowest(found.model, data, geom) for geom in geoms)
    assert found.home[2] == 0.1 and lowest == pytest.approx(0.0, abs=1e-9)


def test_second_arm_with_actuators_is_a_part_of_the_robot(tmp_path: Path) -> None:
    arm = f'<body name="{{0}}" pos="{{1}} 0 1"><joint name="j{{0}}" axis="0 1 0"/>{LINK}</body>'
    motors = '<actuator><motor joint="ja" ctrlrange="-1 1"/><motor joint="jb" ctrlrange="-1 1"/></actuator>'
    bodies = arm.format("a", 0) + arm.format("b", 3) + f'<body name="table" pos="0 0 2">{LINK}</body>'
    saved(tmp_path, f"<mujoco><worldbody>{bodies}</worldbody>{motors}</mujoco>")
    for words in ((), ("env.task.root=table",)):
        found = built("robot_swingup", tmp_path / "robot.xml", *words)
        both = found.model.body_mass[[found.model.body(name).id for name in "ab"]].sum()
        table = found.model.body("table").mass[0] if words else 0.0
        assert found.weight == pytest.approx((both + table) * 9.81) and found.radius > 3.0


def test_home_of_a_tendons_servo_is_the_tendons_length_at_home(tmp_path: Path) -> None:
    tendon = '<tendon><fixed name="cable"><joint joint="elbow" coef="2"/></fixed></tendon>'
    servo = (
        '<actuator><position tendon="cable" kp="10"/></actuator><keyframe><key name="home" qpos="0 0.3"/></keyframe>'
    )
    text = ACROBOT.replace('<actuator><motor joint="elbow" ctrlrange="-5 5"/></actuator>', tendon + servo)
    found = built("robot_swingup", saved(tmp_path, text))
    assert [actuator.home for actuator in found.actuators] == pytest.approx([0.6])


def test_floor_is_added_under_the_feet_where_a_free_robot_has_none() -> None:
    quadruped = robot("quadruped").model
    assert quadruped.geom("rlstable_floor").type == mujoco.mjtGeom.mjGEOM_PLANE
    for model in ("hopper", "arm"):  # one has a floor, the other needs none
        names = [robot(model).model.geom(i).name for i in range(robot(model).model.ngeom)]
        assert "rlstable_floor" not in names


def test_site_to_reach_with_is_the_one_farthest_from_the_root() -> None:
    arm = robot("arm")
    assert arm.model.site(arm.site(None)).name == "hand"
    reach = np.linalg.norm(arm.reachable(arm.site(None)) - [0, 0, 0.5], axis=1)
    assert 0.5 < reach.max() <= 0.55 + 1e-6  # the length of both links


def test_motors_become_position_servos_with_the_same_largest_torque() -> None:
    words = ("env.task.actions.control=position", "env.task.actions.stiffness=50", "env.task.actions.damping=2")
    hip = robot("hopper", words=words).actuators[0]
    assert (hip.kind, hip.stiffness, hip.damping, hip.force) == ("position", 50.0, 2.0, 120.0)
    assert (hip.low, hip.high) == pytest.approx(np.radians([-120, 10]))


def test_first_pattern_that_matches_a_joint_gives_its_gain_and_its_home() -> None:
    gains = ("env.task.actions.stiffness={*_knee: 80, rear_*: 60, *: 40}", "env.task.actions.damping={*: 2}")
    words = ("env.task.actions.control=position", *gains, "env.task.home={front_left_knee: -1.5, *_knee: -1.2}")
    found = robot("quadruped", words=words)
    servos = {one.joint: one for one in found.actuators}
    names = ("front_left_knee", "rear_left_knee", "rear_left_hip", "front_left_hip")
    assert [servos[name].stiffness for name in names] == [80.0, 80.0, 60.0, 40.0]
    assert {one.damping for one in found.actuators} == {2.0}
    assert [servos[name].home for name in names[:3]] == pytest.approx([-1.5, -1.2, 0.8])


def test_largest_force_of_the_task_is_that_of_a_model_without_one(tmp_path: Path) -> None:
    bare = re.sub(r"<actuator>.*</actuator>", "", text_of("arm"), flags=re.DOTALL)
    path, gains = saved(tmp_path, bare), ("env.task.actions.stiffness=30", "env.task.actions.damping=1")
    words = ("env.task.actions.control=position", *gains)
    servos = built("robot", path, *words, "env.task.actions.force={elbow: 4, *: 9}").actuators
    assert [(one.name, one.force) for one in servos] == [("shoulder", 9.0), ("elbow", 4.0)]
    weaker = robot("arm", words=("env.task.actions.control=torque", "env.task.actions.force=2"))
    assert [(one.high, one.force) for one in weaker.actuators] == [(2.0, 2.0), (2.0, 2.0)]


# --- what is missing


def test_velocity_servo_keeps_its_control_range_with_another_gain(tmp_path: Path) -> None:
    servo = '<velocity joint="elbow" kv="1" gear="-2" ctrlrange="-24 12"/>'
    text = ACROBOT.replace('<motor joint="elbow" ctrlrange="-5 5"/>', servo)
    words = ("env.task.actions.control=velocity", "env.task.actions.damping=3")
    (wheel,) = built("robot_swingup", saved(tmp_path, text), *words).actuators
    assert (wheel.damping, wheel.down, wheel.up) == (3.0, 6.0, 12.0)


@pytest.mark.parametrize("lying", [False, True])
def test_robot_falls_from_its_home_even_if_its_frame_lies_there_and_a_fixed_one_never(
    lying: bool, tmp_path: Path
) -> None:
    found = walker(tmp_path)
    if lying:
        path = tmp_path / "robot.xml"
        path.write_text(path.read_text().replace('name="trunk"', 'name="trunk" euler="90 0 0"'))
        found = built("robot", path)
    for degrees, falls in ((0, False), (50, False), (70, True)):
        qpos, turn, turned = np.array(found.home), np.zeros(4), np.zeros(4)
        mujoco.mju_euler2Quat(turn, np.radians([0.0, degrees, 0.0]), "xyz")
        mujoco.mju_mulQuat(turned, turn, qpos[3:7])
        qpos[3:7] = turned
        assert bool(endings.TERMS["fallen"](*moment(found, qpos))) is falls, degrees
    fixed = built("robot_stand", saved(tmp_path, ACROBOT.replace('pos="0 0 2"', 'pos="0 0 2" euler="180 0 0"')))
    assert not bool(endings.TERMS["fallen"](*moment(fixed)))


def test_fixed_robot_below_the_origin_is_not_too_low_at_home(tmp_path: Path) -> None:
    found = built("robot_stand", saved(tmp_path, ACROBOT.replace('pos="0 0 2"', 'pos="0 0 -0.2"')))
    assert found.home_height == pytest.approx(-0.2)
    assert not endings.too_low(*moment(found))


def test_robot_without_sites_reaches_with_its_last_link(tmp_path: Path) -> None:
    text = text_of("arm").replace('<site name="hand" pos="0 0 0.25"/>', "")
    reach = environment("robot_reach", "arm", f"env.xml={saved(tmp_path, text)}").robot
    assert reach.model.site(reach.site(None)).name == "rlstable_link_lower"


@pytest.mark.parametrize(
    "task, model",
    [
        ("robot_stand", "hopper"), ("robot_stand", "quadruped"), ("robot_velocity", "hopper"),
        ("robot_velocity", "quadruped"), ("robot_reach", "arm"), ("robot_getup", "quadruped"),
        ("robot_swingup", "cart_pole"), ("robot_swingup", "arm"),
    ],
)  # fmt: skip
def test_ready_task_fits_a_model_that_it_has_never_seen(task: str, model: str) -> None:
    env = environment(task, model)
    assert env.action_size == env.mj_model.nu


@pytest.mark.parametrize("model, expected", [("quadruped", [1, 1, 1]), ("hopper", [1, 0, 0]), ("cart_pole", [1, 0, 0])])
def test_robot_is_steered_where_joints_let_its_root_move(model: str, expected: list[int]) -> None:
    assert robot(model).steerable.tolist() == expected


def test_command_has_no_direction_in_which_the_robot_cannot_move() -> None:
    env = environment("robot_velocity", "hopper", "+env.task.commands.velocity.stand=0")
    drawn = np.asarray(jax.vmap(lambda key: env.lists.commands["velocity"](env.robot, key))(jax.random.split(KEY, 16)))
    assert (np.abs(drawn[:, 0]) > 0).all() and not drawn[:, 1:].any()


# A joint with a limit of force, a motor without a control range, and a cube that no actuator moves.
CUBE_FIRST = """
<mujoco>
  <worldbody>
    <body name="cube" pos="1 0 0.1"><freejoint/><geom type="box" size="0.05 0.05 0.05"/></body>
    <body name="arm" pos="0 0 0.5">
      <joint name="shoulder" axis="0 1 0" range="-1 1" limited="true" actuatorfrcrange="-50 50"/>
      <geom type="capsule" size="0.03" fromto="0 0 0 0 0 0.3"/>
    </body>
  </worldbody>
  <actuator>{actuator}</actuator>
  <keyframe><key name="home" qpos="1 0 0.1 1 0 0 0 0.5" ctrl="0.5"/></keyframe>
</mujoco>
"""


def arm_beside_a_cube(tmp_path: Path, actuator: str, *words: str) -> Robot:
    return built("robot", saved(tmp_path, CUBE_FIRST.format(actuator=actuator)), *words)


def test_root_body_is_of_a_tree_that_actuators_move(tmp_path: Path) -> None:
    found = arm_beside_a_cube(tmp_path, '<motor joint="shoulder"/>')
    assert found.model.body(found.root).name == "arm" and not found.moves


def test_motor_without_a_control_range_reaches_the_limit_of_its_joint(tmp_path: Path) -> None:
    (motor,) = arm_beside_a_cube(tmp_path, '<motor joint="shoulder" gear="2"/>').actuators
    assert motor.up == motor.force == 25.0


def test_controls_of_a_keyframe_are_not_those_of_converted_actuators(tmp_path: Path) -> None:
    servo = '<position joint="shoulder" kp="500"/>'
    assert arm_beside_a_cube(tmp_path, servo).actuators[0].home == 0.5
    (motor,) = arm_beside_a_cube(tmp_path, servo, "env.task.actions.control=torque").actuators
    assert (motor.kind, motor.home, motor.high) == ("torque", 0.0, 50.0)


# --- files that people have


@pytest.mark.parametrize(
    ("ground", "name"),
    [
        ('<geom name="table" type="box" size="2 2 0.25" pos="0 0 0.25"/>', "a table on the floor"),
        ('<geom name="slab" type="cylinder" size="3 0.5"/>', "a slab in the floor"),
    ],
)
def test_ground_is_what_lies_below_the_robot(ground: str, name: str, tmp_path: Path) -> None:
    found = walker(tmp_path, ground=GROUND + ground, height="0.72")
    assert (found.floor, found.home_height) == pytest.approx((0.5, 0.22)), name
    assert not any(found.model.geom(geom).name == build.FLOOR for geom in range(found.model.ngeom))


def test_feet_and_ground_of_a_model_with_contact_pairs_only_are_found(tmp_path: Path) -> None:
    parts = {
        name: text.replace("<geom", '<geom contype="0" conaffinity="0"')
        for name, text in (("ground", GROUND), ("legs", LEG.format("a") + LEG.format("b")))
    }
    pairs = "".join(f'<pair geom1="ground" geom2="{name}"/>' for name in "ab")
    found = walker(tmp_path, **parts, sensors=f"</sensor><contact>{pairs}</contact><sensor>", needs=("feet",))
    assert [[found.model.geom(geom).name for geom in foot] for foot in found.feet] == [["a"], ["b"]]
    assert not any(found.model.geom(geom).name == build.FLOOR for geom in range(found.model.ngeom))


def test_what_is_drawn_or_moves_is_no_ground(tmp_path: Path) -> None:
    drawn = '<geom type="box" size="2 2 0.05" contype="0" conaffinity="0"/>'
    ball = '<body pos="0 0 0.05"><freejoint/><geom size="0.02"/></body>'
    assert walker(tmp_path, ground=GROUND + drawn, more=ball).floor == 0.0


def test_gyro_is_that_of_the_root_body_and_not_the_first_of_the_file(tmp_path: Path) -> None:
    both = '<gyro name="of_head" site="front"/><gyro name="of_trunk" site="middle"/>'
    for sensors, name in ((both, "of_trunk"), ('<gyro name="of_head" site="front"/>', build.ANGULAR_VELOCITY)):
        found = walker(tmp_path, sensors=sensors)
        assert found.model.sensor(found.root_sensor(mujoco.mjtSensor.mjSENS_GYRO)).name == name


def test_down_is_where_gravity_points(tmp_path: Path) -> None:
    found = walker(tmp_path, gravity="5 0 -5")
    data, half = found.forward(), 0.5**0.5
    seen = observations.TERMS["projected_gravity"](*moment(found))
    np.testing.assert_allclose(seen, [half, 0.0, -half], rtol=1e-6)
    assert float(found.upright(data)) == pytest.approx(1.0)
    np.testing.assert_allclose(found.up_axis, [-half, 0.0, half], rtol=1e-6)


def test_joints_are_those_of_the_robot_without_play_and_doors(tmp_path: Path) -> None:
    play = '<joint name="play" axis="0 1 0" range="-1 1"/>'
    door = '<body><body><joint name="door" axis="0 0 1"/><geom size="0.1"/></body></body>'
    legs = LEG.format("a").replace("<geom", play + "<geom", 1) + LEG.format("b") + LEG.format("tail")
    found = walker(tmp_path, legs=legs, more=door)
    assert [joint.name for joint in found.joints] == ["neck", "a", "b", "tail"]
    seen, unseen = build.passive(found.model, found.root)
    assert [[found.model.joint(j).name for j in some] for some in (seen, unseen)] == [["tail"], ["play", "door"]]
    measured = walker(tmp_path, legs=legs, more=door, sensors='<jointpos joint="play"/>')
    assert "play" in [joint.name for joint in measured.joints]


@pytest.mark.parametrize(
    ("actuator", "down", "up"),
    [
        ('<motor joint="neck" ctrlrange="0 5"/>', 0.0, 5.0),
        ('<motor joint="neck" ctrlrange="-3 5"/>', 3.0, 5.0),
        ('<motor site="middle" gear="0 0 1 0 0 0.02" ctrlrange="0 5"/>', 0.0, 5.0),
        ('<general joint="neck" gainprm="0.3" biastype="affine" biasprm="0 -100 -10" ctrlrange="0 255"/>', 0.0, 255.0),
        ('<position joint="neck" kp="30" ctrlrange="0 2"/>', 0.0, 1.0),
        ('<position joint="neck" kp="30" ctrlrange="-1 2"/>', 0.75, 0.75),
    ],
)
def test_each_side_of_a_control_range_has_its_own_scale(actuator: str, down: float, up: float, tmp_path: Path) -> None:
    found = walker(tmp_path, actuators=actuator)
    task = config("robot", "arm").env.task
    assert task is not None
    assert actions.scales(found, task.actions).ravel().tolist() == pytest.approx([down, up])
    for action, moved in ((-1.0, -down), (1.0, up)):
        control = actions.controls(found, np.array([action], np.float32), task.actions)
        assert float(control[0]) == pytest.approx(moved)


def test_feet_end_a_limb_even_if_a_body_between_has_no_geom_and_one_is_lifted(tmp_path: Path) -> None:
    sole = '<geom name="{0}" type="box" size="0.05 0.03 0.01" pos="0 0 -0.06"/>'
    inertia = '<inertial mass="0.1" pos="0 0 0" diaginertia="1e-3 1e-3 1e-3"/>'
    ankle = f'<body pos="0 0 -0.2"><joint axis="0 1 0"/>{inertia}{{}}</body>'
    below = ankle.format(f"<body><joint/>{sole}</body>")
    leg = f'<body pos="0 0 {{1}}"><joint name="{{0}}"/><geom {SHIN}/>{below}</body>'
    found = walker(tmp_path, legs=leg.format("a", 0) + leg.format("b", 0.15), height="0.27", needs=("feet",))
    assert [[found.model.geom(geom).name for geom in foot] for foot in found.feet] == [["a"], ["b"]]


def test_first_position_is_the_one_in_which_gymnasiums_files_start(tmp_path: Path) -> None:
    custom = '</sensor><custom><numeric name="init_qpos" data="0 0 0.5 1 0 0 0 0.1 0.2 0.3"/></custom><sensor>'
    assert walker(tmp_path, sensors=custom).home.tolist() == pytest.approx([0, 0, 0.5, 1, 0, 0, 0, 0.1, 0.2, 0.3])


def test_two_robots_in_a_file_ask_which_one_the_terms_are_about(tmp_path: Path) -> None:
    arm = '<body><joint name="twist"/><geom size="0.1"/></body>'
    other = f'<body name="other" pos="0 2 1"><freejoint/><geom size="0.1"/>{arm}</body>'
    both = {"more": other, "actuators": SERVOS + '<motor joint="twist" ctrlrange="-1 1"/>'}
    with pytest.raises(ConfigError, match=r"root: the model has 2 robots, trunk, other; name .* env.task.root=trunk"):
        walker(tmp_path, **both)
    found = walker(tmp_path, "env.task.root=other", **both)
    assert found.model.body(found.root).name == "other"


def test_link_is_as_good_as_a_site(tmp_path: Path) -> None:
    text = text_of("arm").replace('<site name="hand" pos="0 0 0.25"/>', "")
    terms = "commands.pose", "observations.site_to_target", "rewards.reach"
    words = [f"+env.task.{term}.site=lower" for term in terms]
    env = environment("robot_reach", "arm", f"env.xml={saved(tmp_path, text)}", *words)
    site = env.robot.site("lower")
    assert env.robot.model.site(site).name == "rlstable_link_lower"
    data = env.robot.forward()
    np.testing.assert_allclose(data.site_xpos[site], data.xipos[env.robot.model.body("lower").id])


def test_base_on_which_an_arm_is_mounted_is_no_ground(tmp_path: Path) -> None:
    arm = '<body><geom size="0.2"/><body pos="0 0 0.1"><joint name="pan"/><geom size="0.1"/></body></body>'
    motor = '<actuator><motor joint="pan" ctrlrange="-1 1"/></actuator>'
    text = f"<mujoco><worldbody>{{}}{arm}</worldbody>{motor}</mujoco>"
    for ground, floor in (("", 0.0), ('<geom type="plane" size="1 1 1" pos="0 0 -0.5"/>', -0.5)):
        assert built("robot", saved(tmp_path, text.format(ground))).floor == floor


@pytest.mark.parametrize(
    ("actuator", "reach"),
    [
        ('<position joint="neck" kp="30" ctrlrange="-1 2" forcerange="-6 6"/>', 0.2),
        ('<position joint="neck" kp="30" ctrlrange="-1 2" forcerange="-60 60"/>', 0.75),
        ('<position joint="neck" kp="30" ctrlrange="-1 2"/>', 0.75),
        ('<motor joint="neck" ctrlrange="-1 1" forcerange="-0.1 0.1"/>', 1.0),
    ],
)
def test_action_asks_a_servo_for_no_more_than_its_force(actuator: str, reach: float, tmp_path: Path) -> None:
    found = walker(tmp_path, actuators=actuator)
    task = config("robot", "arm", "env.task.actions.scale.force=1").env.task
    assert task is not None
    assert actions.scales(found, task.actions).ravel().tolist() == pytest.approx([reach, reach])


# --- cheaper physics


def test_cheaper_physics_changes_time_step_cones_and_what_collides() -> None:
    physics = "env.task.physics={timestep: 0.002, cone: elliptic, contacts: feet}"
    own, cheap = environment("robot", "quadruped"), environment("robot", "quadruped", physics)
    for env, step, steps, cone, others in ((own, 0.004, 5, "PYRAMIDAL", ["trunk"]), (cheap, 0.002, 10, "ELLIPTIC", [])):
        model = env.robot.model
        assert (model.opt.timestep, env.n_substeps) == (step, steps)
        assert model.opt.cone == getattr(mujoco.mjtCone, f"mjCONE_{cone}")
        colliding = {model.geom(geom).name for geom in geometry.colliding(model)}
        assert colliding == {*FEET, *others}


def test_geom_whose_contacts_a_term_reads_still_collides() -> None:
    words = ("env.task.physics.contacts=feet", "+env.task.endings.contact={geoms: [trunk]}")
    model = environment("robot", "quadruped", *words).robot.model
    assert model.geom("trunk").id in geometry.colliding(model)


# --- actuators with a state


@pytest.mark.parametrize(
    ("actuator", "at_home", "kind"),
    [
        ('<position joint="neck" kp="30" timeconst="0.1" ctrlrange="0.2 0.8"/>', 0.2, "position"),
        ('<intvelocity joint="neck" kp="30" ctrlrange="-2 2" actrange="-0.5 0.5"/>', 0.1, "velocity"),
        ('<general joint="neck" dyntype="muscle" gainprm="20" dynprm="0.01 0.04" ctrlrange="0 1"/>', 0.0, "torque"),
        ('<motor joint="neck" ctrlrange="-1 1"/>', None, "torque"),
    ],
)  # fmt: skip
def test_actuator_with_a_state_starts_at_rest(actuator: str, at_home: float | None, kind: str, tmp_path: Path) -> None:
    found = walker(tmp_path, "env.task.home={neck: 0.1}", actuators=actuator)
    assert found.activation.tolist() == pytest.approx([] if at_home is None else [at_home])
    assert found.actuators[0].kind == kind
    assert found.activations(found.forward()).tolist() == pytest.approx([at_home or 0.0])
    assert np.abs(found.forward().actuator_force).max() < 4.0
