"""What every test process needs before jax is imported: fake devices, no network, shared compiled programs."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
# Many tests run the same small program; it is compiled by whichever comes first.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
# Folders of test runs are none that the user has agreed to; workers of pytest-xdist inherit the first one's.
_CACHE = "RLSTABLE_TESTS_CACHE"
if _CACHE not in os.environ:
    os.environ[_CACHE] = tempfile.mkdtemp(prefix="rlstable-tests-")
os.environ["XDG_CACHE_HOME"] = os.environ[_CACHE]

# A script that runs the tests in the background has them ignore Ctrl-C, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402
import pytest  # noqa: E402

from rlstable.compilation import sources  # noqa: E402


@pytest.fixture(scope="module")
def quick_compile():
    """Programs are compiled in a sixth of the time and run slower, see `quick_compile.py`."""
    from quick_compile import quickly

    with quickly():
        yield


@pytest.fixture(autouse=True)
def _modified_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the trace cache, because other tests replace functions in this process."""
    monkeypatch.setattr(sources, "_unmodified", False)


@pytest.fixture(scope="module")
def shared_programs():
    """Runs of one configuration share their compiled programs, see `shared_programs.py`."""
    from shared_programs import sharing

    with sharing():
        yield


# Of the 65,530 mappings that Linux lets a process have; every compiled program takes some, and where there are no more
# the process is aborted.
_MANY_MAPPINGS = 20_000


@pytest.fixture(scope="module", autouse=True)
def _forget_programs() -> Iterator[None]:
    """A worker lives through thousands of tests; before it has too many programs it forgets those it has."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        if (shared := sys.modules.get("shared_programs")) is not None:
            shared.forget()
        jax.clear_caches()
        gc.collect()
