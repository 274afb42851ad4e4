"""Evaluates a saved policy: plays episodes and summarises their returns."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
from rich.table import Table

from rlstable.config import ConfigError
from rlstable.envs.episodes import Episodes
from rlstable.policy.environment import load_policy_environment
from rlstable.policy.evaluator import PolicySnapshot, make_evaluator, summarize, valid_episodes
from rlstable.policy.saved_run import SavedRun
from rlstable.policy.statistics import STATISTICS, Estimate, estimate
from rlstable.supervise.memory_plan import OutOfMemory

_NAMES = {"mean": "mean", "median": "median", "iqm": "interquartile mean"}


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Episodes of a saved policy, and statistics of their returns."""

    run: SavedRun
    backend: str | None  # None if the environment offers no choice
    deterministic: bool
    seed: int  # of the first states and the action samples
    episodes: Episodes  # all played episodes, as host arrays

    @property
    def valid(self) -> np.ndarray:
        """Whether an episode counts, bool `[B]`: it was not aborted and its return is finite."""
        return valid_episodes(self.episodes)

    @property
    def returns(self) -> dict[str, Estimate] | None:
        """Statistics of the return, by name; None if no episode counts."""
        values = self.episodes.metrics["reward"][self.valid]
        return {name: estimate(values, own) for name, own in STATISTICS.items()} if values.size else None

    @property
    def aborted(self) -> int:
        return int((~self.valid).sum())

    @property
    def title(self) -> str:
        """Environment, number of episodes and checkpoint, in one line."""
        action = "of the mean action" if self.deterministic else "of sampled actions"
        physics = "" if self.backend is None else f", {self.backend}"
        return f"{self.run.config.env.name}{physics}: {len(self.valid):,} episodes {action}, {self.run.checkpoint}"

    def table(self) -> Table:
        """The statistics of the return as a table for the terminal."""
        table = Table("return", "value", "95 % interval", box=None, pad_edge=True)
        for column in table.columns[1:]:
            column.justify = "right"
        for name, estimated in (self.returns or {}).items():
            interval = "-" if estimated.low is None else f"{estimated.low:,.1f} to {estimated.high:,.1f}"
            table.add_row(_NAMES[name], f"{estimated.value:,.1f}", interval)
        return table

    def lines(self) -> list[str]:
        """Lines for the terminal below the table: range of returns, episode length, aborted episodes."""
        valid = self.valid
        aborted = f"{self.aborted:,} of {len(valid):,} episodes were aborted"
        if not valid.any():
            return [f"{aborted}: no episode has a return"]
        returns, lengths = self.episodes.metrics["reward"][valid], self.episodes.length[valid]
        return [
            f"returns from {returns.min():,.1f} to {returns.max():,.1f}, standard deviation {returns.std():,.1f}",
            f"length {lengths.mean():,.1f} of {self.run.config.env.episode_length:,} steps on average",
            aborted + (", and left out" if self.aborted else ""),
        ]

    def as_data(self) -> dict[str, Any]:
        """The result as JSON data; the returns of aborted episodes are null."""
        valid, counted = self.valid, summarize(self.episodes)
        returns, others = self.episodes.metrics["reward"], [name for name in self.episodes.metrics if name != "reward"]
        return {
            "run": str(self.run.folder),
            "env": self.run.config.env.name,
            "backend": self.backend,
            "iteration": self.run.iteration,
            "step": self.run.step,
            "deterministic": self.deterministic,
            "seed": self.seed,
            "episodes": len(valid),
            "aborted_share": self.aborted / len(valid),
            "return": None if self.returns is None else {name: one._asdict() for name, one in self.returns.items()},
            "length": counted["eval/avg_episode_length"],
            "metrics": {name: counted[f"eval/episode_{name}"] for name in others},
            "returns": [float(value) if ok else None for value, ok in zip(returns, valid, strict=True)],
            "lengths": self.episodes.length.astype(int).tolist(),
        }


def evaluate_run(
    run: SavedRun, episodes: int, deterministic: bool = True, backend: str | None = None, seed: int = 0
) -> EvaluationResult:
    """Plays episodes with a saved policy.

    Args:
        run: Run with the policy.
        episodes: Number of episodes.
        deterministic: Whether the policy plays the mean action instead of a sample.
        backend: Physics backend, a value of `env.backend`; None for the backend of training.
        seed: Seed of the first states and the action samples.

    Raises:
        ConfigError: As for `load_policy_environment`, or the device has not enough memory for one episode.
    """
    loaded = load_policy_environment(run, episodes, deterministic, backend)
    evaluator = make_evaluator(
        loaded.config, run.policy.networks, lambda _: contextlib.nullcontext(), lambda kind, **_: None, loaded.env
    )
    try:
        [played] = evaluator.play([PolicySnapshot(run.policy.params, run.policy.statistics, jax.random.PRNGKey(seed))])
    except OutOfMemory as error:
        raise ConfigError(
            "episodes: the device has not enough memory for one episode; stop other programs on the device, or set "
            "JAX_PLATFORMS=cpu"
        ) from error
    return EvaluationResult(run, loaded.backend, deterministic, seed, played)
