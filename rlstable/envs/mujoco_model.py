"""The MuJoCo model of an environment, with the environment's changes."""

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
    """A `mujoco.MjModel` with the environment's options and arrays; None if the environment has no MuJoCo model.

    Brax environments change only `env.sys`, the copy of the model on the JAX side. This function applies the same
    changes to a copy of `env.sys.mj_model`.

    Args:
        env: An environment of Brax (`env.sys.mj_model`) or of MuJoCo Playground (`env.mj_model`).
    """
    system: Any = getattr(env, "sys", None)
    model = getattr(system, "mj_model", None)
    if model is None:
        own = getattr(env, "mj_model", None)
        return None if own is None else copy.copy(own)
    model = copy.copy(model)
    options = getattr(system, "opt", None)
    for name in _OPTIONS:
        if (value := getattr(options, name, None)) is not None:
            setattr(model.opt, name, type(getattr(model.opt, name))(value))
    for name in _VECTORS:
        if (value := getattr(options, name, None)) is not None:
            getattr(model.opt, name)[:] = value
    for field in dataclasses.fields(system) if dataclasses.is_dataclass(system) else ():
        _copy_changed_array(model, field.name, getattr(system, field.name))
    return model


def physics_steps(env: Any) -> int:
    """Physics steps of one action: Playground's `n_substeps`, or what `dt` and the timestep of Brax's models say."""
    system: Any = getattr(env, "sys", None)
    if hasattr(system, "mj_model") and hasattr(env, "dt"):
        return round(float(env.dt) / float(system.opt.timestep))
    return int(getattr(env, "n_substeps", 1))


def _copy_changed_array(model: Any, name: str, value: Any) -> None:
    """Writes an array of `env.sys` into the model, if the model has it with other numbers."""
    array = getattr(model, name, None)
    if not isinstance(array, np.ndarray) or getattr(value, "shape", None) != array.shape:
        return
    value = np.asarray(value)
    # JAX arrays are float32. If the numbers agree, the model keeps its more precise float64 numbers.
    if not np.array_equal(value, array.astype(value.dtype)):
        array[...] = value
