"""Ranges of the configuration as domain randomisation: factors within their ranges, on MJX and C MuJoCo."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from moments import config

from rlstable.envs.load import load

pytestmark = pytest.mark.usefixtures("quick_compile")
ALL = (
    "env.task.randomization.mass=[0.8, 1.2]", "env.task.randomization.center_of_mass=0.01",
    "env.task.randomization.friction=[0.5, 0.7]", "env.task.randomization.damping=[2, 3]",
    "env.task.randomization.armature=[2, 3]", "env.task.randomization.gains=[0.9, 1.1]",
    "env.task.randomization.gravity=[0.95, 1.05]",
)  # fmt: skip


def test_every_environment_draws_its_own_model_within_the_ranges() -> None:
    loaded = load(config("robot", "quadruped", *ALL).env)
    assert loaded.backend == "native"
    model = loaded.env.unwrapped.mjx_model
    drawn = jax.vmap(loaded.env._draw)(jax.random.split(jax.random.PRNGKey(0), 16))
    mass = np.asarray(drawn[".body_mass"])[:, 1:] / np.asarray(model.body_mass)[1:]
    assert 0.8 <= mass.min() < 0.85 and 1.15 < mass.max() <= 1.2
    moved = np.abs(np.asarray(drawn[".body_ipos"] - model.body_ipos))
    assert 0.009 < moved.max() <= 0.01 + 1e-7 and moved[:, 0].max() == 0
    friction = np.asarray(drawn[".geom_friction"])[..., 0] / np.asarray(model.geom_friction)[:, 0]
    assert friction.min() >= 0.5 and friction.max() <= 0.7 and np.ptp(friction, axis=1).max() < 1e-6
    gains = np.asarray(drawn[".actuator_gainprm"])[..., 0] / 30.0
    np.testing.assert_allclose(-np.asarray(drawn[".actuator_biasprm"])[..., 1] / 30.0, gains, rtol=1e-6)
    assert 0.9 <= gains.min() < gains.max() <= 1.1
    gravity = np.asarray(drawn[".opt.gravity"])[:, 2] / -9.81
    assert 0.95 <= gravity.min() < gravity.max() <= 1.05
