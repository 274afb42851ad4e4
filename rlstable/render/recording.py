"""Episodes of a saved policy, with everything that is needed to draw them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from rlstable.compilation.ffi import interruptible
from rlstable.config import ConfigError
from rlstable.device.precision import level
from rlstable.envs.mujoco_model import model_of
from rlstable.envs.vector import Episodes, watch_episodes
from rlstable.guards.env import physics
from rlstable.policy.environment import make_stage
from rlstable.policy.evaluator import acting, counts, evaluation_env
from rlstable.policy.saved_run import SavedRun
from rlstable.supervise.memory_plan import is_out_of_memory


@dataclasses.dataclass(frozen=True)
class Recording:
    """One episode.

    Attributes:
        name: Which of those that were played, e.g. `best`.
        positions: Generalized positions, `[1 + T, nq]`, the first state among them.
        rewards: Of every action, `[T]`.
        aborted: Whether it ended because a guard tripped; the bad state itself is left out.
    """

    name: str
    positions: np.ndarray
    rewards: np.ndarray
    aborted: bool

    @property
    def total(self) -> float:
        """The return."""
        return float(self.rewards.sum())


@dataclasses.dataclass(frozen=True)
class Reel:
    """Some episodes of one policy.

    Attributes:
        title: Of whom.
        model: The `mujoco.MjModel` that was simulated.
        seconds: Simulated time per action.
        recordings: Best first.
    """

    title: str
    model: Any
    seconds: float
    recordings: tuple[Recording, ...]


def record(run: SavedRun, episodes: int, deterministic: bool = True, backend: str | None = None, seed: int = 0) -> Reel:
    """Plays episodes and keeps the best, the median and the worst of them.

    An episode that was aborted is worse than any other.

    Args:
        run: Whose.
        episodes: How many are played; of one or two there is no median.
        deterministic: The mean action, or a sample.
        backend: Physics as `env.backend` names it; None for that of the training.
        seed: Of the first states and the samples.

    Raises:
        ConfigError: As for `make_stage`, there is no MuJoCo model that could be drawn, or memory does not suffice.
    """
    stage = make_stage(run, episodes, deterministic, backend)
    config, name = stage.config, stage.config.env.name
    model = model_of(stage.env)
    if model is None:
        raise ConfigError(f"run: {name} has no MuJoCo model, so that there is nothing to draw")
    env, precision = evaluation_env(config, stage.env), level(config.precision)

    def play(params: Any, statistics: Any, key: jax.Array) -> tuple[Episodes, Any]:
        key_policy, key_resets = jax.random.split(key)
        with precision.narrow():
            policy = acting(config, run.policy.networks, params, statistics)
            return watch_episodes(env, policy, jax.random.split(key_resets, episodes), key_policy, _drawable)

    try:
        with precision.compiled(), interruptible():
            played = jax.jit(play)(run.policy.params, run.policy.statistics, jax.random.PRNGKey(seed))
            found, (positions, rewards) = jax.device_get(played)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"episodes: the device has no memory to play and keep {episodes:,}; choose fewer") from error
    if positions.shape[-1] != model.nq:
        raise ConfigError(f"run: {name} has {positions.shape[-1]} positions and its MuJoCo model {model.nq}")
    recordings = tuple(
        _recording(label, index, found, positions, rewards, config.env.action_repeat)
        for label, index in chosen(found).items()
    )
    physics_name = "" if stage.backend is None else f", {stage.backend}"
    title = f"{name}{physics_name}, step {run.step:,}"
    return Reel(title, model, _seconds(stage.env, model) * config.env.action_repeat, recordings)


def chosen(episodes: Episodes) -> dict[str, int]:
    """Which episodes are worth a look, by name: the best, the median, the worst."""
    returns = np.where(counts(episodes), np.asarray(episodes.metrics["reward"], np.float64), -np.inf)
    order = np.argsort(-returns, kind="stable")
    if len(order) == 1:
        return {"episode": int(order[0])}
    median = {"median": int(order[len(order) // 2])} if len(order) > 2 else {}
    return {"best": int(order[0]), **median, "worst": int(order[-1])}


def _drawable(state: Any) -> tuple[jax.Array, jax.Array]:
    """Positions and reward of a batched state."""
    inside = physics(state)
    return (inside.qpos if hasattr(inside, "qpos") else inside.q), state.reward


def _recording(
    name: str, index: int, episodes: Episodes, positions: np.ndarray, rewards: np.ndarray, action_repeat: int
) -> Recording:
    steps = int(episodes.length[index]) // action_repeat
    return Recording(
        name,
        np.asarray(positions[: 1 + steps, index], np.float64),
        np.asarray(rewards[1 : 1 + steps, index], np.float64),
        bool(episodes.aborted[index]),
    )


def _seconds(env: Any, model: Any) -> float:
    """Simulated time per environment step."""
    return float(getattr(env, "dt", model.opt.timestep))
