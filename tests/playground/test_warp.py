"""MJX-Warp on a CPU: one bad environment is quarantined alone, although all environments share contact arrays.

The first run compiles Warp's kernels, which takes a minute or two; `WARP_CACHE_PATH` keeps them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("mujoco_playground")
pytest.importorskip("warp")

from mujoco.mjx.warp.types import DATA_NON_VMAP
from mujoco_playground import registry
from toys import tiny_config

from rlstable.config import ConfigError
from rlstable.config.guards import GuardsConfig
from rlstable.device.shared import Shared, without_shared
from rlstable.envs.objects import Environments
from rlstable.envs.vector import VectorEnv
from rlstable.guards.env import env_guards
from rlstable.replay.engines import step_again
from rlstable.replay.report import compare
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.incident import read

pytestmark = pytest.mark.usefixtures("quick_compile")

COUNT = 4
GUARDS = env_guards(GuardsConfig())


def cartpole(**overrides: Any) -> Any:
    return registry.load("CartpoleBalance", config_overrides=overrides)


def keys() -> jax.Array:
    return jax.random.split(jax.random.PRNGKey(0), COUNT)


def test_shared_leaves_are_those_that_mjx_warp_does_not_batch() -> None:
    state = jax.eval_shape(VectorEnv(cartpole(naconmax=COUNT), 100, 1, GUARDS).reset, keys())
    impl = vars(state.data._impl)
    arrays = {name for name in DATA_NON_VMAP if not isinstance(impl[name], int)}
    assert {name for name, x in impl.items() if isinstance(x, Shared)} == arrays
    assert impl["contact__pos"].value.shape == (1, COUNT, 3)
    assert all(x.shape[0] == COUNT for x in jax.tree.leaves(without_shared(state)))


def test_physics_in_float64_is_refused_in_one_line(tmp_path: Path) -> None:
    env = cartpole()
    config = tiny_config(env={"source": "object", "name": "cartpole:Balance"}, precision={"matmul": "x64"})
    with pytest.raises(ConfigError) as error:
        TrainingLoop(config, tmp_path, environments=Environments(env, env))
    assert str(error.value) == (
        "precision.matmul: x64 needs physics in float64, and cartpole:Balance simulates with MJX-Warp, which computes "
        "in float32; set precision.matmul=highest, or use impl=jax"
    )


def settings(iterations: int, **sections: Any) -> Any:
    env = {
        "source": "import", "name": "mujoco_playground._src.dm_control_suite.cartpole:Balance",
        "kwargs": {"swing_up": False, "sparse": False}, "episode_length": 20,
    }  # fmt: skip
    defaults: dict[str, Any] = {
        "guards": {}, "env": env, "devices": 1, "total_steps": 64 * iterations, "logging": {"console": "off"},
        "eval": {"num_evals": 1, "num_envs": 2}, "supervise": {"incident": {"enabled": True}},
        "fault": {"site": "physics", "probability": 0.02}, "checkpoint": {"every": 1, "asynchronous": False},
    }  # fmt: skip
    return tiny_config(**defaults | sections)


@pytest.mark.slow
def test_run_quarantines_evaluates_resumes_exactly_and_replays_its_incident(tmp_path: Path) -> None:
    whole = TrainingLoop(settings(2), tmp_path / "whole")
    whole.run()
    rows = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["guards/quarantine/trips"] == 1
    assert rows[-1]["eval/aborted_share"] == 0.0 and np.isfinite(rows[-1]["eval/episode_reward"])

    TrainingLoop(settings(1), tmp_path / "parts").run()
    resumed = TrainingLoop(settings(2, resume="auto"), tmp_path / "parts")
    resumed.run()
    for ours, theirs in zip(jax.tree.leaves(resumed.single.state), jax.tree.leaves(whole.single.state), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))

    (folder,) = (tmp_path / "whole/incidents").iterdir()
    incident = read(folder)
    outcomes = step_again(incident)
    assert [outcome.engine for outcome in outcomes] == ["float32", "C MuJoCo"]
    assert compare(incident, outcomes).conclusion.startswith("not reproduced: the run injected fault.site=physics")
    np.testing.assert_allclose(*(outcome.arrays["data/qvel"] for outcome in outcomes), rtol=1e-3)
