"""NumPy inside compiled programs, on the programs' own memory, called by a number that is the same in every process.

A JAX callback is identified by its address in this process, so JAX does not cache programs with callbacks on
disk. A function here is identified by what it computes. It is called by XLA's foreign function interface, whose binary
layout is stable within a major version (`xla/ffi/api/c_api.h`, which jaxlib brings); XLA refuses the registration
where it has another.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import jax
import numpy as np

Arrays = Mapping[str, np.ndarray]
Compute = Callable[[Arrays, Arrays], None]

TARGET = "rlstable_numpy"  # what programs know the way in by
_VERSION = (0, 3)
_METADATA = 1  # XLA_FFI_Extension_Metadata: a call that asks for the version and computes nothing
_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
_MOST_VIEWS = 64  # programs reuse their memory from step to step, so that a few sets of arrays are all there are


class _Extension(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p))


class _Version(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32))


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


class _ErrorArguments(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    )


class _Api(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        ("create_error", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArguments))),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class _Buffers(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
    )


class _Scalar(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int), ("value", ctypes.POINTER(ctypes.c_int64)))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("values", ctypes.POINTER(ctypes.POINTER(_Scalar))),
    )


class _Frame(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extensions", ctypes.POINTER(_MetadataExtension)),
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    )


_DATA = _Buffer.data.offset


@dataclasses.dataclass
class _Call:
    """A computation, and the names, types and shapes of its arrays without the axes that vmap puts in front."""

    compute: Compute
    given: dict[str, jax.ShapeDtypeStruct]
    wanted: dict[str, jax.ShapeDtypeStruct]
    views: dict[tuple[int, ...], tuple[Arrays, Arrays]] = dataclasses.field(default_factory=dict)

    def __call__(self, frame: _Frame) -> None:
        """Computes on the memory of one call."""
        given, wanted = _addresses(frame.arguments), _addresses(frame.results)
        first = _Buffer.from_address(given[0])
        rows = tuple(first.dims[: first.rank - len(next(iter(self.given.values())).shape)])
        places = tuple(ctypes.c_size_t.from_address(address + _DATA).value for address in (*given, *wanted))
        arrays = self.views.get((*rows, *places))
        if arrays is None:
            if len(self.views) >= _MOST_VIEWS:
                self.views.clear()
            arrays = _arrays(places[: len(given)], self.given, rows), _arrays(places[len(given) :], self.wanted, rows)
            self.views[(*rows, *places)] = arrays
        self.compute(*arrays)


_calls: dict[int, _Call] = {}
_registering = threading.Lock()
_registered: list[Any] = []


def call(name: str, compute: Compute, given: Mapping[str, jax.Array], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays that `compute(given, results)` writes, on a CPU; under vmap all of them get the same axes in front.

    Args:
        name: Says all that the computation depends on besides its arguments: what has the same name, in whichever
            process, computes the same.
        compute: Called with NumPy arrays by name, which are the program's own memory: good for the call only.
        given: Its arguments, at least one, each with at least one element.
        wanted: Shapes and types of its results.
    """
    _register()
    shapes = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in given.items()}
    known = f"{name} {[(key, x.shape, str(x.dtype)) for key, x in (*shapes.items(), *wanted.items())]}"
    number = int.from_bytes(hashlib.blake2s(known.encode(), digest_size=8).digest()) >> 1
    _calls[number] = _Call(compute, shapes, dict(wanted))
    function = jax.ffi.ffi_call(TARGET, list(wanted.values()), vmap_method="broadcast_all")
    results = function(*given.values(), computation=np.int64(number))
    return dict(zip(wanted, results, strict=True))


def calls_in(exported: jax.export.Exported) -> frozenset[int]:
    """Numbers of the computations that a program calls.

    Raises:
        ValueError: Its text does not say them as this knows it.
    """
    if not _calls:
        return frozenset()
    text = exported.mlir_module()
    found = re.findall(rf"@{TARGET}\(.*?computation = (\d+)", text)
    if len(found) != text.count(f"@{TARGET}("):
        raise ValueError(f"{TARGET} is called in a way that is not known")
    return frozenset(map(int, found))


def known(calls: Set[int]) -> bool:
    """Whether computations can be called in this process: once they were traced, alone or in a program."""
    return calls <= _calls.keys()


def _register() -> None:
    """Makes the way in known to XLA, once in a process."""
    with _registering:
        if not _registered:
            jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_answer), platform="cpu")
            _registered.append(TARGET)


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))
def _answer(pointer: Any) -> int | None:
    """The function that XLA calls; it returns an error for XLA to raise."""
    # With inline dispatch this may be the main thread, in which a signal is an exception out of any line.
    try:
        frame = pointer.contents
        if frame.extensions and frame.extensions.contents.base.type == _METADATA:
            metadata = frame.extensions.contents.metadata.contents
            metadata.version.major, metadata.version.minor = _VERSION
            return None
        _calls[frame.attributes.values[0].contents.value[0]](frame)
    except BaseException as error:
        message = f"{type(error).__name__}: {error}".encode()
        arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, message, _INTERNAL)
        code: int = pointer.contents.api.contents.create_error(ctypes.byref(arguments))
        return code
    return None


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context in which a program runs: a Ctrl-C that XLA turned into an error becomes KeyboardInterrupt again.

    Raises:
        KeyboardInterrupt: What the program called was interrupted.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if f"{KeyboardInterrupt.__name__}: " in str(error):
            raise KeyboardInterrupt from error
        raise


def _addresses(buffers: _Buffers) -> list[int]:
    return list((ctypes.c_size_t * buffers.count).from_address(buffers.buffers))


def _arrays(places: Any, like: Mapping[str, jax.ShapeDtypeStruct], rows: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {
        name: _array(place, (*rows, *x.shape), x.dtype) for place, (name, x) in zip(places, like.items(), strict=True)
    }


def _array(place: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    memory = (ctypes.c_char * (int(np.prod(shape)) * dtype.itemsize)).from_address(place)
    return np.frombuffer(memory, dtype).reshape(shape)
