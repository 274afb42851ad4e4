"""Checks that play an environment: fading rewards, and reach of actuators."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ball import MODEL, Stick
from brax.envs.base import PipelineEnv
from brax.io import mjcf
from models import found
from toys import PointMass, State, tiny_config

from rlstable.doctor.playing import actuator_reach, fading_rewards, play
from rlstable.envs.mujoco_model import model_of
from rlstable.envs.native import with_native_physics

pytestmark = pytest.mark.usefixtures("quick_compile")


class Weak(Stick):
    """A stick whose motor takes ±40, commanded by `gain` times the action, at once or summed over the steps."""

    def __init__(self, gain: float, sums: bool = False):
        system = mjcf.loads(MODEL.format(gear=3.0).replace('ctrlrange="-1 1"', 'name="elbow" ctrlrange="-40 40"'))
        PipelineEnv.__init__(self, sys=system, backend="mjx", n_frames=1)
        self.reads, self.gain, self.sums = (), gain, sums

    def step(self, state: Any, action: Any) -> Any:
        before = state.pipeline_state.ctrl if self.sums else 0.0
        return super().step(state, before + self.gain * action)


@pytest.mark.parametrize(("gain", "sums", "share"), [(1.0, False, 2.5), (40.0, False, None), (1.0, True, None)])
def test_actions_that_hardly_reach_the_range_of_a_motor_are_found(gain: float, sums: bool, share: float | None) -> None:
    env = with_native_physics(Weak(gain, sums), 1)
    findings = actuator_reach(model_of(env), play(env).controls)
    if share is None:
        assert findings == []
    else:
        (finding,) = findings
        assert found(findings) == [("warning", "actuator reach", ("elbow",))]
        assert finding.what.startswith("actions of -1 to 1 reach 2.5 % of ctrlrange")


class Paid(PointMass):
    """A point mass in which every step pays the same."""

    def __init__(self, reward: float):
        super().__init__(bound=100.0)
        self.reward = reward

    def step(self, state: State, action: jax.Array) -> State:
        return super().step(state, action).replace(reward=jnp.full_like(state.reward, self.reward))


class Fading(PointMass):
    """A point mass whose steps pay 1, `share`, `share` squared and so on."""

    def __init__(self, share: float, bound: float = 1000.0):
        super().__init__(bound=bound)
        self.share = share

    def step(self, state: State, action: jax.Array) -> State:
        reward = jnp.where(state.reward == 0.0, 1.0, self.share * state.reward)
        return super().step(state, action).replace(reward=reward)


def test_rewards_that_fade_in_most_episodes_without_an_end_are_a_note() -> None:
    config, played = tiny_config(env={"episode_length": 1000}), play(Fading(0.9))
    (finding,) = fading_rewards(played, config.env.training_length)
    assert (finding.severity, finding.check) == ("note", "fading rewards")
    assert finding.what.startswith("random actions earn 0.371 a step at first, less than 10 % of that after 75 steps")
    assert finding.advice.endswith("or try env.training_episode_length=100")
    rewards = played.rewards.at[:, :5].set(1.0)  # they fade in 11 of 16 episodes, less than three quarters
    assert fading_rewards(played._replace(rewards=rewards), config.env.training_length) == []


@pytest.mark.parametrize(
    ("env", "length"), [(Fading(0.9), 100), (Fading(0.99), None), (Fading(0.9, bound=0.1), None), (Paid(-1.0), None)]
)
def test_rewards_that_stay_and_episodes_that_end_are_no_finding(env: PointMass, length: int | None) -> None:
    config = tiny_config(env={"episode_length": 1000, "training_episode_length": length})
    assert fading_rewards(play(env), config.env.training_length) == []
