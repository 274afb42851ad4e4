"""Policy and value network over normalised observations, with limiters and the rescaling that keeps their outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import DTypeLike

from rlstable.config.guards import LimiterConfig
from rlstable.config.networks import NetworkConfig
from rlstable.config.schema import ConfigError
from rlstable.device.trees import MEMORY, Observation, Params, PyTree
from rlstable.guards import limiters
from rlstable.ppo import normalizer
from rlstable.ppo.distributions import Normal, TanhNormal
from rlstable.ppo.modules import MLP, GaussianHead, TanhGaussianHead, activation, initializer
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.records import Collected

Activity = dict[str, jax.Array]
_CELL, _INPUTS = "gru", ("ir", "iz", "in")  # parameters of the GRU, and its layers that read the observation


@dataclasses.dataclass(frozen=True)
class Networks:
    """Policy and value network, with observation normalisation before and limiters after them.

    Attributes:
        normalize: Whether observations are normalised.
        dtype: Type of the hidden layers.
    """

    config: NetworkConfig
    limits: LimiterConfig
    action_size: int
    normalize: bool
    dtype: DTypeLike = jnp.float32

    def init(self, key: jax.Array, observation: Observation) -> Params:
        """Initial float32 parameters, from the shapes of one observation, as `select` returns it."""
        key_policy, key_value = jax.random.split(key)
        policy_input = jnp.zeros((1, *self._input(observation, self.config.policy_obs_key).shape))
        value_input = jnp.zeros((1, *self._input(observation, self.config.value_obs_key).shape))
        if self._cell is None:
            policy = self._policy.init(key_policy, policy_input)
        else:
            memory = jnp.zeros((1, self.config.recurrent_size))
            cell = self._cell.init(jax.random.fold_in(key_policy, 0), memory, policy_input)
            head = self._policy.init(key_policy, memory)
            policy = {"params": {**head["params"], _CELL: cell["params"]}}
        return {"policy": policy, "value": self._value.init(key_value, value_input)}

    def distribution(self, params: Params, statistics: Statistics, observation: Observation) -> tuple[Normal, Activity]:
        """The action distribution, and per active limiter the share of action elements at its bound, `[...]`."""
        inputs = self._preprocessed(statistics, observation, self.config.policy_obs_key)
        return self._distribution(params, inputs)

    def act(
        self, params: Params, statistics: Statistics, observation: Observation, memory: jax.Array | None
    ) -> tuple[Normal, jax.Array | None]:
        """The action distribution of one step, and the new state of a recurrent policy, `[..., recurrent_size]`."""
        if memory is None:
            return self.distribution(params, statistics, observation)[0], None
        inputs = self._preprocessed(statistics, observation, self.config.policy_obs_key)
        memory = self._remembered(params, memory, inputs)
        return self._distribution(params, memory)[0], memory

    def over_time(self, params: Params, statistics: Statistics, data: Collected) -> tuple[Normal, Activity]:
        """Distributions of unrolls `[T, B]`; a recurrent policy runs through each from the state at its start.

        The state is 0 after the end of an episode, as in the environments. Gradients flow back to the unroll's start.
        """
        if data.memory is None:
            return self.distribution(params, statistics, data.observation)
        inputs = self._preprocessed(statistics, data.observation, self.config.policy_obs_key)
        ended = (data.termination + data.truncation) > 0
        begins = jnp.concatenate([jnp.zeros_like(ended[:1]), ended[:-1]])

        def step(memory: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            begin, inputs = now
            memory = self._remembered(params, jnp.where(begin[..., None], 0.0, memory), inputs)
            return memory, memory

        return self._distribution(params, jax.lax.scan(step, data.memory[0], (begins, inputs))[1])

    def memory(self, observation: Observation) -> jax.Array | None:
        """The state of a recurrent policy in an observation of its environment (`envs.recurrent`); None without one."""
        return None if self.config.recurrent is None else observation[MEMORY]

    def _remembered(self, params: Params, memory: jax.Array, inputs: jax.Array) -> jax.Array:
        assert self._cell is not None
        own = {"params": params["policy"]["params"][_CELL]}
        return self._cell.apply(own, memory, inputs)[0].astype(jnp.float32)

    def _distribution(self, params: Params, inputs: jax.Array) -> tuple[Normal, Activity]:
        """The action distribution for inputs of the policy's layers."""
        loc, raw_scale = _apply_flat(self._policy, params["policy"], inputs)
        low, high = self.limits.policy_std_min, self.limits.policy_std_max
        scale = limiters.bounded(raw_scale, low, high)
        activity = {}
        if low is not None or high is not None:
            activity["policy_std"] = jnp.mean(limiters.outside(raw_scale, low, high), axis=-1)
        kind = TanhNormal if self.config.distribution_type == "tanh_normal" else Normal
        return kind(loc, scale), activity

    def value(self, params: Params, statistics: Statistics, observation: Observation) -> jax.Array:
        """The value estimate, `[...]`; with the distributional critic the mean of its quantiles."""
        if self.config.use_distributional_critic:
            return jnp.mean(self.value_quantiles(params, statistics, observation), axis=-1)
        outputs = self._value_outputs(params, statistics, observation)
        return _in_reward_units(jnp.squeeze(outputs, axis=-1), statistics)

    def value_quantiles(self, params: Params, statistics: Statistics, observation: Observation) -> jax.Array:
        """The quantiles of the return that the distributional critic estimates, `[..., N]`."""
        return _in_reward_units(self._value_outputs(params, statistics, observation), statistics)

    def rescale_value(self, params: Params, old: Statistics, new: Statistics) -> Params:
        """Rescales the value network's last layer so that new target statistics do not change its value estimates.

        The output-preserving half of PopArt (van Hasselt et al. 2016, arXiv:1602.07714).
        """
        name = f"hidden_{len(self.config.value_hidden_layer_sizes)}"
        layers = dict(params["value"]["params"])
        last = layers[name]
        layers[name] = {
            "kernel": last["kernel"] * (old.std / new.std),
            "bias": (last["bias"] * old.std + old.mean - new.mean) / new.std,
        }
        return {**params, "value": {"params": layers}}

    def rescale_inputs(self, params: Params, old: Statistics, new: Statistics) -> Params:
        """Rescales the first layers so that new observation statistics do not change what the networks compute.

        An element that was constant has untrained weights. The weights may shrink, but not grow with its new scale.
        """
        return {
            "policy": self._rescaled(params["policy"], old, new, self.config.policy_obs_key),
            "value": self._rescaled(params["value"], old, new, self.config.value_obs_key),
        }

    def _rescaled(self, params: Params, old: Statistics, new: Statistics, key: str) -> Params:
        """The parameters of one network, whose first layer has the name `hidden_0` at any depth."""
        layers = dict(params["params"])
        if _CELL in layers:
            cell = {
                name: self._rescaled_layer(x, old, new, key) if name in _INPUTS else x
                for name, x in layers[_CELL].items()
            }
            return {"params": {**layers, _CELL: cell}}
        if "hidden_0" not in layers:
            name = "mlp" if "mlp" in layers else "MLP_0"
            if name not in layers:  # a linear policy
                return params
            return {"params": {**layers, name: self._rescaled({"params": layers[name]}, old, new, key)["params"]}}
        return {"params": {**layers, "hidden_0": self._rescaled_layer(layers["hidden_0"], old, new, key)}}

    def _rescaled_layer(self, first: Params, old: Statistics, new: Statistics, key: str) -> Params:
        """A layer of observations, rescaled."""
        before, after = self._statistics_of(old, key), self._statistics_of(new, key)
        factor = after.std / before.std
        factor = jnp.where(normalizer.constant(before), jnp.minimum(factor, 1.0), factor)
        kernel = first["kernel"] * factor[:, None]
        return {"kernel": kernel, "bias": first["bias"] + ((after.mean - before.mean) / after.std) @ kernel}

    def select(self, observation: Observation, acting: bool = False) -> Observation:
        """The parts of an observation that the networks read; other parts are neither stored nor normalised.

        `acting` selects the policy's part only: a robot has no privileged observations for the critic. Raises
        `ConfigError` if the environment has no observation with a configured key.
        """
        if not isinstance(observation, Mapping):
            return observation
        selected = {}
        for field in ("policy_obs_key",) if acting else ("policy_obs_key", "value_obs_key"):
            key = getattr(self.config, field)
            if key not in observation:
                raise ConfigError(
                    f"network.{field}: the observation has no {key!r}; it has {', '.join(sorted(observation))}"
                )
            selected[key] = observation[key]
        return selected

    def preprocess(self, statistics: Statistics, observation: Observation) -> Observation:
        """Normalises and clips observations; networks `without_preprocessing` read the result.

        SGD reads the same observations in every epoch, so it preprocesses them once.
        """
        if self.normalize:
            observation = normalizer.normalize(observation, statistics)
        return jax.tree.map(lambda x: limiters.clip(x, self.limits.observation), observation)

    def beyond(self, statistics: Statistics, observation: Observation, limit: float) -> jax.Array:
        """Share of the policy's normalised inputs beyond `limit`, `[...]`."""
        inputs = self._input(observation, self.config.policy_obs_key)
        if self.normalize:
            inputs = normalizer.normalize(inputs, self._statistics_of(statistics, self.config.policy_obs_key))
        return jnp.mean(limiters.beyond(inputs, limit), axis=-1)

    @property
    def without_preprocessing(self) -> Networks:
        """The same networks for observations that are already normalised and clipped."""
        limits = self.limits.model_copy(update={"observation": None})
        return dataclasses.replace(self, normalize=False, limits=limits)

    def _value_outputs(self, params: Params, statistics: Statistics, observation: Observation) -> jax.Array:
        inputs = self._preprocessed(statistics, observation, self.config.value_obs_key)
        return _apply_flat(self._value, params["value"], inputs).astype(jnp.float32)

    def _input(self, observation: Observation, key: str) -> Observation:
        return observation[key] if isinstance(observation, Mapping) else observation

    def _preprocessed(self, statistics: Statistics, observation: Observation, key: str) -> jax.Array:
        return self.preprocess(self._statistics_of(statistics, key), self._input(observation, key))

    def _statistics_of(self, statistics: Statistics, key: str) -> Statistics:
        """The statistics of the part of the observation with this key."""
        parts = (self._input(x, key) for x in (statistics.mean, statistics.variance, statistics.std))
        return Statistics(statistics.count, *parts)

    @property
    def output_size(self) -> int:
        """Elements of what the environment receives: an action, and the new state of a recurrent policy."""
        return self.action_size + (0 if self._cell is None else self.config.recurrent_size)

    @property
    def _cell(self) -> linen.GRUCell | None:
        if self.config.recurrent is None:
            return None
        return linen.GRUCell(self.config.recurrent_size, dtype=self.dtype)

    @property
    def _policy(self) -> linen.Module:
        head = TanhGaussianHead if self.config.distribution_type == "tanh_normal" else GaussianHead
        return head(self.action_size, self.config, self.dtype)

    @property
    def _value(self) -> linen.Module:
        init = initializer("value_network_kernel_init", self.config)
        outputs = self.config.num_quantiles if self.config.use_distributional_critic else 1
        sizes = (*self.config.value_hidden_layer_sizes, outputs)
        return MLP(sizes, activation(self.config), init, self.dtype, layer_norm=self.config.value_layer_norm)


def joined(action: jax.Array, memory: jax.Array | None) -> jax.Array:
    """The action for the environment of a policy, with the policy's new state if the policy is recurrent."""
    return action if memory is None else jnp.concatenate([action, memory], axis=-1)


def _in_reward_units(values: jax.Array, statistics: Statistics) -> jax.Array:
    """Outputs of the value network in units of the value targets."""
    if statistics.value is None:
        return values
    return values * statistics.value.std + statistics.value.mean


def _apply_flat(network: linen.Module, params: Params, inputs: jax.Array) -> PyTree:
    """Applies a network to `[..., in]`, with all leading axes merged into one.

    The gradient of a kernel is then one matrix product. With several batch axes XLA would first transpose the output
    gradient, and on a CPU this copy takes as long as the product.
    """
    leading = inputs.shape[:-1]
    if len(leading) < 2:
        return network.apply(params, inputs)
    outputs = network.apply(params, inputs.reshape(-1, inputs.shape[-1]))
    return jax.tree.map(lambda x: x.reshape(*leading, x.shape[-1]), outputs)
