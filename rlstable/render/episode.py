"""Recorded episodes of a policy, which pages and films draw; needs no JAX."""

from __future__ import annotations

import dataclasses

import mujoco
import numpy as np


@dataclasses.dataclass(frozen=True)
class Recording:
    """One episode."""

    name: str  # for example `best`
    positions: np.ndarray  # generalized positions of the first state and after every action, [1 + T, nq]
    rewards: np.ndarray  # of every action, [T]
    aborted: bool  # whether a guard ended the episode; the bad state is not recorded
    # Velocity forward and sideways in m/s and turning in rad/s, commanded and moved, [2, 1 + T, 3]; None: no command.
    motion: np.ndarray | None = None

    @property
    def total(self) -> float:
        return float(self.rewards.sum())

    def start(self, seconds: float | None, seconds_per_action: float) -> Recording:
        """The first simulated seconds of the episode, at least one action; the whole episode for None."""
        count = len(self.rewards) if seconds is None else max(1, round(seconds / seconds_per_action))
        if count >= len(self.rewards):
            return self
        motion = None if self.motion is None else self.motion[:, : count + 1]
        return Recording(self.name, self.positions[: count + 1], self.rewards[:count], aborted=False, motion=motion)


@dataclasses.dataclass(frozen=True)
class RecordedEpisodes:
    """Some episodes of one policy, best first."""

    title: str  # environment, physics backend and training step
    model: mujoco.MjModel
    seconds: float  # simulated time per action
    recordings: tuple[Recording, ...]
