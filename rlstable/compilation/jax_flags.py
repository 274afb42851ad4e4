"""Flags of JAX with which no run works."""

from __future__ import annotations

import jax

from rlstable.config import ConfigError

_GUARDS = "JAX would end the run at the first {}, before a guard can reject it; the guards name the step and the value"
# The rejected value of a flag, and the reason. Other values and flags work, or end with JAX's own error.
_REJECTED = {
    "jax_debug_nans": (True, _GUARDS.format("NaN")),
    "jax_debug_infs": (True, _GUARDS.format("infinity")),
    "jax_enable_x64": (True, "training computes in float32; precision.matmul=highest or x64 is more precise"),
    "jax_disable_jit": (True, "training runs compiled programs; debug reset and step of your environment alone"),
    "jax_numpy_rank_promotion": ("raise", "training and physics broadcast arrays; warn works"),
}


def check_flags() -> None:
    """Checks the flags of JAX, which the shell or the user's program sets.

    Raises:
        ConfigError: A flag has a value with which no run works.
    """
    for name, (rejected, reason) in _REJECTED.items():
        value = getattr(jax.config, name, None)  # another version of JAX may lack a flag
        if value == rejected:
            raise ConfigError(f"{name.upper()}={value}: {reason}; unset {name.upper()}")
