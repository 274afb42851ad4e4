"""Converts parameters to the form of Brax's PPO and back: what `brax.training.agents.ppo` trains, saves and loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from brax.training.acme import running_statistics
from brax.training.types import UInt64

from rlstable.config import ConfigError
from rlstable.config.networks import NetworkConfig
from rlstable.config.ppo import PPOConfig
from rlstable.device.counter import WideCounter
from rlstable.device.trees import Observation, Params, PyTree
from rlstable.ppo.normalizer import Statistics

# (RunningStatisticsState, parameters of the policy, parameters of the value network)
BraxParams = tuple[running_statistics.RunningStatisticsState, Params, Params]


def to_brax(
    ppo: PPOConfig, network: NetworkConfig, params: Params, statistics: Statistics, observation: Observation
) -> BraxParams:
    """The result of `brax.training.agents.ppo.train`, from the parameters and statistics of a run.

    Parts of `observation`, the shapes of a whole one, that no network reads get mean 0 and deviation 1.
    """
    policy, value = params["policy"], params["value"]
    if network.distribution_type == "tanh_normal":
        policy = {"params": policy["params"]["mlp"]}
    if network.use_distributional_critic:
        value = {"params": {"MLP_0": value["params"]}}
    empty = running_statistics.init_state(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), observation),
        std_eps=ppo.normalize_observations_std_eps,
        mode=ppo.normalize_observations_mode,
    )
    if not ppo.normalize_observations:
        return empty, policy, value
    count = statistics.count
    # Brax's `welford` mode keeps the sum of squared deviations, its `ema` mode the variance under the same name.
    factor = count.to_float() if ppo.normalize_observations_mode == "welford" else 1.0
    summed = jax.tree.map(lambda x: x * factor, statistics.variance)
    converted = empty.replace(
        count=UInt64(hi=count.hi, lo=count.lo),
        mean=_completed(statistics.mean, empty.mean),
        std=_completed(statistics.std, empty.std),
        summed_variance=_completed(summed, empty.summed_variance),
    )
    return converted, policy, value


def from_brax(
    ppo: PPOConfig,
    network: NetworkConfig,
    restored: BraxParams,
    params: Params,
    statistics: Statistics,
    *,
    value: bool = True,
) -> tuple[Params, Statistics]:
    """Converts `restored` parameters in Brax's form to those of a run, which they must fit.

    Without `value` the parameters of the value network stay. Raises ConfigError if a shape differs.
    """
    brax_statistics, policy, brax_value = restored
    policy = _plain(policy)
    if network.distribution_type == "tanh_normal":
        policy = {"params": {"mlp": policy["params"]}}
    new: Params = {**params, "policy": _fitted(policy, params["policy"], "policy")}
    if value:
        brax_value = _plain(brax_value)
        if network.use_distributional_critic:
            brax_value = {"params": brax_value["params"]["MLP_0"]}
        new["value"] = _fitted(brax_value, params["value"], "value network")
    if not ppo.normalize_observations:
        return new, statistics
    count = brax_statistics.count
    count = WideCounter.of((int(count.hi) << 32) | int(count.lo) if hasattr(count, "hi") else int(count))
    divisor = jnp.maximum(count.to_float(), 1.0) if ppo.normalize_observations_mode == "welford" else 1.0
    mean, std, summed = (
        _fitted(_selected(part, statistics.mean), statistics.mean, "observation statistics")
        for part in (brax_statistics.mean, brax_statistics.std, brax_statistics.summed_variance)
    )
    variance = jax.tree.map(lambda x: x / divisor, summed)
    return new, dataclasses.replace(statistics, count=count, mean=mean, std=std, variance=variance)


def _completed(part: Observation, whole: Observation) -> Observation:
    return {**whole, **part} if isinstance(whole, Mapping) else part


def _selected(whole: Observation, part: Observation) -> Observation:
    return {key: whole[key] for key in part if key in whole} if isinstance(part, Mapping) else whole


def _plain(tree: PyTree) -> PyTree:
    """Nested dictionaries in the place of other mappings, such as flax's FrozenDict."""
    return {key: _plain(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def _fitted(restored: PyTree, like: PyTree, what: str) -> PyTree:
    """Restored arrays with the types of the run's."""
    shapes = {jax.tree_util.keystr(path): np.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(restored)}
    expected = {jax.tree_util.keystr(path): np.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(like)}
    for name in sorted(shapes.keys() | expected.keys()):
        if shapes.get(name) != expected.get(name):
            raise ConfigError(
                f"restore: {name or 'the array'} of the {what} has shape {shapes.get(name, 'missing')} in what is "
                f"restored and {expected.get(name, 'missing')} here; train the same networks on the same observations"
            )
    return jax.tree.map(lambda x, y: jnp.array(x, y.dtype), restored, like)  # a copy: training donates its state
