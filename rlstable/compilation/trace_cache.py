"""Programs kept as they were traced, so that a run like one before traces nothing.

JAX caches compiled programs by the program's text, but producing that text in Python is most of what
a second start takes. This cache keeps the text (`jax.export`), by a key of everything that is traced: the
configuration, every source file involved, versions and flags.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import tempfile
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import export
from jax.sharding import Mesh

from rlstable.compilation import ffi, sources
from rlstable.compilation.programs import Arguments, Programs
from rlstable.compilation.xla import compiler_options, folder_of_programs
from rlstable.config import Config
from rlstable.device.machine import share_of_cores
from rlstable.device.precision import Precision, level
from rlstable.io.private_folder import make_private, user_id, writable_by_others
from rlstable.io.versions import versions

# Of the configuration and of jax's flags, what no program's text depends on.
_APART = {"seed", "logging", "checkpoint", "compile_cache", "resume"}
_FLAGS_APART = ("jax_compilation_cache", "jax_persistent_cache", "jax_cpu_enable_async_dispatch")
_OWN_CALLS = [export.DisabledSafetyCheck.custom_call(ffi.TARGET)]
_CHECKSUM_BYTES = 4
_MOST_BYTES = 2**28  # of all that are kept; what was used least lately goes first
_UNFINISHED, _WRITING_SECONDS = "unfinished-", 3600.0  # older files were left behind by a killed process


def programs_of(config: Config, mesh: Mesh) -> Programs:
    """Cache of traced programs, used only where a new trace would certainly be the same.

    A user's own environment says nothing of its sources, and text among an environment's arguments may be the path of a
    model. A process registers native physics in float64 only when it traces it. Programs of an accelerator and
    of several devices were never tried.

    Args:
        config: All of the configuration that they are traced from.
        mesh: The devices they run on.
    """
    precision, options = level(config.precision), compiler_options(config.deterministic)
    folder = folder_of_programs() if config.compile_cache is not None else None
    tried = jax.default_backend() == "cpu" and mesh.size == 1 and not precision.x64
    known = config.env.source == "brax" and _plain(config.env.kwargs) and _plain(config.eval.env_kwargs)
    files = sources.fingerprint() if tried and known else None
    if files is None or folder is None:
        return Programs(precision, options)
    # A private folder: its files are executed, and the folder of JAX's programs may be shared.
    own = folder / f"traced-{user_id()}"
    return TraceCache(own, _origin(config, files), mesh, precision, options)


class TraceCache(Programs):
    """Loads programs that an earlier process has traced, and saves the programs that this process traces.

    Both are compiled from the saved text, so JAX finds the compiled program of the earlier process.

    Args:
        folder: Where they are.
        origin: All that they are traced from, but for their names.
        mesh: The device they run on.
        precision: Precision to compile in.
        options: Compiler options.
    """

    def __init__(
        self, folder: Path, origin: str, mesh: Mesh, precision: Precision, options: dict[str, Any] | None = None
    ):
        super().__init__(precision, options)
        self._folder = folder
        self._origin = origin
        self._mesh = mesh

    def build(
        self, name: str, function: Any, arguments: Arguments, donates: bool = False, seldom: bool = False
    ) -> Future[Any]:
        """A compiled program, traced where it was not kept; arguments as in `Programs`."""
        lowered = self._lowered(name, donates, _read(self._place(name)))
        if lowered is None:
            given = arguments()
            with self._precision.compiled():
                kept = _traced(function, given, self._mesh)
            lowered = self._lowered(name, donates, kept)
            if kept is None or lowered is None:  # if it cannot even be traced, that is said now
                return super().build(name, function, lambda: given, donates, seldom)
            with contextlib.suppress(Exception):  # a full disk, an unpicklable tree: the next start traces too
                _write(self._place(name), kept)
        return self._compiled(lowered, seldom)

    def outputs(self, name: str) -> Any:
        """Shapes and types of the results of a program, None where it was not kept."""
        kept = _read(self._place(name))
        exported = None if kept is None else _deserialized(kept)
        if kept is None or exported is None:
            return None
        outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in exported.out_avals]
        return jax.tree.unflatten(kept.results, outputs)

    def _lowered(self, name: str, donates: bool, kept: _Kept | None) -> jax.stages.Lowered | None:
        """The cached trace, lowered; None if it cannot be used."""
        exported = None if kept is None else _deserialized(kept)
        if kept is None or exported is None:
            return None

        def program(*arguments: Any) -> Any:
            return jax.tree.unflatten(kept.results, exported.call(*jax.tree.leaves(arguments)))

        program.__name__ = name.replace(" ", "_")
        try:
            places = exported.in_shardings_jax(self._mesh)
            shapes = map(_placeholder, exported.in_avals, places)
            given = jax.tree.unflatten(kept.arguments, shapes)
            with self._precision.compiled():
                return jax.jit(program, donate_argnums=range(len(given)) if donates else ()).lower(*given)
        except Exception:  # no run ends for want of a shorter way
            return None

    def _place(self, name: str) -> Path:
        return self._folder / hashlib.blake2s(f"{self._origin}\n{name}".encode()).hexdigest()


class _Kept(NamedTuple):
    """A traced program on disk.

    Attributes:
        exported: As `jax.export` serialises it, with flat arguments and results.
        arguments: The tree of its arguments.
        results: The tree of its results.
        calls: Foreign functions that it calls, by their numbers in `ffi`.
    """

    exported: bytearray
    arguments: Any
    results: Any
    calls: frozenset[int]


def _traced(function: Any, arguments: tuple[Any, ...], mesh: Mesh) -> _Kept | None:
    """The traced program; None if it cannot be exported."""
    leaves, tree = jax.tree.flatten(arguments)
    # A sharding outside the mesh only says where an array happens to be; a resumed run has other ones.
    places = (x.sharding if getattr(getattr(x, "sharding", None), "mesh", None) == mesh else None for x in leaves)
    results: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        found, own = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
        results.append(own)
        return found

    try:
        exported = export.export(jax.jit(flat), disabled_checks=_OWN_CALLS)(*map(_placeholder, leaves, places))
        return _Kept(exported.serialize(), tree, results[0], ffi.calls_in(exported))
    except Exception:  # a callback of jax's own, a library's call that jax does not vouch for, or a mistake
        return None


def _placeholder(like: Any, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=place)


def _deserialized(kept: _Kept) -> export.Exported | None:
    """The trace as JAX reads it; None if this JAX cannot read it or this process lacks a function that it calls."""
    if not ffi.known(kept.calls):
        return None
    try:
        return export.deserialize(kept.exported)
    except Exception:  # of another jax, which promises nothing of its errors
        return None


def _read(place: Path) -> _Kept | None:
    """The cached bytes; None if there are none, they are torn, or another user could have written them."""
    try:
        if writable_by_others(place.parent) is not None:
            return None
        found = place.read_bytes()
        body = memoryview(found)[_CHECKSUM_BYTES:]
        if zlib.crc32(body) != int.from_bytes(found[:_CHECKSUM_BYTES]):
            return None
        kept = _Kept(*pickle.loads(body))
        os.utime(place)
    except Exception:  # of classes that are no more, unpickling raises anything
        return None
    return kept


def _write(place: Path, kept: _Kept) -> None:
    """Writes it whole or not at all, and deletes what was used least lately where there is too much.

    Raises:
        OSError: It cannot be written.
    """
    body = pickle.dumps(tuple(kept))
    make_private(place.parent)
    handle, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(zlib.crc32(body).to_bytes(_CHECKSUM_BYTES) + body)
        os.replace(name, place)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    total = 0
    files = []
    for path in place.parent.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process writes and deletes too
            files.append((path.stat(), path))
    for about, path in sorted(files, key=lambda file: -file[0].st_mtime):
        total += about.st_size
        unfinished = path.name.startswith(_UNFINISHED) and time.time() - about.st_mtime < _WRITING_SECONDS
        if total > _MOST_BYTES and not unfinished:
            path.unlink(missing_ok=True)


def _plain(arguments: Mapping[str, Any] | None) -> bool:
    """Whether the arguments of an environment are plain data, so that they identify it."""
    return all(
        name == "backend" or isinstance(value, bool | int | float | None) for name, value in (arguments or {}).items()
    )


def _origin(config: Config, files: str) -> str:
    """All that the programs of a configuration are traced from, as text."""
    apart = _APART if config.ppo.schedules_by_progress else _APART | {"total_steps"}
    flags = {name: str(value) for name, value in jax.config.values.items() if not name.startswith(_FLAGS_APART)}
    # The number of threads is part of a call of native physics. Not JSON, which has no infinity.
    return repr([config.model_dump(exclude=apart), files, versions(), share_of_cores(1), sorted(flags.items())])
