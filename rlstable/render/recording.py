"""Records episodes of a saved policy, with all data for drawing them."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import mujoco
import numpy as np

from rlstable.cli.compose import compose
from rlstable.compilation.compiler import Compiler
from rlstable.compilation.ffi import interruptible
from rlstable.compilation.xla import Compiling, check_flags, disable_async_dispatch, enable_program_cache
from rlstable.config import ConfigError
from rlstable.device.precision import Precision, level
from rlstable.device.trees import Env, EnvState, Observation, Params, PyTree
from rlstable.envs.episodes import Episodes, watch_episodes
from rlstable.envs.load import load
from rlstable.envs.mujoco_model import model_of
from rlstable.envs.vector import VectorEnv
from rlstable.envs.wrapper import EnvWrapper
from rlstable.guards.env import physics
from rlstable.policy.evaluator import Act, acting, evaluation_env, valid_episodes
from rlstable.policy.playback import load_policy_environment
from rlstable.policy.saved_run import SavedRun
from rlstable.ppo.normalizer import Statistics
from rlstable.render.episode import RecordedEpisodes, Recording
from rlstable.supervise.memory import is_out_of_memory


class EpisodeRecorder:
    """Plays and records episodes of policies; a `ConfigError` if the environment has no MuJoCo model to draw.

    `batched` makes many copies of `env`, `act` makes a policy of parameters and statistics, and `about` are the
    environment's name and backend. Without `act` the actions are random, uniform from -1 to 1.
    """

    def __init__(
        self,
        env: Env,
        batched: Callable[[Env], VectorEnv],
        act: Callable[[Params, Statistics], Act] | None,
        precision: Precision,
        about: tuple[str, str | None],
        episodes: int,
        compiling: Compiling = lambda name: contextlib.nullcontext(),
    ):
        (self._name, backend), model = about, model_of(env)
        if model is None:
            raise ConfigError(f"run: {self._name} has no MuJoCo model to draw; choose a run with a MuJoCo environment")
        self._model, self._compiling = model, compiling
        self._title = self._name if backend is None else f"{self._name}, {backend}"
        self._actions = "step {:,}" if act is not None else "random actions"
        self._precision = precision
        self._compiler = Compiler(self._precision)
        self._compiled: Any = None
        robot: Any = getattr(env, "unwrapped", env)
        self._motion = None
        if hasattr(type(robot), "on_course") and robot.velocities is not None:
            env, self._motion = _on_course(env), robot.motion
        vector = batched(env)
        self._action_repeat, self._seconds = vector.action_repeat, seconds_per_step(env, model) * vector.action_repeat

        def play(params: Params, statistics: Statistics, key: jax.Array) -> tuple[Episodes, PyTree]:
            key_policy, key_resets = jax.random.split(key)
            with self._precision.narrow():
                policy = _random_policy(env.action_size) if act is None else act(params, statistics)
                return watch_episodes(vector, policy, jax.random.split(key_resets, episodes), key_policy, self._watched)

        self._play = jax.jit(play)

    def record(self, params: Params, statistics: Statistics, key: jax.Array, step: int) -> RecordedEpisodes:
        """Plays episodes and records the best, the median and the worst of them.

        Raises `ConfigError` if the environment's positions are not those of its MuJoCo model.
        """
        if self._compiled is None:
            with self._compiling("recording"):
                args = params, statistics, key
                self._compiled = self._compiler.build("recording", self._play, lambda: args).result()
        with self._precision.compiled(), interruptible():
            result, (positions, rewards, motion) = jax.device_get(self._compiled(params, statistics, key))
        if positions.shape[-1] != self._model.nq:
            raise ConfigError(
                f"run: {self._name} has {positions.shape[-1]} positions and its MuJoCo model {self._model.nq}"
            )
        recordings = []
        for name, index in best_median_worst(result).items():
            end = 1 + int(result.length[index]) // self._action_repeat
            moved, paid = (np.asarray(x, np.float64) for x in (positions[:end, index], rewards[1:end, index]))
            velocities = np.stack([x[:end, index] for x in motion]) if motion else None
            recordings.append(Recording(name, moved, paid, bool(result.aborted[index]), velocities))
        title = f"{self._title}, {self._actions.format(step)}"
        return RecordedEpisodes(title, self._model, self._seconds, tuple(recordings))

    def _watched(self, state: EnvState) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
        """Positions, reward and motion of a batched state."""
        simulated = physics(state)
        positions = simulated.qpos if hasattr(simulated, "qpos") else simulated.q
        return positions, state.reward, () if self._motion is None else jax.vmap(self._motion)(state)


def record(
    run: SavedRun, episodes: int, deterministic: bool = True, backend: str | None = None, seed: int = 0
) -> RecordedEpisodes:
    """Plays episodes and records the best, the median and the worst of them; aborted episodes rank last.

    Arguments as for `policy.playback.evaluate_run`. A `ConfigError` also if the environment has no MuJoCo model.
    """
    config, loaded = load_policy_environment(run, episodes, deterministic, backend)
    batched, about = functools.partial(evaluation_env, config), (config.env.name, loaded.backend)
    precision = level(config.precision)
    act = acting(run.policy.networks, precision.matmul, deterministic)
    recorder = EpisodeRecorder(loaded.env, batched, act, precision, about, episodes)
    try:
        return recorder.record(run.policy.params, run.policy.statistics, jax.random.PRNGKey(seed), run.step)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"episodes: the device has not enough memory to record {episodes:,} episodes; choose fewer"
        ) from error


def record_random(words: Sequence[str], episodes: int, seed: int = 0) -> tuple[str, RecordedEpisodes]:
    """Records random actions in the environment that overrides choose, as `record` does; returns its name, too."""
    config = compose(words)
    check_flags()
    disable_async_dispatch()  # native physics needs the flag
    enable_program_cache(config.compile_cache)
    loaded = load(config.env, config.eval.env_kwargs, randomize=config.eval.randomize)
    batched, about = functools.partial(evaluation_env, config), (config.env.name, loaded.backend)
    recorder = EpisodeRecorder(loaded.env, batched, None, level(config.precision), about, episodes)
    nothing: PyTree = {}
    return config.env.name, recorder.record(nothing, nothing, jax.random.PRNGKey(seed), 0)


def best_median_worst(episodes: Episodes) -> dict[str, int]:
    """Indices of the best, the median and the worst episode, by name."""
    returns = np.where(valid_episodes(episodes), np.asarray(episodes.metrics["reward"], np.float64), -np.inf)
    order = np.argsort(-returns, kind="stable")
    if len(order) == 1:
        return {"episode": int(order[0])}
    median = {"median": int(order[len(order) // 2])} if len(order) > 2 else {}
    return {"best": int(order[0]), **median, "worst": int(order[-1])}


def _on_course(env: Any) -> Env:
    """A copy of a robot's environment, and of its wrappers, that asks for the velocities of its course."""
    if not isinstance(env, EnvWrapper):
        return env.on_course()
    copied = copy.copy(env)
    copied.env = _on_course(env.env)
    return copied


def _random_policy(action_size: int) -> Callable[[Observation, jax.Array], jax.Array]:
    def policy(obs: Observation, key: jax.Array) -> jax.Array:
        count = jax.tree.leaves(obs)[0].shape[0]
        return jax.random.uniform(key, (count, action_size), minval=-1.0, maxval=1.0)

    return policy


def steps_of(env: Env, seconds: float, action_repeat: int) -> int:
    """The environment steps in so much simulated time, whole actions and at least one."""
    model = model_of(env)
    per_action = seconds_per_step(env, model) * action_repeat if model else seconds
    return max(1, round(seconds / per_action)) * action_repeat


def seconds_per_step(env: Env, model: mujoco.MjModel) -> float:
    return float(getattr(env, "dt", model.opt.timestep))
