"""Implementations of MJX: MJX in JAX, and MJX-Warp."""

from __future__ import annotations

import importlib.util


def implementation(chosen: str) -> str:
    """`jax` or `warp`. `auto` is warp on an NVIDIA GPU if warp-lang is installed, and jax elsewhere."""
    if chosen != "auto":
        return chosen
    import jax

    on_cuda = jax.default_backend() == "gpu" and "rocm" not in jax.devices()[0].client.platform_version
    return "warp" if on_cuda and importlib.util.find_spec("warp") is not None else "jax"


def uses_warp(env: object) -> bool:
    """Whether an environment steps MJX-Warp, whose kernels belong to one process and compute in float32."""
    model = getattr(getattr(env, "unwrapped", env), "mjx_model", None)
    return str(getattr(getattr(model, "impl", None), "value", "")) == "warp"
