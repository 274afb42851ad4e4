"""PPO of Stable-Baselines3 learns on a task of rlstable."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gymnasium")
baselines = pytest.importorskip("stable_baselines3")

from toys import Target  # noqa: E402

import rlstable  # noqa: E402


@pytest.mark.slow
def test_ppo_of_stable_baselines_finds_the_best_action() -> None:
    env = rlstable.gym_env(Target(), overrides=["env.episode_length=16"])
    model = baselines.PPO(
        "MlpPolicy", env, n_steps=128, batch_size=64, learning_rate=3e-3, gamma=0.5, seed=0, device="cpu",
        policy_kwargs={"net_arch": [16]},
    )  # fmt: skip
    model.learn(4_000)
    action, _ = model.predict(np.zeros((1, 2), np.float32), deterministic=True)
    assert action[0, 0] == pytest.approx(0.6, abs=0.15)
