"""Settings of every test process: eight CPU devices, no network, a shared compilation cache, no time limits."""

import atexit
import gc
import os
import shutil
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
# Many tests run the same small program: the first test compiles it, the others read it from this cache.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
# The list of trusted run folders lies here, not in the user's home. Workers of pytest-xdist inherit the folder.
_CACHE = "RLSTABLE_TESTS_CACHE"
if _CACHE not in os.environ:
    os.environ[_CACHE] = tempfile.mkdtemp(prefix="rlstable-tests-")
    atexit.register(shutil.rmtree, os.environ[_CACHE], ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = os.environ[_CACHE]

# A shell that starts the tests in the background makes them ignore SIGINT, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
import yaml  # noqa: E402

from rlstable.compilation import sources  # noqa: E402

# Tests compose hundreds of configurations, and most of that is parsing; this parser is in C.
if hasattr(yaml, "CSafeLoader"):
    yaml.SafeLoader = yaml.CSafeLoader

# Tracing makes so many objects that Python's collector, at its own threshold, takes 6 % of the tests' time.
gc.set_threshold(20_000)

# No test depends on the speed of the machine.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="module")
def quick_compile():
    """Compiles in a sixth of the time to slower programs, see `quick_compile.py`."""
    from quick_compile import quickly

    with quickly():
        yield


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    from disks import small_disk

    with small_disk(tmp_path / "disk"):
        yield tmp_path / "disk"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the test, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _modified_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the trace cache, because other tests replace functions in this process."""
    monkeypatch.setattr(sources, "_unmodified", False)


@pytest.fixture(scope="module")
def shared_programs():
    """Runs of equal configuration share their compiled programs, see `shared_programs.py`."""
    from shared_programs import sharing

    with sharing():
        yield


# Every compiled program takes memory mappings. Linux allows 65,530 per process and aborts a process that needs more.
_MANY_MAPPINGS = 20_000


@pytest.fixture(scope="module", autouse=True)
def _forget_programs() -> Iterator[None]:
    """Frees the compiled programs of a worker before the worker runs out of memory mappings."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        if (shared := sys.modules.get("shared_programs")) is not None:
            shared.forget()
        jax.clear_caches()
        gc.collect()
