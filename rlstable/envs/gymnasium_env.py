"""Gymnasium's MuJoCo tasks as environments with Brax's interface, on MJX or on C MuJoCo."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax import struct
from mujoco import mjx

from rlstable.config import ConfigError
from rlstable.device.trees import Observation, PyTree
from rlstable.envs.gymnasium_specs import spec_of
from rlstable.envs.gymnasium_tasks import TASKS, Transition, View
from rlstable.envs.simulator import MjxSimulator, Simulator


class State(struct.PyTreeNode):
    """State of one environment, also of a robot's task, with the fields of Playground's `mjx_env.State`."""

    data: PyTree
    obs: Observation
    reward: jax.Array
    done: jax.Array
    metrics: dict[str, jax.Array]
    info: dict[str, Any]


class GymnasiumEnv:
    """A task of Gymnasium by its name, `Ant-v5`, with Gymnasium's arguments as `kwargs`.

    An action of -1 to 1 is scaled to the range of the controls, so that tasks with other ranges suit every policy.
    """

    def __init__(self, name: str, **kwargs: object):
        spec = spec_of(name, kwargs)
        self._task, self._arguments = TASKS[name], spec.arguments
        self.mj_model = mujoco.MjModel.from_xml_path(str(spec.model_file))
        self.n_substeps = spec.frame_skip
        self.dt = float(self.mj_model.opt.timestep) * spec.frame_skip
        self.simulator: Simulator = MjxSimulator(self.mj_model, forces=self._task.forces(spec.arguments))
        low, high = np.asarray(self.mj_model.actuator_ctrlrange, np.float32).T
        self._middle, self._reach = (low + high) / 2, (high - low) / 2

    def make_mjx_model(self) -> None:
        """Makes `mjx_model`, which has Newton's method in place of MuJoCo's PGS solver; native physics needs no model.

        Both solve the same convex problem. Raises `ConfigError` if MJX cannot simulate the model.
        """
        model = copy.copy(self.mj_model)
        if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
            model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
        try:
            self.mjx_model = mjx.put_model(model, impl="jax")
        except NotImplementedError as error:
            raise ConfigError(
                f"env.backend: MJX cannot simulate this task ({error}); set JAX_PLATFORMS=cpu to train it with C MuJoCo"
            ) from error

    @property
    def _mjx_model(self) -> PyTree:
        """The model for the simulator; native physics reads only its randomised arrays."""
        return getattr(self, "mjx_model", None)

    @property
    def action_size(self) -> int:
        return int(self.mj_model.nu)

    def reset(self, rng: jax.Array) -> State:
        blank = View(self.mj_model, None, self._arguments, first=True)
        qpos, qvel = self._task.draw(blank, rng)
        data = self.simulator.start(self._mjx_model, qpos=qpos, qvel=qvel)
        # Gymnasium's first observation has the quaternion before MuJoCo normalises it.
        first = self._view(data.replace(qpos=qpos), True)
        parts, _ = self._task.judge(Transition(first, first, jnp.zeros(self.action_size), self.dt))
        zero = jnp.zeros(())
        return State(data, self._observe(first), zero, zero, dict.fromkeys(parts, zero), {})

    def step(self, state: State, action: jax.Array) -> State:
        ctrl = self._middle + self._reach * action
        data = self.simulator.steps(self._mjx_model, state.data, ctrl, self.n_substeps)
        step = Transition(self._view(state.data), self._view(data), ctrl, self.dt)
        parts, ended = self._task.judge(step)
        reward = jnp.sum(jnp.stack(list(parts.values())))
        return state.replace(
            data=data, obs=self._observe(step.after), reward=reward, done=ended.astype(reward.dtype), metrics=parts
        )

    def _view(self, data: PyTree, first: bool = False) -> View:
        return View(self.mj_model, data, self._arguments, first)

    def _observe(self, view: View) -> jax.Array:
        return jnp.concatenate([jnp.ravel(part) for part in self._task.observe(view)])
