"""Model files: URDF with its meshes, robots of a package, and the copy of a model with all its files."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from moments import MODELS, built, environment

from rlstable.config import ConfigError
from rlstable.envs import menagerie
from rlstable.robot import build, files
from rlstable.robot.model import Robot

BIPED = MODELS / "biped_description"
URDF = BIPED / "urdf" / "biped.urdf"
SERVOS = ("env.task.actions.control=position", "env.task.actions.stiffness=80", "env.task.actions.damping=2")


INCLUDING = """<mujoco><compiler meshdir="assets"/><include file="parts/meshes.xml"/><worldbody><body>
<joint name="j" axis="0 1 0"/><geom type="mesh" mesh="wedge"/></body></worldbody>
<actuator><motor joint="j" ctrlrange="-1 1" name="m"/></actuator></mujoco>"""


def robot(path: Path | str, *words: str) -> Robot:
    return built("robot", path, *words, needs=("feet",))


def mistake(path: Path | str, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        robot(path, *words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def copied(folder: Path) -> Path:
    shutil.copytree(BIPED, folder / BIPED.name)
    return folder / BIPED.name / "urdf" / "biped.urdf"


def including(folder: Path) -> Path:
    (folder / "parts").mkdir()
    (folder / "assets").mkdir()
    shutil.copy(BIPED / "meshes" / "wedge.obj", folder / "assets")
    (folder / "parts" / "meshes.xml").write_text('<mujoco><asset><mesh file="wedge.obj"/></asset></mujoco>')
    (folder / "robot.xml").write_text(INCLUDING)
    return folder / "robot.xml"


# --- URDF


def test_urdf_gets_a_servo_for_every_joint_with_the_efforts_limit() -> None:
    found = robot(URDF, *SERVOS)
    assert [(one.name, one.joint, one.kind) for one in found.actuators] == [
        ("left_hip", "left_hip", "position"), ("right_hip", "right_hip", "position"),
    ]  # fmt: skip
    assert [(one.stiffness, one.damping, one.force, one.low, one.high) for one in found.actuators] == [
        (80.0, 2.0, 40.0, -1.0, 1.0)
    ] * 2
    assert not found.moves and not found.floating


def test_joint_that_mimics_another_gets_no_actuator(tmp_path: Path) -> None:
    path = copied(tmp_path)
    text = path.read_text()
    at = text.index("</joint>", text.index('<joint name="right_hip"'))
    path.write_text(text[:at] + '<mimic joint="left_hip" multiplier="1"/>' + text[at:])
    assert [one.name for one in robot(path, *SERVOS).actuators] == ["left_hip"]


def test_urdf_with_a_free_base_walks_on_a_floor_below_its_feet() -> None:
    found = robot(URDF, *SERVOS, "env.task.free_base=true")
    assert found.floating and found.model.body(found.root).name == "base"
    assert len(found.feet) == 2
    assert found.home_height == pytest.approx(0.315)
    assert found.floor == pytest.approx(-0.315)


def test_urdf_gets_motors_of_the_efforts_limit() -> None:
    (left, _) = robot(URDF, "env.task.actions.control=torque").actuators
    assert (left.kind, left.low, left.high, left.up) == ("torque", -40.0, 40.0, 40.0)


@pytest.mark.parametrize("name", ["wedge.obj", "../meshes/wedge.obj", "file://wedge.obj", "package://other/wedge.obj"])
def test_mesh_of_a_urdf_is_found_beside_the_file(name: str, tmp_path: Path) -> None:
    path = copied(tmp_path)
    if "../" not in name:
        shutil.move(path.parents[1] / "meshes" / "wedge.obj", path.parent)
    path.write_text(path.read_text().replace("package://biped_description/meshes/wedge.obj", name))
    assert robot(path, *SERVOS).model.nmesh == 1


@pytest.mark.parametrize(
    ("old", "new", "words", "message"),
    [
        ("", "", (), "env.xml: {path} has no actuator; add <actuator> with a motor or a position servo per joint"),
        (' effort="40"', ' effort="0"', SERVOS, "env.task.actions.force: joint left_hip has no largest force"),
        ("wedge.obj", "none.obj", SERVOS,
         "env.xml: {path} needs the mesh package://biped_description/meshes/none.obj, which is missing; put it beside"),
    ],
    ids=["no actuator", "no largest force", "missing mesh"],
)  # fmt: skip
def test_urdf_that_lacks_something_is_one_line(
    old: str, new: str, words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    path = copied(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    assert mistake(path, *words).startswith(message.replace("{path}", str(path)))


def test_options_of_mujoco_in_a_urdf_are_kept(tmp_path: Path) -> None:
    path = copied(tmp_path)
    options = '<mujoco><compiler meshdir="../meshes"/><option timestep="0.004"/></mujoco></robot>'
    text = path.read_text().replace("package://biped_description/meshes/wedge.obj", "wedge.obj")
    path.write_text(text.replace("</robot>", options))
    assert robot(path, *SERVOS).model.opt.timestep == 0.004


# --- home


def test_positions_of_home_replace_those_of_the_keyframe() -> None:
    words = ("env.task.home={front_left_knee: -1.2}",)
    found = robot(MODELS / "quadruped.xml", *words)
    homes = {joint.name: joint.home for joint in found.joints}
    assert (homes["front_left_knee"], homes["front_right_knee"]) == (-1.2, -1.6)
    assert {one.name: one.home for one in found.actuators}["front_left_knee"] == pytest.approx(-1.2)


def test_robot_stands_on_its_own_floor_at_a_home_that_is_set(tmp_path: Path) -> None:
    text = (MODELS / "quadruped.xml").read_text()
    path = tmp_path / "robot.xml"
    path.write_text(text.replace("<worldbody>", '<worldbody><geom type="plane" size="0 0 1"/>'))
    knees = ", ".join(f"{side}_knee: -2.4" for side in ("front_left", "front_right", "rear_left", "rear_right"))
    found = robot(path, f"env.task.home={{{knees}}}")
    data = build.geometry.in_pose(found.model, found.home)
    assert min(build.geometry.lowest(found.model, data, geom) for (geom,) in found.feet) == pytest.approx(0.0, abs=1e-9)


# --- robots of a package


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in the place of `robot_descriptions`."""
    folder = tmp_path / "robot_descriptions"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "arm_mj_description.py").write_text(f"MJCF_PATH = {str(MODELS / 'arm.xml')!r}\n")
    (folder / "biped_description.py").write_text(f"URDF_PATH = {str(URDF)!r}\n")
    (folder / "offline_description.py").write_text("raise RuntimeError('git failed:\\n no network')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("robot_descriptions")]:
        monkeypatch.delitem(sys.modules, name)
    return folder


def test_robot_of_the_package_is_found_by_its_name(package: Path) -> None:
    assert [joint.name for joint in robot("robot_descriptions:arm_mj_description").joints] == ["shoulder", "elbow"]
    assert len(robot("robot_descriptions:biped_description", *SERVOS).joints) == 2


def test_robot_that_is_neither_there_nor_downloaded_is_one_line(package: Path) -> None:
    error = mistake("robot_descriptions:offline_description")
    assert error.startswith("env.xml: robot_descriptions:offline_description is not in ROBOT_DESCRIPTIONS_CACHE")
    assert "git failed: no network" in error
    assert mistake("robot_descriptions:none").startswith("env.xml: robot_descriptions:none is not in")


def test_robot_of_menagerie_is_found_in_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "files_of_menagerie" / menagerie._INSIDE / "small_arm"
    inside.mkdir(parents=True)
    (tmp_path / "files_of_menagerie" / "__init__.py").touch()
    shutil.copy(MODELS / "arm.xml", inside)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(menagerie, "_PACKAGES", ("files_of_menagerie",))
    menagerie._folders.cache_clear()
    assert [joint.name for joint in robot("menagerie:small_arm").joints] == ["shoulder", "elbow"]
    assert mistake("menagerie:arm") == "env.xml: the packages of Menagerie have no 'arm'; they have small_arm"
    menagerie._folders.cache_clear()


def test_missing_package_is_one_line_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    menagerie._folders.cache_clear()
    assert "[menagerie]" in mistake("menagerie:unitree_go1")
    menagerie._folders.cache_clear()
    assert "[robots]" in mistake("robot_descriptions:arm_mj_description")


# --- the copy


@pytest.mark.parametrize("kind", ["included", "urdf", "plain"])
def test_copy_gives_the_same_model_after_the_files_are_gone(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    path = {"included": including, "urdf": copied}.get(kind, lambda folder: shutil.copy(MODELS / "arm.xml", folder))(
        source
    )
    words = SERVOS if kind == "urdf" else ()
    before, bundle = robot(path, *words).model, files.bundle(str(path))
    assert files.bundle(str(path)) == bundle
    copy = tmp_path / "model.zip"
    copy.write_bytes(bundle)
    shutil.rmtree(source)
    after = robot(copy, *words).model
    for name in ("body_mass", "body_inertia", "geom_size", "geom_pos", "mesh_vert", "qpos0", "actuator_gainprm"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    assert files.bundle(str(copy)) == bundle


def test_changed_mesh_changes_the_copy(tmp_path: Path) -> None:
    path = including(tmp_path)
    before = files.bundle(str(path))
    mesh = tmp_path / "assets" / "wedge.obj"
    mesh.write_text(mesh.read_text().replace("v 1 0 0", "v 2 0 0"))
    assert files.bundle(str(path)) != before


@pytest.mark.parametrize("place", ["name", "size", "comment", "content", "all"])
def test_damaged_copy_is_one_line_that_does_not_blame_the_users_file(place: str, tmp_path: Path) -> None:
    content = bytearray(files.bundle(str(including(tmp_path))))
    at = {"name": 32, "size": content.index(b"PK\x01\x02") + 24, "comment": -1, "content": 60, "all": 0}[place]
    path = tmp_path / "model.zip"
    content[at] ^= 0x55
    path.write_bytes(b"nothing" if place == "all" else content)
    assert mistake(path).startswith(f"env.xml: {path}, the copy of the model that a run keeps, is damaged: ")


def archive(path: Path, main: str, **entries: str | int) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in entries.items():
            made.writestr(name.replace("_xml", ".xml"), bytes(content) if isinstance(content, int) else content)
        made.comment = main.encode()
    return path


def test_copy_that_would_fill_the_disk_is_not_unpacked(tmp_path: Path) -> None:
    path = archive(tmp_path / "model.zip", "robot.xml", robot_xml=INCLUDING, filler=2**26)
    assert mistake(path) == f"env.xml: {path} would unpack to 64 MiB; it is not unpacked"


def test_copy_reads_no_file_outside_of_it(tmp_path: Path) -> None:
    mesh = BIPED / "meshes" / "wedge.obj"
    outside = INCLUDING.replace('<include file="parts/meshes.xml"/>', f'<asset><mesh file="{mesh}"/></asset>')
    path = archive(tmp_path / "model.zip", "robot.xml", robot_xml=outside)
    assert mistake(path) == f"env.xml: {path} needs {mesh}, which is not in it; give the model's own file"
    main = tmp_path / "main.xml"
    main.write_text(INCLUDING)
    path = archive(tmp_path / "model.zip", str(main), **{str(main): INCLUDING})
    assert "is damaged: ValueError: its main file is outside of it" in mistake(path)


def test_copy_of_a_model_with_absolute_paths_needs_none_of_the_users_files(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    path = including(own)
    path.write_text(path.read_text().replace('meshdir="assets"', f'meshdir="{own / "assets"}"'))
    copy = tmp_path / "model.zip"
    copy.write_bytes(files.bundle(str(path)))
    with files.opened(str(path)) as spec:
        before = spec.compile()
    shutil.rmtree(own)
    with files.opened(str(copy)) as spec:
        np.testing.assert_array_equal(spec.compile().mesh_vert, before.mesh_vert)


def test_ready_task_trains_a_urdf() -> None:
    words = (*SERVOS, "env.task.free_base=true", f"env.xml={URDF}")
    assert environment("robot_velocity", "arm", *words).action_size == 2
