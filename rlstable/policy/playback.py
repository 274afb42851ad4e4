"""Evaluates a saved policy: plays episodes and summarises their returns."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
from rich.table import Table

from rlstable.config import ConfigError
from rlstable.envs.vector import Episodes
from rlstable.policy.environment import load_policy_environment
from rlstable.policy.evaluator import PolicySnapshot, make_evaluator, valid_episodes
from rlstable.policy.saved_run import SavedRun
from rlstable.policy.statistics import STATISTICS, Estimate, estimate
from rlstable.supervise.memory_plan import OutOfMemory

_NAMES = {"mean": "mean", "median": "median", "iqm": "interquartile mean"}


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Episodes of a saved policy.

    Attributes:
        run: Whose.
        backend: What simulated them, None where the environment has no choice.
        deterministic: Whether the mean action was played.
        seed: Of the first states and the samples.
        episodes: All that were played, as arrays of the host.
    """

    run: SavedRun
    backend: str | None
    deterministic: bool
    seed: int
    episodes: Episodes

    @property
    def kept(self) -> np.ndarray:
        """Which episodes count, `[B]`: those that were not aborted."""
        return valid_episodes(self.episodes)

    @property
    def returns(self) -> dict[str, Estimate] | None:
        """Statistics of the return, by name; None where every episode was aborted."""
        kept = self.kept
        if not kept.any():
            return None
        values = self.episodes.metrics["reward"][kept]
        return {name: estimate(values, statistic) for name, statistic in STATISTICS.items()}

    @property
    def aborted(self) -> int:
        """How many episodes' simulation went bad."""
        return int((~self.kept).sum())

    @property
    def title(self) -> str:
        """The played episodes, in one line."""
        action = "of the mean action" if self.deterministic else "of sampled actions"
        physics = "" if self.backend is None else f", {self.backend}"
        return f"{self.run.config.env.name}{physics}: {len(self.kept):,} episodes {action}, {self.run.checkpoint}"

    def table(self) -> Table:
        """The statistics of the return, for people."""
        table = Table("return", "value", "95 % interval", box=None, pad_edge=True)
        for column in table.columns[1:]:
            column.justify = "right"
        for name, found in (self.returns or {}).items():
            interval = "-" if found.low is None else f"{found.low:,.1f} to {found.high:,.1f}"
            table.add_row(_NAMES[name], f"{found.value:,.1f}", interval)
        return table

    def lines(self) -> list[str]:
        """Further remarks, for people."""
        kept = self.kept
        aborted = f"{self.aborted:,} of {len(kept):,} episodes were aborted"
        if not kept.any():
            return [f"{aborted}: there is no return to speak of"]
        returns, lengths = self.episodes.metrics["reward"][kept], self.episodes.length[kept]
        return [
            f"returns from {returns.min():,.1f} to {returns.max():,.1f}, standard deviation {returns.std():,.1f}",
            f"length {lengths.mean():,.1f} of {self.run.config.env.episode_length:,} steps on average",
            aborted + (", and left out" if self.aborted else ""),
        ]

    def as_data(self) -> dict[str, Any]:
        """All of it as JSON data; the returns of aborted episodes are null."""
        kept = self.kept
        metrics = {name: float(values[kept].mean()) if kept.any() else None for name, values in self._others().items()}
        returns = self.episodes.metrics["reward"]
        return {
            "run": str(self.run.folder),
            "env": self.run.config.env.name,
            "backend": self.backend,
            "iteration": self.run.iteration,
            "step": self.run.step,
            "deterministic": self.deterministic,
            "seed": self.seed,
            "episodes": len(kept),
            "aborted_share": self.aborted / len(kept),
            "return": None if self.returns is None else {name: found._asdict() for name, found in self.returns.items()},
            "length": float(self.episodes.length[kept].mean()) if kept.any() else None,
            "metrics": metrics,
            "returns": [float(value) if ok else None for value, ok in zip(returns, kept, strict=True)],
            "lengths": self.episodes.length.astype(int).tolist(),
        }

    def _others(self) -> dict[str, Any]:
        return {name: values for name, values in self.episodes.metrics.items() if name != "reward"}


def evaluate_run(
    run: SavedRun, episodes: int, deterministic: bool = True, backend: str | None = None, seed: int = 0
) -> EvaluationResult:
    """Plays episodes with a saved policy.

    Args:
        run: Whose.
        episodes: How many.
        deterministic: The mean action, or a sample.
        backend: Physics as `env.backend` names it; None for that of the training.
        seed: Of the first states and the samples.

    Raises:
        ConfigError: As for `load_policy_environment`, or memory does not suffice for a single episode.
    """
    stage = load_policy_environment(run, episodes, deterministic, backend)
    evaluator = make_evaluator(
        stage.config, run.policy.networks, lambda _: contextlib.nullcontext(), lambda kind, **_: None, stage.env
    )
    try:
        [played] = evaluator.play([PolicySnapshot(run.policy.params, run.policy.statistics, jax.random.PRNGKey(seed))])
    except OutOfMemory as error:
        raise ConfigError(
            "episodes: the device has no memory for a single one; is something else training on it? JAX_PLATFORMS=cpu "
            "leaves it alone"
        ) from error
    return EvaluationResult(run, stage.backend, deterministic, seed, played)
