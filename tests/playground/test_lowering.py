"""Programs of a run on a task of Playground, physics in JAX, lowered for accelerators without one."""

from __future__ import annotations

import pytest

pytest.importorskip("mujoco_playground")

from lowering import PLATFORMS, host_decisions, outside_calls, programs_of_run

TASK = ("env=playground", "env.name=CartpoleBalance", "env.impl=jax")
LINEAR_ALGEBRA = {"cuda": {"cusolver_potrf_ffi"}, "tpu": set[str]()}  # Cholesky factorisations of MJX


def test_programs_of_a_task_lower_for_accelerators_without_a_callback() -> None:
    programs = programs_of_run(*TASK)
    assert set(programs) == {"resets", "untrained", "training 1", "evaluation 1 4"}
    for name, program in programs.items():
        for platform in PLATFORMS:
            module = program.module(platform)
            allowed = set() if name == "untrained" else LINEAR_ALGEBRA[platform]
            assert outside_calls(module) == allowed, (name, platform)
            # The solver of this task takes one step, so no loop of MJX waits for the host.
            assert host_decisions(module) == {"training 1": {0: 5}, "evaluation 1 4": {0: 1}}.get(name, {})
