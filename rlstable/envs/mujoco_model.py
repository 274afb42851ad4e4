"""The MuJoCo model of an environment, with the environment's changes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from rlstable.device.trees import Env

if TYPE_CHECKING:
    import jax
    import mujoco

# Options that an environment may change after it has loaded its model.
_OPTIONS = (
    "timestep", "iterations", "ls_iterations", "tolerance", "ls_tolerance", "impratio", "density", "viscosity",
    "integrator", "solver", "cone", "disableflags",
)  # fmt: skip
_VECTORS = ("gravity", "wind", "magnetic")


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Context that drops MuJoCo's warnings. MuJoCo prints each warning and adds it to a file in the working folder."""
    import mujoco

    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda _: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


def model_of(env: object) -> mujoco.MjModel | None:
    """A `mujoco.MjModel` with the environment's options and arrays; None if the environment has no MuJoCo model.

    Brax environments change only `env.sys`, the copy of the model on the JAX side. This function applies the same
    changes to a copy of `env.sys.mj_model`. Playground's tasks have `env.mj_model`.
    """
    system: Any = getattr(env, "sys", None)
    model = getattr(system, "mj_model", None)
    if model is None:
        own = getattr(env, "mj_model", None)
        return None if own is None else copy.copy(own)
    model = copy.copy(model)
    options = getattr(system, "opt", None)
    for name in (*_OPTIONS, *_VECTORS):
        if (value := getattr(options, name, None)) is not None:
            set_number(model.opt, name, value)
    for field in dataclasses.fields(system) if dataclasses.is_dataclass(system) else ():
        array, value = getattr(model, field.name, None), getattr(system, field.name)
        if isinstance(array, np.ndarray) and getattr(value, "shape", None) == array.shape:
            value = np.asarray(value)
            # JAX arrays are float32. If the numbers agree, the model keeps its more precise float64 numbers.
            if not np.array_equal(value, array.astype(value.dtype)):
                array[...] = value
    return model


def set_number(owner: mujoco.MjModel | mujoco.MjOption, name: str, value: jax.typing.ArrayLike) -> None:
    """Writes a number or an array of the same size into a field of MuJoCo's model or options."""
    field = getattr(owner, name)
    if isinstance(field, np.ndarray):
        field[...] = np.reshape(value, field.shape)
    else:
        setattr(owner, name, type(field)(np.reshape(value, ())))


def physics_steps(env: Env) -> int:
    """Physics steps of one action: Playground's `n_substeps`, or what `dt` and the timestep of Brax's models say."""
    system: Any = getattr(env, "sys", None)
    if hasattr(system, "mj_model") and hasattr(env, "dt"):
        return round(float(env.dt) / float(system.opt.timestep))
    return int(getattr(env, "n_substeps", 1))
