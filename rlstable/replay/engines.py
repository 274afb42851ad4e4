"""Replays one environment step from saved arrays: in JAX as in the run, in JAX with float64, and in C MuJoCo."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.config import ConfigError
from rlstable.config.run import EnvConfig
from rlstable.config.supervise import X64
from rlstable.device.mjx import uses_warp
from rlstable.device.precision import level
from rlstable.device.shared import row, vmapped
from rlstable.envs.load import load_env
from rlstable.envs.mujoco_batch import set_arrays
from rlstable.envs.mujoco_model import model_of, physics_steps, without_warnings
from rlstable.envs.recurrent import with_memory
from rlstable.envs.vector import MODEL, VectorEnv, as_environments_see
from rlstable.faults import PROBES
from rlstable.io.arrays import describe, implementation, is_key
from rlstable.supervise.incident import Incident, find_bad_numbers, group, limits_of

FLOAT32, FLOAT64, C = "float32", "float64", "C MuJoCo"
_INPUTS = (
    "qpos", "qvel", "act", "ctrl", "qacc_warmstart", "qfrc_applied", "xfrc_applied", "mocap_pos", "mocap_quat",
    "eq_active",
)  # fmt: skip
_WATCHED = ("qacc", "qvel", "qpos")


class Outcome(NamedTuple):
    """The state after the step in one engine by name, and a remark, which may be empty."""

    engine: str
    arrays: dict[str, np.ndarray]
    note: str = ""


def own_engine(incident: Incident) -> str:
    return FLOAT64 if incident.facts["precision"]["matmul"] == X64 else FLOAT32


def step_again(incident: Incident) -> list[Outcome]:
    """Replays the step in every engine that has the environment's physics.

    Raises `ConfigError` if the environment cannot be built here, or differs from the incident's.
    """
    before = _state_before(incident)
    engines = (FLOAT32,) if uses_warp(load_env(incident.config.env)) else (FLOAT32, FLOAT64)
    outcomes = [in_jax(incident, before, engine) for engine in engines]
    in_c = in_mujoco(incident, outcomes[-1].arrays)
    return outcomes if in_c is None else [*outcomes, in_c]


def in_jax(incident: Incident, before: Mapping[str, np.ndarray], engine: str) -> Outcome:
    """Replays the step from the whole state `before` it with the environment itself.

    The engine is `float32`, with the matrix products of the run, or `float64`, with the model in float64, too.
    """
    config, wide = incident.config, engine == FLOAT64
    # The model of a run in float64 is in float32.
    with jax.enable_x64(wide and own_engine(incident) != FLOAT64):
        env = with_memory(load_env(config.env), config.network)
    traced = level(config.precision.model_copy(update=incident.facts["precision"])).traced()
    with jax.enable_x64(wide), contextlib.nullcontext() if wide else traced:
        batch = jax.eval_shape(lambda key: _first_states(env, config.env, key), jax.random.PRNGKey(0))
        template = jax.eval_shape(lambda states: row(states, 0), batch)
        state = _restored(template, incident, before)
        action = jnp.asarray(incident.arrays["action"], jnp.float64 if wide else jnp.float32)
        # One of a batch, as in the run.
        states = jax.tree.unflatten(jax.tree.structure(batch), [x[None] for x in jax.tree.leaves(state)])
        stepped = jax.jit(functools.partial(vmapped, env.step))(states, action[None])
        after = row(stepped, 0)
        arrays = {
            name: np.broadcast_to(np.asarray(leaf).astype(np.asarray(old).dtype), old.shape)
            for (name, leaf), (_, old) in zip(_named(after), _named(template), strict=True)
        }
    arrays["action"] = incident.arrays["action"]
    note = "the environment draws random numbers in its step, which differ between float32 and float64"
    return Outcome(engine, arrays, note if wide and _draws(incident) else "")


def _draws(incident: Incident) -> bool:
    """Whether the step changed a random key of the environment."""
    before, after = incident.part("before"), incident.part("after")
    keys = (name for name, x in before.items() if x.dtype == np.uint32 and name.split("/")[-1] not in PROBES)
    return any(name in after and not np.array_equal(before[name], after[name]) for name in keys)


def in_mujoco(incident: Incident, replayed: Mapping[str, np.ndarray]) -> Outcome | None:
    """Replays the physics of the step in C MuJoCo with the environment's options; None without MuJoCo's physics.

    `replayed`, the arrays of the same step in JAX, include the controls, which depend on the action.
    """
    import mujoco

    env: Any = load_env(incident.config.env)
    env = getattr(env, "unwrapped", env)
    before = incident.part("before")
    root, model = _physics_of(before), model_of(env)
    if root is None or model is None:
        return None
    prefix = f"info/{MODEL}/."
    set_arrays(model, {name.removeprefix(prefix): x for name, x in before.items() if name.startswith(prefix)})
    # MuJoCo would silently replace a bad state by the first state.
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
    data = mujoco.MjData(model)
    inputs = {**before, f"{root}/ctrl": replayed.get(f"{root}/ctrl", before.get(f"{root}/ctrl"))}
    for name in _INPUTS:
        array, field = inputs.get(f"{root}/{name}"), getattr(data, name)
        if array is not None and array.size and array.shape == field.shape:
            field[...] = array
    if f"{root}/time" in before:
        data.time = float(before[f"{root}/time"])
    frames = physics_steps(env)
    limits, note = limits_of(incident.config.guards), ""
    for frame in range(frames):
        with without_warnings():
            mujoco.mj_step(model, data)
        watched = {f"{root}/{name}": np.array(getattr(data, name)) for name in _WATCHED}
        if not note and (bad := find_bad_numbers(watched, limits)):
            note = f"first in physics step {frame + 1} of {frames}: {bad[0]}"
    arrays = {}
    for path, array in replayed.items():
        field = getattr(data, path.removeprefix(f"{root}/"), None) if path.startswith(f"{root}/") else None
        if isinstance(field, np.ndarray) and field.shape == array.shape:
            arrays[path] = np.array(field)
    return Outcome(C, arrays, note)


def _state_before(incident: Incident) -> dict[str, np.ndarray]:
    """The state before the step, without the arrays of injected faults.

    An incident stores only the inputs of MuJoCo's step. All other arrays come from a first state; the step computes
    them again.
    """
    saved = {name: x for name, x in incident.part("before").items() if name.rsplit("/", 1)[-1] not in PROBES}
    if _physics_of(saved) is None:
        return saved
    config = incident.config
    with jax.enable_x64(False):
        env = with_memory(load_env(config.env), config.network)
        first = jax.jit(lambda key: row(_first_states(env, config.env, key), 0))(jax.random.PRNGKey(0))
        derived = {name: np.asarray(x) for name, x in _named(first) if group(name) == "physics"}
    return derived | saved


def _physics_of(before: Mapping[str, np.ndarray]) -> str | None:
    """The name of MuJoCo's physics in a state; None with other physics."""
    return next((root for root in ("pipeline_state", "data") if f"{root}/qacc_warmstart" in before), None)


def _first_states(env: Any, settings: EnvConfig, key: jax.Array) -> Any:
    envs = VectorEnv(env, settings.episode_length, settings.action_repeat, {})
    return as_environments_see(envs.reset(key[None]))


def _restored(template: Any, incident: Incident, before: Mapping[str, np.ndarray]) -> Any:
    """The state before the step as the environment's pytree; a `ConfigError` if it does not fit or is incomplete."""
    folder, left = incident.folder, dict(before)
    not_fit = f"{folder}: the incident does not fit this {incident.config.env.name}"
    remedy = "replay it with the code that the run was trained with"
    wanted, structure = jax.tree_util.tree_flatten_with_path(template)
    leaves = []
    for path, like in wanted:
        leaf = describe(path, like)
        array = left.pop(leaf.path, None)
        if array is None or array.shape != leaf.shape:
            saved = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise ConfigError(f"{not_fit}: {leaf.path} is {leaf} here, {saved} there; {remedy}")
        leaves.append(_as(array, like))
    if left:
        raise ConfigError(f"{not_fit}, which has no {next(iter(left))}; {remedy}")
    return jax.tree_util.tree_unflatten(structure, leaves)


def _as(array: np.ndarray, like: Any) -> jax.Array:
    if not is_key(like):
        return jnp.asarray(array, like.dtype)
    return jax.random.wrap_key_data(jnp.asarray(array), impl=implementation(like))


def _named(tree: Any) -> list[tuple[str, Any]]:
    """The leaves by name, with typed random keys as integers."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(describe(path, x).path, _data(x)) for path, x in paths]


def _data(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        x = jax.eval_shape(jax.random.key_data, x) if is_key(x) else x
        return np.empty(x.shape, x.dtype)
    return jax.random.key_data(x) if is_key(x) else x
