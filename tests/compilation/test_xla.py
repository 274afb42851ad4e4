"""Compiler options, the folder of compiled programs, and properties of compiled programs."""

from __future__ import annotations

import collections
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from quick_compile import quickly
from saved import events
from toys import mesh, tiny_config

from rlstable.cli.compose import compose
from rlstable.compilation import xla
from rlstable.compilation.xla import (
    NO_FUSION_EMITTERS,
    compiler_options,
    enable_program_cache,
    program_cache_folder,
    quick_options,
)
from rlstable.config import Config
from rlstable.policy.evaluator import make_evaluator, snapshot_of
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.setup import TrainingSetup
from rlstable.supervise.memory import footprint


def is_known(options: dict[str, Any]) -> bool:
    try:
        jax.jit(lambda: None).lower().compile(options)
    except jax.errors.JaxRuntimeError as error:
        assert "No such compile option" in str(error)
        return False
    return True


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_this_jaxlib_knows_every_compiler_option(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    options = compiler_options(True, True)
    assert options is not None and is_known(options)


def test_fusion_emitters_are_switched_off_where_this_jaxlib_has_the_option() -> None:
    assert bool(NO_FUSION_EMITTERS) == is_known({"xla_cpu_use_fusion_emitters": False})


def options_used(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The compiler options of the resets, the first parameters, the iteration and the evaluation."""
    told: list[Any] = []
    compile_ = jax.stages.Lowered.compile

    def compiled(self: Any, options: Any = None) -> Any:
        told.append(options)
        return None if len(told) == 3 else compile_(self, options)  # the iteration is not run

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    assembly, key = TrainingSetup(config, mesh()), jax.random.PRNGKey(0)
    state = assembly.first_state(key, key, config.fault)
    assembly.compiled(state)
    evaluator = make_evaluator(config, assembly.ppo.networks, lambda _: contextlib.nullcontext(), print)
    evaluator.prepare([snapshot_of(state, key)])
    return told


@quickly()
def test_every_program_of_a_deterministic_run_gets_the_compiler_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU only: XLA rejects an option that it does not know."""
    assert compiler_options(True) is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    told = options_used(tiny_config(deterministic=True, eval={"num_envs": 3}), monkeypatch)
    assert told == [{"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}] * 4


@quickly()
def test_rarely_used_programs_and_those_of_a_short_run_are_compiled_without_optimisation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = quick_options()
    assert quick["xla_backend_optimization_level"] == 0
    assert options_used(tiny_config(eval={"num_envs": 3}), monkeypatch) == [quick, quick, None, None]
    short = tiny_config(total_steps=64, quick_compile_iterations=2, eval={"num_envs": 3})
    assert options_used(short, monkeypatch) == [quick] * 4


@pytest.mark.parametrize(
    ("words", "quickly"),
    [
        (["env=inverted_pendulum"], True),
        (["env=inverted_pendulum", "total_steps=204_800"], True),
        (["env=inverted_pendulum", "total_steps=204_801"], False),
        (["env=inverted_pendulum", "seeds=2"], False),
        (["env=inverted_pendulum", "quick_compile_iterations=0"], False),
        (["env=ant", "total_steps=8192"], False),
    ],
)
def test_only_short_runs_with_a_recipe_for_it_compile_quickly(words: list[str], quickly: bool) -> None:
    config = compose(["recipe_for=cpu", *words])
    assert config.compiles_quickly == quickly
    assert config.of_seed(config.seed, "group").compiles_quickly == quickly


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """JAX without a folder of programs, and a home directory for one."""
    names = (
        "jax_compilation_cache_dir",
        "jax_compilation_cache_max_size",
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(xla, "_WORTH_SECONDS", 0.0)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def programs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("jit__lambda*-cache"))


def compile_something(size: int) -> Any:
    return jax.jit(lambda x: jnp.linalg.qr(jnp.sin(x) @ x + size)[0]).lower(jnp.ones((size, size))).compile()


def test_compiled_programs_are_cached_in_the_home_of_the_user_after_a_first_compilation(cache: Path) -> None:
    compile_something(3)
    assert program_cache_folder() is None
    assert enable_program_cache("auto") is None
    compile_something(4)
    assert len(programs(cache)) == 1
    (folder,) = (cache / "rlstable" / "programs").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_max_size == 2**31
    assert program_cache_folder() == folder
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert program_cache_folder() is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
    assert program_cache_folder() is None


def test_compile_cache_option_sets_the_folder(cache: Path) -> None:
    assert enable_program_cache(None) is None
    assert jax.config.jax_compilation_cache_dir is None
    (cache / "file").write_text("")
    assert "Not a directory" in str(enable_program_cache(str(cache / "file")))
    assert enable_program_cache(str(cache / "mine")) is None
    compile_something(5)
    assert len(programs(cache / "mine")) == 1
    assert enable_program_cache("auto") is None  # a folder that is set already stays
    assert jax.config.jax_compilation_cache_dir.startswith(str(cache / "mine"))


def test_processes_with_accelerators_need_a_folder_that_the_user_names(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(xla.hosts, "count", lambda: 2)
    assert str(enable_program_cache("auto")).startswith("processes with accelerators must share one; set compile_cache")
    assert program_cache_folder() is None
    assert enable_program_cache(str(cache / "shared")) is None


def test_cache_folder_that_other_users_can_write_is_not_used_and_logged_once(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingSetup, "begin", lambda _: None)  # no test waits for this program
    shared = cache / "scratch"
    shared.mkdir()
    shared.chmod(0o777)
    said = enable_program_cache(str(shared))
    assert said is not None and said.startswith(f"{shared} can be") and "(mode 0777)" in said
    assert "set compile_cache to a folder that only you can write" in said
    assert program_cache_folder() is None
    TrainingLoop(tiny_config(logging={"console": "lines"}, compile_cache=str(shared)), tmp_path / "run").close()
    assert [event["error"] for event in events(tmp_path / "run", "compile_cache_unusable")] == [said]
    assert capsys.readouterr().out.count("compile_cache_unusable") == 1
    assert program_cache_folder() is None


@quickly()
def test_training_state_is_donated() -> None:
    """Outputs reuse the memory of the inputs, so there is no second copy of a state."""
    config = tiny_config(guards={}, ppo={"num_envs": 256, "batch_size": 256}, supervise={})
    assembly = TrainingSetup(config, mesh(1))
    state = assembly.shapes()
    needs = footprint(assembly.compiled(state).executable)
    assert needs.arguments > 2**14
    assert needs.arguments - needs.aliased < 0.02 * needs.arguments


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_COPY = re.compile(r"= [a-z]+(\d+)\[([\d,]*)\]\S* copy\(")


def copies_in_loops(text: str) -> dict[int, list[int]]:
    """Bytes of every `copy` inside a loop of `compiled.as_text()`, by the number of enclosing loops."""
    copies: dict[str, list[int]] = collections.defaultdict(list)
    called: dict[str, set[tuple[str, bool]]] = collections.defaultdict(set)
    own, entry = "", ""
    for line in text.splitlines():
        begins = _COMPUTATION.match(line)
        if begins:
            own = begins[1]
            entry = own if line.startswith("ENTRY") else entry
            continue
        names = _CALLED.findall(line) + [
            name.strip(" %") for group in _BRANCHES.findall(line) for name in group.split(",")
        ]
        called[own] |= {(name, f"body=%{name}" in line) for name in names}
        for bits, shape in _COPY.findall(line):
            size = int(bits) // 8
            for length in filter(None, shape.split(",")):
                size *= int(length)
            copies[own].append(size)
    found: dict[int, list[int]] = collections.defaultdict(list)
    seen: set[tuple[str, int]] = set()
    todo = [(entry, 0)]
    while todo:
        name, depth = todo.pop()
        if (name, depth) in seen:
            continue
        seen.add((name, depth))
        if depth:
            found[depth] += copies[name]
        todo += [(other, depth + is_body) for other, is_body in called[name]]
    return dict(found)


def test_training_loop_copies_no_large_arrays() -> None:
    """Loops update moments and experience in place, also in a program that is compiled quickly, as here.

    Copies of parameters and of their two moments are allowed: parameters once, six arrays if the KL limiter rolls back
    to the start of an epoch, and three if it rolls back to the start of the iteration.
    """
    config = tiny_config(
        guards={"limiters": {"kl": 0.1}}, supervise={}, total_steps=64, quick_compile_iterations=2,
        network={"policy_hidden_layer_sizes": (64, 64), "value_hidden_layer_sizes": (64, 64)},
        ppo={"num_envs": 32, "batch_size": 8, "num_minibatches": 4, "num_updates_per_batch": 3},
    )  # fmt: skip
    assembly = TrainingSetup(config, mesh(1))
    state = assembly.shapes()
    parameters = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.params))
    found = copies_in_loops(assembly.compiled(state).executable.as_text())
    copied = {depth: sum(sizes) / parameters for depth, sizes in found.items()}
    assert copied.get(1, 0.0) <= 12.5, copied
    assert copied.get(2, 0.0) <= 7.5, copied
    assert sum(share for depth, share in copied.items() if depth > 2) < 0.05, copied  # a step of SGD


@pytest.mark.parametrize(("given", "threads"), [(None, "1"), ("4", "4")])
def test_programs_compute_in_one_thread_unless_the_user_says_how_many(
    given: str | None, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    if given is not None:
        monkeypatch.setenv("NPROC", given)
    xla.use_one_thread()
    assert os.environ["NPROC"] == threads


@pytest.mark.parametrize(
    ("words", "little"),
    [
        (["env=halfcheetah"], True), (["env=humanoid"], False), (["env=halfcheetah", "seeds=8"], False),
        (["env=halfcheetah", "env.backend=mjx"], False), (["env=import", "env.name=toys:PointMass"], False),
    ],
)  # fmt: skip
def test_small_minibatches_on_a_cpu_train_in_one_thread(words: list[str], little: bool) -> None:
    assert compose([*words, "recipe_for=cpu"]).computes_little == little
