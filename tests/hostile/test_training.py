"""Runs under hostile environments and settings end with a named stop reason, finite parameters and a result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import PointMass, State, tiny_config

from rlstable import load_policy
from rlstable.io.run_folder import read_result
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason

# Each attack compiles a program; `tests/runs/test_endings.py` has the storms of every day.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compile", "shared_programs")]
Attack = Callable[[State, jax.Array], State]


def _reward(value: Callable[[State, jax.Array], Any]) -> Attack:
    return lambda state, age: state.replace(reward=jnp.asarray(value(state, age), jnp.float32))


def _observation(value: Callable[[jax.Array, jax.Array], Any]) -> Attack:
    return lambda state, age: state.replace(obs=jnp.asarray(value(state.obs, age), jnp.float32))


def _physics(value: Callable[[jax.Array, jax.Array], Any]) -> Attack:
    def attack(state: State, age: jax.Array) -> State:
        physics = state.pipeline_state
        return state.replace(pipeline_state=physics.replace(q=value(physics.q, age)))

    return attack


# The attack in every step, by its description. `age` counts the steps since the reset, from 1.
ATTACKS: dict[str, Attack] = {
    "every reward is infinite": _reward(lambda state, age: jnp.inf),
    "every reward is 1e30": _reward(lambda state, age: 1e30),
    "rewards grow tenfold per step": _reward(lambda state, age: 10.0**age),
    "no reward is ever paid": _reward(lambda state, age: 0.0),
    "every third reward is NaN": _reward(lambda state, age: jnp.where(age % 3 > 1, jnp.nan, 1.0)),
    "observations never change": _observation(lambda obs, age: jnp.ones_like(obs)),
    "every observation is NaN": _observation(lambda obs, age: jnp.full_like(obs, jnp.nan)),
    "observations grow tenfold per step": _observation(lambda obs, age: obs * 10.0**age),
    "observations are the greatest float32": _observation(lambda obs, age: jnp.full_like(obs, 3e38)),
    "observations jump between 1e-6 and 1e6": _observation(lambda obs, age: obs * jnp.where(age % 2 > 0, 1e-6, 1e6)),
    "every step ends the episode": lambda state, age: state.replace(done=jnp.ones(())),
    "done is NaN": lambda state, age: state.replace(done=jnp.full((), jnp.nan)),
    "no step ends the episode": lambda state, age: state.replace(done=jnp.zeros(())),
    "the physics explodes": _physics(lambda q, age: q * 1e3**age),
    "a metric is infinite": lambda state, age: state.replace(metrics={"distance": jnp.full((), jnp.inf)}),
}


class Hostile(PointMass):
    """A point mass under one of `ATTACKS`, or none; a share of the resets has an observation of NaN."""

    def __init__(self, attack: str = "", bad_resets: float = 0.0):
        super().__init__(bad_resets=bad_resets)
        self._attack = ATTACKS[attack] if attack else lambda state, age: state

    def reset(self, rng: jax.Array) -> State:
        state = super().reset(rng)
        return state.replace(info={**state.info, "age": jnp.zeros(())})

    def step(self, state: State, action: jax.Array) -> State:
        age = state.info["age"] + 1.0
        state = super().step(state, action)
        return self._attack(state.replace(info={**state.info, "age": age}), age)


ITERATIONS = 12

NEVER_TRAINED = (
    "every reward is infinite", "every reward is 1e30", "every observation is NaN",
    "observations are the greatest float32", "done is NaN", "a metric is infinite",
)  # fmt: skip

# Attacks by settings, by description.
SETTINGS: dict[str, dict[str, Any]] = {
    "a learning rate of 1e30": {"learning_rate": 1e30},
    "rewards times 1e12": {"reward_scaling": 1e12},
    "an entropy cost of 1e6": {"entropy_cost": 1e6},
    "a clipping of 1e6": {"clipping_epsilon": 1e6, "learning_rate": 1.0},
    "a value coefficient of 1e12": {"vf_loss_coefficient": 1e12},
    "gradients clipped to 1e-30": {"max_grad_norm": 1e-30},
    "a hundred epochs at a high rate": {"num_updates_per_batch": 100, "learning_rate": 0.3},
    "minibatches of one unroll": {"batch_size": 1, "num_minibatches": 16, "learning_rate": 0.3},
}


def train(folder: Path, attack: str = "", bad_resets: float = 0.0, ppo: Any = None) -> Any:
    """The result of a run under default guards, whose parameters are checked."""
    config = tiny_config(
        guards={}, devices=1, seed=3, total_steps=ITERATIONS * 64, ppo=ppo or {},
        env={"name": "test_training:Hostile", "kwargs": {"attack": attack, "bad_resets": bad_resets}},
        eval={"num_evals": 2, "num_envs": 4}, logging={"console": "off"}, supervise={},
        checkpoint={"every": 1, "asynchronous": False},
    )  # fmt: skip
    runner = TrainingLoop(config, folder)
    result = runner.run()
    left = read_result(folder)
    assert left is not None and left["stop_reason"] == result.stop_reason.name
    state = runner.single.state
    for leaf in jax.tree.leaves((state.params, state.opt_state, state.normalizer)):
        if np.issubdtype(np.asarray(leaf).dtype, np.floating):
            assert np.isfinite(leaf).all()
    assert result.stop_reason in (StopReason.completed, StopReason.physics_unstable, StopReason.recovery_exhausted)
    if result.stop_reason.succeeded:
        assert np.isfinite(load_policy(folder).act(np.zeros(4, np.float32))).all()
    return result


@pytest.mark.parametrize("attack", ATTACKS)
def test_run_in_a_hostile_environment_ends_with_a_stop_reason_and_finite_parameters(
    tmp_path: Path, attack: str
) -> None:
    result = train(tmp_path, attack)
    # A run without an accepted update has not trained.
    assert result.stop_reason.succeeded is (attack not in NEVER_TRAINED)


@pytest.mark.parametrize("settings", SETTINGS)
def test_run_with_hostile_settings_ends_with_a_stop_reason_and_finite_parameters(tmp_path: Path, settings: str) -> None:
    train(tmp_path, ppo=SETTINGS[settings])


def test_run_completes_with_nine_of_ten_resets_bad(tmp_path: Path) -> None:
    assert train(tmp_path, bad_resets=0.9).stop_reason is StopReason.completed
