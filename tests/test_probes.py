"""PPO finds the value function and the policy of probe environments, which are known by hand.

The failing probe names the broken part: the policy gradient (action), or the value, the discount and the mask of
rejected samples (two steps).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import ObservationActionReward, Probe, Recall, TwoSteps
from toys import assemble, compiled, placed, tiny_config

from rlstable.envs.episodes import run_episodes
from rlstable.envs.recurrent import with_memory
from rlstable.policy.evaluator import acting
from rlstable.policy.policy import choose_action
from rlstable.ppo.iteration import PPO
from rlstable.ppo.state import TrainState

pytestmark = pytest.mark.usefixtures("quick_compile")
DISCOUNT = 0.7


def train(
    probe: Probe, iterations: int, guarded: bool = False, recurrent: str | None = None, **ppo: float
) -> tuple[PPO, TrainState]:
    settings = tiny_config(
        guards={} if guarded else None,
        ppo={
            "num_envs": 32, "batch_size": 32, "num_minibatches": 2, "num_updates_per_batch": 4, "unroll_length": 4,
            "learning_rate": 5e-3, "entropy_cost": 1e-4, "discounting": DISCOUNT, "normalize_observations": False,
            **ppo,
        },
        network={
            "policy_hidden_layer_sizes": (16,), "value_hidden_layer_sizes": (16,), "recurrent": recurrent,
            "recurrent_size": 8,
        },
        env={"name": "probes:Probe", "episode_length": 10},
    )  # fmt: skip
    made, state = assemble(settings, with_memory(probe, settings.network))
    iterate, state = compiled(made), placed(state)
    for _ in range(iterations):
        state, _ = iterate(state)
    return made, jax.device_get(state)


def test_best_action_for_each_observation_is_learned() -> None:
    # Short steps: with long ones a third of all seeds ends far from the best action.
    ppo, state = train(ObservationActionReward(), 300, learning_rate=1e-3, clipping_epsilon=0.1)
    observations, key = jnp.array([[-1.0], [1.0]]), jax.random.PRNGKey(0)
    actions, *_ = choose_action(ppo.networks, "default", state.params, state.normalizer, observations, key, True)
    np.testing.assert_allclose(actions[:, 0], [-0.5, 0.5], atol=0.15)


def test_values_of_two_steps_with_bad_rewards_are_discounted() -> None:
    ppo, state = train(TwoSteps(), 200, guarded=True)
    values = ppo.networks.value(state.params, state.normalizer, jnp.array([[0.0], [1.0]]))
    np.testing.assert_allclose(values, [DISCOUNT, 1.0], atol=0.05)


def test_recurrent_policy_solves_a_task_that_hides_what_it_showed_before() -> None:
    """The best return is 1 with memory and 0 without memory."""
    ppo, state = train(Recall(), 120, guarded=True, recurrent="gru", unroll_length=8)
    policy = acting(ppo.networks, ppo.precision.matmul, True)(state.params, state.normalizer)
    episodes = run_episodes(ppo.env, policy, jax.random.split(jax.random.PRNGKey(0), 64), jax.random.PRNGKey(1))  # type: ignore[arg-type]
    assert float(episodes.metrics["reward"].mean()) >= 0.9
