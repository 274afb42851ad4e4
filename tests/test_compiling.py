"""What the compiler is told."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toys import mesh, tiny_config

from rlstable.assembly import Assembly
from rlstable.compiling import compiler_options


def test_a_cpu_needs_to_be_told_nothing() -> None:
    assert jax.default_backend() == "cpu"
    assert compiler_options(True) is None


def test_a_gpu_is_told_what_xla_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that this XLA does not know is refused by it, whatever the device."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compiler_options(False) is None
    options = compiler_options(True)
    assert options == {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
    twice = jax.jit(lambda x: 2 * x).lower(jnp.ones(3))
    assert twice.compile(options)(jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such_option"):
        twice.compile({"xla_gpu_no_such_option": True})


def test_every_program_of_a_run_is_compiled_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jit, compile_ = jax.jit, jax.stages.Lowered.compile
    monkeypatch.setattr(jax, "jit", lambda f, **kwargs: told.append(kwargs.get("compiler_options")) or jit(f, **kwargs))
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self, options=None: told.append(options) or compile_(self, options)
    )
    assembly = Assembly(tiny_config(deterministic=True), mesh())
    assembly.compiled(assembly.shapes())
    assert told.count({"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}) == 2  # resets and training
