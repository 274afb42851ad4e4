"""Converts a traced function of one observation into an ONNX graph over a batch of observations.

- The function is traced without a batch axis, so every value that depends on the observation is a vector. ONNX
  broadcasts from the last axis, so the graph works with a batch axis in front.
- A scalar that depends on the observation, like the mean in layer normalisation, becomes a vector of one element.
- Values that do not depend on the observation are computed during the conversion and become constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

_OPSET, _IR = 17, 9  # old enough for the runtimes of the last years
_UNARY = {
    "neg": "Neg", "abs": "Abs", "exp": "Exp", "log": "Log", "tanh": "Tanh", "logistic": "Sigmoid", "not": "Not",
    "sqrt": "Sqrt", "erf": "Erf", "sign": "Sign",
}  # fmt: skip
_BINARY = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "max": "Max", "min": "Min", "and": "And", "or": "Or",
    "gt": "Greater", "ge": "GreaterOrEqual", "lt": "Less", "le": "LessOrEqual", "eq": "Equal", "pow": "Pow",
}  # fmt: skip
_SCALARS = ((), (1,))  # shapes that become one element behind the batch axis in ONNX
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


class UnsupportedOperation(NotImplementedError):
    """The function uses an operation that has no translation to ONNX."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Value:
    """A value that depends on the observation and is not yet in the graph."""

    primitive: str  # JAX primitive that computes the value; empty for the observation itself
    params: dict[str, Any]  # of the primitive
    inputs: tuple[Any, ...]  # of the primitive: values, or arrays
    output: int  # index among the outputs of the primitive
    shape: tuple[int, ...]  # without the batch axis
    dtype: Any


def to_onnx(function: Callable[[Any], Any], inputs: Mapping[str, int], outputs: Mapping[str, int]) -> Any:
    """An `onnx.ModelProto` of a function of float32 vectors, with a free batch dimension in front.

    `inputs` and `outputs` are sizes by name; several of them are parts of the function's argument or result. Raises
    `UnsupportedOperation`.
    """
    import onnx

    size = sum(inputs.values())
    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((size,), np.float32))
    argument = _Value("", {}, (), 0, (size,), np.float32)
    (result,) = _run(closed.jaxpr, closed.consts, [argument])
    builder = _Builder(argument, list(inputs))
    builder.add_outputs(result, outputs)
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        builder.nodes,
        "policy",
        [onnx.helper.make_tensor_value_info(name, kind, ["batch", size]) for name, size in inputs.items()],
        [
            onnx.helper.make_tensor_value_info(name, kind, ["batch", *([size] if len(outputs) > 1 else result.shape)])
            for name, size in outputs.items()
        ],
        builder.constants,
    )
    opset = onnx.helper.make_opsetid("", _OPSET)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=_IR, producer_name="rlstable")


def _run(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr: values if they depend on the observation, else arrays."""
    environment: dict[Any, Any] = dict(zip(jaxpr.constvars, map(np.asarray, constants), strict=True))
    environment |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return np.asarray(atom.val) if isinstance(atom, core.Literal) else environment[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        inner = next((equation.params[key] for key in _CALLS if key in equation.params), None)
        if inner is not None:
            outputs = _run(inner.jaxpr, inner.consts, inputs)
        elif not any(isinstance(value, _Value) for value in inputs):
            results = equation.primitive.bind(*inputs, **equation.params)
            outputs = [np.asarray(value) for value in (results if equation.primitive.multiple_results else [results])]
        else:
            name, params = equation.primitive.name, equation.params
            outputs = [
                _Value(name, params, tuple(inputs), index, tuple(variable.aval.shape), variable.aval.dtype)
                for index, variable in enumerate(equation.outvars)
            ]
        environment.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


class _Builder:
    """Adds values to a graph on demand, so unused values stay out; `argument` consists of the inputs `names`."""

    def __init__(self, argument: _Value, names: list[str]):
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._names: dict[Any, str] = {argument: names[0] if len(names) == 1 else self._node("Concat", *names, axis=-1)}

    def name_of(self, value: Any) -> str:
        """The tensor name of a value or an array; adds nodes to the graph if needed."""
        if not isinstance(value, _Value):
            return self._constant(np.asarray(value))
        if value not in self._names:
            self._names[value] = self._translated(value)
        return self._names[value]

    def add_outputs(self, value: Any, sizes: Mapping[str, int]) -> None:
        """Names the value, or its parts of these sizes."""
        import onnx

        tensor, start = self.name_of(value), 0
        if isinstance(value, _Value) and value.shape == ():
            tensor = self._node("Squeeze", tensor, np.array([-1], np.int64))
        for name, size in sizes.items():
            bounds = [np.array([at], np.int64) for at in (start, start + size, -1)]
            part = tensor if len(sizes) == 1 else self._node("Slice", tensor, *bounds)
            self.nodes.append(onnx.helper.make_node("Identity", [part], [name]))
            start += size

    def _translated(self, value: _Value) -> str:
        primitive, params, inputs = value.primitive, value.params, value.inputs
        if primitive in _UNARY:
            return self._node(_UNARY[primitive], inputs[0])
        if primitive in _BINARY:
            return self._node(_BINARY[primitive], *inputs)
        first = inputs[0]
        match primitive:
            case "ne":
                return self._node("Not", self._node("Equal", *inputs))
            case "rsqrt":
                return self._node("Reciprocal", self._node("Sqrt", first))
            case "log1p":
                return self._node("Log", self._node("Add", first, np.float32(1)))
            case "expm1":
                return self._node("Sub", self._node("Exp", first), np.float32(1))
            case "square":
                return self._node("Mul", first, first)
            case "integer_pow":
                return self._node("Pow", first, np.float32(params["y"]))
            case "select_n" if len(inputs) == 3:
                return self._node("Where", first, inputs[2], inputs[1])
            case "convert_element_type":
                return self._converted(first, value.dtype)
            case "reduce_sum" if len(first.shape) == 1:
                return self._node("ReduceSum", first, np.array([-1], np.int64))
            case "reshape" | "broadcast_in_dim" | "squeeze" if value.shape in _SCALARS and first.shape in _SCALARS:
                return self.name_of(first)
            case "broadcast_in_dim" if len(value.shape) == 1 and first.shape in _SCALARS:
                return self._node("Expand", first, np.array([1, *value.shape], np.int64))
            case "dot_general":
                return self._product(inputs[0], inputs[1], params["dimension_numbers"])
            case "concatenate" if params["dimension"] == 0 and all(isinstance(x, _Value) for x in inputs):
                return self._node("Concat", *inputs, axis=-1)
            case "split" if params["axis"] == 0:
                start = sum(params["sizes"][: value.output])
                bounds = [np.array([at], np.int64) for at in (start, start + params["sizes"][value.output], -1)]
                return self._node("Slice", first, *bounds)
            case "copy" | "stop_gradient" | "reshape" | "broadcast_in_dim" | "squeeze" if value.shape == first.shape:
                return self.name_of(first)
        raise UnsupportedOperation(f"no ONNX for {primitive} to {value.shape}")

    def _product(self, left: Any, right: Any, dimensions: Any) -> str:
        """The product of a vector that depends on the observation and a constant matrix."""
        ((contracted_left, contracted_right), batches) = dimensions
        if isinstance(right, _Value):
            left, right, contracted_left, contracted_right = right, left, contracted_right, contracted_left
        if isinstance(right, _Value) or len(left.shape) != 1 or any(batches) or len(contracted_left) != 1:
            raise UnsupportedOperation("no ONNX for a product of two values that depend on the observation")
        matrix = np.moveaxis(right, contracted_right[0], 0)
        return self._node("MatMul", left, matrix if matrix.ndim > 1 else matrix[:, None])

    def _converted(self, value: Any, dtype: Any) -> str:
        import onnx

        if value.dtype == dtype:
            return self.name_of(value)
        return self._node("Cast", value, to=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def _node(self, operator: str, *inputs: Any, **attributes: Any) -> str:
        import onnx

        names = [one if isinstance(one, str) else self.name_of(one) for one in inputs]
        name = f"t{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(operator, names, [name], **attributes))
        return name

    def _constant(self, value: np.ndarray) -> str:
        import onnx

        name = f"c{len(self.constants)}"
        self.constants.append(onnx.numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name))
        return name
