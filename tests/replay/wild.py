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


class SelfDriven(InvertedPendulum):
    """An inverted pendulum in MJX whose cart gains speed by friction, ever more; its episodes do not end by themselves.

    Args:
        damping: Of the cart's slider; a negative one drives it.
        backend: Of Brax.
    """

    def __init__(self, damping: float = -300.0, backend: str = "mjx", **kwargs: Any):
        super().__init__(backend=backend, **kwargs)
        model = copy.copy(self.sys.mj_model)
        model.dof_damping[0] = damping
        self.sys = mjcf.load_model(model)

    def step(self, state: Any, action: Any) -> Any:
        return super().step(state, action).replace(done=0.0 * state.done)
