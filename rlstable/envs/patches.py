"""Functions of Brax, MJX and Playground that need a replacement while an environment is built or stepped."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.device import compatibility


def with_functions(module: types.ModuleType, **functions: Callable[..., object]) -> types.SimpleNamespace:
    """A namespace like a module, with other functions under some names."""
    return types.SimpleNamespace(**vars(module) | functions)


def use_own_devices() -> None:
    """Makes MJX (3.17) put its models on a device of this process: it takes the first one of all processes."""
    if jax.process_count() > 1:
        compatibility.mjx_io().jax = with_functions(
            jax, devices=lambda backend=None: jax.local_devices(backend=backend)
        )


def repair_fluid_model() -> None:
    """Brax 0.14's fluid model, used by its swimmer, calls `clip` with a keyword that JAX 0.10 has removed."""
    from brax import fluid

    if isinstance(fluid.jp, types.ModuleType):
        fluid.jp = with_functions(jnp, clip=lambda x, a_min: jnp.clip(x, min=a_min))


def repair_clip(task: object) -> None:
    """Two tasks of Playground 0.2 with a cube call `clip` with a keyword that JAX 0.10 has removed."""
    module: Any = sys.modules[type(task).__module__]

    def clip(x: jax.Array, *bounds: Any, a_max: Any = None) -> jax.Array:
        return jnp.clip(x, *bounds) if a_max is None else jnp.clip(x, max=a_max)

    if module.__name__.endswith((".reorient", ".push_cube")) and module.jp is jnp:
        module.jp = with_functions(jnp, clip=clip)


@contextlib.contextmanager
def without_copies() -> Iterator[None]:
    """Inside, `brax.io.mjcf.load_model` does not copy the arrays of a new model: JAX would compile a copy per shape."""

    def array(x: Any, *args: Any, **kwargs: Any) -> jax.Array:
        plain = isinstance(x, jax.Array | np.ndarray) and not args and not kwargs
        return jnp.asarray(x) if plain else jnp.array(x, *args, **kwargs)

    mjcf: Any = sys.modules.get("brax.io.mjcf")  # imported with every environment that it builds a model for
    if mjcf is None:
        yield
        return
    before = mjcf.jp
    mjcf.jp = with_functions(jnp, array=array)
    try:
        yield
    finally:
        mjcf.jp = before
