"""Which implementation of MJX an environment computes with."""

from __future__ import annotations


def uses_warp(env: object) -> bool:
    """Whether an environment steps MJX-Warp, whose kernels belong to one process and compute in float32."""
    model = getattr(getattr(env, "unwrapped", env), "mjx_model", None)
    return str(getattr(getattr(model, "impl", None), "value", "")) == "warp"
