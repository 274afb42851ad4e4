"""Times a robot's task beside the same physics without terms, a few steps at a time, and prints one line of JSON.

python -m scripts.bench.terms env=robot_velocity env.xml=robot.xml ppo.num_envs=16

The task and the bare physics run in one process, without policy and training. The order alternates from pair to pair.
"""

import json
import sys
from collections.abc import Callable, Sequence

import jax
import numpy as np

from rlstable.cli.compose import compose
from rlstable.config.robot import RewardConfig, TaskConfig
from rlstable.envs.load import load_env
from rlstable.envs.vector import VectorEnv
from rlstable.policy.statistics import estimate
from scripts.bench.pairs import PAIRS, in_turn

STEPS = 200


def bare(task: TaskConfig) -> TaskConfig:
    """Returns the task with the same actions and resets, one observation and one constant reward."""
    nothing: dict[str, object] = {"critic_observations": {}, "commands": {}, "endings": {}, "pushes": None}
    observations = dict([next(iter(task.observations.items()))])
    return task.model_copy(
        update={**nothing, "observations": observations, "rewards": {"alive": RewardConfig(weight=1.0)}}
    )


def stepping(env: VectorEnv, num_envs: int) -> Callable[[], object]:
    """Returns a function that takes `STEPS` random actions in every environment."""
    keys = jax.random.split(jax.random.PRNGKey(0), num_envs)
    actions = jax.random.uniform(keys[0], (STEPS, num_envs, env.env.action_size), minval=-1.0)
    state = jax.jit(env.reset)(keys)
    run = jax.jit(
        lambda state: jax.lax.scan(lambda s, a: (env.step(s, a, None, keys[0], {}).state, None), state, actions)
    )
    return lambda: jax.block_until_ready(run(state))


def main(overrides: Sequence[str], pairs: int = PAIRS) -> None:
    config = compose([*overrides, "devices=1"])
    if config.env.task is None:
        sys.exit("terms: env: has no terms; choose a robot's task: env=robot_velocity env.xml=robot.xml")
    num_envs, length = config.ppo.num_envs, config.env.episode_length
    tasks = (bare(config.env.task), config.env.task)
    envs = [load_env(config.env.model_copy(update={"task": task})) for task in tasks]
    calls = [stepping(VectorEnv(env, length, config.env.action_repeat, {}), num_envs) for env in envs]
    times = in_turn(calls, pairs)
    ratio, *interval = estimate(times[0] / times[1], np.median)
    rates = {side: STEPS * num_envs / float(np.median(own)) for side, own in zip(("bare", "task"), times, strict=True)}
    print(json.dumps({"ratio": ratio, "interval": interval, **rates, "num_envs": num_envs, "pairs": pairs}))


if __name__ == "__main__":
    main(sys.argv[1:])
