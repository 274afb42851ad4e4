"""The check of the reward scale, on rewards of known size."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toys import PointMass, State, tiny_config

from rlstable.doctor.playing import play
from rlstable.doctor.reward_scale import lint

pytestmark = pytest.mark.usefixtures("quick_compile")


class Paid(PointMass):
    """A point mass in which every step pays the same; NaN in every other episode where `breaks`."""

    def __init__(self, reward: float, breaks: bool = False):
        super().__init__(bound=100.0)
        self.reward = reward
        self.breaks = breaks

    def step(self, state: State, action: jax.Array) -> State:
        state = super().step(state, action)
        bad = self.breaks & (state.pipeline_state.q[0] > 0.0)
        return state.replace(reward=jnp.where(bad, jnp.nan, self.reward))


def findings(env: Any, **ppo: Any) -> list[Any]:
    plain = {"discounting": 0.99, "normalize_advantage": False, "reward_scaling": 1.0}
    return lint(tiny_config(env={"episode_length": 1000}, ppo=plain | ppo), play(env))


@pytest.mark.parametrize(("reward", "target"), [(30.0, 3000.0), (-30.0, 3000.0), (1e-5, 1e-3)])
def test_rewards_far_from_1_are_a_warning_with_the_recipe(reward: float, target: float) -> None:
    (found,) = findings(Paid(reward))
    assert (found.severity, found.check) == ("warning", "rewards")
    assert found.numbers["value_target"] == pytest.approx(target, rel=1e-3)
    assert "far from 1" in found.what
    assert "set ppo.normalize_values=true ppo.normalize_advantage=true" in found.advice


@pytest.mark.parametrize(
    ("reward", "ppo"),
    [
        (0.5, {}),
        (0.0, {}),  # a sparse task says nothing about its scale
        (30.0, {"reward_scaling": 0.01}),
        (30.0, {"normalize_values": True}),
        (30.0, {"normalize_advantage": True}),
    ],
)
def test_usual_rewards_and_normalised_values_are_no_finding(reward: float, ppo: dict[str, Any]) -> None:
    assert findings(Paid(reward), **ppo) == []


def test_rewards_that_are_not_finite_are_left_out_of_the_scale() -> None:
    (found,) = findings(Paid(30.0, breaks=True))
    assert found.numbers["value_target"] == pytest.approx(3000.0, rel=1e-3)
    assert findings(Paid(float("nan"))) == []
