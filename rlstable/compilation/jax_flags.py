"""Flags of JAX with which no run works."""

from __future__ import annotations

import jax

from rlstable.config import ConfigError

_GUARDS = "JAX would end the run at the first {}, before a guard can reject it; the guards name the step and the value"
_TRANSFERS = "each run copies random keys and metrics between host and device"
# The rejected values of a flag, and the reason. Other values and flags work.
_ON = (True,)
_DISALLOW = ("disallow", "disallow_explicit")
_REJECTED = {
    "jax_debug_nans": (_ON, _GUARDS.format("NaN")),
    "jax_debug_infs": (_ON, _GUARDS.format("infinity")),
    "jax_enable_x64": (_ON, "training computes in float32; precision.matmul=highest or x64 is more precise"),
    "jax_disable_jit": (_ON, "training runs compiled programs; debug reset and step of your environment alone"),
    "jax_no_tracing": (_ON, "training traces its programs"),
    "jax_numpy_rank_promotion": (("raise",), "training and physics broadcast arrays; warn works"),
    "jax_numpy_dtype_promotion": (("strict",), "training and physics mix types of numbers"),
    "jax_enable_custom_prng": (_ON, "random keys are arrays of integers, as in Brax; JAX_DEFAULT_PRNG_IMPL works"),
    "jax_legacy_prng_key": (("error",), "random keys are arrays of integers, as in Brax; warn works"),
    "jax_transfer_guard": (_DISALLOW, _TRANSFERS),
    "jax_transfer_guard_host_to_device": (_DISALLOW, _TRANSFERS),
    "jax_transfer_guard_device_to_host": (_DISALLOW, _TRANSFERS),
    "jax_transfer_guard_device_to_device": (_DISALLOW, _TRANSFERS),
}


def check_flags() -> None:
    """Checks the flags of JAX, which the shell or the user's program sets.

    Raises:
        ConfigError: A flag has a value with which no run works.
    """
    for name, (rejected, reason) in _REJECTED.items():
        value = getattr(jax.config, name, None)  # another version of JAX may lack a flag
        if value in rejected:
            raise ConfigError(f"{name.upper()}={value}: {reason}; unset {name.upper()}")
