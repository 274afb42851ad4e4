"""Settings of every test process before JAX is imported: fake devices, no network, shared compiled programs."""

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
# Many tests run the same small program; the first one compiles it.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
# A cache folder without trusted run folders; workers of pytest-xdist inherit it.
_CACHE = "RLSTABLE_TESTS_CACHE"
if _CACHE not in os.environ:
    os.environ[_CACHE] = tempfile.mkdtemp(prefix="rlstable-tests-")
os.environ["XDG_CACHE_HOME"] = os.environ[_CACHE]

# A shell script starts background tests with SIGINT ignored, but some tests send SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from rlstable.compilation import sources  # noqa: E402

# No test depends on how fast the machine is.
hypothesis.settings.register_profile("rlstable", deadline=None)
hypothesis.settings.load_profile("rlstable")


@pytest.fixture(scope="module")
def quick_compile():
    """Programs compile in a sixth of the time and run slower, see `quick_compile.py`."""
    from quick_compile import quickly

    with quickly():
        yield


@pytest.fixture(autouse=True)
def _untrusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that tests run in this process must not keep traced programs, since tests replace functions."""
    monkeypatch.setattr(sources, "_trusted", [])


@pytest.fixture(scope="module")
def shared_programs():
    """Runs of the same configuration share compiled programs, see `shared_programs.py`."""
    from shared_programs import sharing

    with sharing():
        yield


# Linux allows a process 65,530 memory mappings and aborts it beyond; every compiled program takes some.
_MANY_MAPPINGS = 20_000


@pytest.fixture(scope="module", autouse=True)
def _forget_programs() -> Iterator[None]:
    """Drops compiled programs after a module when the process has many memory mappings."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        if (shared := sys.modules.get("shared_programs")) is not None:
            shared.forget()
        jax.clear_caches()
        gc.collect()
