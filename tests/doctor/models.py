"""Tiny models to examine: a body on a slide or a hinge, with whatever is put into it."""

from __future__ import annotations

from typing import Any

import mujoco


def arm(
    joint: str = "", *, option: str = "", flags: str = "", mass: str = "1", more: str = "", kind: str = "slide"
) -> Any:
    """One body on one joint `j`: attributes of the joint and of `option`, and elements after the world."""
    return mujoco.MjModel.from_xml_string(f"""
<mujoco>
  <option timestep="0.001" {option}><flag {flags}/></option>
  <worldbody>
    <body name="b">
      <joint name="j" type="{kind}" axis="1 0 0" limited="true" range="-1 1" {joint}/>
      <geom name="g" size="0.1" mass="{mass}"/>
    </body>
  </worldbody>
  {more}
</mujoco>""")


def world(bodies: str, *, option: str = "", more: str = "") -> Any:
    """Whatever bodies, without gravity."""
    return mujoco.MjModel.from_xml_string(f"""
<mujoco>
  <option timestep="0.001" gravity="0 0 0" {option}/>
  <worldbody>{bodies}</worldbody>
  {more}
</mujoco>""")


def found(findings: list[Any]) -> list[tuple[str, str, tuple[str, ...]]]:
    """What a test compares: severity, check, subject."""
    return [(finding.severity, finding.check, finding.subject) for finding in findings]
