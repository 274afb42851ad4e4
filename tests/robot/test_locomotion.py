"""Velocities that fit a robot's legs or wheels."""

from __future__ import annotations

from pathlib import Path

import pytest
from moments import walker

from rlstable.robot import geometry, locomotion
from rlstable.robot.model import Robot


def legged(folder: Path, axes: str = "0 1 0", length: float = 0.2) -> Robot:
    """A robot on two legs with knees and ankles; `axes` are those of the hips."""
    shin = f'type="capsule" size="0.02" fromto="0 0 0 0 0 -{length}"'
    sole = '<geom type="box" pos="0.02 0 -0.03" size="0.05 0.03 0.01"/>'
    foot = f'<body name="{{0}}_foot" pos="0 0 -{length}"><joint axis="0 1 0"/>{sole}</body>'
    legs = "".join(
        f'<body pos="0 {y} 0"><joint name="{name}" axis="{axes}"/><geom {shin}/><body pos="0 0 -{length}">'
        f'<joint name="{name}_knee" axis="0 1 0" range="-150 150"/><geom {shin}/>{foot.format(name)}</body></body>'
        for name, y in (("a", 0.1), ("b", -0.1))
    )
    servos = "".join(
        f'<position joint="{name}" kp="30" ctrlrange="-0.8 0.8"/>' for name in ("a", "b", "a_knee", "b_knee")
    )
    return walker(folder, "env.task.home={*_knee: -1.0, a: 0.5, b: 0.5}", legs=legs, actuators=servos)


def test_robot_is_asked_for_a_walk_that_fits_its_height_and_its_hips(tmp_path: Path) -> None:
    small, large = legged(tmp_path, length=0.1), legged(tmp_path, length=0.5)
    height = float(geometry.in_pose(small.model, small.home).subtree_com[small.root, 2]) - small.floor
    assert locomotion.velocities(small)[0].tolist() == pytest.approx(
        [-(v := (9.81 * height) ** 0.5 / 2) / 2, v], abs=5e-3
    )
    assert locomotion.velocities(large)[0].tolist() == [-0.5, 1.0]
    assert locomotion.velocities(small)[1].tolist() == [0.0, 0.0]
    assert locomotion.velocities(legged(tmp_path, axes="1 0 0"))[1, 1] > 0.1


@pytest.mark.parametrize(("control", "forward"), [("velocity", 0.48), ("motor", 1.0)])
def test_car_is_asked_for_what_its_wheels_can_do_and_never_to_go_sideways(
    control: str, forward: float, tmp_path: Path
) -> None:
    wheel = (
        '<body pos="0 {1} -0.04"><joint name="{0}" axis="0 1 0" limited="false"/>'
        '<geom type="cylinder" size="0.06 0.02" zaxis="0 1 0"/></body>'
    )
    kv = 'kv="1"' if control == "velocity" else ""
    servos = "".join(f'<{control} joint="{name}" {kv} ctrlrange="-10 10"/>' for name in "ab")
    legs = wheel.format("a", 0.13) + wheel.format("b", -0.13)
    found = walker(tmp_path, legs=legs, height="0.1", actuators=servos)
    assert locomotion.velocities(found).tolist() == [[-forward / 2, forward], [0.0, 0.0], [-0.7, 0.7]]
