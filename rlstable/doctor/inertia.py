"""The mass matrix of a model where it starts, armature included."""

from __future__ import annotations

from typing import Any

import numpy as np


def mass_matrix(model: Any) -> np.ndarray:
    """The mass matrix at `qpos0`, `[nv, nv]`."""
    import mujoco

    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    columns = np.zeros((model.nv, model.nv))
    # One column at a time: `mj_fullM` takes other arguments since MuJoCo 4.
    for unit, column in zip(np.eye(model.nv), columns, strict=True):
        mujoco.mj_mulM(model, data, column, unit)
    return columns


def inverse_masses(model: Any) -> np.ndarray:
    """Acceleration of each degree of freedom under a unit force at `qpos0`, the others free to follow, `[nv]`.

    MuJoCo's own `dof_invweight0` leaves armature out (MuJoCo 4.0).
    """
    # What float32 cannot invert float64 mostly can; where it cannot either, the check of the mass matrix says so.
    return np.diag(np.linalg.pinv(mass_matrix(model), hermitian=True))
