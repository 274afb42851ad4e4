"""Brax's callbacks during a run: `policy_params_fn`, checkpoints in Brax's format, and `progress_fn`."""

from __future__ import annotations

import collections
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from brax.training.agents.ppo import checkpoint

from rlstable.brax_ppo.params import BraxParams, to_brax
from rlstable.config.ppo import brax_epochs
from rlstable.config.schema import expand_home
from rlstable.device import sharding
from rlstable.device.trees import Observation, PyTree
from rlstable.runner.log import Row
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.seeds import Result
from rlstable.supervise.stop_reasons import StopReason

Metrics = dict[str, float]
MakePolicy = Callable[..., Callable[[Observation, jax.Array], tuple[jax.Array, PyTree]]]


class BraxCalls:
    """Callback of a run that makes Brax's calls at Brax's steps. `metrics` are those of the last evaluation."""

    loop: TrainingLoop  # set before the run starts

    def __init__(self, arguments: dict[str, Any], make_policy: MakePolicy, observation: Observation):
        self.metrics: Metrics = {}
        self._arguments = arguments
        self._make_policy = make_policy
        self._observation = observation
        self._rows: list[Row] = []
        self._since_logged: list[Row] = []
        self._eval_names: tuple[str, ...] = ("eval/episode_reward", "eval/episode_reward_std")
        self._logged: Metrics = {}
        self._logged_at = 0
        self._epoch_at = 0
        self._evaluates = arguments["run_evals"] and arguments["num_evals"] > 0
        self._epochs = brax_epochs(arguments)
        self._log_steps = arguments["training_metrics_steps"] or self._epochs.iteration_steps

    @property
    def params(self) -> BraxParams:
        """A copy of the present parameters in Brax's form; the next iteration reuses the memory of the original."""
        run = self.loop.single
        params, statistics = jax.tree.map(jnp.array, sharding.first_device(run.parameters))
        return to_brax(run.config.ppo, run.config.network, params, statistics, self._observation)

    def __call__(self, step: int, row: Row) -> None:
        if "training/iteration" in row:
            self._rows.append(row)
            self._since_logged.append(row)
        if self._arguments["log_training_metrics"] and step - self._logged_at >= self._log_steps:
            # Intervals in which no episode ended repeat the numbers of earlier episodes.
            self._logged |= self._episode_metrics()
            self._arguments["progress_fn"](step, dict(self._logged))
            self._since_logged, self._logged_at = [], step
        evaluated = "eval/episode_reward" in row
        at_epoch = self.loop.single.host.step % self._epochs.steps == 0
        if evaluated or (not self._evaluates and at_epoch):
            self._after_epoch(step, row)
        elif self._evaluates and at_epoch:
            # A state guard tripped in this iteration, so the run neither evaluates nor saves its policy.
            self._arguments["progress_fn"](step, self._training_metrics() | dict.fromkeys(self._eval_names, math.nan))

    def finish(self, result: Result) -> None:
        """Makes the calls that the last iteration lacked, and takes the return of a resumed complete run."""
        host = self.loop.single.host
        trained = host.logged_step
        if self._rows and trained > self._epoch_at and result.stop_reason is StopReason.completed:
            self._after_epoch(trained, {})
        if not self.metrics and self._evaluates and host.last_return is not None:
            self.metrics = {"eval/episode_reward": float(host.last_return)}

    def _after_epoch(self, step: int, row: Row) -> None:
        self._epoch_at = step
        arguments, params = self._arguments, self.params
        if step > 0:
            arguments["policy_params_fn"](step, self._make_policy, params)
            if arguments["save_checkpoint_path"] is not None:
                self._save(step, params)
        evaluation = {name: value for name, value in row.items() if name.startswith("eval/")}
        self._eval_names = tuple(evaluation) or self._eval_names
        metrics = self._training_metrics() | _floats(evaluation)
        if arguments["num_evals"] > 0:
            self.metrics = metrics
            arguments["progress_fn"](step, metrics)

    def _training_metrics(self) -> Metrics:
        """Means over the iterations since the last call of `progress_fn`."""
        metrics = _floats(_means(self._rows, "training/"))
        self._rows = []
        return metrics

    def _save(self, step: int, params: BraxParams) -> None:
        config = checkpoint.network_config(
            # Plain numbers: Brax 0.14.2 saves its own `specs.Array` as text that it cannot load.
            observation_size=jax.tree.map(lambda x: x.shape[-1], self._observation),
            action_size=self._arguments["environment"].action_size,
            normalize_observations=self._arguments["normalize_observations"],
            network_factory=self._arguments["network_factory"],
        )
        settings = config.network_factory_kwargs
        for name in [name for name, value in settings.items() if value is None]:
            del settings[name]  # Brax 0.14.2 saves an initializer of None and then cannot load it
        checkpoint.save(absolute(self._arguments["save_checkpoint_path"]), step, params, config)

    def _episode_metrics(self) -> Metrics:
        """Training metrics under the names that Brax's `EpisodeMetricsLogger` gives them."""
        means = _means(self._since_logged, "training/") | _means(self._since_logged, "episode/")
        return _floats({f"episode/{name.partition('/')[2]}": value for name, value in means.items()})


def _means(rows: Sequence[Row], prefix: str) -> dict[str, float]:
    """The means of metrics over rows; of counters and clocks the last value."""
    values = collections.defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if name.startswith(prefix) and value is not None:
                values[name].append(value)
    last = ("training/walltime", "training/iteration", "training/updates", "training/episodes")
    return {name: xs[-1] if name in last else sum(xs) / len(xs) for name, xs in values.items()}


def _floats(metrics: Mapping[str, object]) -> Metrics:
    """Plain floats; NaN where an evaluation had no episode that counts."""
    return {
        name: math.nan if value is None else float(value)
        for name, value in metrics.items()
        if value is None or isinstance(value, numbers.Real)
    }


def absolute(path: str | Path) -> str:
    """A path as Orbax needs it; addresses such as `gs://...` stay as they are."""
    return str(path) if "://" in str(path) else str(expand_home(path).absolute())
