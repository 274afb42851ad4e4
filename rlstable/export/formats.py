"""The files: written, loaded again by what will load them, and compared with the policy they came from."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstable.config import ConfigError
from rlstable.export.function import ACTION, OBSERVATION, PolicyFunction
from rlstable.export.graph import UnsupportedOperation, to_onnx
from rlstable.io.run_folder import write_atomically

# Greatest difference of an action element, by the size of the largest action or of 1, that is put down to the order of
# sums in float32.
TOLERANCE = 1e-5
# The same by what the last digit of the observations does to the actions, which for a steep policy is more, to a bound.
_DIGITS, _STEEPEST = 10.0, 100.0


class Written(NamedTuple):
    """A file of a policy.

    Attributes:
        path: Of the file.
        difference: The greatest difference of an action element from the policy's, over a thousand observations.
    """

    path: Path
    difference: float


def write_onnx(function: PolicyFunction, path: Path) -> Written:
    """Writes ONNX, with its metadata inside and a free batch dimension.

    Args:
        function: The policy.
        path: The file; it is there whole, and agreeing with the policy, or not at all.

    Raises:
        ConfigError: A package is not installed, the policy computes something that has no translation, or the file does
            not agree with the policy.
    """
    for package in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"format: onnx needs {package}, which is not installed; pip install 'rlstable[export]', or choose "
                "format=stablehlo"
            )
    import onnx
    import onnxruntime

    try:
        model = to_onnx(function.apply, function.observation_size, (OBSERVATION, ACTION))
    except UnsupportedOperation as error:
        raise ConfigError(f"format: {error}; choose format=stablehlo") from error
    onnx.helper.set_model_props(model, function.texts)
    onnx.checker.check_model(model)
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    difference = _agreement(function, lambda x: session.run([ACTION], {OBSERVATION: x})[0], "ONNX")
    write_atomically(path, content)
    return Written(path, difference)


def write_stablehlo(function: PolicyFunction, path: Path) -> Written:
    """Writes StableHLO as `jax.export` serialises it, for CPU, CUDA and TPU; the metadata goes into a file beside it.

    Args:
        function: The policy.
        path: The file; it is there whole, and agreeing with the policy, or not at all.

    Raises:
        ConfigError: The file does not agree with the policy.
    """
    batch = jax.export.symbolic_shape(f"b, {function.observation_size}")
    shape = jax.ShapeDtypeStruct(batch, np.float32)
    exported = jax.export.export(jax.jit(function.apply), platforms=["cpu", "cuda", "tpu"])(shape)
    content = bytes(exported.serialize())
    loaded = jax.export.deserialize(bytearray(content))
    difference = _agreement(function, loaded.call, "StableHLO")
    write_atomically(path, content)
    write_atomically(path.with_suffix(".json"), json.dumps(function.metadata, indent=2) + "\n")
    return Written(path, difference)


def _agreement(function: PolicyFunction, call: Callable[[np.ndarray], Any], name: str) -> float:
    found, single = np.asarray(call(function.samples)), np.asarray(call(function.samples[:1]))
    expected, nudged = function.actions(function.samples), function.actions(np.nextafter(function.samples, np.inf))
    ordinary = TOLERANCE * max(1.0, np.abs(expected).max())
    allowed = np.clip(_DIGITS * np.abs(nudged - expected).max(), ordinary, _STEEPEST * ordinary)
    differences = np.append(found - expected, single - expected[:1])
    difference = float(np.max(np.abs(differences)))
    # A comparison that NaN fails.
    if not difference <= allowed:
        raise ConfigError(
            f"format: the {name} file differs from the policy by {difference:.2g}, where rounding explains "
            f"{allowed:.2g}; it was not written"
        )
    return difference
