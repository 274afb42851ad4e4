"""PPO finds the value function and the policy of probe environments, which are known by hand.

The failing probe names the broken part: the value network (observation), the policy gradient (action), the discount
(two steps), the mask (quarantined).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import (
    ObservationActionReward,
    ObservationReward,
    Probe,
    QuarantinedTwoSteps,
    TwoSteps,
)
from toys import assemble, compiled, placed, tiny_config

from rlstable.policy.policy import choose_action
from rlstable.ppo.iteration import PPO
from rlstable.ppo.state import TrainState

pytestmark = pytest.mark.usefixtures("quick_compile")
DISCOUNT = 0.7


def train(probe: Probe, iterations: int, guarded: bool = False, **ppo: float) -> tuple[PPO, TrainState]:
    settings = tiny_config(
        guards={} if guarded else None,
        ppo={
            "num_envs": 32, "batch_size": 32, "num_minibatches": 2, "num_updates_per_batch": 4, "unroll_length": 4,
            "learning_rate": 5e-3, "entropy_cost": 1e-4, "discounting": DISCOUNT, "normalize_observations": False,
            **ppo,
        },
        network={"policy_hidden_layer_sizes": (16,), "value_hidden_layer_sizes": (16,)},
        env={"name": "probes:Probe", "episode_length": 10},
    )  # fmt: skip
    made, state = assemble(settings, probe)
    iterate, state = compiled(made), placed(state)
    for _ in range(iterations):
        state, _ = iterate(state)
    return made, jax.device_get(state)


def values(ppo: PPO, state: TrainState, *positions: float) -> np.ndarray:
    return np.array(ppo.networks.value(state.params, state.normalizer, jnp.array(positions)[:, None]))


def actions(ppo: PPO, state: TrainState, *positions: float) -> np.ndarray:
    observations = jnp.array(positions)[:, None]
    key = jax.random.PRNGKey(0)
    chosen, _ = choose_action(ppo.networks, "default", state.params, state.normalizer, observations, key, True)
    return np.array(chosen)[:, 0]


def test_value_of_an_observed_reward_is_learned() -> None:
    ppo, state = train(ObservationReward(), 150)
    np.testing.assert_allclose(values(ppo, state, -1.0, 1.0), [-1.0, 1.0], atol=0.05)


def test_best_action_for_each_observation_is_learned() -> None:
    # Short steps: with long ones a third of all seeds ends far from the best action.
    ppo, state = train(ObservationActionReward(), 300, learning_rate=1e-3, clipping_epsilon=0.1)
    np.testing.assert_allclose(actions(ppo, state, -1.0, 1.0), [-0.5, 0.5], atol=0.15)


@pytest.mark.parametrize(("probe", "guarded"), [(TwoSteps(), False), (QuarantinedTwoSteps(), True)])
def test_values_of_two_steps_are_discounted(probe: Probe, guarded: bool) -> None:
    ppo, state = train(probe, 200, guarded)
    np.testing.assert_allclose(values(ppo, state, 0.0, 1.0), [DISCOUNT, 1.0], atol=0.05)


def test_bad_rewards_without_guards_make_values_nan() -> None:
    ppo, state = train(QuarantinedTwoSteps(), 2)
    assert np.isnan(values(ppo, state, 0.0, 1.0)).all()
