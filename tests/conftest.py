"""What every test process needs before jax is imported: fake devices, no network, shared compiled programs."""

import os
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

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(scope="module")
def quick_compile():
    """Compiles without LLVM's expensive optimisations, in two thirds of the time; XLA's own passes are the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def shared_programs():
    """Runs of one configuration share their compiled programs, see `shared_programs.py`."""
    from shared_programs import sharing

    with sharing():
        yield
