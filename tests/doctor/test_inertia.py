"""The mass matrix, and the inverse mass seen by each joint."""

from __future__ import annotations

import numpy as np
from models import arm, world

from rlstable.doctor.inertia import inverse_masses, mass_matrix

NESTED = """
<body><joint type="slide" axis="1 0 0" {}/><geom size="0.1" mass="2"/>
  <body><joint type="slide" axis="1 0 0"/><geom size="0.1" mass="1"/></body>
</body>"""


def test_mass_matrix_of_nested_bodies() -> None:
    assert mass_matrix(world(NESTED.format(""))).tolist() == [[3.0, 1.0], [1.0, 1.0]]
    assert mass_matrix(world(NESTED.format('armature="4"'))).tolist() == [[7.0, 1.0], [1.0, 1.0]]


def test_inverse_mass_of_each_joint() -> None:
    np.testing.assert_allclose(inverse_masses(world(NESTED.format(""))), [1 / 2, 1 / 2 + 1])
    np.testing.assert_allclose(inverse_masses(arm(joint='armature="3"')), [1 / 4])
