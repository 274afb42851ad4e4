"""Robots on MJX-Warp on a CPU: room for contacts, and a short training. tests/robot/test_parity.py compares the terms.

The first run compiles Warp's kernels, which takes a minute or two; `WARP_CACHE_PATH` keeps them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

pytest.importorskip("warp")

from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from rlstable.device.mjx import uses_warp
from rlstable.envs.load import load
from rlstable.envs.simulator import warp_sizes
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile")
MODELS = Path(__file__).parents[1] / "robot" / "models"
ROBOT = ("env=robot_velocity", f"env.xml={MODELS / 'quadruped.xml'}", "env.impl=warp")
TINY = (
    "ppo.num_envs=8", "ppo.batch_size=8", "ppo.num_minibatches=1", "ppo.num_updates_per_batch=1", "ppo.unroll_length=4",
    "env.reset_pool_size=8", "env.episode_length=20", "eval.num_envs=4", "eval.num_evals=0", "total_steps=64",
    "network=small", "supervise.incident.enabled=false", "logging=quiet", "checkpoint=off",
)  # fmt: skip

RANDOMIZED = ["env.task.randomization.friction=[0.5, 1.2]", "env.task.randomization.mass=[0.8, 1.2]"]


def test_chosen_implementation_is_of_mjx_with_room_for_contacts_and_constraints() -> None:
    loaded: Any = load(compose([*ROBOT]).env)
    assert loaded.backend == "mjx" and uses_warp(loaded.env)
    shapes: Any = jax.eval_shape(loaded.env.reset, jax.random.PRNGKey(0))
    assert shapes.data._impl.contact__dist.shape == (2**17,)
    assert warp_sizes(loaded.env.robot.model) == {"naconmax": 2**17, "njmax": 12 + 12 + 4 * 32}


def test_solver_that_reaches_its_limit_prints_no_line() -> None:
    env: Any = load(compose([*ROBOT]).env).env
    assert env.mjx_model.opt._impl.warn_overflow & (512 | 1024) == 0
    assert env.mjx_model.opt._impl.warn_overflow & 1


def test_warp_is_refused_with_c_mujoco() -> None:
    with pytest.raises(ConfigError, match=r"env\.impl: warp is of MJX; set env\.backend=mjx, or env\.impl=auto"):
        compose([*ROBOT, "env.backend=native"])


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], RANDOMIZED])
def test_robot_trains_on_mjx_warp(more: list[str], tmp_path: Path) -> None:
    loop = TrainingLoop(compose([*ROBOT, *TINY, *more]), tmp_path / "run")
    result = loop.run()
    assert result.stop_reason is StopReason.completed and result.step == 64
    last = loop.single.log.history[-1]
    assert last["guards/quarantine/trips"] == last["guards/finite_update/trips"] == 0
