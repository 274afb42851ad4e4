"""Compilation in a background thread, and a process that ends without waiting for the thread."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax import monitoring
from quick_compile import quickly
from toys import mesh, tiny_config

from rlstable.compilation import background
from rlstable.policy.evaluator import make_evaluator, snapshot_of
from rlstable.runner.setup import TrainingSetup


def test_program_is_built_in_another_thread_and_its_error_reaches_the_caller() -> None:
    assert background.build(threading.current_thread).result() is not threading.current_thread()
    begun = background.build(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        begun.result()


def test_programs_are_built_one_after_another() -> None:
    told: list[str] = []
    may_end = threading.Event()
    first = background.build(lambda: (may_end.wait(60), told.append("first")))
    second = background.build(lambda: told.append("second"))
    assert not first.done() and not second.done()
    may_end.set()
    second.result(60)
    assert told == ["first", "second"]


def test_accelerator_programs_compile_in_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not background.available()
    begun = background.build(threading.current_thread)
    assert begun.done() and begun.result() is threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        background.build(lambda: 1 // 0).result()


@quickly()
def test_every_accelerator_program_compiles_while_a_progress_line_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise minutes pass without a line, in which no signal is handled."""
    background.build(lambda: None).result()  # what another test began is built
    monkeypatch.setattr(background, "available", lambda: False)
    telling: list[str] = []
    compiled: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def compiling(name: str) -> Iterator[None]:
        telling.append(name)
        yield
        telling.pop()

    def listen(name: str, seconds: float, **about: str) -> None:
        if name.endswith("backend_compile_duration"):
            compiled.setdefault(about["fun_name"], []).append("".join(telling))

    config = tiny_config(eval={"num_evals": 1, "num_envs": 3}, network={"policy_hidden_layer_sizes": (5,)})
    monitoring.register_event_duration_secs_listener(listen)
    try:
        assembly = TrainingSetup(config, mesh(1), None, compiling)
        keys = jax.random.split(jax.random.PRNGKey(0))
        state = assembly.first_state(*keys, config.fault, ahead=True)
        judged = [snapshot_of(state, keys[0])]
        evaluator = make_evaluator(config, assembly.ppo.networks, compiling, lambda *_, **__: None)
        evaluator.begin(judged)
        assembly.compiled(state)
        evaluator.prepare(judged)
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert compiled["jit(program)"] == compiled["jit(_init_state)"] == ["resets"]
    assert compiled["jit(iteration)"] == ["training"]
    assert compiled["jit(play_pass)"] == ["evaluation"]


ROOT = Path(__file__).resolve().parents[2]
_ENDS = """
import sys, threading, time
from rlstable.compilation import background
begun = threading.Event()
program = background.build(lambda: (begun.set(), time.sleep({seconds})))
begun.wait()
if not {seconds}:
    program.result()
print("ended", end="")
try:
    sys.exit({code})
except SystemExit as end:
    background.exit_process(end)
"""


@pytest.mark.parametrize(("seconds", "code"), [(600, 143), (0, 3)])
def test_process_ends_while_a_program_is_being_built(seconds: int, code: int) -> None:
    """Python would wait for the thread, here for longer than the timeout of the test."""
    command = [sys.executable, "-c", _ENDS.format(seconds=seconds, code=code)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, "ended")
