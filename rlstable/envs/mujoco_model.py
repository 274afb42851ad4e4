"""The MuJoCo model that an environment simulates, as the environment has set it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np

# Options that an environment may change after it has loaded its model.
_OPTIONS = (
    "timestep", "iterations", "ls_iterations", "tolerance", "ls_tolerance", "impratio", "density", "viscosity",
    "integrator", "solver", "cone", "disableflags",
)  # fmt: skip
_VECTORS = ("gravity", "wind", "magnetic")


def model_of(env: Any) -> Any | None:
    """A `mujoco.MjModel` with the environment's own options and numbers, or None where it has none.

    Brax's environments change a copy of the model that jax has, `env.sys`; here the changes are made in MuJoCo's.

    Args:
        env: Brax's (`env.sys.mj_model`) or MuJoCo Playground's (`env.mj_model`, which has its options already).
    """
    system: Any = getattr(env, "sys", None)
    model = getattr(system, "mj_model", None)
    if model is None:
        return getattr(env, "mj_model", None)
    model = copy.copy(model)
    options = getattr(system, "opt", None)
    for name in _OPTIONS:
        if (value := getattr(options, name, None)) is not None:
            setattr(model.opt, name, type(getattr(model.opt, name))(value))
    for name in _VECTORS:
        if (value := getattr(options, name, None)) is not None:
            getattr(model.opt, name)[:] = value
    for field in dataclasses.fields(system) if dataclasses.is_dataclass(system) else ():
        _take_over(model, field.name, getattr(system, field.name))
    return model


def _take_over(model: Any, name: str, value: Any) -> None:
    """Writes an array of the environment's into the model, if the model has it with other numbers."""
    own = getattr(model, name, None)
    if not isinstance(own, np.ndarray) or getattr(value, "shape", None) != own.shape:
        return
    value = np.asarray(value)
    # What jax has is float32: where it says the same, the model's own digits are the better ones.
    if not np.array_equal(value, own.astype(value.dtype)):
        own[...] = value
