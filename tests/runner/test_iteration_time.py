"""The estimate of an iteration's time on this CPU, before anything compiles."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from ball import Stick
from toys import PointMass

from rlstable.cli.compose import compose
from rlstable.envs.load import Loaded
from rlstable.runner import iteration_time
from rlstable.runner.iteration_time import expected_seconds, long_iteration


@pytest.fixture(autouse=True)
def a_known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, 1e11 flop/s in training, and 1 ms for a physics step on one core."""
    monkeypatch.setattr(iteration_time, "_matmul_rate", lambda: 2e11)
    monkeypatch.setattr(iteration_time, "_seconds_of", lambda work: 1e-3)
    monkeypatch.setattr(iteration_time, "share_of_cores", lambda devices: 2)


def config(*words: str) -> Any:
    sizes = ("ppo.num_envs=100", "ppo.batch_size=100", "ppo.num_minibatches=10", "ppo.unroll_length=10")
    return compose(["env=ant", "recipe_for=accelerator", *sizes, "ppo.num_updates_per_batch=5", *words])


POINT = Loaded(PointMass(), "toy")


def test_estimate_adds_the_gradients_and_the_physics_steps_on_all_cores() -> None:
    gradients = 10_000 * 5 * 6 * 1e6 / 1e11
    assert expected_seconds(config(), POINT, 1_000_000) == pytest.approx(gradients)
    for backend, factor in (("native", 1), ("mjx", 4)):
        physics = 10_000 * 4 * factor * 1e-3 / 2
        stick = Loaded(Stick(n_frames=4), backend)
        assert expected_seconds(config(), stick, 1_000_000) == pytest.approx(gradients + physics)


def test_estimate_counts_all_seeds_and_repeated_actions() -> None:
    one = expected_seconds(config(), POINT, 1_000_000)
    assert one is not None
    assert expected_seconds(config("seeds=3"), POINT, 1_000_000) == pytest.approx(3 * one)
    assert expected_seconds(config("env.action_repeat=4"), POINT, 1_000_000) == pytest.approx(one)


def test_iteration_of_more_than_a_minute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert long_iteration(config(), POINT, 19_000_000) is None
    said = "an iteration of 10,000 steps will take about 2 min on this machine"
    assert long_iteration(config(), POINT, 40_000_000) == said
    assert long_iteration(config("ppo.num_envs=10", "ppo.batch_size=10"), POINT, 10**9) is None, "too few steps"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert long_iteration(config(), POINT, 40_000_000) is None


def test_measurement_takes_a_moment_and_is_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(iteration_time, "_MEASURED", 0.001)
    assert 1e7 < iteration_time._matmul_rate() < 1e14
    assert 0 < iteration_time._step_seconds(Loaded(Stick(), "native")) < 0.1
