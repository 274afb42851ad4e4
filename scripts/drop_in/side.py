"""Trains one seed of a Playground task as Playground's own script does, with Brax's PPO or with rlstable's drop-in.

python -m scripts.drop_in.side brax CartpoleBalance 0 8 10
"""

import functools
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
from brax.training.agents.ppo import networks as ppo_networks

from scripts.rivals.brax_rival import device_put_replicated

MODULES = {"brax": "brax.training.agents.ppo.train", "rlstable": "rlstable.brax_ppo"}
EVALUATIONS = 6


def settings(task: str, divisor: int, iterations: int) -> dict[str, Any]:
    """Returns Playground's arguments of `ppo.train`, smaller where a processor needs it.

    Args:
        task: Name of the task.
        divisor: Number by which the environments and the batch are divided. The unrolls per environment, minibatches
            and epochs stay, so that an iteration has as many updates, each of fewer samples.
        iterations: Number of iterations; a multiple of the `EVALUATIONS - 1` parts of the training.
    """
    from mujoco_playground.config import dm_control_suite_params

    arguments: dict[str, Any] = dm_control_suite_params.brax_ppo_config(task, "jax").to_dict()
    arguments["num_envs"] //= divisor
    arguments["batch_size"] //= divisor
    iteration = (
        arguments["batch_size"] * arguments["num_minibatches"] * arguments["unroll_length"] * arguments["action_repeat"]
    )
    return arguments | {
        "num_timesteps": iteration * iterations,
        "num_evals": EVALUATIONS,
        "num_resets_per_eval": 1,
        "num_eval_envs": 64,
        "deterministic_eval": True,
    }


def main(argv: Sequence[str]) -> None:
    """Prints a JSON object per evaluation: steps, return and seconds since the start."""
    side, task, seed, divisor, iterations = argv[0], argv[1], *map(int, argv[2:])
    from mujoco_playground import registry, wrapper

    started = time.perf_counter()
    train = importlib.import_module(MODULES[side]).train
    own = {"run_dir": tempfile.mkdtemp()} if side == "rlstable" else {}

    def progress(steps: int, metrics: dict[str, Any]) -> None:
        seconds = round(time.perf_counter() - started, 1)
        row = {"steps": int(steps), "return": round(float(metrics["eval/episode_reward"]), 1), "seconds": seconds}
        print(json.dumps(row), flush=True)

    # The function that JAX has dropped and Brax's released trainer still calls.
    with mock.patch.object(jax, "device_put_replicated", device_put_replicated, create=True):
        train(
            environment=registry.load(task, config_overrides={"impl": "jax"}),
            progress_fn=progress,
            network_factory=functools.partial(ppo_networks.make_ppo_networks),
            wrap_env_fn=wrapper.wrap_for_brax_training,
            seed=seed,
            **settings(task, divisor, iterations),
            **own,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
