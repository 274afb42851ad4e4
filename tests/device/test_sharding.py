"""Devices of a run, and errors about devices that JAX does not find."""

from __future__ import annotations

import jax
import pytest

from rlstable.config import ConfigError
from rlstable.config.extras import install
from rlstable.device.mesh import make_mesh


def no_device() -> list:
    raise AssertionError  # as JAX does for a platform without a device


def test_platform_without_a_device_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", no_device)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(ConfigError) as caught:
        make_mesh()
    assert str(caught.value) == (
        "JAX_PLATFORMS: JAX finds no device for 'cuda' on this machine; unset it to train on the devices that JAX "
        f"finds, or install JAX for it, such as {install('cuda12')}"
    )
