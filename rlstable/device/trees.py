"""Type names for JAX data that JAX leaves untyped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import jax

PyTree = Any
Params = dict[str, Any]  # of the networks, by network: `{"policy", "value"}`
EnvState = Any  # of brax.envs.State or Playground's mjx_env.State; batched in vectorised environments
Observation = Any  # a vector, or a dictionary of vectors
MEMORY = "policy_memory"  # key of the observation that holds the state of a recurrent policy

# An entry of an environment's `info`, int32: training sets it to the environment steps trained before the iteration.
TRAINED_STEPS = "trained_steps"
# The entry of `info` that outlives episodes, in Playground's BraxAutoResetWrapper too.
PRESERVED = "AutoResetWrapper_preserve_info"


class Env(Protocol):
    """One environment with Brax's interface."""

    @property
    def action_size(self) -> int: ...

    def reset(self, rng: jax.Array) -> EnvState: ...

    def step(self, state: EnvState, action: jax.Array) -> EnvState: ...
