"""The mass matrix of a model at its start, with armature."""

from __future__ import annotations

from typing import Any

import numpy as np


def mass_matrix(model: Any) -> np.ndarray:
    """Returns the mass matrix at `qpos0`, `[nv, nv]`."""
    import mujoco

    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    columns = np.zeros((model.nv, model.nv))
    # One column at a time, because MuJoCo 4 changed the arguments of `mj_fullM`.
    for unit, column in zip(np.eye(model.nv), columns, strict=True):
        mujoco.mj_mulM(model, data, column, unit)
    return columns


def inverse_masses(model: Any) -> np.ndarray:
    """Returns the acceleration of each degree of freedom under a unit force at `qpos0` with the others free, `[nv]`.

    MuJoCo's `dof_invweight0` leaves armature out (MuJoCo 4.0).
    """
    # float64 can invert most matrices that float32 cannot. The check of the mass matrix reports the others.
    return np.diag(np.linalg.pinv(mass_matrix(model), hermitian=True))
