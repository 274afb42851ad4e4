"""Joint limits, loops, masses, and mass matrices that float32 cannot solve."""

from __future__ import annotations

import pytest
from models import arm, found, world

from rlstable.doctor.structure_lint import equalities, joints, masses

CHAIN = """
<body name="upper">
  <joint name="first" type="hinge" axis="0 1 0" range="-1 1" limited="true" {armature}/>
  <geom type="capsule" size="0.05" fromto="0 0 0 0 0 -0.5" mass="{upper}"/>
  <body name="lower" pos="0 0 -0.5">
    <joint name="second" type="hinge" axis="0 1 0" range="-1 1" limited="true" {armature}/>
    <geom type="capsule" size="0.05" fromto="0 0 0 0 0 -0.5" mass="{lower}"/>
  </body>
</body>"""


def chain(upper: str = "1", lower: str = "1", armature: str = ""):
    return world(CHAIN.format(upper=upper, lower=lower, armature=armature))


def test_unlimited_hinge_is_a_note() -> None:
    assert joints(arm(kind="hinge")) == []
    wheel = arm(kind="hinge")
    wheel.jnt_limited[:] = False
    assert found(joints(wheel)) == [("note", "unlimited joint", ("j",))]
    cart = '<body><joint type="slide" axis="1 0 0"/><joint type="hinge" axis="0 1 0"/><geom size="0.1"/></body>'
    assert joints(world(cart)) == []
    assert joints(world('<body><freejoint/><geom size="0.1"/></body>')) == []


PARALLEL = """
<body name="left"><joint axis="0 1 0"/><geom type="capsule" size="0.02" fromto="0 0 0 0 0 -1"/></body>
<body name="right" pos="0.5 0 0"><joint axis="0 1 0"/><geom type="capsule" size="0.02" fromto="0 0 0 0 0 -1"/></body>
<body name="hand" mocap="true"/>"""


@pytest.mark.parametrize(
    ("equality", "expected"),
    [
        ("", []),
        ('<connect name="rod" body1="left" body2="right" anchor="0 0 -1"/>', [("note", "closed loop", ("rod",))]),
        ('<connect name="rod" body1="left" body2="right" anchor="0 0 -1" active="false"/>', []),
        ('<weld name="held" body1="hand" body2="right"/>', []),
        (
            '<weld name="rod" body1="left" body2="right" relpose="0.6 0 0 1 0 0 0"/>',
            [("note", "closed loop", ("rod",)), ("warning", "open equality", ("rod",))],
        ),
    ],
)
def test_closed_loops_and_open_equalities_are_found(equality: str, expected: list) -> None:
    assert found(equalities(world(PARALLEL, more=f"<equality>{equality}</equality>"))) == expected


def test_open_equality_names_its_gap() -> None:
    weld = '<equality><weld body1="left" body2="right" relpose="0.6 0 0 1 0 0 0"/></equality>'
    assert equalities(world(PARALLEL, more=weld))[-1].numbers["gap"] == pytest.approx(0.1)


def test_coupling_of_joints_is_no_closed_loop() -> None:
    assert equalities(arm(more='<equality><joint joint1="j" polycoef="0 1 0 0 0"/></equality>')) == []


def test_small_masses_without_armature_are_a_warning() -> None:
    assert masses(arm()) == []
    assert found(masses(arm(mass="0.0005"))) == [("warning", "small mass", ("b",))]
    assert masses(arm(mass="0.0005", joint='armature="0.01"')) == []
    speck = '<body name="speck"><joint type="hinge"/><geom size="0.001" mass="0.002"/></body>'
    assert found(masses(world(speck))) == [("warning", "small mass", ("speck",))]


@pytest.mark.parametrize(("lower", "severities"), [("0.002", []), ("200", []), ("2e3", ["note"]), ("5e4", ["warning"])])
def test_heavy_body_on_a_light_one_is_found(lower: str, severities: list[str]) -> None:
    found_here = found(masses(chain(lower=lower)))
    assert [entry for entry in found_here if entry[1] == "mass ratio"] == [
        (severity, "mass ratio", ("lower",)) for severity in severities
    ]
    assert masses(chain(lower=lower, armature='armature="100"')) == []


NESTED = """
<body name="base">
  <joint name="x" type="slide" axis="1 0 0"/><inertial pos="0 0 0" mass="{0}" diaginertia="{0} {0} {0}"/>
  <body name="load"><joint name="again" type="slide" axis="1 0 0"/><geom size="0.1" mass="1"/></body>
</body>"""


@pytest.mark.parametrize(("mass", "severity"), [("1e-4", None), ("1e-5", "warning"), ("1e-9", "error")])
def test_mass_matrix_that_float32_cannot_solve_is_found(mass: str, severity: str | None) -> None:
    entries = [entry for entry in found(masses(world(NESTED.format(mass)))) if entry[1] == "mass matrix"]
    assert [entry[0] for entry in entries] == ([] if severity is None else [severity])


def test_mass_matrix_finding_does_not_depend_on_units() -> None:
    assert [f.check for f in masses(chain(upper="1000", lower="0.01"))] == []
