"""Times iterations with guards=off and guards=default beside physics, inference and plain SGD; prints a line of JSON.

python -m scripts.bench.limit env=halfcheetah

Everything is timed in turn in one process, without the supervisor; default guards capture incidents. Every PPO needs
the physics, the policy's inference and an update of the networks. Each of the three is timed alone, on the same batch.
The sum of the three times over the time of an iteration is the share of the limit.
"""

import contextlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlstable.cli.compose import compose
from rlstable.compilation.xla import use_one_thread
from rlstable.device.sharding import fetch
from rlstable.device.shared import vmapped
from rlstable.envs.mujoco_batch import Simulations
from rlstable.envs.vector import VectorEnv, as_environments_see
from rlstable.guards.env import physics, physics_field
from rlstable.policy.statistics import estimate
from rlstable.ppo import gae
from rlstable.ppo.flat import ParamFlattener
from rlstable.ppo.gradient import preprocess_batch
from rlstable.ppo.iteration import PPO
from rlstable.ppo.records import Collected, swap_axes
from rlstable.ppo.state import TrainState
from rlstable.runner.loop import TrainingLoop
from scripts import results

SIDES = {"off": ("guards=off",), "default": ("guards=default", "supervise.incident.enabled=true")}
QUIET = (
    "supervise=off", "supervise.incident.enabled=false", "logging=quiet", "checkpoint=off", "eval.num_evals=0",
    f"total_steps={2**30}", "devices=1",
)  # fmt: skip
WARM_UP, PAIRS = 4, 60
Call = Callable[[], object]
_step = Simulations.step  # of C MuJoCo, before it is recorded


def in_turn(calls: Sequence[Call], rounds: int) -> np.ndarray:
    """Returns the seconds of the functions, `[calls, rounds]`; the order is reversed from round to round."""
    times = np.empty((len(calls), WARM_UP + rounds))
    for number in range(WARM_UP + rounds):
        for index in range(len(calls))[:: -1 if number % 2 else 1]:
            started = time.perf_counter()
            calls[index]()
            times[index, number] = time.perf_counter() - started
    return times[:, WARM_UP:]


def compiled(function: Callable[..., Any], *args: Any) -> Call:
    program = jax.jit(function)
    return lambda: jax.block_until_ready(program(*args))


def recorded_physics(calls: Sequence[tuple[Any, ...]]) -> Call:
    """Repeats the steps of C MuJoCo that an iteration took, from the same states, and leaves their results in it."""

    def repeat() -> None:
        for simulations, inputs, frames in calls:
            _step(simulations, inputs, {}, frames)

    return repeat


def physics_alone(env: VectorEnv, state: TrainState, actions: jax.Array) -> Call:
    """Takes the actions `[steps, envs, A]` in the environments; XLA leaves out what no physics reads, and resets."""
    start = as_environments_see(env.begin(state.env_state, state.reset_pool))

    def step(now: Any, action: jax.Array) -> tuple[Any, None]:
        return physics(vmapped(env.env.step, start.replace(**{physics_field(start): now}), action)), None

    return compiled(lambda now, actions: jax.lax.scan(step, now, actions)[0], physics(start), actions)


def inference(ppo: PPO, state: TrainState, observations: Any) -> Call:
    """Draws the actions of all steps `[steps, envs]`, one step after another."""
    networks = ppo.networks

    def act(key: jax.Array, observation: Any) -> tuple[jax.Array, Any]:
        key, key_noise = jax.random.split(key)
        policy, _ = networks.distribution(state.params, state.normalizer, observation)
        raw = policy.sample(jax.random.normal(key_noise, policy.loc.shape))
        return key, (policy.action(raw), policy.log_prob(raw))

    return compiled(lambda key, observations: jax.lax.scan(act, key, observations), state.key, observations)


def plain_sgd(ppo: PPO, state: TrainState, data: Collected) -> Call:
    """All epochs of the plainest PPO on a batch `[rows, T]`, with Adam and a bound on the gradient's norm."""
    settings, networks, statistics = ppo.settings.ppo, ppo.networks.without_preprocessing, state.normalizer
    bound = math.inf if settings.max_grad_norm is None else settings.max_grad_norm
    optimizer = optax.chain(optax.clip_by_global_norm(bound), optax.adam(settings.learning_rate))
    epsilon, layout = settings.clipping_epsilon, ParamFlattener.of(state.params)  # one vector, as in our PPO

    def loss(params: Any, samples: tuple[Any, ...]) -> jax.Array:
        observation, raw, old, advantage, target, noise = samples
        policy, _ = networks.distribution(params, statistics, observation)
        value = networks.value(params, statistics, observation)
        advantage = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)
        ratio = jnp.exp(policy.log_prob(raw) - old)
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - epsilon, 1 + epsilon) * advantage)
        entropy = jnp.mean(policy.entropy(noise)) if settings.entropy_cost else 0.0
        error = 0.5 * settings.vf_loss_coefficient * jnp.mean(jnp.square(target - value))
        return -jnp.mean(surrogate) + error - settings.entropy_cost * entropy

    def update(carry: Any, rows: tuple[Any, jax.Array]) -> tuple[Any, None]:
        params, opt_state = carry
        samples, key = rows
        noise = jax.random.normal(key, samples[1].shape) if settings.entropy_cost else None
        gradient = layout.join(jax.grad(loss)(layout.split(params), (*samples, noise)))
        direction, opt_state = optimizer.update(gradient, opt_state)
        return (optax.apply_updates(params, direction), opt_state), None

    def run(params: Any, data: Collected, key: jax.Array) -> Any:
        data = swap_axes(preprocess_batch(ppo.networks, statistics, data))
        last = networks.value(params, statistics, data.bootstrap_observation)[0]
        targets, advantages = gae.estimate(
            rewards=data.reward, values=networks.value(params, statistics, data.observation), bootstrap_value=last,
            truncation=data.truncation, termination=data.termination, discount=settings.discounting,
            lambda_=settings.gae_lambda,
        )  # fmt: skip
        samples = (data.observation, data.raw_action, data.log_prob, advantages, targets)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)

        def epoch(carry: Any, key: jax.Array) -> tuple[Any, None]:
            order = jax.random.permutation(key, targets.size).reshape(settings.num_minibatches, -1)
            shuffled = jax.tree.map(lambda x: x[order], flat)
            return jax.lax.scan(update, carry, (shuffled, jax.random.split(key, settings.num_minibatches)))

        carry = (layout.join(params), optimizer.init(layout.join(params)))
        return jax.lax.scan(epoch, carry, jax.random.split(key, settings.num_updates_per_batch))[0]

    return compiled(run, state.params, data, state.key)


def parts(run: TrainingLoop, calls: list[tuple[Any, ...]]) -> dict[str, Call]:
    """Returns the physics, the inference and the update of an iteration of the run, as functions by name."""
    ppo, state = run.single.setup.ppo, jax.tree.map(jnp.asarray, fetch(run.single.state))
    data = jax.jit(ppo.collect)(state, state.key).data
    envs = ppo.settings.ppo.num_envs

    def by_time(x: jax.Array) -> jax.Array:  # `[unrolls * envs, T]` to `[unrolls * T, envs]`
        return jnp.swapaxes(x.reshape(-1, envs, *x.shape[1:]), 1, 2).reshape(-1, envs, *x.shape[2:])

    calls.clear()
    run.advance()
    native = recorded_physics(list(calls)) if calls else None
    actions = by_time(data.distribution.action(data.raw_action))
    return {
        "physics": native or physics_alone(run.single.setup.env, state, actions),
        "inference": inference(ppo, state, jax.tree.map(by_time, data.observation)),
        "sgd": plain_sgd(ppo, state, data),
    }


def main(overrides: Sequence[str], pairs: int = PAIRS) -> None:
    calls: list[tuple[Any, ...]] | None = None

    def recording(simulations: Simulations, inputs: Any, results: Any, frames: int) -> None:
        if calls is not None:
            calls.append((simulations, {name: array.copy() for name, array in inputs.items()}, frames))
        _step(simulations, inputs, results, frames)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Simulations, "step", recording))
        runs = []
        for own in SIDES.values():
            config = compose([*overrides, *QUIET, *own])
            if config.computes_little:  # as the command `train`
                use_one_thread()
            runs.append(TrainingLoop(config, Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"))
            stack.callback(runs[-1].close)
        runs[0].advance()
        calls = []
        alone = parts(runs[0], calls)
        calls = None
        times = in_turn([*(run.advance for run in runs), *alone.values()], pairs)
        trips, steps = results.trips(runs[1].single.log.history[-1]), runs[0].config.env_steps_per_iteration
    ratio, *interval = estimate(times[0] / times[1], np.median)
    seconds = np.median(times, axis=1)
    found = {
        "ratio": ratio, "interval": interval, "share": float(np.median(times[2:].sum(0) / times[1])), "pairs": pairs,
        "steps": steps, "trips": trips, "sps_off": steps / seconds[0], "sps_default": steps / seconds[1],
        **{f"{name}_ms": 1e3 * own for name, own in zip(alone, seconds[2:], strict=True)},
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
