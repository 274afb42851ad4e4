"""Programs of a run as an accelerator would get them: recorded where the run builds them, lowered without a device."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toys import mesh

from rlstable.cli.compose import compose
from rlstable.compilation.compiler import Arguments, Compiler
from rlstable.config import Config
from rlstable.device.precision import Precision, level
from rlstable.policy import evaluator
from rlstable.runner import setup

PLATFORMS = ("cuda", "tpu")
# Overrides of a run whose programs are small.
TINY = (
    "network=small", "total_steps=1280", "eval.num_envs=4", "env.reset_pool_size=8", "ppo.num_envs=8",
    "ppo.batch_size=8", "ppo.num_minibatches=2", "ppo.num_updates_per_batch=2", "ppo.unroll_length=4",
    "ppo.num_resets_per_eval=0",
)  # fmt: skip
_HOST_OPERATIONS = ("send", "recv", "infeed", "outfeed")
_ALLOCATION = "AllocateBuffer"  # since JAX 0.12; XLA replaces it by memory without values
_BRANCHES = ("case", "if")
_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_to_all",
    "reduce_scatter",
    "collective_permute",
    "collective_broadcast",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """A traced program of a run, with the precision that it is lowered in, its function and its arguments."""

    traced: Any
    precision: Precision
    function: Any
    arguments: tuple[Any, ...]

    def lowered(self, *platforms: str) -> jax.stages.Lowered:
        """Lowered for platforms; without arguments for this machine."""
        with self.precision.compiled():
            return self.traced.lower(lowering_platforms=platforms or None)

    @functools.cache  # noqa: B019 - `programs_of_run` keeps the programs anyway
    def module(self, *platforms: str) -> Any:
        """The lowered program as an MLIR module of StableHLO."""
        return self.lowered(*platforms).compiler_ir("stablehlo")


@functools.cache
def programs_of_run(*overrides: str, devices: int = 1) -> Mapping[str, Recorded]:
    """All programs of a run on an accelerator, by name, traced but not compiled; `TINY` follows the overrides."""
    config = compose([*overrides, *TINY])
    with on_accelerator(), recording() as programs:
        assembly, key = setup.TrainingSetup(config, mesh(devices)), jax.random.PRNGKey(0)
        state = assembly.first_state(key, key, config.fault)
        assembly.compiled(*[state] * config.seeds)
        played = evaluator.make_evaluator(config, assembly.ppo.networks, lambda _: contextlib.nullcontext(), print)
        played.prepare([evaluator.snapshot_of(state, key)] * config.seeds)
    return programs


@contextlib.contextmanager
def on_accelerator(platform: str = "gpu") -> Iterator[None]:
    """Makes rlstable trace what it traces on an accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: platform)
        yield


@contextlib.contextmanager
def recording() -> Iterator[dict[str, Recorded]]:
    """Traces and records the programs that runs inside build; instead of compiled programs they get `_Ones`."""
    programs: dict[str, Recorded] = {}

    def compiler_of(config: Config, *_: Any, **__: Any) -> Compiler:
        return _Recorder(level(config.precision), programs)

    with pytest.MonkeyPatch.context() as patch:
        for module in (setup, evaluator):
            patch.setattr(module, "compiler_of", compiler_of)
        yield programs


class _Recorder(Compiler):
    def __init__(self, precision: Precision, programs: dict[str, Recorded]):
        super().__init__(precision)
        self._recorded = programs

    def build(self, name: str, function: Any, arguments: Arguments, **_: bool) -> Future[Any]:
        given = arguments()
        with self.precision.compiled():
            traced = function.trace(*given)
        self._recorded[name] = Recorded(traced, self.precision, function, given)
        future: Future[Any] = Future()
        future.set_result(_Ones(traced.out_info))
        return future


@dataclasses.dataclass(frozen=True)
class _Ones:
    """Stands in for a compiled program: all its results are 1, so that every reset is clean."""

    shapes: Any

    def memory_analysis(self) -> None:
        return None

    def __call__(self, *_: Any) -> Any:
        def one(x: Any) -> Any:
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return jnp.broadcast_to(jax.random.key(0), x.shape)
            return jnp.ones(x.shape, x.dtype)

        return jax.tree.map(one, self.shapes)


def outside_calls(module: Any) -> set[str]:
    """Calls of a program that leave XLA: targets of its custom calls, and operations that talk to the host."""
    found = set()
    for operation, _ in _operations(module):
        name = operation.name.removeprefix("stablehlo.")
        if name == "custom_call":
            found.add(operation.attributes["call_target_name"].value)
            found.discard(_ALLOCATION)
        elif name in _HOST_OPERATIONS:
            found.add(name)
    return found


def host_decisions(module: Any) -> dict[int, int]:
    """Loops and branches whose predicate the host of a GPU reads, counted by the number of enclosing loops."""
    found: collections.Counter[int] = collections.Counter()
    for operation, loops in _operations(module):
        name = operation.name.removeprefix("stablehlo.")
        found[loops] += name in _BRANCHES or (name == "while" and not _has_fixed_length(operation))
    return {loops: count for loops, count in sorted(found.items()) if count}


def collectives(module: Any) -> dict[int, tuple[int, int]]:
    """Numbers and bytes of the reductions over devices in one pass, by the number of enclosing loops."""
    found: dict[int, tuple[int, int]] = {}
    for operation, loops in _operations(module):
        if operation.name.removeprefix("stablehlo.") in _COLLECTIVES:
            count, size = found.get(loops, (0, 0))
            types = [result.type for result in operation.results]
            found[loops] = count + 1, size + sum(math.prod(x.shape) * x.element_type.width // 8 for x in types)
    return dict(sorted(found.items()))


def size_of(module: Any) -> int:
    """Number of operations of a program."""
    return sum(1 for _ in _operations(module))


def _has_fixed_length(loop: Any) -> bool:
    """Whether a loop compares its counter with a constant, as XLA needs to know the length."""
    (condition,) = loop.regions[0].blocks
    compare = condition.operations[len(condition.operations) - 1].operands[0].owner
    if getattr(compare, "name", None) != "stablehlo.compare":
        return False
    counter, limit = compare.operands
    is_argument = not hasattr(counter.owner, "name")
    return is_argument and getattr(limit.owner, "name", None) == "stablehlo.constant"


def _functions(module: Any) -> dict[str, Any]:
    return {operation.attributes["sym_name"].value: operation.operation for operation in module.body.operations}


def _operations(module: Any) -> Iterator[tuple[Any, int]]:
    """All operations of a program, each with the number of enclosing loops; a function counts once per call."""
    functions = _functions(module)

    def inside(operation: Any, loops: int) -> Iterator[tuple[Any, int]]:
        for region in operation.regions:
            for block in region.blocks:
                for child in block.operations:
                    yield child.operation, loops
                    if child.operation.name == "func.call":
                        yield from inside(functions[child.attributes["callee"].value], loops)
                    else:
                        yield from inside(child.operation, loops + (child.operation.name == "stablehlo.while"))

    return inside(functions["main"], 0)
