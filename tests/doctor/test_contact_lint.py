"""Pairs of geoms that may touch, the number of contacts, and overlaps at the start."""

from __future__ import annotations

import pytest
from models import found, world

from rlstable.doctor.contact_lint import candidates, contact_count, contacts
from rlstable.doctor.finding import names

FLOOR = '<geom name="floor" type="plane" size="1 1 1"/>'
LEG = """
<body name="body" pos="0 0 {height}">
  <freejoint/><geom name="torso" type="box" size="0.2 0.2 0.2" mass="5"/>
  <body name="thigh" pos="0 0 -0.3">
    <joint name="hip" axis="0 1 0" range="-1 1" limited="true"/>
    <geom name="upper" type="capsule" size="0.05 0.2" pos="0 0 -0.2" mass="1"/>
    <body name="shin" pos="0 0 {reach}">
      <joint name="knee" axis="0 1 0" range="-1 1" limited="true"/>
      <geom name="lower" type="capsule" size="0.05 0.2" pos="0 0 -0.2" mass="1" {shin}/>
    </body>
  </body>
</body>"""


def leg(height: float = 2.0, reach: float = -0.5, shin: str = "", more: str = "", option: str = ""):
    return world(FLOOR + LEG.format(height=height, reach=reach, shin=shin), more=more, option=option)


def pairs(model) -> list[tuple[str, ...]]:
    return [names(model, "geom", pair) for pair in candidates(model)]


def test_candidates_are_the_pairs_of_geoms_that_may_touch() -> None:
    assert pairs(leg()) == [("floor", "torso"), ("floor", "upper"), ("floor", "lower"), ("lower", "torso")]
    assert pairs(leg(shin='contype="0" conaffinity="0"')) == [("floor", "torso"), ("floor", "upper")]
    exclude = '<contact><exclude body1="body" body2="shin"/></contact>'
    assert ("lower", "torso") not in pairs(leg(more=exclude))
    pair = '<contact><pair geom1="torso" geom2="upper"/></contact>'
    assert pairs(leg(more=pair))[0] == ("upper", "torso")
    free = leg()
    free.opt.disableflags |= 1 << 10  # filterparent
    assert ("upper", "torso") in pairs(free)
    free.opt.disableflags |= 1 << 4  # contact
    assert pairs(free) == []


def test_contact_count_respects_max_contact_points() -> None:
    model = leg()
    assert contact_count(model, candidates(model)) == 4 + 2 + 2 + 2
    capped = leg(more='<custom><numeric name="max_contact_points" data="5"/></custom>')
    assert contact_count(capped, candidates(capped)) == 5


@pytest.mark.parametrize(("balls", "severity"), [(2, None), (9, "note"), (20, "warning")])
def test_many_contacts_are_a_finding(balls: int, severity: str | None) -> None:
    model = world(FLOOR + "".join(f'<body pos="{i} 0 1"><freejoint/><geom size="0.1"/></body>' for i in range(balls)))
    every = candidates(model)
    assert len(every) == balls * (balls + 1) // 2
    assert found(contacts(model, every)) == ([] if severity is None else [(severity, "contact count", ())])
    if severity == "warning":
        assert "210 contacts from 210 pairs of geoms, 190 of them among moving bodies" in contacts(model, every)[0].what


def test_overlap_of_geoms_at_the_start_is_found() -> None:
    assert contacts(leg(), candidates(leg())) == []
    folded = leg(reach=0.2)
    assert found(contacts(folded, candidates(folded))) == [("warning", "overlap at start", ("lower–torso",))]
    sunk = leg(height=1.0)
    (finding,) = contacts(sunk, candidates(sunk))
    assert (finding.severity, finding.subject) == ("note", ("floor–lower",))
    assert finding.numbers["depth"] == pytest.approx(0.25)
    assert "250.0 mm" in finding.what
