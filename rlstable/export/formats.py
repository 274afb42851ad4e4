"""Writes the exported files; before that, loads each with its runtime and compares it with the policy."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.config import ConfigError
from rlstable.config.extras import install
from rlstable.export.function import PolicyFunction
from rlstable.export.graph import UnsupportedOperation, to_onnx
from rlstable.io.files import write_atomically
from rlstable.robot.contract import binary
from rlstable.robot.environment import RobotEnv

# Largest allowed difference of an action element, relative to the largest action or 1: the order of sums in float32
# explains it.
TOLERANCE = 1e-5
# A steep policy amplifies rounding errors. Allowed is also `_ROUNDING_FACTOR` times the effect that the last digit of
# the observations has on the actions, but at most `_MAX_FACTOR` times the tolerance.
_ROUNDING_FACTOR, _MAX_FACTOR = 10.0, 100.0


class Written(NamedTuple):
    """A file of a policy."""

    path: Path
    difference: float  # largest one of an action element from the policy, over a thousand observations


def write_onnx(function: PolicyFunction, path: Path) -> Written:
    """Writes ONNX with a free batch dimension and with metadata in the file.

    Raises `ConfigError`, and writes no file, without a package, without a translation of an operation to ONNX, or if
    the file does not agree with the policy.
    """
    for package in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"format: onnx needs {package}, which is not installed; {install('export')}, or choose format=stablehlo"
            )
    import onnx
    import onnxruntime

    try:
        model = to_onnx(function.apply, function.inputs, function.outputs)
    except UnsupportedOperation as error:
        raise ConfigError(f"format: {error}; choose format=stablehlo") from error
    onnx.helper.set_model_props(model, function.texts)
    onnx.checker.check_model(model)
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(samples: np.ndarray) -> np.ndarray:
        return np.concatenate(session.run(list(function.outputs), _parts(samples, function.inputs)), axis=-1)

    difference = _largest_difference(function, run, "ONNX")
    write_atomically(path, content)
    return Written(path, difference)


def write_stablehlo(function: PolicyFunction, path: Path) -> Written:
    """Writes StableHLO by `jax.export`, for CPU, CUDA and TPU, and the metadata into a `.json` file beside it.

    Raises `ConfigError`, and writes no file, if it does not agree with the policy.
    """
    scope = jax.export.SymbolicScope()
    shapes = [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"b, {size}", scope=scope), np.float32)
        for size in function.inputs.values()
    ]

    def apply(*inputs: jax.Array) -> Any:
        if len(inputs) == 1:
            return function.apply(*inputs)
        return tuple(_parts(function.apply(jnp.concatenate(inputs, axis=-1)), function.outputs).values())

    exported = jax.export.export(jax.jit(apply), platforms=["cpu", "cuda", "tpu"])(*shapes)
    content = bytes(exported.serialize())
    loaded = jax.export.deserialize(bytearray(content))

    def run(samples: np.ndarray) -> np.ndarray:
        results = loaded.call(*_parts(samples, function.inputs).values())
        return np.concatenate(results, axis=-1) if isinstance(results, tuple | list) else np.asarray(results)

    difference = _largest_difference(function, run, "StableHLO")
    write_atomically(path, content)
    write_atomically(path.with_suffix(".json"), json.dumps(function.metadata, indent=2) + "\n")
    return Written(path, difference)


def write_player(robot: RobotEnv, folder: Path) -> list[Path]:
    """Writes the model of a robot as training has used it, and a copy of `rlstable/play.py`."""
    model, program = folder / "robot.mjb", folder / "play.py"
    write_atomically(model, binary(robot.mj_model))
    write_atomically(program, importlib.resources.files("rlstable").joinpath("play.py").read_bytes())
    return [model, program]


def _parts(whole: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The named parts of an array, along its last axis."""
    ends = np.cumsum(list(sizes.values()))
    return {name: whole[..., end - size : end] for (name, size), end in zip(sizes.items(), ends, strict=True)}


def _largest_difference(function: PolicyFunction, call: Callable[[np.ndarray], np.ndarray], name: str) -> float:
    """The largest difference of an action element; raises `ConfigError` if rounding does not explain it."""
    actual, single = np.asarray(call(function.samples)), np.asarray(call(function.samples[:1]))
    expected, nudged = function.actions(function.samples), function.actions(np.nextafter(function.samples, np.inf))
    tolerance = TOLERANCE * max(1.0, np.abs(expected).max())
    allowed = np.clip(_ROUNDING_FACTOR * np.abs(nudged - expected).max(), tolerance, _MAX_FACTOR * tolerance)
    differences = np.append(actual - expected, single - expected[:1])
    difference = float(np.max(np.abs(differences)))
    if not difference <= allowed:  # true for NaN
        raise ConfigError(
            f"format: the {name} file differs from the policy by {difference:.2g}, where rounding explains "
            f"{allowed:.2g}; it was not written"
        )
    return difference
