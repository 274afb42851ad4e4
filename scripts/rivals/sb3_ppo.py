"""Trains SB3's or SBX's PPO on Gymnasium's MuJoCo tasks, in its own virtual environment without rlstable.

.rivals/sb3/bin/python scripts/rivals/sb3_ppo.py '<settings as JSON>' lines.jsonl

The settings: `library` (`sb3` or `sbx`), `env`, `num_envs`, `normalize` (VecNormalize around the environments), `ppo`
(arguments of `PPO`), `threshold`, `evaluate_every` (collected batches between evaluations), `episodes` of an
evaluation, all at once, and `seed`. There is a line per evaluation.
"""

import contextlib
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from rival_log import Reached, write_line
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, sync_envs_normalization

LIBRARIES = {"sb3": ("stable_baselines3", "torch.nn", "ReLU"), "sbx": ("sbx", "flax.linen", "relu")}
WITHOUT_END = 2**40
EVALUATION_SEED = 10_000


class Evaluations(BaseCallback):
    """Evaluates the mean action at regular intervals, and ends the training at the threshold."""

    def __init__(self, env: VecEnv, settings: dict[str, Any], lines: Any):
        super().__init__()
        self._env = env
        self._settings = settings
        self._lines = lines
        self._batches = -1

    def _on_rollout_start(self) -> None:
        self._batches += 1
        if self._batches == 0 or self._batches % self._settings["evaluate_every"]:
            return
        started = time.time()
        if isinstance(self._env, VecNormalize):
            sync_envs_normalization(self.training_env, self._env)
        count = self._settings["episodes"]
        value, _ = evaluate_policy(self.model, self._env, n_eval_episodes=count, deterministic=True, warn=False)
        now = time.time()
        write_line(self._lines, time=now, step=self.num_timesteps, value=float(value), evaluating=now - started)
        if value >= self._settings["threshold"]:
            raise Reached

    def _on_step(self) -> bool:
        return True


def environments(settings: dict[str, Any], count: int, seed: int, training: bool) -> VecEnv:
    envs = make_vec_env(settings["env"], n_envs=count, seed=seed)
    if not settings["normalize"]:
        return envs
    gamma = settings["ppo"].get("gamma", 0.99)
    return VecNormalize(envs, training=training, norm_reward=training, gamma=gamma)


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    _, module, name = LIBRARIES[settings["library"]]
    ppo = dict(settings["ppo"])
    policy = dict(ppo.pop("policy_kwargs", {}))
    if policy.get("activation_fn") == "relu":
        policy["activation_fn"] = getattr(importlib.import_module(module), name)
    return {**ppo, "policy_kwargs": policy or None}


def main(settings: dict[str, Any], path: Path) -> None:
    learner = importlib.import_module(LIBRARIES[settings["library"]][0]).PPO
    envs = environments(settings, settings["num_envs"], settings["seed"], training=True)
    evaluated = environments(settings, settings["episodes"], EVALUATION_SEED, training=False)
    with path.open("w", buffering=1) as lines:
        model = learner("MlpPolicy", envs, seed=settings["seed"], device="cpu", **arguments(settings))
        with contextlib.suppress(Reached):
            model.learn(WITHOUT_END, callback=Evaluations(evaluated, settings, lines))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
