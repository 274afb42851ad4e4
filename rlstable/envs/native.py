"""Brax's environments on the physics of C MuJoCo: their own resets, rewards and observations, another engine below.

An environment step is one call out of the compiled program, all its physics steps inside. What is carried from step to
step is MuJoCo's whole integration state, by the names that MJX has for it, so that guards, incidents and checkpoints
see what they know.
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
    """An environment reads a part of the physics that the state has not got."""


@struct.dataclass
class State(Base):
    """The physics of one simulation, as far as environments read it and MuJoCo starts from it.

    As in MJX a step starts from `qpos` and `qvel`, and what is derived is that of the last physics step's beginning.

    Attributes:
        q: `[nq]` positions, the same numbers as `qpos`.
        qd: `[nv]` velocities, the same numbers as `qvel`.
        x: Where links are, in the world's frame.
        xd: How they move, in the world's frame.
        time: Seconds since the first state.
        qpos: `[nq]`.
        qvel: `[nv]`.
        act: `[na]`.
        qacc_warmstart: `[nv]`, from which the solver starts.
        ctrl: `[nu]`, of the last step.
        qfrc_applied: `[nv]`, put in from outside, like all that follow.
        xfrc_applied: `[nbody, 6]`.
        eq_active: `[neq]`.
        mocap_pos: `[nmocap, 3]`.
        mocap_quat: `[nmocap, 4]`.
        userdata: `[nuserdata]`.
        derived: What else the environment reads; read as attributes of the state, `state.sensordata`.
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
    """A pipeline in Brax's sense: initialises a simulation and steps it.

    Args:
        simulations: That compute.
    """

    def __init__(self, simulations: Simulations):
        self._simulations = simulations
        self._nonempty = [name for name in (*STATE_ARRAYS, *INPUT_ARRAYS) if math.prod(simulations.shapes[name])]
        moved = [name for name in STATE_ARRAYS if name in self._nonempty]
        self._after_step = (*moved, *LINK_ARRAYS, *simulations.derived)
        self._after_start = (*self._nonempty, *LINK_ARRAYS, *simulations.derived)

    def init(self, system: Any, q: Any, qd: Any, act: Any = None, ctrl: Any = None, debug: bool = False) -> State:
        """A first state at rest in its place: positions and velocities as given, all else the model's own."""
        del system, debug
        given = {"qpos": q, "qvel": qd, "act": act, "ctrl": ctrl}
        given = {name: jnp.asarray(x, float) for name, x in given.items() if x is not None and name in self._nonempty}
        found = self._call("start", self._simulations.start, given, self._after_start)
        empty = {
            name: jnp.zeros(like.shape, like.dtype)
            for name, like in self._shapes_of((*STATE_ARRAYS, *INPUT_ARRAYS)).items()
        }
        return _state(**empty | found)

    def step(self, system: Any, state: State, action: jax.Array, debug: bool = False) -> State:
        """One physics step."""
        del system, debug
        return self.steps(state, action, 1)

    def steps(self, state: State, action: jax.Array, frames: int) -> State:
        """Physics steps with the same controls, in one call.

        Args:
            state: Before them.
            action: The controls, `[nu]`.
            frames: How many.
        """

        def compute(given: Mapping[str, np.ndarray], results: Mapping[str, np.ndarray]) -> None:
            self._simulations.step(given, results, frames)

        before = {name: getattr(state, name) for name in (*STATE_ARRAYS, *INPUT_ARRAYS)} | {
            "ctrl": jnp.asarray(action, float)
        }
        given = {name: before[name] for name in self._nonempty}
        return _state(**before | self._call(f"step {frames}", compute, given, self._after_step))

    def _call(
        self, kind: str, compute: ffi.Compute, given: dict[str, jax.Array], names: tuple[str, ...]
    ) -> dict[str, jax.Array]:
        """Arrays by name that NumPy computes of arrays by name; all that a kind computes is the same computation."""
        wanted = self._shapes_of(names)
        if jax.default_backend() == "cpu":
            # Threads change no result, but the last owner of the name computes: an evaluation would bring all of them.
            name = f"{self._simulations.fingerprint} {self._simulations.threads} {kind}"
            return ffi.call(name, compute, given, wanted)
        return _call_on_host(compute, given, wanted)

    def _shapes_of(self, names: Iterable[str]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types by name: those of MJX, physics in float64 where that is what jax makes of a float."""
        shapes, kind = self._simulations.shapes, jnp.result_type(float)
        return {name: jax.ShapeDtypeStruct(shapes[name], jnp.uint8 if name == "eq_active" else kind) for name in names}


def _call_on_host(compute: ffi.Compute, given: dict[str, jax.Array], wanted: dict[str, Any]) -> dict[str, jax.Array]:
    """For programs on an accelerator, whose memory NumPy cannot see."""

    def run(given: dict[str, Any]) -> dict[str, np.ndarray]:
        rows = np.shape(given["qpos"])[:-1]
        results = {name: np.empty((*rows, *like.shape), like.dtype) for name, like in wanted.items()}
        compute(_numpy(given), results)
        return results

    found: dict[str, jax.Array] = jax.pure_callback(run, wanted, given, vmap_method="broadcast_all")
    return found


def _numpy(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in arrays.items()}


def _state(**found: jax.Array) -> State:
    derived = {name: found.pop(name) for name in sorted(DERIVED_ARRAYS & found.keys())}
    x = Transform(pos=found.pop("x_pos"), rot=found.pop("x_rot"))
    xd = Motion(ang=found.pop("xd_ang"), vel=found.pop("xd_vel"))
    return State(q=found["qpos"], qd=found["qvel"], x=x, xd=xd, derived=derived, **found)


def with_native_physics(env: Any, devices: int = 1) -> Any:
    """The environment itself, its physics replaced.

    Args:
        env: Made on Brax's `PipelineEnv`, with any wrappers of Brax's around it, and not used yet.
        devices: On which it will be stepped at once; they share the processor's cores.

    Raises:
        Unsupported: It has no MuJoCo model, or reads or needs what cannot be carried.
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
            raise Unsupported(f"it reads pipeline_state.{missing}, which is not carried")
        derived = (*derived, missing)


def _install(env: Any, pipeline: Pipeline) -> None:
    env._pipeline = pipeline
    if type(env).pipeline_step is PipelineEnv.pipeline_step:
        # One that has its own is given single physics steps, each with a call; this one all of them in one.
        env.pipeline_step = lambda state, action: pipeline.steps(state, action, env._n_frames)


def _missing(env: Any) -> str | None:
    """Names of physics arrays that the environment reads and the state lacks, found by tracing the environment."""
    try:
        jax.eval_shape(lambda key: env.step(env.reset(key), jnp.zeros(env.action_size)).obs, jax.random.PRNGKey(0))
    except MissingArray as error:
        return str(error)
    return None
