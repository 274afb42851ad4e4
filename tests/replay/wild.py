"""Environments whose physics truly explodes."""

from __future__ import annotations

import copy
from typing import Any

from brax.envs.inverted_pendulum import InvertedPendulum
from brax.io import mjcf


class WildPendulum(InvertedPendulum):
    """An inverted pendulum in MJX whose motor is far too strong for its integrator.

    Args:
        gain: What the motor's gain is multiplied by.
        backend: Of Brax.
    """

    def __init__(self, gain: float = 1e7, backend: str = "mjx", **kwargs: Any):
        super().__init__(backend=backend, **kwargs)
        model = copy.copy(self.sys.mj_model)
        model.actuator_gainprm[:, 0] *= gain
        self.sys = mjcf.load_model(model)
