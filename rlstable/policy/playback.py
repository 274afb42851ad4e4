"""Plays a saved policy in its environment, and summarises the returns of its episodes."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import jax
import numpy as np
from rich.table import Table

from rlstable.compilation.xla import enable_program_cache
from rlstable.config import Config, ConfigError
from rlstable.config.run import EnvConfig
from rlstable.device.trees import Env
from rlstable.envs.episodes import Episodes
from rlstable.envs.interface import check
from rlstable.envs.load import Loaded, load
from rlstable.envs.recurrent import with_memory
from rlstable.io.private_folder import require_trust
from rlstable.policy.evaluator import PolicySnapshot, make_evaluator, summarize, valid_episodes
from rlstable.policy.policy import Policy
from rlstable.policy.saved_run import SavedRun
from rlstable.policy.statistics import STATISTICS, Estimate, estimate
from rlstable.supervise.memory import OutOfMemory


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
            table.add_row("interquartile mean" if name == "iqm" else name, f"{estimated.value:,.1f}", interval)
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

    def as_data(self) -> dict[str, object]:
        """The result as JSON data; the returns of aborted episodes are null."""
        valid, counted, metrics = self.valid, summarize(self.episodes), self.episodes.metrics
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
            "metrics": {name: counted[f"eval/episode_{name}"] for name in metrics if name != "reward"},
            "returns": [float(value) if ok else None for value, ok in zip(metrics["reward"], valid, strict=True)],
            "lengths": self.episodes.length.astype(int).tolist(),
        }


def evaluate_run(
    run: SavedRun, episodes: int, deterministic: bool = True, backend: str | None = None, seed: int = 0
) -> EvaluationResult:
    """Plays episodes with a saved policy, with the mean action if `deterministic`, else with samples.

    `backend` is a value of `env.backend`, None for that of training; `seed` is for first states and samples. Raises
    `ConfigError` as `load_policy_environment`, or if the device has not enough memory for one episode.
    """
    config, loaded = load_policy_environment(run, episodes, deterministic, backend)
    evaluator = make_evaluator(
        config, run.policy.networks, lambda _: contextlib.nullcontext(), lambda kind, **_: None, loaded.env
    )
    try:
        [played] = evaluator.play([PolicySnapshot(run.policy.params, run.policy.statistics, jax.random.PRNGKey(seed))])
    except OutOfMemory as error:
        raise ConfigError(
            "episodes: the device has not enough memory for one episode; stop other programs on the device, or set "
            "JAX_PLATFORMS=cpu"
        ) from error
    return EvaluationResult(run, loaded.backend, deterministic, seed, played)


def load_policy_environment(
    run: SavedRun, episodes: int, deterministic: bool, backend: str | None
) -> tuple[Config, Loaded]:
    """The configuration for `evaluate_run`'s arguments, and the environment.

    Raises `ConfigError` if the environment does not support the backend or does not fit the policy, or if the folder
    names code that the user does not trust.
    """
    require_trust(run.folder / "config.yaml", run.config.env, run.trust)
    evaluation = run.config.eval.model_copy(update={"num_envs": episodes, "deterministic": deterministic})
    env = run.config.env if backend is None else run.config.env.model_copy(update={"backend": backend})
    config = run.config.model_copy(update={"eval": evaluation, "env": env})
    enable_program_cache(config.compile_cache)
    loaded = load(config.env, config.eval.env_kwargs, randomize=config.eval.randomize)
    _require_fit(run.policy, loaded.env, config.env, backend)
    return config, loaded


def _require_fit(policy: Policy, env: Env, settings: EnvConfig, backend: str | None) -> None:
    """Checks that the policy can play in an environment, whose class may have changed since training."""
    if settings.source == "import":
        check(env, settings.name, policy.networks.config)
    own = with_memory(env, policy.networks.config)
    observation = policy.networks.select(jax.eval_shape(own.reset, jax.random.PRNGKey(0)).obs, acting=True)
    given, read = (
        {jax.tree_util.keystr(path).replace("'", '"'): math.prod(x.shape) for path, x in leaves}
        for leaves in map(jax.tree_util.tree_leaves_with_path, (observation, policy.statistics.mean))
    )
    differing = [
        f"the class gives {given.get(key, 0)} numbers in obs{key}, the policy reads {read.get(key, 0)}"
        for key in sorted(given)
        if given.get(key) != read.get(key)
    ]
    if env.action_size != policy.networks.action_size:
        differing.append(f"the class takes {env.action_size} actions, the policy gives {policy.networks.action_size}")
    if differing:
        remedy = "choose another backend" if backend else "play the policy with the class that trained it"
        key = "backend" if backend else "env.name"
        raise ConfigError(f"{key}: {settings.name} does not fit the policy: {'; '.join(differing)}; {remedy}")
