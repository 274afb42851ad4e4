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
from rlstable.export.graph import to_onnx
from rlstable.io.rundir import write_atomically

# Greatest difference of an action element that is put down to the order of sums in float32.
TOLERANCE = 1e-5


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
        ConfigError: A package is not installed.
        RuntimeError: The file does not agree with the policy.
        Untranslatable: The policy computes something that has no translation.
    """
    for package in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"format: onnx needs {package}, which is not installed; pip install 'rlstable[export]', or choose "
                "format=stablehlo"
            )
    import onnx
    import onnxruntime

    model = to_onnx(function.apply, function.observation_size, (OBSERVATION, ACTION))
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
        RuntimeError: The file does not agree with the policy.
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
    found, expected = np.asarray(call(function.samples)), function.expected
    single = np.asarray(call(function.samples[:1]))
    difference = float(np.max(np.abs(found - expected)))
    # A comparison that NaN fails.
    if not (difference <= TOLERANCE and np.allclose(single, expected[:1], atol=TOLERANCE)):
        raise RuntimeError(f"the {name} file differs from the policy by {difference:.2g}; it was not written")
    return difference
