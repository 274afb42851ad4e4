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
from jax.stages import Lowered, Wrapped

from rlstable.compilation import ffi, sources
from rlstable.compilation.compiler import Arguments, Compiler, collector_paused
from rlstable.compilation.xla import Options, compiler_options, program_cache_folder
from rlstable.config import Config
from rlstable.config.run import EnvConfig
from rlstable.device.machine import share_of_cores
from rlstable.device.mjx import uses_warp
from rlstable.device.precision import Precision, level
from rlstable.device.trees import Env, PyTree
from rlstable.io.private_folder import make_private, writable_by_others
from rlstable.io.versions import versions

# Configuration keys and JAX flags that do not change a program's text: the host reads them, or they are data.
_IRRELEVANT_KEYS: dict[str, Any] = {
    **dict.fromkeys(("total_steps", "seed", "logging", "checkpoint", "render", "recipe_for"), True),
    **dict.fromkeys(("compile_cache", "quick_compile_iterations", "resume"), True),
    "ppo": {"learning_rate", "num_resets_per_eval"},
    "eval": {"num_evals", "at_start", "target_return"},
    "supervise": {"max_wall_time"},
}
_IRRELEVANT_FLAGS = ("jax_compilation_cache", "jax_persistent_cache", "jax_cpu_enable_async_dispatch")
_OWN_CALLS = [export.DisabledSafetyCheck.custom_call(ffi.TARGET)]
_MOST_FILES = 400  # a run has four programs, of up to a few megabytes each


def compiler_of(config: Config, mesh: Mesh, env: Env | None = None, cached: bool = True) -> Compiler:
    """Compiler of a run's programs: if `cached`, with the trace cache if a new trace would certainly be the same.

    These cases do not use the cache:

    - an environment or a domain randomisation of the user, whose sources are unknown
    - text in an environment's arguments, which may be the path of a model
    - native physics in float64, which a process registers while tracing
    - several processes, which must compile the same text whether their cache folder has it or not
    - MJX-Warp, whose programs call functions of one process

    `env` is only read for a task of Playground or Gymnasium, and for a robot.
    """
    precision, options = level(config.precision), compiler_options(config.deterministic, config.compiles_quickly)
    folder = program_cache_folder() if config.compile_cache is not None else None
    supported = cached and jax.process_count() == 1 and not precision.x64
    plain = _plain(config.env.kwargs) and _plain(config.eval.env_kwargs)
    files = _sources_of(config.env, env) if supported and plain else None
    if files is None or folder is None:
        return Compiler(precision, options)
    # A private folder, because its files are executed and JAX's cache folder may be shared.
    return TraceCache(
        folder / f"traced-{os.getuid()}",
        _key_text(config.model_dump(exclude=_IRRELEVANT_KEYS), files, mesh),
        mesh,
        precision,
        options,
    )


def _sources_of(config: EnvConfig, env: object) -> str | None:
    """A hash of everything that programs with an environment are traced from; None if it cannot be known."""
    if config.randomization_fn is not None:
        return None
    if config.source == "brax":
        return sources.fingerprint()
    model = getattr(env, "mj_model", None)
    known = {"playground": ["mujoco_playground"], "gymnasium": ["gymnasium"], "robot": []}
    if config.source not in known or config.own_terms or model is None or uses_warp(env):
        return None
    # The compiled model stands for its file with all meshes and textures, which are too large to hash as files.
    content = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, content)
    files = sources.fingerprint(*known[config.source])
    return None if files is None else files + hashlib.blake2s(content.data).hexdigest()


class TraceCache(Compiler):
    """Loads programs that an earlier process has traced, and saves the programs that this process traces.

    Both are compiled from the saved text, so JAX finds the compiled program of the earlier process. A program's file is
    named by a hash of `key_text`, which says everything that the programs are traced from, and of the program's name.
    """

    def __init__(self, folder: Path, key_text: str, mesh: Mesh, precision: Precision, options: Options | None = None):
        super().__init__(precision, options)
        self._folder = folder
        self._key_text = key_text
        self._mesh = mesh

    def _lower(self, name: str, function: Wrapped, arguments: Arguments, donates: bool) -> Lowered:
        """Lowers the cached trace of a program; traces the program only if the cache does not have it."""
        lowered = self._lowered(name, donates, _read(self._path(name)))
        if lowered is not None:
            return lowered
        args = arguments()
        with self.precision.compiled(), collector_paused():
            saved = _traced(function, args, self._mesh)
        lowered = self._lowered(name, donates, saved)
        if saved is None or lowered is None:  # raises the error of a function that cannot be traced
            return super()._lower(name, function, lambda: args, donates)
        with contextlib.suppress(OSError):  # a full disk: the next start traces again
            _write(self._path(name), saved)
        return lowered

    def outputs(self, name: str) -> PyTree:
        trace = _loaded(_read(self._path(name)))
        if trace is None:
            return None
        outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in trace.exported.out_avals]
        return jax.tree.unflatten(trace.results, outputs)

    def _lowered(self, name: str, donates: bool, saved: bytes | None) -> Lowered | None:
        """A saved trace, lowered; None if it cannot be used, and the caller traces the function instead."""
        trace = _loaded(saved)
        if trace is None:
            return None

        def program(*arguments: PyTree) -> PyTree:
            return jax.tree.unflatten(trace.results, trace.exported.call(*jax.tree.leaves(arguments)))

        program.__name__ = name.replace(" ", "_")
        try:
            shapes = map(_placeholder, trace.exported.in_avals, trace.exported.in_shardings_jax(self._mesh))
            args = jax.tree.unflatten(trace.arguments, shapes)
            with self.precision.compiled(), collector_paused():
                return jax.jit(program, donate_argnums=range(len(args)) if donates else ()).lower(*args)
        except Exception:
            return None

    def _path(self, name: str) -> Path:
        return self._folder / hashlib.blake2s(f"{self._key_text}\n{name}".encode()).hexdigest()


class _Trace(NamedTuple):
    """A traced program with flat arguments and results, and their tree structures."""

    exported: export.Exported
    arguments: jax.tree_util.PyTreeDef
    results: jax.tree_util.PyTreeDef


def _traced(function: Wrapped, arguments: tuple[PyTree, ...], mesh: Mesh) -> bytes | None:
    """The traced program as it is saved; None if it cannot be."""
    leaves, tree = jax.tree.flatten(arguments)
    # A sharding outside the mesh depends on how the array was made, and differs in a resumed run.
    shardings = (x.sharding if getattr(getattr(x, "sharding", None), "mesh", None) == mesh else None for x in leaves)
    results: list[jax.tree_util.PyTreeDef] = []

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        outputs, structure = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
        results.append(structure)
        return outputs

    try:
        exported = export.export(jax.jit(flat), disabled_checks=_OWN_CALLS)(*map(_placeholder, leaves, shardings))
        return pickle.dumps((exported.serialize(), tree, results[0], ffi.calls_in(exported)))
    except Exception:  # a JAX callback, a library's custom call, an unpicklable tree, or the function's mistake
        return None


def _loaded(saved: bytes | None) -> _Trace | None:
    """The trace; None if it is damaged, of another JAX, or calls a function of `ffi` that this process lacks."""
    try:
        exported, arguments, results, calls = pickle.loads(saved or b"")
        return _Trace(export.deserialize(exported), arguments, results) if ffi.all_registered(calls) else None
    except Exception:  # unpickling and deserialising can raise any error
        return None


def _placeholder(like: PyTree, sharding: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)


def _read(path: Path) -> bytes | None:
    """The saved trace; None if it is missing, or if another user could have written it."""
    try:
        if writable_by_others(path.parent) is not None:
            return None
        os.utime(path)
        return path.read_bytes()
    except OSError:
        return None


def _write(path: Path, saved: bytes) -> None:
    """Saves a trace atomically, and deletes the least recently used files if there are too many."""
    make_private(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as unfinished_file:
            unfinished_file.write(saved)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    for file in sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)[:-_MOST_FILES]:
        file.unlink(missing_ok=True)


def _plain(arguments: Mapping[str, object] | None) -> bool:
    """Whether an environment's arguments are numbers, booleans or null, which fully describe the environment."""
    return all(
        name == "backend" or isinstance(value, bool | int | float | None) for name, value in (arguments or {}).items()
    )


def _key_text(settings: Mapping[str, object], files: str, mesh: Mesh) -> str:
    """Everything that the programs of a configuration are traced from, as text for the cache key."""
    flags = {name: str(value) for name, value in jax.config.values.items() if not name.startswith(_IRRELEVANT_FLAGS)}
    # Calls of native physics contain the number of threads. Not as JSON, which has no infinity.
    devices = jax.default_backend(), sorted(mesh.shape.items()), share_of_cores(mesh.size)
    return repr([settings, files, versions(), devices, sorted(flags.items())])
