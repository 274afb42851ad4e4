"""Cache of traced programs, so that a repeated run need not trace.

JAX caches compiled programs by the program's text, but most of the time of a second start is spent on tracing, which
produces that text. This cache stores the text (`jax.export`). Its key covers everything that a trace depends on: the
configuration, all source files involved, versions and flags.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import mujoco
import numpy as np
from jax import export
from jax.sharding import Mesh

from rlstable.compilation import ffi, sources
from rlstable.compilation.programs import Arguments, Programs, collector_paused
from rlstable.compilation.xla import compiler_options, program_cache_folder
from rlstable.config import Config
from rlstable.config.run import EnvConfig
from rlstable.device.machine import share_of_cores
from rlstable.device.mjx import uses_warp
from rlstable.device.precision import Precision, level
from rlstable.io.private_folder import make_private, writable_by_others
from rlstable.io.versions import versions

# Configuration keys and JAX flags that do not change a program's text: the host reads them, or they are data.
_IRRELEVANT_KEYS: dict[str, Any] = {
    **dict.fromkeys(("total_steps", "seed", "logging", "checkpoint", "render", "recipe_for"), True),
    **dict.fromkeys(("compile_cache", "quick_compile_iterations", "resume"), True),
    "ppo": {"learning_rate", "num_resets_per_eval"},
    "env": {"reset_pool_refresh"},
    "eval": {"num_evals", "at_start", "target_return"},
    "supervise": {
        "max_wall_time": True,
        "memory": {"limit_gib"},
        "recovery": {"every", "attempts", "window", "relax_after"},
        "ladder": {"matmul"},
        "incident": {"window", "keep", "max_mb"},
    },
}
_IRRELEVANT_FLAGS = ("jax_compilation_cache", "jax_persistent_cache", "jax_cpu_enable_async_dispatch")
_OWN_CALLS = [export.DisabledSafetyCheck.custom_call(ffi.TARGET)]
_PLAYGROUND = "mujoco_playground"
_MOST_FILES = 400  # a run has four programs, of up to a few megabytes each


def programs_of(config: Config, mesh: Mesh, env: Any = None) -> Programs:
    """Builder of a run's programs: with the trace cache only if a new trace would certainly be the same.

    These cases do not use the cache:

    - an environment or a domain randomisation of the user, whose sources are unknown
    - text in an environment's arguments, which may be the path of a model
    - native physics in float64, which a process registers while tracing
    - several processes, which must compile the same text whether their cache folder has it or not
    - MJX-Warp, whose programs call functions of one process

    A task of Playground is identified by Playground's source files and by its compiled model. The model contains the
    meshes and textures of MuJoCo Menagerie, which are too large to hash at every start.

    Args:
        config: The run's configuration.
        mesh: The devices that run the programs.
        env: The environment; only read for a task of Playground.
    """
    precision, options = level(config.precision), compiler_options(config.deterministic, config.compiles_quickly)
    folder = program_cache_folder() if config.compile_cache is not None else None
    supported = jax.process_count() == 1 and not precision.x64
    plain = _plain(config.env.kwargs) and _plain(config.eval.env_kwargs)
    files = _sources_of(config.env, env) if supported and plain else None
    if files is None or folder is None:
        return Programs(precision, options)
    # A private folder, because its files are executed and JAX's cache folder may be shared.
    return TraceCache(folder / f"traced-{os.getuid()}", _key_text(config, files, mesh), mesh, precision, options)


def _sources_of(config: EnvConfig, env: Any) -> str | None:
    """A hash of everything that programs with an environment are traced from; None if it cannot be known."""
    if config.randomization_fn is not None:
        return None
    if config.source == "brax":
        return sources.fingerprint()
    model = getattr(env, "mj_model", None)
    if config.source != "playground" or model is None or uses_warp(env):
        return None
    files = sources.fingerprint(_PLAYGROUND)
    return None if files is None else files + _hash_of_model(model)


def _hash_of_model(model: mujoco.MjModel) -> str:
    """A hash of a compiled MuJoCo model with its meshes, height fields and textures."""
    content = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, content)
    return hashlib.blake2s(content.data).hexdigest()


class TraceCache(Programs):
    """Loads programs that an earlier process has traced, and saves the programs that this process traces.

    Both are compiled from the saved text, so JAX finds the compiled program of the earlier process.

    Args:
        folder: Folder of the cache.
        key_text: Everything that the programs are traced from, as text. A program's file is named by a hash of this
            text and of the program's name.
        mesh: The devices that run the programs.
        precision: Precision to compile in.
        options: Compiler options.
    """

    def __init__(
        self, folder: Path, key_text: str, mesh: Mesh, precision: Precision, options: dict[str, Any] | None = None
    ):
        super().__init__(precision, options)
        self._folder = folder
        self._key_text = key_text
        self._mesh = mesh

    def _lower(self, name: str, function: Any, arguments: Arguments, donates: bool) -> jax.stages.Lowered:
        """Lowers the cached trace of a program; traces the program only if the cache does not have it."""
        lowered = self._lowered(name, donates, _read(self._path(name)))
        if lowered is not None:
            return lowered
        args = arguments()
        with self._precision.compiled(), collector_paused():
            trace = _traced(function, args, self._mesh)
        lowered = self._lowered(name, donates, trace)
        if trace is None or lowered is None:  # raises the error of a function that cannot be traced
            return super()._lower(name, function, lambda: args, donates)
        with contextlib.suppress(Exception):  # a full disk or an unpicklable tree: the next start traces again
            _write(self._path(name), trace)
        return lowered

    def outputs(self, name: str) -> Any:
        """Shapes and dtypes of a program's results; None if the program is not in the cache."""
        trace = _read(self._path(name))
        exported = None if trace is None else _deserialized(trace)
        if trace is None or exported is None:
            return None
        outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in exported.out_avals]
        return jax.tree.unflatten(trace.results, outputs)

    def _lowered(self, name: str, donates: bool, trace: _Trace | None) -> jax.stages.Lowered | None:
        """The cached trace, lowered; None if it cannot be used."""
        exported = None if trace is None else _deserialized(trace)
        if trace is None or exported is None:
            return None

        def program(*arguments: Any) -> Any:
            return jax.tree.unflatten(trace.results, exported.call(*jax.tree.leaves(arguments)))

        program.__name__ = name.replace(" ", "_")
        try:
            shardings = exported.in_shardings_jax(self._mesh)
            shapes = map(_placeholder, exported.in_avals, shardings)
            args = jax.tree.unflatten(trace.arguments, shapes)
            with self._precision.compiled(), collector_paused():
                return jax.jit(program, donate_argnums=range(len(args)) if donates else ()).lower(*args)
        except Exception:  # the caller traces the function instead
            return None

    def _path(self, name: str) -> Path:
        return self._folder / hashlib.blake2s(f"{self._key_text}\n{name}".encode()).hexdigest()


class _Trace(NamedTuple):
    """A traced program as saved: with flat arguments and results, their tree structures, and its numbers of `ffi`."""

    exported: bytearray
    arguments: Any
    results: Any
    calls: frozenset[int]


def _traced(function: Any, arguments: tuple[Any, ...], mesh: Mesh) -> _Trace | None:
    """The traced program; None if it cannot be exported."""
    leaves, tree = jax.tree.flatten(arguments)
    # A sharding outside the mesh depends on how the array was made, and differs in a resumed run.
    shardings = (x.sharding if getattr(getattr(x, "sharding", None), "mesh", None) == mesh else None for x in leaves)
    results: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        outputs, structure = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
        results.append(structure)
        return outputs

    try:
        exported = export.export(jax.jit(flat), disabled_checks=_OWN_CALLS)(*map(_placeholder, leaves, shardings))
        return _Trace(exported.serialize(), tree, results[0], ffi.calls_in(exported))
    except Exception:  # a JAX callback, an unstable custom call of a library, or a mistake in the function
        return None


def _placeholder(like: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)


def _deserialized(trace: _Trace) -> export.Exported | None:
    """The deserialised trace; None if this JAX cannot read it or this process lacks a function that it calls."""
    if not ffi.all_registered(trace.calls):
        return None
    try:
        return export.deserialize(trace.exported)
    except Exception:  # another version of JAX may raise any error
        return None


def _read(path: Path) -> _Trace | None:
    """The saved trace; None if it is missing or damaged, or if another user could have written it."""
    try:
        if writable_by_others(path.parent) is not None:
            return None
        trace = _Trace(*pickle.loads(path.read_bytes()))
        os.utime(path)
    except Exception:  # unpickling can raise any error if a class no longer exists
        return None
    return trace


def _write(path: Path, trace: _Trace) -> None:
    """Saves a trace atomically, and deletes the least recently used files if there are too many.

    Raises:
        OSError: The trace cannot be written.
    """
    body = pickle.dumps(tuple(trace))
    make_private(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as unfinished_file:
            unfinished_file.write(body)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    for file in sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)[:-_MOST_FILES]:
        file.unlink(missing_ok=True)


def _plain(arguments: Mapping[str, Any] | None) -> bool:
    """Whether an environment's arguments are numbers, booleans or null, which fully describe the environment."""
    return all(
        name == "backend" or isinstance(value, bool | int | float | None) for name, value in (arguments or {}).items()
    )


def _key_text(config: Config, files: str, mesh: Mesh) -> str:
    """Everything that the programs of a configuration are traced from, as text for the cache key."""
    flags = {name: str(value) for name, value in jax.config.values.items() if not name.startswith(_IRRELEVANT_FLAGS)}
    # Calls of native physics contain the number of threads. Not as JSON, which has no infinity.
    devices = jax.default_backend(), sorted(mesh.shape.items()), share_of_cores(mesh.size)
    return repr([config.model_dump(exclude=_IRRELEVANT_KEYS), files, versions(), devices, sorted(flags.items())])
