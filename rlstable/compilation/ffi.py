"""Calls NumPy functions from compiled programs, in a way that JAX can cache on disk.

JAX identifies a callback by its address in the process, so it does not cache programs with callbacks on disk. Here a
number identifies a function by its name and its array shapes, equally in every process. XLA calls the function through
its foreign function interface, on the program's own memory. The interface's binary layout is stable within a major
version (`xla/ffi/api/c_api.h` in jaxlib); XLA rejects the registration if the versions differ.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import jax
import numpy as np

Arrays = Mapping[str, np.ndarray]
Compute = Callable[[Arrays, Arrays], None]

TARGET = "rlstable_numpy"  # name of the call target in programs
_VERSION = (0, 3)
_METADATA = 1  # XLA_FFI_Extension_Metadata: XLA only asks for the version
_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
_MOST_VIEWS = 64  # a program reuses its memory, so it needs few sets of arrays


def _struct(name: str, *fields: tuple[str, type], extensions: type = ctypes.c_void_p) -> Any:
    """A structure of the interface; all but a few begin with their size and a list of extensions."""
    head = (("size", ctypes.c_size_t), ("extensions", extensions))
    return type(name, (ctypes.Structure,), {"_fields_": (*head, *fields)})


class _Extension(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p))


_Version = _struct("_Version", ("major", ctypes.c_int), ("minor", ctypes.c_int))


class _Metadata(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32))


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


class _Scalar(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int), ("value", ctypes.POINTER(ctypes.c_int64)))


_Pointer = ctypes.c_void_p
_Error = _struct("_Error", ("message", ctypes.c_char_p), ("code", ctypes.c_int))
_CreateError = ctypes.CFUNCTYPE(_Pointer, ctypes.POINTER(_Error))
_Api = _struct("_Api", ("version", _Version), ("internal", _Pointer), ("create_error", _CreateError))
_Buffer = _struct(
    "_Buffer",
    ("dtype", ctypes.c_int), ("data", _Pointer), ("rank", ctypes.c_int64), ("dims", ctypes.POINTER(ctypes.c_int64)),
)  # fmt: skip
_Buffers = _struct("_Buffers", ("count", ctypes.c_int64), ("types", _Pointer), ("buffers", _Pointer))
_Attributes = _struct(
    "_Attributes",
    ("count", ctypes.c_int64), ("types", _Pointer), ("names", _Pointer),
    ("values", ctypes.POINTER(ctypes.POINTER(_Scalar))),
)  # fmt: skip
_Frame = _struct(
    "_Frame",
    ("api", ctypes.POINTER(_Api)), ("context", _Pointer), ("stage", ctypes.c_int), ("arguments", _Buffers),
    ("results", _Buffers), ("attributes", _Attributes), extensions=ctypes.POINTER(_MetadataExtension),
)  # fmt: skip
_DATA = _Buffer.data.offset


@dataclasses.dataclass
class _Call:
    """A function, and the names, dtypes and shapes of its arrays without the leading axes that vmap adds."""

    compute: Compute
    arguments: dict[str, jax.ShapeDtypeStruct]
    results: dict[str, jax.ShapeDtypeStruct]
    views: dict[tuple[int, ...], tuple[Arrays, Arrays]] = dataclasses.field(default_factory=dict)

    def __call__(self, frame: Any) -> None:
        inputs, outputs = _addresses(frame.arguments), _addresses(frame.results)
        first = _Buffer.from_address(inputs[0])
        batch = tuple(first.dims[: first.rank - len(next(iter(self.arguments.values())).shape)])
        data = tuple(ctypes.c_size_t.from_address(address + _DATA).value for address in (*inputs, *outputs))
        arrays = self.views.get((*batch, *data))
        if arrays is None:
            if len(self.views) >= _MOST_VIEWS:
                self.views.clear()
            split = len(inputs)
            arrays = _arrays(data[:split], self.arguments, batch), _arrays(data[split:], self.results, batch)
            self.views[(*batch, *data)] = arrays
        self.compute(*arrays)


_calls: dict[int, _Call] = {}


def call(
    name: str, compute: Compute, arguments: Mapping[str, jax.Array], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Calls `compute(arguments, results)`, which writes the results; only on a CPU.

    The same name must mean the same computation, with all its constants, in every process. The NumPy arrays are the
    program's own memory, valid only during the call. At least one argument, and no array without elements. Under vmap,
    all arrays get the same leading axes.
    """
    _register()
    shapes = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in arguments.items()}
    identity = f"{name} {[(key, x.shape, str(x.dtype)) for key, x in (*shapes.items(), *wanted.items())]}"
    number = int.from_bytes(hashlib.blake2s(identity.encode(), digest_size=8).digest()) >> 1
    _calls[number] = _Call(compute, shapes, dict(wanted))
    function = jax.ffi.ffi_call(TARGET, list(wanted.values()), vmap_method="broadcast_all")
    results = function(*arguments.values(), computation=np.int64(number))
    return dict(zip(wanted, results, strict=True))


def calls_in(exported: jax.export.Exported) -> frozenset[int]:
    """Numbers of the functions that a program calls; ValueError if its text has a call in an unknown form."""
    if not _calls:
        return frozenset()
    text = exported.mlir_module()
    numbers = re.findall(rf"@{TARGET}\(.*?computation = (\d+)", text)
    if len(numbers) != text.count(f"@{TARGET}("):
        raise ValueError(f"a call of {TARGET} has an unknown form")
    return frozenset(map(int, numbers))


def all_registered(calls: Set[int]) -> bool:
    return calls <= _calls.keys()


@functools.cache
def _register() -> None:
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_handle), platform="cpu")


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))
def _handle(pointer: Any) -> int | None:
    """Handles a call from XLA. Returns None, or an error for XLA to raise."""
    # Without asynchronous dispatch this may be the main thread, where a signal can raise at any line.
    try:
        frame = pointer.contents
        if frame.extensions and frame.extensions.contents.base.type == _METADATA:
            metadata = frame.extensions.contents.metadata.contents
            metadata.version.major, metadata.version.minor = _VERSION
            return None
        _calls[frame.attributes.values[0].contents.value[0]](frame)
    except BaseException as error:
        message = f"{type(error).__name__}: {error}".encode()
        arguments = _Error(ctypes.sizeof(_Error), None, message, _INTERNAL)
        code: int = pointer.contents.api.contents.create_error(ctypes.byref(arguments))
        return code
    return None


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context manager for running a program: turns XLA's error for a Ctrl-C back into KeyboardInterrupt."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if f"{KeyboardInterrupt.__name__}: " in str(error):
            raise KeyboardInterrupt from error
        raise


def _addresses(buffers: Any) -> list[int]:
    return list((ctypes.c_size_t * buffers.count).from_address(buffers.buffers))


def _arrays(data: Any, like: Mapping[str, jax.ShapeDtypeStruct], batch: tuple[int, ...]) -> dict[str, np.ndarray]:
    arrays = {}
    for address, (name, x) in zip(data, like.items(), strict=True):
        dtype, shape = np.dtype(x.dtype), (*batch, *x.shape)
        memory = (ctypes.c_char * (int(np.prod(shape)) * dtype.itemsize)).from_address(address)
        arrays[name] = np.frombuffer(memory, dtype).reshape(shape)
    return arrays
