"""Programs kept as they were traced, so that a run like one before traces nothing.

jax keeps what it has compiled and finds it by the program's text, but to come to that text, in Python, is most of what
a second start takes. Here the text itself is kept (`jax.export`), and found by what it would be traced from: the
configuration, every source file that has a part in it, versions and flags.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pickle
import tempfile
import zlib
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import export
from jax.sharding import Mesh

from rlstable import background, sources
from rlstable.compiling import compiler_options, folder_of_programs
from rlstable.config import Config
from rlstable.envs import foreign
from rlstable.precision import Precision, level
from rlstable.programs import Arguments, Programs
from rlstable.versions import versions

# Of the configuration and of jax's flags, what no program's text depends on.
_APART = {"seed", "sinks", "checkpoint", "compile_cache", "resume"}
_FLAGS_APART = ("jax_compilation_cache", "jax_persistent_cache", "jax_cpu_enable_async_dispatch")
_OWN_CALLS = [export.DisabledSafetyCheck.custom_call(foreign.TARGET)]
_CHECKSUM_BYTES = 4
_MOST_BYTES = 2**28  # of all that are kept; what was used least lately goes first


def programs_of(config: Config, mesh: Mesh) -> Programs:
    """What builds the programs of a configuration, kept where it is sure that they would be the same again.

    A user's own environment says nothing of its sources, and text among an environment's arguments may be the path of a
    model. For an accelerator and for several devices it was never tried.

    Args:
        config: All of the configuration that they are traced from.
        mesh: The devices they run on.
    """
    precision, options = level(config.precision), compiler_options(config.deterministic)
    folder = folder_of_programs() if config.compile_cache is not None else None
    known = config.env.source == "brax" and _plain(config.env.kwargs) and _plain(config.eval.env_kwargs)
    files = sources.fingerprint() if known and mesh.size == 1 and jax.default_backend() == "cpu" else None
    if files is None or folder is None:
        return Programs(precision, options)
    return KeptPrograms(folder / "traced", _origin(config, files), mesh, precision, options)


class KeptPrograms(Programs):
    """Reads programs that a process before this one has traced, and keeps those that it traces itself.

    Both are compiled from what is kept, so that jax finds for one what it has compiled for the other.

    Args:
        folder: Where they are.
        origin: All that they are traced from, but for their names.
        mesh: The device they run on.
        precision: What they are compiled in.
        options: For the compiler.
    """

    def __init__(
        self, folder: Path, origin: str, mesh: Mesh, precision: Precision, options: dict[str, Any] | None = None
    ):
        super().__init__(precision, options)
        self._folder = folder
        self._origin = origin
        self._mesh = mesh

    def build(self, name: str, function: Any, arguments: Arguments, donates: bool = False) -> Future[Any]:
        """A compiled program, traced where it was not kept; arguments as in `Programs`."""
        lower = functools.partial(self._lower, name, donates)
        try:
            lowered = lower(_read(self._place(name)))
        except Exception:  # not there, torn, or what this jax or this process does not know
            given = arguments()
            try:
                with self._precision.compiled():
                    kept = _traced(function, given)
                lowered = lower(kept)
                _write(self._place(name), kept)
            except Exception:  # what cannot be exported or written; if it cannot be traced, that is said now
                return super().build(name, function, lambda: given, donates)
        return background.build(functools.partial(lowered.compile, self._options))

    def outputs(self, name: str) -> Any:
        """Shapes and types of the results of a program, None where it was not kept."""
        try:
            kept = _read(self._place(name))
            exported = export.deserialize(kept.exported)
        except Exception:
            return None
        outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in exported.out_avals]
        return jax.tree.unflatten(kept.results, outputs)

    def _lower(self, name: str, donates: bool, kept: _Kept) -> jax.stages.Lowered:
        if not foreign.known(kept.calls):
            raise LookupError(f"{name} calls what this process does not know")
        exported = export.deserialize(kept.exported)

        def program(*arguments: Any) -> Any:
            return jax.tree.unflatten(kept.results, exported.call(*jax.tree.leaves(arguments)))

        program.__name__ = name.replace(" ", "_")
        places = exported.in_shardings_jax(self._mesh)
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
            for x, place in zip(exported.in_avals, places, strict=True)
        ]
        given = jax.tree.unflatten(kept.arguments, shapes)
        with self._precision.compiled():
            return jax.jit(program, donate_argnums=range(len(given)) if donates else ()).lower(*given)

    def _place(self, name: str) -> Path:
        return self._folder / hashlib.blake2s(f"{self._origin}\n{name}".encode()).hexdigest()


class _Kept(NamedTuple):
    """A program as it lies on disk.

    Attributes:
        exported: As `jax.export` serialises it, with flat arguments and results.
        arguments: The tree of its arguments.
        results: The tree of its results.
        calls: What it calls that is no part of it, by `foreign`'s numbers.
    """

    exported: bytearray
    arguments: Any
    results: Any
    calls: frozenset[int]


def _traced(function: Any, arguments: tuple[Any, ...]) -> _Kept:
    leaves, tree = jax.tree.flatten(arguments)
    results: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        found, own = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
        results.append(own)
        return found

    exported = export.export(jax.jit(flat), disabled_checks=_OWN_CALLS)(*leaves)
    return _Kept(exported.serialize(), tree, results[0], foreign.calls_in(exported))


def _read(place: Path) -> _Kept:
    """What was kept.

    Raises:
        OSError: Nothing was, or it cannot be read.
        ValueError: It is torn.
    """
    found = place.read_bytes()
    body = memoryview(found)[_CHECKSUM_BYTES:]
    if zlib.crc32(body) != int.from_bytes(found[:_CHECKSUM_BYTES]):
        raise ValueError(f"{place} does not have its checksum")
    with contextlib.suppress(OSError):
        os.utime(place)
    return _Kept(*pickle.loads(body))


def _write(place: Path, kept: _Kept) -> None:
    """Writes it whole or not at all, and deletes what was used least lately where there is too much."""
    body = pickle.dumps(tuple(kept))
    place.parent.mkdir(mode=0o700, exist_ok=True)  # what lies here is executed: it is nobody else's to write
    handle, name = tempfile.mkstemp(dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(zlib.crc32(body).to_bytes(_CHECKSUM_BYTES) + body)
        os.replace(name, place)
    except BaseException:
        os.unlink(name)
        raise
    total = 0
    files = ((path.stat(), path) for path in place.parent.iterdir())
    for about, path in sorted(files, key=lambda file: -file[0].st_mtime):
        total += about.st_size
        if total > _MOST_BYTES:
            path.unlink(missing_ok=True)


def _plain(arguments: Mapping[str, Any] | None) -> bool:
    """Whether an environment's arguments say themselves what they are."""
    return all(
        name == "backend" or isinstance(value, bool | int | float | None) for name, value in (arguments or {}).items()
    )


def _origin(config: Config, files: str) -> str:
    """All that the programs of a configuration are traced from, as text."""
    apart = _APART if config.ppo.schedules_by_progress else _APART | {"total_steps"}
    flags = {name: str(value) for name, value in jax.config.values.items() if not name.startswith(_FLAGS_APART)}
    return json.dumps(
        {
            "config": config.model_dump(mode="json", exclude=apart),
            "sources": files,
            "versions": versions(),
            "flags": flags,
        },
        sort_keys=True,
    )
