"""One environment step, again, from saved arrays: in jax as it was and in float64, and in C MuJoCo."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.config import Config, ConfigError
from rlstable.config.supervise import X64
from rlstable.device.precision import level
from rlstable.envs.load import load_env
from rlstable.envs.mujoco_model import model_of
from rlstable.envs.vector import VectorEnv, without_first_state
from rlstable.faults import PROBES
from rlstable.io.arrays import describe, is_key
from rlstable.supervise.bad_values import BadNumber, find_bad_numbers, group
from rlstable.supervise.incident import Incident, limits_of

FLOAT32, FLOAT64, C = "float32", "float64", "C MuJoCo"
_INPUTS = (
    "qpos", "qvel", "act", "ctrl", "qacc_warmstart", "qfrc_applied", "xfrc_applied", "mocap_pos", "mocap_quat",
    "eq_active",
)  # fmt: skip
_WATCHED = ("qacc", "qvel", "qpos")


class Outcome(NamedTuple):
    """The result of a step in one engine.

    Attributes:
        engine: Its name.
        arrays: The state after the step, by name.
        bad: What is bad in it.
        note: What else there is to say; empty if nothing.
    """

    engine: str
    arrays: dict[str, np.ndarray]
    bad: list[BadNumber]
    note: str = ""


def own_engine(incident: Incident) -> str:
    """The engine that computes as the run did."""
    return FLOAT64 if incident.facts["precision"]["matmul"] == X64 else FLOAT32


def step_again(incident: Incident) -> list[Outcome]:
    """The step in every engine that has the environment's physics.

    Raises:
        ConfigError: The environment cannot be built here, or is not the one that the incident is of.
    """
    before = _whole(incident)
    outcomes = [in_jax(incident, before, FLOAT32), in_jax(incident, before, FLOAT64)]
    in_c = in_mujoco(incident, outcomes[1].arrays)
    return outcomes if in_c is None else [*outcomes, in_c]


def in_jax(incident: Incident, before: Mapping[str, np.ndarray], engine: str) -> Outcome:
    """The step by the environment itself.

    Args:
        incident: What is stepped.
        before: The whole state before the step.
        engine: `float32`, with the matrix products of the run, or `float64`, the model included.

    Raises:
        ConfigError: The environment is not the one that the incident is of.
    """
    config, wide = incident.config, engine == FLOAT64
    # A run in float64 has its model in float32 all the same.
    with jax.enable_x64(wide and own_engine(incident) != FLOAT64):
        env = load_env(config.env)
    traced = level(config.precision.model_copy(update=incident.facts["precision"])).traced()
    with jax.enable_x64(wide), contextlib.nullcontext() if wide else traced:
        template = jax.eval_shape(lambda key: _inputs(env, config, key), jax.random.PRNGKey(0))
        state = _restored(template, incident, before)
        action = jnp.asarray(incident.arrays["action"], jnp.float64 if wide else jnp.float32)
        # One of a batch, as in the run.
        stepped = jax.jit(jax.vmap(env.step))(jax.tree.map(lambda x: x[None], state), action[None])
        after = jax.tree.map(lambda x: x[0], stepped)
        arrays = {
            name: np.broadcast_to(np.asarray(leaf).astype(np.asarray(old).dtype), old.shape)
            for (name, leaf), (_, old) in zip(_named(after), _named(template), strict=True)
        }
    arrays["action"] = incident.arrays["action"]
    note = (
        "the environment draws random numbers in its step, here others than in float32"
        if wide and _draws(incident)
        else ""
    )
    return Outcome(engine, arrays, find_bad_numbers(arrays, limits_of(config)), note)


def _draws(incident: Incident) -> bool:
    """Whether the environment has a random key that its step moved on."""
    before, after = incident.part("before"), incident.part("after")
    keys = (name for name, x in before.items() if x.dtype == np.uint32 and name.split("/")[-1] not in PROBES)
    return any(name in after and not np.array_equal(before[name], after[name]) for name in keys)


def in_mujoco(incident: Incident, replayed: Mapping[str, np.ndarray]) -> Outcome | None:
    """The physics of the step in C MuJoCo, with the environment's own options; None where it has not MuJoCo's physics.

    Args:
        incident: What is stepped.
        replayed: The same step by the environment, whose controls are taken: they are made of the action in there.
    """
    import mujoco

    env: Any = load_env(incident.config.env)
    env = getattr(env, "unwrapped", env)
    before = incident.part("before")
    root, model = _physics_of(before), model_of(env)
    if root is None or model is None:
        return None
    # It would put the first state in the place of a bad one, as if nothing had been.
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
    data = mujoco.MjData(model)
    given = {**before, f"{root}/ctrl": replayed.get(f"{root}/ctrl", before.get(f"{root}/ctrl"))}
    for name in _INPUTS:
        array, place = given.get(f"{root}/{name}"), getattr(data, name)
        if array is not None and array.size and array.shape == place.shape:
            place[...] = array
    if f"{root}/time" in before:
        data.time = float(before[f"{root}/time"])
    frames = int(getattr(env, "_n_frames", getattr(env, "n_substeps", 1)))  # Brax's name, and Playground's
    limits, note = limits_of(incident.config), ""
    for frame in range(frames):
        _step_quietly(mujoco, model, data)
        watched = {f"{root}/{name}": np.array(getattr(data, name)) for name in _WATCHED}
        if not note and (bad := find_bad_numbers(watched, limits)):
            note = f"first in physics step {frame + 1} of {frames}: {bad[0]}"
    arrays = {}
    for path, array in replayed.items():
        own = getattr(data, path.removeprefix(f"{root}/"), None) if path.startswith(f"{root}/") else None
        if isinstance(own, np.ndarray) and own.shape == array.shape:
            arrays[path] = np.array(own)
    return Outcome(C, arrays, find_bad_numbers(arrays, limits), note)


def _step_quietly(mujoco: Any, model: Any, data: Any) -> None:
    """A step without MuJoCo's warnings of bad numbers, which it writes into a file in the working folder."""
    mujoco.set_mju_user_warning(lambda _: None)
    try:
        mujoco.mj_step(model, data)
    finally:
        mujoco.set_mju_user_warning(None)


def _whole(incident: Incident) -> dict[str, np.ndarray]:
    """The state before the step; without what an injected fault adds.

    Of MuJoCo's physics only the start of a step is stored. The rest is a first state's, and computed again.
    """
    saved = {name: x for name, x in incident.part("before").items() if name.rsplit("/", 1)[-1] not in PROBES}
    if _physics_of(saved) is None:
        return saved
    config = incident.config
    with jax.enable_x64(False):
        env = load_env(config.env)
        first = jax.jit(lambda key: _inputs(env, config, key))(jax.random.PRNGKey(0))
        derived = {name: np.asarray(x) for name, x in _named(first) if group(name) == "physics"}
    left_out = {name.removeprefix("before/") for name in incident.facts["left_out"]}
    return {name: x for name, x in derived.items() if name not in left_out} | saved


def _physics_of(before: Mapping[str, np.ndarray]) -> str | None:
    """The name under which a state has MuJoCo's physics, None where it has another one's."""
    return next((root for root in ("pipeline_state", "data") if f"{root}/qacc_warmstart" in before), None)


def _inputs(env: Any, config: Config, key: jax.Array) -> Any:
    """A first state as `env.step` takes it."""
    envs = VectorEnv(env, config.env.episode_length, config.env.action_repeat, {})
    return jax.tree.map(lambda x: x[0], without_first_state(envs.reset(key[None])))


def _restored(template: Any, incident: Incident, before: Mapping[str, np.ndarray]) -> Any:
    """The state before the step.

    Raises:
        ConfigError: It is not that of this environment, or not whole.
    """
    folder, name, left = incident.folder, incident.config.env.name, dict(before)
    wanted, structure = jax.tree_util.tree_flatten_with_path(template)
    leaves = []
    for path, like in wanted:
        leaf = describe(path, like)
        array = left.pop(leaf.path, None)
        if array is None and f"before/{leaf.path}" in incident.facts["left_out"]:
            raise ConfigError(
                f"{folder}: {leaf.path} was left out for its size, so that the step cannot be done again; "
                "raise supervise.incident.max_mb for the next one"
            )
        if array is None or array.shape != leaf.shape:
            there = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise ConfigError(
                f"{folder}: is not of this {name}: {leaf.path} is {leaf} here and {there} there; "
                "replay it with the code that the run was trained with"
            )
        leaves.append(_as(array, like))
    if left:
        raise ConfigError(
            f"{folder}: is not of this {name}, which has no {next(iter(left))}; "
            "replay it with the code that the run was trained with"
        )
    return jax.tree_util.tree_unflatten(structure, leaves)


def _as(array: np.ndarray, like: Any) -> jax.Array:
    if not is_key(like):
        return jnp.asarray(array, like.dtype)
    implementation: list[Any] = []
    jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(jnp.asarray(array), impl=implementation[0])


def _named(tree: Any) -> list[tuple[str, Any]]:
    """Leaves by name; typed random keys as the integers they are made of."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(describe(path, x).path, _data(x)) for path, x in paths]


def _data(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        x = jax.eval_shape(jax.random.key_data, x) if is_key(x) else x
        return np.empty(x.shape, x.dtype)
    return jax.random.key_data(x) if is_key(x) else x
