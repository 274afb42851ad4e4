"""Programs of a run for accelerators, without one: they lower, and rarely leave XLA or wait for the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from lowering import PLATFORMS, TINY, collectives, host_decisions, outside_calls, programs_of_run, size_of

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


# --- decisions of the host, and what devices exchange

# Loops and branches whose predicate a GPU asks of the host, by the number of enclosing loops. In an iteration, outside
# of its loops: rare rewards, the reference and the bounds of the first batch, and the trust region; with normalised
# values also their first statistics. In a loop only MJX's solver. An evaluation asks every 100 actions whether an
# episode still runs.
OURS = {0: 4}
DECISIONS: dict[tuple[str, str], dict[int, int]] = {
    ("default", "resets"): {}, ("default", "untrained"): {}, ("default", "training 1"): OURS,
    ("default", "evaluation 1 4"): {0: 1}, ("guards off", "training 1"): {},
    ("eight devices, pool, normalised values", "training 1"): {0: 5},
    ("mjx", "resets"): {0: 1}, ("mjx", "training 1"): OURS | {3: 1}, ("mjx", "evaluation 1 4"): {0: 2, 3: 1},
}  # fmt: skip


@pytest.mark.parametrize(("run", "program"), DECISIONS)
def test_program_asks_the_host_of_a_gpu_for_these_decisions_only(run: str, program: str) -> None:
    assert host_decisions(RUNS[run].programs[program].module("cuda")) == DECISIONS[run, program]


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
