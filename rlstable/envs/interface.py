"""Checks the interface of an imported environment: traces reset and step, and reports the first mistake.

Each function is traced twice, to find Python state, and once with `jax.vmap`, as training calls it.
"""

from __future__ import annotations

import operator
import sysconfig
import traceback
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rlstable.config import ConfigError
from rlstable.config.networks import NetworkConfig
from rlstable.device.shared import vmapped
from rlstable.envs import python_state
from rlstable.envs.randomized import MODEL, RandomizedEnv
from rlstable.envs.shared_leaves import mark
from rlstable.envs.vector import FIRST_STATE, episode_entries

_FIELDS = ("obs", "reward", "done", "metrics", "info")
_STATE = f"it must return a state with {', '.join(_FIELDS)} and pipeline_state (brax.envs.State) or data (Playground)"
_RLSTABLE_AND_JAX = (Path(__file__).resolve().parents[1], Path(jax.__file__).resolve().parent)
_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_NUMBER_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def check(env: Any, name: str, network: NetworkConfig | None = None) -> None:
    """Checks that training can use an environment, by tracing, without compiling or running anything.

    Step must return the structure, shapes and kinds of numbers that reset returns. Conversions without loss are
    allowed: training converts integers and booleans of step to the floats of reset.

    Args:
        env: One environment with Brax's Env interface.
        name: Name of the environment in `env.name`.
        network: Settings of the networks, which choose parts of the observation; None to accept all parts.

    Raises:
        ConfigError: The environment has a mistake; the message describes the first one.
    """
    mistakes = list(_mistakes(env, name, network))
    if mistakes:
        more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
        raise ConfigError(f"env.name: {name}: {mistakes[0]}{more}")


def user_code_error(error: Exception, name: str, what: str) -> ConfigError:
    """The error for an exception in the user's code, with its type, the first line of its message, file and line.

    Args:
        error: The exception.
        name: Name of the environment.
        what: The part of the environment that was called.
    """
    message = next(iter(str(error).strip().splitlines()), "")
    hint = "; JAX traces it: use jax.numpy, jnp.where and jax.lax" if isinstance(error, jax.errors.JAXTypeError) else ""
    if isinstance(error, jax.errors.UnexpectedTracerError):
        message, hint = "a Python variable holds a traced value of an earlier call", "; keep it in info"
    text = f"{what} raises {type(error).__name__}{': ' * bool(message)}{message}{location(error)}{hint}"
    return ConfigError(f"env.name: {name}: {text}")


def _mistakes(env: Any, name: str, network: NetworkConfig | None) -> Iterator[str]:
    """The mistakes in the first of action_size, reset and step that has any."""
    size, mistake = _action_size(env, name)
    if mistake is not None:
        yield mistake
        return
    mistakes: list[str] = []
    first = _traced(env, name, "reset", mistakes, jax.random.PRNGKey(0))
    mistakes = mistakes or [*_reset_mistakes(first, env)] or [*_observation_mistakes(env, first, network)]
    if not mistakes:
        added = episode_entries(first.metrics, jax.ShapeDtypeStruct((), jnp.float32))
        before = first.replace(info={**first.info, **added})
        action = jax.ShapeDtypeStruct((size,), jnp.float32)
        after = _traced(env, name, "step", mistakes, before, action)
        mistakes = mistakes or list(_step_mistakes(before, after, added))
    if not mistakes:
        _trace_several(env, name, size)
    yield from mistakes


def _action_size(env: Any, name: str) -> tuple[int, str | None]:
    if not hasattr(type(env), "action_size") and not hasattr(env, "action_size"):
        return 0, "has no action_size; set it to the number of actions"
    try:
        value = env.action_size
    except Exception as error:
        raise user_code_error(error, name, "action_size") from error
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    return size, f"action_size is {value!r}; it must be a whole number above 0" if size < 1 else None


def _traced(env: Any, name: str, what: str, mistakes: list[str], *args: Any) -> Any:
    """Shapes and types of the state that reset or step returns; None if tracing has found a mistake."""

    def program() -> tuple[Any, Any]:
        def arrays_only(*args: Any) -> Any:
            state = getattr(env, what)(*args)
            for path, leaf in jax.tree_util.tree_leaves_with_path(state):
                if not isinstance(leaf, typing.get_args(jax.typing.ArrayLike)):
                    kind = type(leaf).__name__
                    mistakes.append(
                        f"{what} returns {_leaf_name(path)} as {kind}; only arrays and numbers can be in a state"
                    )
            return None if mistakes else state

        return jax.make_jaxpr(arrays_only, return_shape=True)(*args)

    kept = [python_state.values(env)]
    try:
        one, state = program()
        kept.append(python_state.values(env))
        if mistakes:
            return None
        other, _ = program()
        kept.append(python_state.values(env))
    except Exception as error:
        raise user_code_error(error, name, what) from error
    mistakes += python_state.mistakes(env, what, kept, (one, other))
    return state


def _trace_several(env: Any, name: str, size: int) -> None:
    """Traces reset and step as training calls them, with `jax.vmap`.

    Raises:
        ConfigError: One environment can be traced, but not several.
    """

    def reset_and_step(keys: jax.Array, actions: jax.Array) -> Any:
        state = mark(jax.vmap(env.reset)(keys), env.reset, keys)
        added = episode_entries(state.metrics, jnp.zeros(keys.shape[:1]))
        return vmapped(env.step, state.replace(info={**state.info, **added}), actions)

    try:
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.PRNGKey(0)))
        jax.eval_shape(reset_and_step, keys, jax.ShapeDtypeStruct((2, size), jnp.float32))
    except ConfigError:
        raise
    except Exception as error:
        raise user_code_error(error, name, "jax.vmap of reset and step") from error


def _reset_mistakes(state: Any, env: Any) -> Iterator[str]:
    missing = [field for field in _FIELDS if not hasattr(state, field)]
    if missing or not (hasattr(state, "pipeline_state") or hasattr(state, "data")) or not hasattr(state, "replace"):
        yield f"reset returns {type(state).__name__}; {_STATE}"
        return
    for field in ("metrics", "info"):
        if not isinstance(getattr(state, field), Mapping):
            yield f"reset returns {field} as {type(getattr(state, field)).__name__}; it must be a dictionary"
            return
    if FIRST_STATE in state.info:
        yield f'reset returns info["{FIRST_STATE}"], where training keeps its first states; choose another name'
    if MODEL in state.info and not isinstance(env, RandomizedEnv):
        yield f'reset returns info["{MODEL}"], where training keeps randomised models; choose another name'
    for field in ("reward", "done"):
        leaf = getattr(state, field)
        if getattr(leaf, "shape", None) != () or not jnp.issubdtype(leaf.dtype, jnp.floating):
            shown = _type_and_shape(leaf) if hasattr(leaf, "shape") else type(leaf).__name__
            yield f"reset returns {field} as {shown}; it must be a float scalar, for example jnp.zeros(())"
    for key, leaf in state.metrics.items():
        if getattr(leaf, "shape", None) != ():
            shown = _type_and_shape(leaf) if hasattr(leaf, "shape") else type(leaf).__name__
            yield f'reset returns metrics["{key}"] as {shown}; every metric must be a scalar'
    if not isinstance(state.obs, jax.ShapeDtypeStruct) and not isinstance(state.obs, Mapping):
        yield f"reset returns obs as {type(state.obs).__name__}; it must be an array, or a dictionary of arrays"


def _observation_mistakes(env: Any, state: Any, network: NetworkConfig | None) -> Iterator[str]:
    """Mistakes in the parts of the observation that the networks read, and in `observation_size`."""
    named = isinstance(state.obs, Mapping)
    parts = {f'["{key}"]': x for key, x in state.obs.items()} if named else {"": state.obs}
    if named and network is not None:
        parts = {at: x for at, x in parts.items() if at[2:-2] in (network.policy_obs_key, network.value_obs_key)}
    for at, x in parts.items():
        if not isinstance(x, jax.ShapeDtypeStruct):
            yield f"reset returns obs{at} as {type(x).__name__}; the networks read a vector: concatenate its parts"
        elif len(x.shape) != 1:
            yield f"reset returns obs{at} as {_type_and_shape(x)}; the networks read a vector: use jnp.ravel"
    yield from _observation_size_mistakes(env, state)


def _observation_size_mistakes(env: Any, state: Any) -> Iterator[str]:
    """Compares `observation_size` with the observation, unless Brax or Playground derive the size from reset."""
    prop = getattr(type(env), "observation_size", None)
    module = getattr(getattr(prop, "fget", None), "__module__", "")
    if module.partition(".")[0] in ("brax", "mujoco_playground"):
        return
    try:
        size = env.observation_size
    except Exception:  # training does not need it
        return
    whole = not isinstance(state.obs, Mapping) and not isinstance(size, Mapping)
    sizes, parts = ({"": size}, {"": state.obs}) if whole else (size, state.obs)
    if not isinstance(sizes, Mapping) or not isinstance(parts, Mapping):
        return  # not comparable, and training does not need it
    for key in sizes.keys() & parts.keys():
        if hasattr(parts[key], "shape") and not _size_fits(sizes[key], parts[key].shape):
            at = "" if whole else f'["{key}"]'
            returned = f"reset returns obs{at} as {_type_and_shape(parts[key])}"
            yield f"observation_size{at} is {sizes[key]}, but {returned}; make them agree"


def _size_fits(size: Any, shape: tuple[int, ...]) -> bool:
    try:
        return operator.index(size) == shape[-1]
    except TypeError:
        return isinstance(size, tuple | list) and tuple(size) == shape


def _step_mistakes(before: Any, after: Any, added: Mapping[str, Any]) -> Iterator[str]:
    if type(after) is not type(before):
        yield f"step returns {type(after).__name__}; it must return state.replace(...), a {type(before).__name__}"
        return
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
        if not any(name.startswith(f'info["{key}"]') for key in counts):
            yield f"step drops {name}, which reset has; return it from every step"
    for name in old:
        if name in new and (new[name].shape != old[name].shape or _loses_information(new[name].dtype, old[name].dtype)):
            change = f"{_type_and_shape(old[name])} in reset, {_type_and_shape(new[name])} in step"
            yield f"step changes the shape or type of {name}: {change}; return the same in both"
    if old.keys() == new.keys():
        for field in vars(before):
            try:  # JAX 0.10 compares structures of different classes as equal if their fields are the same
                jax.tree.map(lambda *_: None, getattr(before, field), getattr(after, field))
            except ValueError:
                yield f"step changes the structure of {field}; return the same classes as reset"


def _loses_information(new: Any, old: Any) -> bool:
    """Whether the conversion to the old type loses values, for example fractions."""
    ranks = [rank for kind in (new, old) for rank, above in enumerate(_NUMBER_KINDS) if jnp.issubdtype(kind, above)]
    return ranks[0] > ranks[1] if len(ranks) == 2 else bool(new != old)  # random keys are not numbers


def _leaf_name(path: Any) -> str:
    """The path of a leaf in Python syntax: `info["speed"]`, `pipeline_state.q`."""
    return jax.tree_util.keystr(path).lstrip(".").replace("'", '"') or "the state"


def _type_and_shape(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


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
