"""Checks the interface of an imported environment: traces reset and step, and reports the first mistake.

Each function is traced twice, because JAX runs Python code only while tracing: a counter, `np.random` or the time keeps
its value for the whole training. Then both are traced with `jax.vmap`, as training calls them.
"""

from __future__ import annotations

import operator
import sysconfig
import traceback
import typing
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.config import ConfigError
from rlstable.config.networks import NetworkConfig
from rlstable.device.shared import vmapped
from rlstable.device.trees import Env, EnvState, PyTree
from rlstable.envs.history import without_history
from rlstable.envs.randomized import RandomizedEnv
from rlstable.envs.shared_leaves import mark
from rlstable.envs.vector import FIRST_STATE, MODEL, episode_entries

_FIELDS = ("obs", "reward", "done", "metrics", "info")
_STATE = f"it must return a state with {', '.join(_FIELDS)} and pipeline_state (brax.envs.State) or data (Playground)"
_RLSTABLE_AND_JAX = (Path(__file__).resolve().parents[1], Path(jax.__file__).resolve().parent)
_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
# rlstable itself does what their classes do: vectorise, repeat, truncate and reset.
_TRAINING_WRAPPERS = ("brax.envs.wrappers.training", "mujoco_playground._src.wrapper")
_NUMBER_KINDS: tuple[Any, ...] = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def check(env: Env, name: str, network: NetworkConfig | None = None) -> None:
    """Checks that training can use an environment, by tracing, without compiling or running anything.

    Step must return the structure, shapes and kinds of numbers that reset returns. Conversions without loss are
    allowed: training converts integers and booleans of step to the floats of reset. Only the parts of the observation
    that `network` reads must be vectors. Raises `ConfigError` with the first mistake.
    """
    for mistake in _mistakes(without_history(env), name, network):
        raise ConfigError(f"env.name: {name}: {mistake}")


def require_unwrapped(env: object) -> None:
    """Raises ConfigError if an environment is inside a training wrapper of Brax or Playground."""
    while env is not None:
        kind = type(env)
        if kind.__module__ in _TRAINING_WRAPPERS and kind.__name__ != "Wrapper":
            raise ConfigError(
                f"env.name: {kind.__name__} is a training wrapper, and rlstable does its work; pass the environment "
                "without it, with env.episode_length and env.action_repeat, and a randomisation as env.randomization_fn"
            )
        env = getattr(env, "__dict__", {}).get("env")


def user_code_error(error: Exception, name: str, what: str) -> ConfigError:
    """The error for an exception in the user's code, with its type, the first line of its message, file and line."""
    message = next(iter(str(error).strip().splitlines()), "")
    hint = "; JAX traces it: use jax.numpy, jnp.where and jax.lax" if isinstance(error, jax.errors.JAXTypeError) else ""
    if isinstance(error, jax.errors.UnexpectedTracerError):
        message, hint = "a Python variable holds a traced value of an earlier call", "; keep it in info"
    text = f"{what} raises {type(error).__name__}{': ' * bool(message)}{message}{location(error)}{hint}"
    return ConfigError(f"env.name: {name}: {text}")


def _mistakes(env: Env, name: str, network: NetworkConfig | None) -> Iterator[str]:
    """The mistakes in the order in which they are found; code after a mistake may rely on its absence."""
    try:
        size = operator.index(env.action_size)
    except Exception:
        size = 0
    if size < 1:
        yield "it needs action_size, the number of actions, a whole number above 0"
    first = yield from _traced(env, name, "reset", jax.random.PRNGKey(0))
    yield from _reset_mistakes(first, env)
    yield from _observation_mistakes(first, network)
    added = episode_entries(jax.ShapeDtypeStruct((), jnp.float32))
    before = first.replace(info={**first.info, **added})
    after = yield from _traced(env, name, "step", before, jax.ShapeDtypeStruct((size,), jnp.float32))
    yield from _step_mistakes(before, after, added)
    _trace_several(env, name, size)


def _traced(env: Env, name: str, what: str, *args: PyTree) -> Generator[str, None, EnvState]:
    """Yields mistakes, and returns shapes and types of the state that reset or step returns."""
    foreign: list[str] = []

    def program() -> tuple[Any, EnvState]:
        def arrays_only(*args: PyTree) -> EnvState:
            state = getattr(env, what)(*args)
            for path, leaf in jax.tree_util.tree_leaves_with_path(state):
                if not isinstance(leaf, typing.get_args(jax.typing.ArrayLike)):
                    foreign.append(f"{_leaf_name(path)} as {type(leaf).__name__}")
            return None if foreign else state

        return jax.make_jaxpr(arrays_only, return_shape=True)(*args)

    try:
        (first, state), (second, _) = program(), program()
    except Exception as error:
        raise user_code_error(error, name, what) from error
    for part in foreign:
        yield f"{what} returns {part}; only arrays and numbers can be in a state"
    one, other = _constants(first), _constants(second)
    if any(isinstance(x, jax.core.Tracer) for x in other):
        yield f"{what} reads a value that an earlier call of reset or step traced; keep it in info"
    elif len(one) != len(other) or not all(map(_same, one, other)):
        yield (
            f"{what} differs between two traces: a Python counter, np.random or the time never changes in the compiled "
            "program; keep counters in info, and use jax.random with a key in info"
        )
    return state


def _constants(program: Any) -> list[Any]:
    """Names of the operations of a program, with the constants that they read."""
    found = [*getattr(program, "consts", ())]
    for equation in program.eqns:
        found += [equation.primitive.name, *(x.val for x in equation.invars if hasattr(x, "val"))]
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            found += _constants(value) if hasattr(value, "eqns") else []
    return found


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not hasattr(one, "dtype") or not hasattr(other, "dtype"):
        return type(one) is type(other) and repr(one) == repr(other)
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()


def _trace_several(env: Env, name: str, size: int) -> None:
    """Traces reset and step as training calls them, with `jax.vmap`, which not every environment allows."""

    def reset_and_step(keys: jax.Array, actions: jax.Array) -> EnvState:
        state = mark(jax.vmap(env.reset)(keys), env.reset, keys)
        added = episode_entries(jnp.zeros(keys.shape[:1]))
        return vmapped(env.step, state.replace(info={**state.info, **added}), actions)

    try:
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.PRNGKey(0)))
        jax.eval_shape(reset_and_step, keys, jax.ShapeDtypeStruct((2, size), jnp.float32))
    except ConfigError:
        raise
    except Exception as error:
        raise user_code_error(error, name, "jax.vmap of reset and step") from error


def _reset_mistakes(state: EnvState, env: Env) -> Iterator[str]:
    missing = [field for field in _FIELDS if not hasattr(state, field)]
    if missing or not (hasattr(state, "pipeline_state") or hasattr(state, "data")) or not hasattr(state, "replace"):
        yield f"reset returns {type(state).__name__}; {_STATE}"
    for field in ("metrics", "info"):
        if not isinstance(getattr(state, field), Mapping):
            yield f"reset returns {field} as {_kind(getattr(state, field))}; it must be a dictionary"
    for entry in (FIRST_STATE, *(() if isinstance(env, RandomizedEnv) else (MODEL,))):
        if entry in state.info:
            yield f'reset returns info["{entry}"], which training uses; choose another name'
    for field in ("reward", "done"):
        leaf = getattr(state, field)
        if getattr(leaf, "shape", None) != () or not jnp.issubdtype(leaf.dtype, jnp.floating):
            yield f"reset returns {field} as {_kind(leaf)}; it must be a float scalar, for example jnp.zeros(())"
    for key, leaf in state.metrics.items():
        if getattr(leaf, "shape", None) != ():
            yield f'reset returns metrics["{key}"] as {_kind(leaf)}; every metric must be a scalar'


def _observation_mistakes(state: EnvState, network: NetworkConfig | None) -> Iterator[str]:
    """Mistakes in the parts of the observation that the networks read."""
    named = isinstance(state.obs, Mapping)
    parts = {f'["{key}"]': x for key, x in state.obs.items()} if named else {"": state.obs}
    if named and network is not None:
        parts = {at: x for at, x in parts.items() if at[2:-2] in (network.policy_obs_key, network.value_obs_key)}
    for at, x in parts.items():
        if len(getattr(x, "shape", ())) != 1:
            yield f"reset returns obs{at} as {_kind(x)}; the networks read a vector, or a dictionary of vectors"


def _step_mistakes(before: EnvState, after: EnvState, added: Mapping[str, PyTree]) -> Iterator[str]:
    if type(after) is not type(before):
        yield f"step returns {type(after).__name__}; it must return state.replace(...), a {type(before).__name__}"
    old, new = (
        {_leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(x)} for x in (before, after)
    )
    for name in sorted(new.keys() - old.keys()):
        where = name.partition("[")[0].partition(".")[0]
        yield f"step adds {name}, which reset does not have; put it into reset's {where} with the same shape and type"
    dropped = sorted(old.keys() - new.keys())
    counts = [key for key in added if any(name.startswith(f'info["{key}"]') for name in dropped)]
    if counts:
        yield f"step drops {', '.join(counts)} from info, where training counts; return info={{**state.info, ...}}"
    for name in dropped:
        yield f"step drops {name}, which reset has; return it from every step"
    for name in old:
        if new[name].shape != old[name].shape or _loses_information(new[name].dtype, old[name].dtype):
            change = f"{_kind(old[name])} in reset, {_kind(new[name])} in step"
            yield f"step changes the shape or type of {name}: {change}; return the same in both"
    for field in vars(before):
        try:  # JAX 0.10 compares structures of different classes as equal if their fields are the same
            jax.tree.map(lambda *_: None, getattr(before, field), getattr(after, field))
        except ValueError:
            yield f"step changes the structure of {field}; return the same classes as reset"


def _loses_information(new: jnp.dtype, old: jnp.dtype) -> bool:
    """Whether the conversion to the old type loses values, for example fractions."""
    ranks = [rank for kind in (new, old) for rank, above in enumerate(_NUMBER_KINDS) if jnp.issubdtype(kind, above)]
    return ranks[0] > ranks[1] if len(ranks) == 2 else bool(new != old)  # random keys are not numbers


def _leaf_name(path: jax.tree_util.KeyPath) -> str:
    """The path of a leaf in Python syntax: `info["speed"]`, `pipeline_state.q`."""
    return jax.tree_util.keystr(path).lstrip(".").replace("'", '"') or "the state"


def _kind(x: Any) -> str:
    """Type and shape of an array, `float32[3]`, or the type of anything else."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]" if hasattr(x, "shape") else type(x).__name__


def location(error: Exception) -> str:
    """File and line of the innermost call in the user's code as ` (file:line)`; empty if there is none.

    Code outside Python's library folders is preferred to installed packages.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    for libraries in ((*_RLSTABLE_AND_JAX, *_INSTALLED), _RLSTABLE_AND_JAX):
        for frame in reversed(frames):
            file, cwd = Path(frame.filename), Path.cwd()
            if not any(file.is_relative_to(folder) for folder in libraries):
                return f" ({file.relative_to(cwd) if file.is_relative_to(cwd) else file}:{frame.lineno})"
    return ""
