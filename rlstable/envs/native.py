"""Runs Brax's environments on C MuJoCo: resets, rewards and observations stay, only the physics engine changes.

Each environment step is one call from the compiled program to the host, with all its physics steps. The state holds
MuJoCo's whole integration state under MJX's names, so guards, incidents and checkpoints work as with MJX.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from brax.base import Base, Motion, Transform
from brax.envs.base import PipelineEnv
from flax import struct

from rlstable.compilation import ffi
from rlstable.device.machine import share_of_cores
from rlstable.envs.mujoco_batch import DERIVED_ARRAYS, INPUT_ARRAYS, LINK_ARRAYS, STATE_ARRAYS, Simulations, Unsupported
from rlstable.envs.mujoco_model import model_of


class MissingArray(AttributeError):
    """An environment reads a physics array that the state does not contain."""


@struct.dataclass
class State(Base):
    """The physics state of one simulation: MuJoCo's integration state and the arrays that the environment reads.

    As in MJX a step starts from `qpos` and `qvel`. Derived arrays are computed at the start of the last physics step.

    Attributes:
        q: Positions `[nq]`, equal to `qpos`.
        qd: Velocities `[nv]`, equal to `qvel`.
        x: Poses of the links in the world frame.
        xd: Velocities of the links in the world frame.
        time: Seconds since the first state.
        qpos: `[nq]`.
        qvel: `[nv]`.
        act: `[na]`.
        qacc_warmstart: Start of the constraint solver, `[nv]`.
        ctrl: Controls of the last step, `[nu]`.
        qfrc_applied: Input of the environment, like all arrays below, `[nv]`.
        xfrc_applied: `[nbody, 6]`.
        eq_active: `[neq]`.
        mocap_pos: `[nmocap, 3]`.
        mocap_quat: `[nmocap, 4]`.
        userdata: `[nuserdata]`.
        derived: Further arrays that the environment reads, as attributes of the state: `state.sensordata`.
    """

    q: jax.Array
    qd: jax.Array
    x: Transform
    xd: Motion
    time: jax.Array
    qpos: jax.Array
    qvel: jax.Array
    act: jax.Array
    qacc_warmstart: jax.Array
    ctrl: jax.Array
    qfrc_applied: jax.Array
    xfrc_applied: jax.Array
    eq_active: jax.Array
    mocap_pos: jax.Array
    mocap_quat: jax.Array
    userdata: jax.Array
    derived: dict[str, jax.Array]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "derived":
            raise AttributeError(name)
        if name not in self.derived:
            raise MissingArray(name)
        return self.derived[name]


class Pipeline:
    """A Brax pipeline on C MuJoCo: initialises a simulation and steps it.

    Args:
        simulations: Batched simulations of the model.
    """

    def __init__(self, simulations: Simulations):
        self._simulations = simulations
        self._nonempty = [name for name in (*STATE_ARRAYS, *INPUT_ARRAYS) if math.prod(simulations.shapes[name])]
        moved = [name for name in STATE_ARRAYS if name in self._nonempty]
        self._after_step = (*moved, *LINK_ARRAYS, *simulations.derived)
        self._after_start = (*self._nonempty, *LINK_ARRAYS, *simulations.derived)

    def init(self, system: Any, q: Any, qd: Any, act: Any = None, ctrl: Any = None, debug: bool = False) -> State:
        """A first state with these positions and velocities, and the model's values for everything else."""
        del system, debug
        arguments = {"qpos": q, "qvel": qd, "act": act, "ctrl": ctrl}
        inputs = {
            name: jnp.asarray(x, float) for name, x in arguments.items() if x is not None and name in self._nonempty
        }
        outputs = self._call("start", self._simulations.start, inputs, self._after_start)
        empty = {
            name: jnp.zeros(like.shape, like.dtype)
            for name, like in self._shapes_of((*STATE_ARRAYS, *INPUT_ARRAYS)).items()
        }
        return _state(**empty | outputs)

    def step(self, system: Any, state: State, action: jax.Array, debug: bool = False) -> State:
        """One physics step."""
        del system, debug
        return self.steps(state, action, 1)

    def steps(self, state: State, action: jax.Array, frames: int) -> State:
        """Several physics steps with the same controls, in one call.

        Args:
            state: State before the steps.
            action: Controls, `[nu]`.
            frames: Number of physics steps.
        """

        def compute(inputs: Mapping[str, np.ndarray], results: Mapping[str, np.ndarray]) -> None:
            self._simulations.step(inputs, results, frames)

        before = {name: getattr(state, name) for name in (*STATE_ARRAYS, *INPUT_ARRAYS)} | {
            "ctrl": jnp.asarray(action, float)
        }
        inputs = {name: before[name] for name in self._nonempty}
        return _state(**before | self._call(f"step {frames}", compute, inputs, self._after_step))

    def _call(
        self, kind: str, compute: ffi.Compute, inputs: dict[str, jax.Array], names: tuple[str, ...]
    ) -> dict[str, jax.Array]:
        """Calls a NumPy function from the compiled program.

        Args:
            kind: Name of the computation; calls of one kind must compute the same function.
            compute: Computes arrays from arrays, by name.
            inputs: Arguments by name.
            names: Names of the results.
        """
        shapes = self._shapes_of(names)
        if jax.default_backend() == "cpu":
            # The thread count changes no result. It is part of the name because the last function registered under a
            # name is called: an evaluation would otherwise change the threads of training.
            name = f"{self._simulations.fingerprint} {self._simulations.threads} {kind}"
            return ffi.call(name, compute, inputs, shapes)
        return _call_on_host(compute, inputs, shapes)

    def _shapes_of(self, names: Iterable[str]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types by name, as in MJX; floats are float64 if JAX's default float type is."""
        shapes, kind = self._simulations.shapes, jnp.result_type(float)
        return {name: jax.ShapeDtypeStruct(shapes[name], jnp.uint8 if name == "eq_active" else kind) for name in names}


def _call_on_host(compute: ffi.Compute, inputs: dict[str, jax.Array], shapes: dict[str, Any]) -> dict[str, jax.Array]:
    """Calls a NumPy function from a program on an accelerator; arrays are copied to the host and back."""

    def run(inputs: dict[str, Any]) -> dict[str, np.ndarray]:
        rows = np.shape(inputs["qpos"])[:-1]
        results = {name: np.empty((*rows, *like.shape), like.dtype) for name, like in shapes.items()}
        compute(_numpy(inputs), results)
        return results

    outputs: dict[str, jax.Array] = jax.pure_callback(run, shapes, inputs, vmap_method="broadcast_all")
    return outputs


def _numpy(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in arrays.items()}


def _state(**arrays: jax.Array) -> State:
    derived = {name: arrays.pop(name) for name in sorted(DERIVED_ARRAYS & arrays.keys())}
    x = Transform(pos=arrays.pop("x_pos"), rot=arrays.pop("x_rot"))
    xd = Motion(ang=arrays.pop("xd_ang"), vel=arrays.pop("xd_vel"))
    return State(q=arrays["qpos"], qd=arrays["qvel"], x=x, xd=xd, derived=derived, **arrays)


def with_native_physics(env: Any, devices: int = 1) -> Any:
    """Replaces the physics of an environment by C MuJoCo, in place.

    Args:
        env: A new environment on Brax's `PipelineEnv`, possibly in Brax's wrappers.
        devices: Number of devices that step the environment at the same time; they share the CPU cores.

    Raises:
        Unsupported: The environment has no MuJoCo model, or needs physics arrays that native physics does not have.
    """
    inner = getattr(env, "unwrapped", env)
    model = model_of(inner)
    if model is None or not isinstance(inner, PipelineEnv):
        raise Unsupported("it has no MuJoCo model that Brax's PipelineEnv simulates (env.sys.mj_model)")
    threads = share_of_cores(devices)
    derived: tuple[str, ...] = ()
    while True:
        _install(inner, Pipeline(Simulations(model, threads, derived)))
        missing = _missing(env)
        if missing is None:
            return env
        if missing not in DERIVED_ARRAYS:
            raise Unsupported(f"it reads pipeline_state.{missing}, which native physics does not compute")
        derived = (*derived, missing)


def _install(env: Any, pipeline: Pipeline) -> None:
    env._pipeline = pipeline
    if type(env).pipeline_step is PipelineEnv.pipeline_step:
        # All physics steps of an action in one call. An environment that overrides `pipeline_step` calls each of them.
        env.pipeline_step = lambda state, action: pipeline.steps(state, action, env._n_frames)


def _missing(env: Any) -> str | None:
    """The first physics array that the environment reads and the state lacks; None if there is none."""
    try:
        jax.eval_shape(lambda key: env.step(env.reset(key), jnp.zeros(env.action_size)).obs, jax.random.PRNGKey(0))
    except MissingArray as error:
        return str(error)
    return None
