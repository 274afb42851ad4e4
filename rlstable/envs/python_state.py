"""Finds Python state in an environment: counters, `np.random`, the time, and traced values kept between two calls.

JAX runs the Python code of reset and step only while tracing. Python state then keeps its value for the whole training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def mistakes(env: Any, what: str, kept: Sequence[Mapping[str, Any]], programs: Sequence[Any]) -> Iterator[str]:
    """The mistake of a function (`what`) that depends on what JAX does not trace.

    `programs` are two jaxprs of the function, and `kept` are `values` before the first trace and after each trace.
    """
    one, other = map(_constants, programs)
    traced = [x for x in other if isinstance(x, jax.core.Tracer)]
    if traced:
        names = [name for name, value in _attributes(env).items() if any(value is x for x in traced)]
        yield f"{what} reads {', '.join(names) or 'a value'}, traced in an earlier call; keep it in info"
    elif len(one) != len(other) or not all(map(_same, one, other)):
        before, between, after = kept
        changed = {name for name in after if after[name] != between.get(name)}
        changed |= {name for name in before if before[name] != between.get(name)}
        once = "but JAX runs its Python code only once, while tracing; keep it in info"
        twice = "np.random or time, whose values never change in the compiled program"
        yield (
            f"{what} changes {', '.join(sorted(changed))}, {once}"
            if changed
            else (f"{what} differs between two traces: {twice}; use jax.random with a key in info")
        )


def _attributes(env: Any) -> dict[str, Any]:
    """Attributes of an environment, of the environments that it wraps, and of their classes."""
    found: dict[str, Any] = {}
    while env is not None:
        named = [(f"{kind.__name__}.", vars(kind)) for kind in type(env).__mro__[:-1]]
        for prefix, values in (("self.", getattr(env, "__dict__", {})), *named):
            found = {f"{prefix}{name}": value for name, value in values.items()} | found
        env = getattr(env, "__dict__", {}).get("env")
    return found


def values(env: Any) -> dict[str, Any]:
    """Comparable copies of an environment's numbers, texts and NumPy arrays, and the sizes of its lists."""
    attributes, plain = _attributes(env), (int, float, str, np.ndarray, np.generic)
    sizes = {name: len(x) for name, x in attributes.items() if isinstance(x, list | dict)}
    return sizes | {name: repr(x) for name, x in attributes.items() if isinstance(x, plain)}


def _constants(program: Any) -> list[Any]:
    """Names of the operations of a program, with the constants that they read."""
    found = [*getattr(program, "consts", ())]
    for equation in program.eqns:
        found += [equation.primitive.name, *(x.val for x in equation.invars if hasattr(x, "val"))]
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            found += _constants(value) if hasattr(value, "eqns") else []
    return found


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not hasattr(one, "dtype") or not hasattr(other, "dtype"):
        return type(one) is type(other) and repr(one) == repr(other)
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()
