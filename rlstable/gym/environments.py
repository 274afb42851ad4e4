"""The classes that Gymnasium knows: one environment, and a vector of environments stepped by one program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rlstable.device.trees import Observation
from rlstable.gym.frames import Frames
from rlstable.gym.simulation import Outcome, Simulation

_LARGEST_SEED = 2**32


class Task(gymnasium.Env[Any, np.ndarray]):
    """One environment of rlstable as a `gymnasium.Env`.

    Actions are float32 in -1 to 1, as a policy of rlstable gives them. `info` has the environment's metrics, and
    `quarantined`: whether a guard ended the episode because the simulation went bad. `model` is the `mujoco.MjModel`,
    None without one.
    """

    def __init__(
        self, simulation: Simulation, action_size: int, fps: float | None, frames: Frames | None, model: Any = None
    ):
        self._simulation, self._frames, self.model = simulation, frames, model
        self.observation_space = observation_space(simulation.observation())
        self.action_space = action_space(action_size)
        self.metadata = metadata(fps)
        self.render_mode = None if frames is None else "rgb_array"
        self._started = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode. With a seed this and the further episodes are reproducible; `options` has no effect."""
        super().reset(seed=seed)
        first = seed is not None or not self._started
        self._started = True
        seen = self._simulation.reset(np.array([_seed_of(self.np_random)]) if first else None)
        return _row(seen.obs, 0), _row(seen.metrics, 0)

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        outcome = self._simulation.step(_checked(action, self.action_space)[None])
        info = {**_row(outcome.final.metrics, 0), "quarantined": bool(outcome.quarantined[0])}
        ended = bool(outcome.terminated[0]), bool(outcome.truncated[0])
        return _row(outcome.final.obs, 0), float(outcome.reward[0]), *ended, info

    def render(self) -> np.ndarray | None:
        return None if self._frames is None else self._frames.draw(self._simulation.positions[0])

    def close(self) -> None:
        if self._frames is not None:
            self._frames.close()
            self._frames = None


class TaskVector(gymnasium.vector.VectorEnv[Any, np.ndarray, np.ndarray]):
    """Environments of rlstable as a `gymnasium.vector.VectorEnv`, all stepped by one call of a compiled program.

    The autoreset mode is `SAME_STEP`: the step that ends an episode returns the first observation of the next episode,
    and `info` has the last observation (`final_obs`) and the metrics (`final_info`) of the episode that has ended.
    Environment i of seed s has the episodes of a `Task` with seed s + i.
    """

    def __init__(self, simulation: Simulation, action_size: int, fps: float | None, frames: Frames | None, count: int):
        self._simulation, self._frames = simulation, frames
        self.num_envs = count
        self.single_observation_space = observation_space(simulation.observation())
        self.single_action_space = action_space(action_size)
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)
        self.metadata = metadata(fps) | {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = None if frames is None else "rgb_array"
        self._started = False

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Starts an episode in every environment; the seed is one number, or a list with one per environment."""
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        if seeds is None and self._started:
            drawn = None
        elif seeds is None:
            drawn = self.np_random.integers(_LARGEST_SEED, size=self.num_envs)
        else:
            if len(seeds) != self.num_envs:
                raise ValueError(
                    f"reset: {len(seeds)} seeds for {self.num_envs} environments; give one per environment"
                )
            drawn = np.array([_seed_of(seeding.np_random(one)[0]) for one in seeds])
            self._np_random, self._np_random_seed = seeding.np_random(seeds[0])
        self._started = True
        seen = self._simulation.reset(drawn)
        return seen.obs, self._infos(seen.metrics)

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        outcome = self._simulation.step(_checked(actions, self.action_space))
        infos = self._infos({**outcome.next.metrics, "quarantined": outcome.quarantined})
        infos |= self._final(outcome)
        return outcome.next.obs, outcome.reward.astype(np.float64), outcome.terminated, outcome.truncated, infos

    def render(self) -> tuple[np.ndarray, ...] | None:
        """One frame per environment."""
        frames = self._frames
        return None if frames is None else tuple(frames.draw(positions) for positions in self._simulation.positions)

    def close_extras(self, **kwargs: Any) -> None:
        if self._frames is not None:
            self._frames.close()
            self._frames = None

    def _final(self, outcome: Outcome) -> dict[str, Any]:
        """`final_obs` and `final_info` if any episode has ended, each with its mask, as Gymnasium's own vectors."""
        finished = outcome.terminated | outcome.truncated
        if not finished.any():
            return {}
        last = np.full(self.num_envs, None, dtype=object)
        for index in np.flatnonzero(finished).tolist():
            last[index] = _row(outcome.final.obs, index)
        ended = {**outcome.final.metrics, "quarantined": outcome.quarantined}
        blank = {name: np.where(finished, x, np.zeros_like(x)) for name, x in ended.items()}
        return {
            "final_obs": last,
            "_final_obs": finished,
            "final_info": blank | {f"_{name}": finished.copy() for name in ended},
            "_final_info": finished.copy(),
        }

    def _infos(self, entries: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Entries that all environments have, each with its mask."""
        return dict(entries) | {f"_{name}": np.ones(self.num_envs, bool) for name in entries}


def observation_space(observation: Observation) -> spaces.Space[Any]:
    """The space of observations with these shapes; rlstable knows no bounds of an environment's observation."""
    if isinstance(observation, Mapping):
        return spaces.Dict({name: observation_space(part) for name, part in observation.items()})
    return spaces.Box(-np.inf, np.inf, observation.shape, np.dtype(observation.dtype))


def action_space(size: int) -> spaces.Box:
    return spaces.Box(-1.0, 1.0, (size,), np.float32)


def metadata(fps: float | None) -> dict[str, Any]:
    return {"render_modes": []} if fps is None else {"render_modes": ["rgb_array"], "render_fps": round(fps)}


def _checked(action: np.ndarray, space: spaces.Space[Any]) -> np.ndarray:
    array = np.asarray(action, np.float32)
    if array.shape != space.shape:
        raise ValueError(f"step: the action has the shape {array.shape}, this environment takes {space.shape}")
    return array


def _seed_of(generator: np.random.Generator) -> int:
    return int(generator.integers(_LARGEST_SEED))


def _row(tree: Any, index: int) -> Any:
    """The part of one environment: numbers of NumPy, arrays, or a dictionary of them."""
    if isinstance(tree, Mapping):
        return {name: _row(part, index) for name, part in tree.items()}
    return tree[index]
