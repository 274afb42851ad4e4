"""Runs environments of Brax and of MuJoCo Playground on C MuJoCo: resets, rewards and observations stay.

Each environment step is one call from the compiled program to the host, with all its physics steps. The state holds
MuJoCo's whole integration state under MJX's names, so guards, incidents and checkpoints work as with MJX.
"""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from brax.base import Base, Motion, Transform
from brax.envs.base import PipelineEnv
from flax import struct

from rlstable.compilation import ffi
from rlstable.device import compatibility
from rlstable.device.machine import share_of_cores
from rlstable.device.trees import Env, EnvState, PyTree
from rlstable.envs.gymnasium_env import GymnasiumEnv
from rlstable.envs.mujoco_batch import (
    DERIVED_ARRAYS,
    FORCES,
    INPUT_ARRAYS,
    LINK_ARRAYS,
    STATE_ARRAYS,
    Simulations,
    Unsupported,
)
from rlstable.envs.mujoco_model import model_of, physics_steps
from rlstable.envs.patches import with_functions
from rlstable.envs.randomized import RandomizedEnv

_INTEGRATION = (*STATE_ARRAYS, *INPUT_ARRAYS)


class MissingArray(AttributeError):
    """An environment reads a physics array that the state does not contain."""


@struct.dataclass
class State(Base):
    """The physics state of one simulation: MuJoCo's integration state and the arrays that the environment reads.

    As in MJX a step starts from `qpos` and `qvel`. Derived arrays are computed at the start of the last physics step.
    `q`, `qd`, `x` and `xd` are Brax's names of positions, velocities, and poses and velocities of links in the world.
    The arrays in `derived` are attributes of the state: `state.sensordata`.
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

    def __getattr__(self, name: str) -> jax.Array:
        if name.startswith("__") or name == "derived":
            raise AttributeError(name)
        if name not in self.derived:
            raise MissingArray(name)
        return self.derived[name]


class Pipeline:
    """A Brax pipeline on C MuJoCo, which reads the randomised arrays of the model that it gets, and nothing else of it.

    Some methods are those of `mujoco.mjx` and `mjx_env`, through which Playground's tasks simulate.
    """

    def __init__(self, simulations: Simulations):
        self._simulations = simulations
        self._nonempty = [name for name in _INTEGRATION if math.prod(simulations.shapes[name])]
        moved = [name for name in STATE_ARRAYS if name in self._nonempty]
        self._after_step = (*moved, *LINK_ARRAYS, *simulations.derived)
        self._after_start = (*self._nonempty, *LINK_ARRAYS, *simulations.derived)

    def init(
        self, system: PyTree, q: PyTree, qd: PyTree, act: PyTree = None, ctrl: PyTree = None, debug: bool = False
    ) -> State:
        del debug
        return self.start(system, qpos=q, qvel=qd, act=act, ctrl=ctrl)

    def start(self, model: PyTree, **arrays: jax.Array | None) -> State:
        """A first state with these arrays (`qpos` and others), and the model's values in the place of None."""
        inputs = {name: x for name, x in arrays.items() if x is not None and name in self._nonempty}
        inputs |= self._randomized(model)
        outputs = self._call("start", self._simulations.start, self._typed(inputs), self._after_start)
        shapes = self._shapes_of(_INTEGRATION)
        return _state(**{name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()} | outputs)

    def step(self, system: PyTree, state: State, action: jax.Array, debug: bool = False) -> State:
        del debug
        return self.steps(system, state, action)

    def steps(self, model: PyTree, state: State, action: jax.Array, n_substeps: int = 1) -> State:
        """Several physics steps with the same controls, in one call."""
        compute = functools.partial(self._simulations.step, frames=n_substeps)
        before = self._typed({name: getattr(state, name) for name in _INTEGRATION} | {"ctrl": action})
        inputs = {name: before[name] for name in self._nonempty} | self._typed(self._randomized(model))
        return _state(**before | self._call(f"step {n_substeps}", compute, inputs, self._after_step))

    def _call(
        self, kind: str, compute: ffi.Compute, inputs: dict[str, jax.Array], names: tuple[str, ...]
    ) -> dict[str, jax.Array]:
        """Calls a NumPy function from the compiled program; calls of one kind must compute the same function."""
        # The thread count changes no result. It is part of the name because the last function registered under a name
        # is called: an evaluation would otherwise change the threads of training.
        name = f"{self._simulations.fingerprint} {self._simulations.threads} {kind}"
        return ffi.call(name, compute, inputs, self._shapes_of(names))

    def make_data(self, model: PyTree, **arguments: jax.Array | None) -> State:
        arrays = {name: x for name, x in arguments.items() if name in _INTEGRATION and x is not None}
        return self.start(model, **{"qpos": jnp.asarray(self._simulations.first_positions, float)} | arrays)

    def forward(self, model: PyTree, data: State) -> State:
        return self.start(model, **{name: getattr(data, name) for name in _INTEGRATION})

    def _randomized(self, model: PyTree) -> dict[str, jax.Array]:
        return {name: operator.attrgetter(name)(model) for name in self._simulations.randomized}

    def _typed(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        types_of = self._shapes_of(arrays)
        return {name: jnp.asarray(x, types_of[name].dtype) for name, x in arrays.items()}

    def _shapes_of(self, names: Iterable[str]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types by name, as in MJX; floats are float64 if JAX's default float type is."""
        shapes, kind = self._simulations.shapes, jnp.result_type(float)
        return {name: jax.ShapeDtypeStruct(shapes[name], jnp.uint8 if name == "eq_active" else kind) for name in names}


def _state(**arrays: jax.Array) -> State:
    derived = {name: arrays.pop(name) for name in sorted((DERIVED_ARRAYS | {FORCES}) & arrays.keys())}
    x = Transform(pos=arrays.pop("x_pos"), rot=arrays.pop("x_rot"))
    xd = Motion(ang=arrays.pop("xd_ang"), vel=arrays.pop("xd_vel"))
    return State(q=arrays["qpos"], qd=arrays["qvel"], x=x, xd=xd, derived=derived, **arrays)


def with_native_physics(env: Env, devices: int = 1) -> Env:
    """Replaces the physics of a new environment, Brax's `PipelineEnv` or a task, by C MuJoCo, in place.

    Raises Unsupported without a MuJoCo model, or if the environment reads or randomises arrays that C MuJoCo lacks.
    """
    inner = getattr(env, "unwrapped", env)
    model = model_of(inner)
    of_gymnasium = isinstance(inner, GymnasiumEnv)
    is_task = hasattr(inner, "mjx_model") or hasattr(inner, "simulator")
    if model is None or not (is_task or isinstance(inner, PipelineEnv)):
        raise Unsupported("it has no MuJoCo model that Brax's PipelineEnv or a task of Playground simulates")
    install: Callable[[Any, Pipeline], None] = _install_in_task if is_task else _install
    if hasattr(inner, "simulator"):
        install = _install_as_simulator
    # MJX lacks these forces unless a step computes them, as Gymnasium's tasks do.
    available = DERIVED_ARRAYS | ({FORCES} if of_gymnasium else frozenset())
    own_class = type(inner)
    randomized = env.randomized if isinstance(env, RandomizedEnv) else ()
    threads = share_of_cores(devices)
    derived: tuple[str, ...] = ()
    while True:
        inner.__class__ = own_class
        install(inner, Pipeline(Simulations(model, threads, derived, randomized)))
        missing = _missing(env)
        if missing is None:
            return env
        if missing not in available:
            field = "data" if is_task else "pipeline_state"
            raise Unsupported(f"it reads {field}.{missing}, which native physics does not compute")
        derived = (*derived, missing)


def _install(env: PipelineEnv, pipeline: Pipeline) -> None:
    if not hasattr(env, compatibility.BRAX_PIPELINE):
        raise Unsupported("this version of Brax has no pipeline that can be replaced")
    setattr(env, compatibility.BRAX_PIPELINE, pipeline)
    frames = physics_steps(env)
    if type(env).pipeline_step is PipelineEnv.pipeline_step:
        # All physics steps of an action in one call. An environment that overrides `pipeline_step` calls each of them.
        _override(env, pipeline_step=lambda self, state, action: pipeline.steps(self.sys, state, action, frames))


def _install_as_simulator(env: Env, pipeline: Pipeline) -> None:
    """Replaces the `rlstable.envs.simulator.Simulator` of a robot or of a task of Gymnasium."""
    vars(env)["simulator"] = pipeline


def _install_in_task(env: Env, pipeline: Pipeline) -> None:
    """Gives `reset` and `step` of this task, not of its class, other functions in place of MJX's."""
    replaced: dict[str, dict[str, Callable[..., State]]] = {
        "mjx_env": {"make_data": pipeline.make_data, "step": pipeline.steps},
        "mjx": {"forward": pipeline.forward},
    }

    def on_native_physics(function: types.FunctionType) -> types.FunctionType:
        names = function.__globals__
        own = {module: with_functions(names[module], **new) for module, new in replaced.items() if module in names}
        return types.FunctionType(
            function.__code__, names | own, function.__name__, function.__defaults__, function.__closure__
        )

    _override(env, **{method: on_native_physics(getattr(type(env), method)) for method in ("reset", "step")})


def _override(env: Env, **methods: Callable[..., EnvState]) -> None:
    """Overrides methods of one object by giving it a subclass, so that a copy of the object has the methods too."""
    own = type(env)
    env.__class__ = type(own.__name__, (own,), {"__module__": own.__module__, "__doc__": own.__doc__, **methods})


def _missing(env: Env) -> str | None:
    """The first physics array that the environment reads and the state lacks; None if there is none."""
    try:
        state = jax.eval_shape(lambda key: env.step(env.reset(key), jnp.zeros(env.action_size)), jax.random.PRNGKey(0))
    except MissingArray as error:
        return str(error)
    physics = getattr(state, "pipeline_state", None) or getattr(state, "data", None)
    if not isinstance(physics, State):
        raise Unsupported("its reset or step does not simulate with mjx.forward and mjx_env.step")
    return None
