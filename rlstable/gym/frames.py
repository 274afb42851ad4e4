"""Frames of a simulation, drawn with MuJoCo's renderer in this process."""

from __future__ import annotations

import mujoco
import numpy as np

from rlstable.config import ConfigError
from rlstable.config.schema import first_line
from rlstable.render.scene import followed_body

_WIDTH, _HEIGHT = 480, 480  # pixels, as Gymnasium's own MuJoCo tasks


class Frames:
    """Draws states of a `mujoco.MjModel`; the camera follows a robot that travels.

    Raises `ConfigError` if MuJoCo finds no OpenGL.
    """

    def __init__(self, model: mujoco.MjModel):
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, _WIDTH)
        model.vis.global_.offheight = max(model.vis.global_.offheight, _HEIGHT)
        self._model, self._data, self._camera = model, mujoco.MjData(model), mujoco.MjvCamera()
        mujoco.mjv_defaultFreeCamera(model, self._camera)
        if (body := followed_body(model)) is not None:
            self._camera.type, self._camera.trackbodyid = mujoco.mjtCamera.mjCAMERA_TRACKING, body
        try:
            self._renderer = mujoco.Renderer(model, _HEIGHT, _WIDTH)
        except Exception as error:  # each OpenGL backend has other error classes
            raise ConfigError(
                f"render_mode: MuJoCo cannot draw here ({first_line(error)}); set the environment variable "
                "MUJOCO_GL=egl or MUJOCO_GL=osmesa before Python starts, or leave render_mode=None"
            ) from error

    def draw(self, positions: np.ndarray) -> np.ndarray:
        """The frame of generalized positions `[nq]`, uint8 `[height, width, 3]`."""
        self._data.qpos[:] = positions
        for compute in (mujoco.mj_kinematics, mujoco.mj_comPos, mujoco.mj_camlight, mujoco.mj_tendon):
            compute(self._model, self._data)
        self._renderer.update_scene(self._data, self._camera)
        return np.array(self._renderer.render())

    def close(self) -> None:
        self._renderer.close()
