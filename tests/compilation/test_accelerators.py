"""Programs of a run for accelerators, without one: they lower, leave XLA for linear algebra only, and keep budgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from lowering import PLATFORMS, TINY, boundary, collectives, host_decisions, outside_calls, programs_of_run, size_of

from rlstable.cli.compose import compose

# Cholesky factorisations of MJX's mass matrix and constraint solver. XLA for TPUs has an operation for them.
LINEAR_ALGEBRA = {"cuda": {"cusolver_potrf_ffi"}, "tpu": set[str]()}
MJX = ("env=inverted_pendulum", "env.backend=auto")


class Run(NamedTuple):
    """Overrides, number of devices, and whether the environment is simulated by MJX."""

    overrides: tuple[str, ...]
    devices: int = 1
    mjx: bool = False

    @property
    def programs(self) -> Any:
        return programs_of_run(*self.overrides, devices=self.devices)


RUNS = {
    "default": Run(("env=fast",)),
    "guards off": Run(("env=fast", "guards=off")),
    "two seeds": Run(("env=fast", "seeds=2")),
    "eight devices, pool, normalised values": Run(("env=fast", "env.reset=pool", "ppo.normalize_values=true"), 8),
    "mjx": Run(MJX, mjx=True),
    "mjx, x64": Run((*MJX, "precision.matmul=x64"), mjx=True),
}
# --- lowering


def allowed_calls(run: Run, program: str, platform: str) -> set[str]:
    """The calls out of XLA that a program may make: networks need none, MJX needs linear algebra."""
    return LINEAR_ALGEBRA[platform] if run.mjx and program != "untrained" else set()


SLOW = ("mjx, x64",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNS])
def test_programs_of_a_run_lower_for_accelerators_without_a_callback(name: str) -> None:
    run = RUNS[name]
    seeds = compose([*run.overrides, *TINY]).seeds
    assert set(run.programs) == {"resets", "untrained", f"training {seeds}", f"evaluation {seeds} 4"}
    for program, recorded in run.programs.items():
        for platform in PLATFORMS:
            expected = allowed_calls(run, program, platform)
            assert outside_calls(recorded.module(platform)) == expected, (program, platform)


def test_check_of_lowered_programs_finds_a_callback() -> None:
    (target,) = outside_calls(module_of(lambda x: jax.pure_callback(lambda y: y, x, x), "cpu", jnp.ones(3)))
    assert "callback" in target


def module_of(function: Callable[..., Any], platform: str, *arguments: Any) -> Any:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")


# --- budgets


class Budget(NamedTuple):
    """Limits of a program.

    Attributes:
        inputs: Arrays into the program. Each costs the host about a microsecond per call.
        outputs: Arrays out of the program.
        decisions: Loops and branches whose predicate a GPU asks of the host, by the number of enclosing loops.
    """

    inputs: int
    outputs: int
    decisions: dict[int, int]


# In an iteration, outside of its loops: rare rewards, the reference and the bounds of the first batch, and the trust
# region; with normalised values also their first statistics. In a loop only MJX's solver.
# An evaluation asks every 100 actions whether an episode still runs.
OURS = {0: 4}
# An array more is a leaf more in the training state, in the metrics or in the state of the environment. MJX's state
# has about 100 arrays; the cached first states are one array per type.
BUDGETS: dict[tuple[str, str], Budget] = {
    ("default", "resets"): Budget(0, 15, {}),
    ("default", "untrained"): Budget(1, 64, {}),
    ("default", "training 1"): Budget(95, 109, OURS),
    ("default", "evaluation 1 4"): Budget(9, 3, {0: 1}),
    ("guards off", "training 1"): Budget(75, 85, {}),
    ("eight devices, pool, normalised values", "training 1"): Budget(100, 114, {0: 5}),
    ("mjx", "resets"): Budget(1, 116, {0: 1}),
    ("mjx", "training 1"): Budget(198, 212, OURS | {3: 1}),
    ("mjx", "evaluation 1 4"): Budget(10, 3, {0: 2, 3: 1}),
}


@pytest.mark.parametrize(("run", "program"), BUDGETS)
def test_program_keeps_its_budget_of_arrays_and_of_decisions_on_the_host(run: str, program: str) -> None:
    module = RUNS[run].programs[program].module("cuda")
    found, budget = Budget(*boundary(module), host_decisions(module)), BUDGETS[run, program]
    assert found.decisions == budget.decisions
    # A newer JAX leaves out an input that no operation reads.
    assert budget.inputs - 1 <= found.inputs <= budget.inputs
    assert found.outputs == budget.outputs


# Reductions over devices by the number of enclosing loops: count and bytes. 2: a step of SGD, with the gradients of the
# small networks; 1: an epoch, with one less since JAX 0.12, and the first batch; 0: the rest of an iteration.
COLLECTIVES = ({0: (25, 668), 1: (5, 32), 2: (33, 35_680)}, {0: (25, 668), 1: (4, 28), 2: (33, 35_680)})


def test_number_of_devices_changes_neither_the_size_of_the_program_nor_what_devices_exchange() -> None:
    programs = {
        count: programs_of_run("env=fast", devices=count)["training 1"].module("cuda") for count in (1, 2, 4, 8)
    }
    exchanged = {count: collectives(module) for count, module in programs.items()}
    assert exchanged[1] == {} and exchanged[2] in COLLECTIVES
    assert exchanged[2] == exchanged[4] == exchanged[8]
    sizes = [size_of(programs[count]) for count in (2, 4, 8)]
    assert max(sizes) <= 1.01 * min(sizes)
