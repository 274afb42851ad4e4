"""Type names for JAX data that JAX leaves untyped."""

from __future__ import annotations

from typing import Any

PyTree = Any
Params = dict[str, Any]  # of the networks, by network: `{"policy", "value"}`
EnvState = Any  # of brax.envs.State or Playground's mjx_env.State; batched in vectorised environments
Observation = Any  # a vector, or a dictionary of vectors
