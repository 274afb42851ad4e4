"""Compilation in a background thread, and a process that ends without waiting for the thread."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest

from rlstable.compilation import background


def test_program_is_built_in_another_thread_and_its_error_reaches_the_caller() -> None:
    assert background.build(threading.current_thread).result() is not threading.current_thread()
    begun = background.build(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        begun.result()


def test_programs_are_built_one_after_another() -> None:
    ended: list[str] = []
    may_end = threading.Event()
    first = background.build(lambda: (may_end.wait(60), ended.append("first")))
    second = background.build(lambda: ended.append("second"))
    assert not first.done() and not second.done()
    may_end.set()
    second.result(60)
    assert ended == ["first", "second"]


def test_accelerator_programs_compile_in_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not background.available()
    begun = background.build(threading.current_thread)
    assert begun.done() and begun.result() is threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        background.build(lambda: 1 // 0).result()


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
    """Python would wait for the thread, here longer than the timeout of the subprocess."""
    command = [sys.executable, "-c", _ENDS.format(seconds=seconds, code=code)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, "ended")
