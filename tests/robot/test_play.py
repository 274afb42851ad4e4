"""The exported policy in plain MuJoCo acts like the policy in the environment of training."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import mujoco
import numpy as np
import onnx
import onnx.parser
import pytest
from commands import ROOT, exit_code
from exported import Exported, exported, file_of

from rlstable import play
from rlstable.robot.environment import PAST

pytestmark = pytest.mark.usefixtures("quick_compile")
WALK = (
    "env.history=2", "env.task.actions.delay=[1, 2]", "env.task.actions.filter=0.3",
    "env.task.commands.velocity.resample=null",
    "+env.task.observations.joint_positions.history=3", "+env.task.observations.gyro.delay=[1, 1]",
    "+env.task.observations.joint_velocities.scale=0.05", "+env.task.observations.joint_velocities.clip=0.5",
    "+env.task.observations.accelerometer={scale: 0.01}", "+env.task.observations.linear_velocity={}",
    "+env.task.observations.height={}", "+env.task.observations.phase={frequency: 2}",
    "+env.task.observations.site_position={site: imu}",
    "+env.task.observations.sensor={name: accelerometer, scale: 0.01}",
    "+env.task.observations.contact={geoms: [trunk, rear_left_shin]}", "+env.task.observations.foot_contacts={}",
)  # fmt: skip
REACH = (
    "env.history=2", "env.task.actions.delay=[0, 2]", "env.task.actions.filter=0.2",
    "env.task.commands.pose.resample=null", "+env.task.observations.joint_positions.history=3",
    "+env.task.observations.command={}", "env.task.actions.control=position", "env.task.actions.stiffness=20",
    "env.task.actions.damping=0.5",
)  # fmt: skip

SELF = '<asset><model name="m" file="itself.xml"/></asset><worldbody><attach model="m" body="upper" prefix="x"/>'


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exported(tmp_path_factory.mktemp("walker"), "robot_velocity", "quadruped", *WALK)


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    # A larger gain would amplify rounding beyond the tolerances.
    return exported(tmp_path_factory.mktemp("arm"), "robot_reach", "arm", *REACH, gain=2.0)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    words = (
        "env.task.commands={}",
        "+env.task.observations.activations={}",
        "+env.task.observations.site_position={site: pole}",
    )
    return exported(tmp_path_factory.mktemp("slow"), "robot", "slow_pole", *words, gain=40.0)


@pytest.fixture(scope="module")
def rough(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    # What only the critic of other tasks sees is shown to this policy, as to a teacher.
    words = (
        "env.task.observations.height_scan=null", "network.policy_obs_key=privileged_state",
        "env.task.terrain.levels=2", "env.task.terrain.size=4",
    )  # fmt: skip
    return exported(tmp_path_factory.mktemp("rough"), "robot_rough", "quadruped", *words, gain=4.0)


def loop_of(made: Exported, model: str, **arguments: Any) -> play.Loop:
    policy, contract = play.load_policy(made.onnx)
    path = made.folder / model if model == "robot.mjb" else file_of(model)
    return play.Loop(play.load_model(path, contract), contract, policy, **arguments)


def started(made: Exported, model: str, seed: int) -> tuple[Any, play.Loop]:
    """A first state of training, and the loop in this state with the delay and the commands of its episode."""
    state = jax.jit(made.env.reset)(jax.random.PRNGKey(seed))
    past = state.info[PAST]
    command = np.concatenate([[], *(past.command[name] for name in sorted(past.command))])
    loop = loop_of(made, model, command=command.tolist(), delay=int(past.delay))
    loop.reset(np.asarray(state.data.qpos), np.asarray(state.data.qvel))
    return state, loop


@pytest.mark.parametrize(
    "name, model, steps",
    [("walker", "quadruped", 1000), ("arm", "arm", 200), ("slow", "slow_pole", 50), ("rough", "robot.mjb", 50)],
)
def test_exported_loop_acts_as_training_in_every_step_of_an_episode(
    name: str, model: str, steps: int, request: pytest.FixtureRequest
) -> None:
    made = request.getfixturevalue(name)
    step = jax.jit(made.env.step)
    state, loop = started(made, model, 1)
    actions = []
    for _ in range(steps):
        seen = {"walker": "state", "rough": "privileged_state"}.get(name)  # the rest is the critic's
        seen = state.obs[seen] if seen else state.obs
        # Contacts with triangles magnify the roundings of float32.
        np.testing.assert_allclose(loop.observation, seen, rtol=1e-5, atol=1e-3 if name == "rough" else 2e-5)
        actions.append(np.asarray(made.policy.act(state.obs)))
        state = step(state, actions[-1])
        loop.step()
        np.testing.assert_allclose(loop.actions[0], state.info[PAST].actions[0], atol=1e-5)
        np.testing.assert_allclose(loop.data.ctrl, state.data.ctrl, atol=1e-5)
        np.testing.assert_allclose(loop.data.qpos, state.data.qpos, rtol=1e-6, atol=1e-5)
    assert np.std(actions, axis=0).mean() > 0.02  # the policy reacts to what it sees


def test_hinges_without_limits_are_seen_as_directions(tmp_path: Path) -> None:
    made = exported(tmp_path, "robot_swingup", "cart_pole")
    loop = loop_of(made, "cart_pole")
    state = jax.jit(made.env.reset)(jax.random.PRNGKey(0))
    loop.reset(np.asarray(state.data.qpos), np.asarray(state.data.qvel))
    np.testing.assert_allclose(loop.observation, state.obs, atol=1e-6)


def test_longer_delay_less_friction_and_pushes_change_the_episode(walker: Exported) -> None:
    ends = []
    for delay, friction, push in ((1, 1.0, 0.0), (3, 1.0, 0.0), (1, 0.3, 0.0), (1, 1.0, 1.0)):
        loop = loop_of(walker, "quadruped", delay=delay)
        loop.model.geom_friction *= friction
        loop.push(np.array([push, 0.0]))
        for _ in range(20):
            loop.step()
        ends.append(float(loop.data.qpos[0]))
        assert not loop.data.xfrc_applied.any()
    assert len(set(ends)) == 4
    assert ends[3] > ends[0] + 0.1


def test_action_repeat_takes_several_control_steps(walker: Exported) -> None:
    policy, contract = play.load_policy(walker.onnx)
    loop = play.Loop(play.load_model(file_of("quadruped"), contract), {**contract, "action_repeat": 2}, policy)
    loop.step()
    assert loop.steps == 2 and loop.data.time == pytest.approx(0.04)


def test_loop_of_the_docs_moves_the_robot_as_play_does(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = exported(here, "robot_velocity", "quadruped")
    page = (ROOT / "docs" / "export.md").read_text()
    (program,) = (text for text in page.split("```") if "default_joint_pos" in text and text.startswith("python"))
    names: dict[str, Any] = {}
    exec(program.removeprefix("python").replace("range(500)", "range(20)"), names)
    loop = loop_of(made, "quadruped", command=[0.5, 0.0, 0.0])
    for _ in range(20):
        loop.step()
    np.testing.assert_allclose(names["data"].qpos, loop.data.qpos, atol=1e-5)
    assert capsys.readouterr().out.splitlines()[-1].startswith("height 0.")


# --- the command

run = functools.partial(exit_code, play.main)


def test_command_prints_how_long_the_robot_stood_and_its_command_error(
    walker: Exported, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(walker.onnx), str(file_of("quadruped")), "--steps", "5", "--command", "0.5 0 0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "stood 0.10 of 0.10 s" and lines[1].startswith("final height 0.")
    assert lines[2].endswith("commanded 0.50 0.00 0.00") and lines[3].startswith("mean command error 0.")


def test_random_commands_are_of_the_ranges_of_training_and_their_errors_are_averaged(
    walker: Exported, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, contract = play.load_policy(walker.onnx)
    commands, model = play.random_commands(contract, 3), play.load_model(file_of("quadruped"), contract)
    assert (np.array([-0.5, -0.3, -0.7]) <= commands).all() and (commands <= np.array([1.0, 0.3, 0.7])).all()
    episodes = [play.play(play.Loop(model, contract, policy, command), 5, 0.0) for command in commands]
    linear = [np.linalg.norm(one.moved[:, :2] - one.wanted[:, :2], axis=1).mean() for one in episodes]
    turning = [np.abs(one.moved[:, 2] - one.wanted[:, 2]).mean() for one in episodes]
    assert run(str(walker.onnx), str(file_of("quadruped")), "--steps", "5", "--commands", "3") == 0
    worst = " ".join(f"{x:.2f}" for x in commands[int(np.argmax(linear))])
    assert capsys.readouterr().out.splitlines() == [
        "stood to the end in 3 of 3 episodes of 0.10 s",
        f"mean command error {np.mean(linear):.3f} m/s and {np.mean(turning):.3f} rad/s",
        f"greatest command error {max(linear):.3f} m/s, at {worst}",
        f"a foot lands {np.mean([one.landings for one in episodes]):.1f} times a second",
    ]


def test_landings_are_those_of_a_foot_in_a_second(walker: Exported) -> None:
    contacts = np.array([[1, 1, 0], [0, 1, 1], [1, 1, 0], [0, 1, 1]], bool)  # three feet land 1, 0 and 2 times
    one = play.Played(0.5, None, 0.3, [], None, np.zeros((4, 3)), None, contacts, 0.0)
    assert one.landings == pytest.approx(2.0)
    assert np.isnan(one._replace(contacts=np.zeros((4, 0), bool)).landings)
    policy, contract = play.load_policy(walker.onnx)
    model = play.load_model(file_of("quadruped"), contract)
    loop = play.Loop(model, contract, policy)
    assert loop.contacts == [True] * 4
    loop.reset(np.array(contract["default_qpos"]) + np.eye(model.nq)[2])  # 1 m higher
    assert loop.contacts == [False] * 4


def test_keys_change_the_velocity_command_within_the_range_of_training(
    walker: Exported, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = loop_of(walker, "quadruped", command=[0.0, 0.0, 0.0])
    entry = loop.contract["commands"][0]
    forward, turn = entry["high"][0], max(abs(entry["low"][2]), entry["high"][2])
    play.steered(loop, 265)
    assert loop.command.tolist() == pytest.approx([forward / 5, 0, 0])
    for key in (263, 65):  # left, and a key without a meaning
        play.steered(loop, key)
    assert loop.command.tolist() == pytest.approx([forward / 5, 0, turn / 5])
    for _ in range(9):
        play.steered(loop, 265)
    assert loop.command[0] == pytest.approx(forward)
    entry["term"] = "my_package.my_module:own"  # a command of the user has no range
    play.steered(loop, 264)
    assert loop.command[0] == pytest.approx(forward)
    assert capsys.readouterr().out.splitlines()[1] == f"command {forward / 5:.2f} 0.00 {turn / 5:.2f}"


def test_episode_ends_if_the_user_closes_the_viewer_and_its_commands_are_those_of_each_step(walker: Exported) -> None:
    loop, seen = loop_of(walker, "quadruped", command=[0.0, 0.0, 0.0]), []

    def watch() -> None:
        seen.append(loop.steps)
        play.steered(loop, 265)
        if loop.steps == 3:
            raise play.Closed

    one = play.play(loop, 10, 0.0, [watch])
    assert seen == [1, 2, 3] and one.wanted is not None
    assert one.wanted[:, 0] == pytest.approx(loop.contract["commands"][0]["high"][0] * np.array([0, 0.2, 0.4]))


def test_each_episode_starts_with_an_empty_memory_of_a_recurrent_policy(walker: Exported) -> None:
    class Session:
        """Adds 1 to the memory."""

        def run(self, _: None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
            return [np.zeros((1, 12), np.float32), inputs["memory"] + 1]

    contract = play.load_policy(walker.onnx)[1]
    policy = play.Policy(Session(), 2)
    loop = play.Loop(play.load_model(file_of("quadruped"), contract), contract, policy)
    loop.step()
    loop.step()
    assert policy.memory["memory"].tolist() == [[2, 2]]
    loop.reset()
    assert policy.memory["memory"].tolist() == [[0, 0]]


def test_model_beside_the_policy_is_the_default(arm: Exported, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(arm.onnx), "--seconds", "0.1") == 0
    height, farthest, missed = capsys.readouterr().out.splitlines()  # an arm cannot fall, and has no velocity
    assert height == "final height 0.500 m" and farthest.startswith("joints farthest from home ")
    loop = loop_of(arm, "arm")
    for _ in range(5):
        loop.step()
    apart = np.linalg.norm(loop.command - loop.data.site("hand").xpos)
    assert missed == f"distance from the target {apart:.3f} m" and apart > 0.01


def test_episode_starts_from_given_positions_and_whole_turns_of_a_free_hinge_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = exported(tmp_path, "robot_swingup", "cart_pole", gain=0.0)
    words = (str(made.onnx), str(file_of("cart_pole")), "--steps", "1", "--qpos")
    assert run(*words, f"0.5 {2 * np.pi + 0.1}") == 0
    assert "joints farthest from home slider 0.5" in (out := capsys.readouterr().out) and "hinge 0.1" in out
    assert run(*words, "0 0 0") == 2
    assert capsys.readouterr().err == "rlstable: --qpos: 0.00 0.00 0.00 must be the model's 2 finite positions\n"
    assert run(*words, "nan 0") == 2


@pytest.mark.parametrize(
    "name, words, message",
    [
        ("walker", ("--command", "1 2"), "--command: has 2 numbers; the policy's commands need 3: velocity (3)"),
        ("walker", ("--command", "fast"), "argument --command: invalid numbers value: 'fast'"),
        ("walker", ("--delay", "-1"), "argument --delay: -1 must be a number of at least 0"),
        ("walker", ("--friction", "nan"), "argument --friction: nan must be a number of at least 0"),
        ("walker", ("--steps", "3", "--seconds", "1"), "argument --seconds: not allowed with argument --steps"),
        (
            "walker", ("--commands", "2", "--command", "0 0 0"),
            "argument --commands: leave out --command, --qpos, --video and --viewer",
        ),
        ("walker", ("--viewr",), "unrecognized arguments: --viewr"),
        ("walker", ("--terrain", "stairs"), "--terrain: this model stands on a floor; give the robot.mjb"),
        (
            "rough", ("--terrain", "stairs", "--height", "1"),
            "--height: this course rises by 14 m, and the ground by",
        ),
        ("rough", ("--tries", "3"), "argument --tries: needs --terrain"),
        ("rough", ("--terrain", "lava"), "argument --terrain: invalid choice"),
        ("arm", ("--commands", "3"),
         "--commands: is for policies with a velocity command and no other; leave it out\n"),
    ],
)  # fmt: skip
def test_mistake_is_one_line_and_exit_code_2(
    name: str, words: tuple[str, ...], message: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(request.getfixturevalue(name).onnx), *words) == 2
    (line,) = capsys.readouterr().err.splitlines(keepends=True)
    assert line.startswith(f"rlstable: {message}")


def test_another_model_is_refused_unless_any_model_is_allowed(
    walker: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "heavy.xml"
    other.write_text(file_of("quadruped").read_text().replace('mass="6"', 'mass="7"'))
    assert run(str(walker.onnx), str(other), "--steps", "1") == 2
    assert capsys.readouterr().err == (
        f"rlstable: {other} is not the model that the policy was trained on (the file or the additions differ); "
        "give robot.mjb, which export writes, or add --any-model\n"
    )
    assert run(str(walker.onnx), str(other), "--steps", "1", "--any-model") == 0
    assert run(str(walker.onnx), str(file_of("arm")), "--any-model") == 2
    assert "the model has no body 'trunk', which the policy needs" in capsys.readouterr().err
    assert run(str(walker.onnx), str(tmp_path / "missing.xml")) == 2
    assert "there is no file" in capsys.readouterr().err


def test_command_without_a_range_has_no_default(walker: Exported) -> None:
    policy, contract = play.load_policy(walker.onnx)
    model = play.load_model(file_of("quadruped"), contract)
    unknown = {**contract["commands"][0], "name": "gait", "default": None}
    with pytest.raises(play.Refused, match=r"--command: gait has no default; give 3 numbers: gait \(3\)"):
        play.Loop(model, {**contract, "commands": [unknown]}, policy)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("observations", "{nope", "the policy or the model is damaged, or not of this version of play: "),
        ("observations", None, "the policy or the model is damaged, or not of this version of play: KeyError"),
        ("observations", "[" * 200_000, "the policy or the model is damaged, or not of this version of play: "),
        ("action_scale", ",".join(["nan"] * 2), "step 1 is not finite: the policy is bad, or the"),
    ],
)
def test_damaged_contract_is_one_line_and_ends(
    key: str, value: str | None, line: str, arm: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = onnx.load(arm.onnx)
    texts = {one.key: one.value for one in model.metadata_props} | {key: value}
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, {name: text for name, text in texts.items() if text is not None})
    onnx.save(model, tmp_path / "policy.onnx")
    assert run(str(tmp_path / "policy.onnx"), str(arm.folder / "robot.mjb")) == 2
    (written,) = capsys.readouterr().err.splitlines()
    assert written.startswith(f"rlstable: {line}")


def test_damaged_model_and_one_that_attaches_itself_do_not_end_python(
    arm: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bytearray((arm.folder / "robot.mjb").read_bytes())
    content[40:400] = bytes(range(1, 91)) * 4
    (tmp_path / "damaged.mjb").write_bytes(content)
    own = file_of("arm").read_text().replace("<worldbody>", SELF, 1)
    (tmp_path / "itself.xml").write_text(own)
    for name, line in (("damaged.mjb", "cannot be read: "), ("itself.xml", "crashes MuJoCo: it is damaged, or ")):
        assert run(str(arm.onnx), str(tmp_path / name), "--any-model") == 2
        assert capsys.readouterr().err.startswith(f"rlstable: {tmp_path / name} {line}")
    assert not list(tmp_path.glob("MUJOCO_LOG.TXT"))


def test_policy_without_a_contract_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rlstable.export.graph import to_onnx

    plain = tmp_path / "plain.onnx"
    plain.write_bytes(to_onnx(lambda x: x, {"observation": 2}, {"action": 2}).SerializeToString())
    assert run(str(plain)) == 2
    assert f"{plain} has no contract of a robot; play is for policies that were trained with env=robot" in (
        capsys.readouterr().err
    )


# --- the file alone

ALONE = """
import runpy, sys
sys.argv = ["play.py", "policy.onnx", "robot.xml", *sys.argv[1:]]
runpy.run_path("play.py", run_name="__main__")
print(sorted({"brax", "flax", "hydra", "jax", "pydantic", "rlstable", "scipy"} & set(sys.modules)))
"""


def alone(made: Exported, folder: Path, *words: str) -> list[str]:
    """The output of the exported program in a folder with the policy and the plain model."""
    for name in ("play.py", "policy.onnx"):
        shutil.copy(made.folder / name, folder)
    shutil.copy(file_of("quadruped"), folder / "robot.xml")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MUJOCO_GL")}
    command = [sys.executable, "-c", ALONE, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_exported_program_runs_alone_and_imports_nothing_of_rlstable(walker: Exported, tmp_path: Path) -> None:
    lines = alone(walker, tmp_path, "--steps", "3")
    assert lines[0] == "stood 0.06 of 0.06 s" and lines[-1] == "[]"
    assert (tmp_path / "play.py").read_text() == Path(play.__file__).read_text()


def test_camera_distance_follows_the_robot_and_not_its_large_floor() -> None:
    model = mujoco.MjModel.from_xml_path(str(file_of("hopper")))
    data, camera = mujoco.MjData(model), mujoco.MjvCamera()
    mujoco.mj_forward(model, data)
    size = play._follow(camera, SimpleNamespace(model=model, data=data, root=1))
    assert model.stat.extent == 4.0 and 1.0 < size < 1.5
    assert (camera.distance, camera.trackbodyid) == (2 * size, 1)


@pytest.mark.skipif("libOSMesa" not in os.popen("ldconfig -p").read(), reason="no libosmesa6 here")
def test_exported_program_writes_a_film(walker: Exported, tmp_path: Path) -> None:
    import imageio_ffmpeg

    lines = alone(walker, tmp_path, "--seconds", "0.2", "--video", "film.mp4")
    assert lines[-1] == "film film.mp4" or lines[-2] == "film film.mp4"
    frames = imageio_ffmpeg.read_frames(str(tmp_path / "film.mp4"))
    assert next(frames)["size"] == (640, 480)
    assert len(list(frames)) == 7  # 30 per second, and the first one


def test_course_of_stairs_begins_ahead_of_the_robot_and_keeps_within_the_ground(rough: Exported) -> None:
    loop = loop_of(rough, "robot.mjb")
    higher = play.lay(loop.model, "stairs", 0.05)
    loop = play.Loop(loop.model, loop.contract, loop.policy)
    begin = float(loop.ground(np.zeros(2)))
    assert begin == pytest.approx(higher, abs=1e-4)
    places = np.stack([[0.9, 1.2, 1.5, 4.98, 5.5], np.zeros(5)], axis=1)
    np.testing.assert_allclose(loop.ground(places) - begin, [0.0, 0.05, 0.1, 0.7, 0.7], atol=1e-4)
    (qpos,) = play.starts(loop, 1, higher)
    loop.reset(qpos)
    assert loop.height == pytest.approx(loop.contract["default_height"] + 0.005, abs=1e-3)


def test_tries_say_how_many_robots_crossed(rough: Exported, capsys: pytest.CaptureFixture[str]) -> None:
    play.main([str(rough.onnx), "--terrain", "slope", "--height", "0.1", "--tries", "2", "--steps", "3"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == "crossed 4 m of slope, 0.1 m: 0 of 2; fell: 0" and second.startswith("went ")


def test_film_draws_of_uneven_ground_one_box_for_each_height_near_the_robot(rough: Exported) -> None:
    loop = loop_of(rough, "robot.mjb")
    play.lay(loop.model, "stairs", 0.05)
    loop = play.Loop(loop.model, loop.contract, loop.policy)
    assert loop.heights is not None
    scene = mujoco.MjvScene(loop.model, 100)
    play._add_ground(scene, np.array([3.0, 0.0, 0.5]), *loop.heights)
    assert scene.ngeom == 2 * 25 + 1  # heights change along the course only
    tops = [scene.geoms[i].pos[2] + 1.0 for i in range(scene.ngeom)]
    np.testing.assert_allclose(tops, loop.ground(np.stack([np.linspace(0.5, 5.5, 51), np.zeros(51)], 1)), atol=1e-5)
