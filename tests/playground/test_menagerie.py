"""Robots of MuJoCo Menagerie by name, from packages of files."""

from __future__ import annotations

import pytest

pytest.importorskip("mujoco_playground")

from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from rlstable.envs import menagerie
from rlstable.robot.model import Robot


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("unitree_go1", "go1.xml"),
        ("google_barkour_vb", "barkour_vb.xml"),
        ("apptronik_apollo", "scene.xml"),  # which alone has its contacts
        ("unitree_g1/g1_mjx.xml", "g1_mjx.xml"),
    ],
)
def test_robot_is_its_own_file_unless_its_contacts_are_in_the_scene(name: str, file: str) -> None:
    assert menagerie.model(name).name == file


def test_robot_or_file_that_is_not_there_is_one_line_that_names_those_that_are() -> None:
    with pytest.raises(
        ConfigError, match=r"^env\.xml: the packages of Menagerie have no 'go1'; they have aloha, .*_h1$"
    ):
        menagerie.model("go1")
    with pytest.raises(
        ConfigError, match=r"^env\.xml: leap_hand has no scene\.xml; name one, as menagerie:leap_hand/l"
    ):
        menagerie.model("leap_hand")


@pytest.mark.parametrize(("name", "feet"), [("unitree_go1", 4), ("apptronik_apollo", 2)])
def test_robot_of_menagerie_has_its_motors_and_feet(name: str, feet: int) -> None:
    config = compose(["env=robot_velocity", f"env.xml=menagerie:{name}"])
    assert config.env.xml == f"menagerie:{name}"
    robot = Robot(config.env.xml, config.env.task, (), ("feet",))
    assert len(robot.feet) == feet and len(robot.actuators) == robot.model.nu
