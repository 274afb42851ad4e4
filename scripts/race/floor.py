"""Measures the physics alone and the rate of matrix products, which bound the speed of training on this machine.

python -m scripts.race.floor env=humanoid env.backend=native

prints one line of JSON. Physics: a compiled loop of steps with random actions, with the number of environments, the
episodes and the automatic resets of a training. Matrix products: float32, square or of the shape of a hidden layer on
a minibatch, whichever is faster.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from brax.envs import training

from rlstable.cli.compose import compose
from rlstable.compilation.xla import disable_async_dispatch
from rlstable.config import Config
from rlstable.envs.load import load_env

SECONDS = 5.0
LEAST_CALLS = 5
STEPS = 20


def calls_per_second(call: Callable[[], Any]) -> float:
    """Returns the rate of the median call, after one call to compile."""
    jax.block_until_ready(call())
    times: list[float] = []
    while len(times) < LEAST_CALLS or sum(times) < SECONDS:
        started = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - started)
    return 1.0 / statistics.median(times)


def physics_sps(config: Config) -> float:
    """Returns environment steps per second with random actions and without learning."""
    env = training.wrap(load_env(config.env), config.env.episode_length, config.env.action_repeat)
    count = config.ppo.num_envs

    @jax.jit
    def steps(state: Any, key: jax.Array) -> Any:
        def step(state: Any, key: jax.Array) -> Any:
            action = jax.random.uniform(key, (count, env.action_size), minval=-1.0, maxval=1.0)
            following = env.step(state, action)
            return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), following, state), None

        return jax.lax.scan(step, state, jax.random.split(key, STEPS))[0]

    state = jax.jit(env.reset)(jax.random.split(jax.random.PRNGKey(0), count))
    state = jax.tree.map(jnp.asarray, state)
    return calls_per_second(lambda: steps(state, jax.random.PRNGKey(1))) * STEPS * count * config.env.action_repeat


def gflops(shapes: Sequence[tuple[int, int, int]]) -> float:
    """Returns the best rate of matrix products, in 10^9 operations per second."""
    best = 0.0
    for rows, inner, columns in shapes:
        left, right = jnp.ones((rows, inner)), jnp.ones((inner, columns))
        product = jax.jit(jnp.matmul)
        rate = calls_per_second(lambda product=product, left=left, right=right: product(left, right))  # type: ignore[misc]
        best = max(best, rate * 2e-9 * rows * inner * columns)
    return best


def operations(sizes: Sequence[int], passes: int) -> int:
    """Returns a network's operations per sample: forward and backward; the first layer's input needs no gradient."""
    layers = [one * other for one, other in itertools.pairwise(sizes)]
    return passes * (6 * sum(layers) - 2 * layers[0])


def operations_per_step(config: Config, observation: int, actions: int) -> int:
    """Returns the matrix operations of learning and of choosing an action, per environment step."""
    policy = (observation, *config.network.policy_hidden_layer_sizes, 2 * actions)
    value = (observation, *config.network.value_hidden_layer_sizes, 1)
    passes = config.ppo.num_updates_per_batch
    acting = 2 * sum(one * other for one, other in itertools.pairwise(policy))
    return (operations(policy, passes) + operations(value, passes) + acting) // config.env.action_repeat


def main(overrides: Sequence[str]) -> None:
    config = compose(list(overrides))
    if config.env.backend in ("native", "auto"):
        disable_async_dispatch()
    env = load_env(config.env)
    width = max(config.network.value_hidden_layer_sizes)
    rate = gflops([(2048, 2048, 2048), (config.ppo.batch_size * config.ppo.unroll_length, width, width)])
    needed = operations_per_step(config, int(env.observation_size), int(env.action_size))
    physics, learner = physics_sps(config), 1e9 * rate / needed
    floor = 1 / (1 / physics + 1 / learner)
    print(json.dumps({"physics_sps": physics, "gflops": rate, "learner_sps": learner, "floor_sps": floor}))


if __name__ == "__main__":
    main(sys.argv[1:])
