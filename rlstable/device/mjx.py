"""Implementations of MJX: MJX in JAX, and MJX-Warp."""

from __future__ import annotations

import importlib.util
from typing import Any


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


def without_solver_lines(model: Any) -> Any:
    """A model of MJX-Warp that does not print when a solver reaches its limit of iterations.

    Models for training have few iterations on purpose, and the kernels print a line for every such environment and
    step. Other models are returned as they are.
    """
    own: Any = getattr(model.opt, "_impl", None)
    if not hasattr(own, "warn_overflow"):
        return model
    from mujoco.mjx.third_party.mujoco_warp import OverflowType

    shown = own.warn_overflow & ~int(OverflowType.ITERATIONS | OverflowType.LS_ITERATIONS)
    return model.replace(opt=model.opt.replace(_impl=own.replace(warn_overflow=shown)))
