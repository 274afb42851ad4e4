"""Devices, drivers and settings of the machine in a report."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import jax
import pytest

from rlstable.doctor import surroundings as module
from rlstable.doctor.surroundings import surroundings


def test_surroundings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda _: None)
    found = surroundings({"NVIDIA_TF32_OVERRIDE": "0", "HOME": "/root"})
    assert found.devices == "8 x cpu"
    assert found.nvidia == ()
    assert not found.gpu_unused
    assert found.versions["jax"] == jax.__version__
    assert found.settings == {
        "jax_default_matmul_precision": "None",
        "jax_enable_x64": "False",
        "jax_debug_nans": "False",
        "NVIDIA_TF32_OVERRIDE": "0",
    }
    assert found.processor.endswith(("core", "cores"))


def test_surroundings_name_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 12090")
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", client=client)
    monkeypatch.setattr(module.jax, "devices", lambda: [device, device])
    assert module._devices() == ("2 x gpu (NVIDIA H100)", "PJRT C API cuda 12090")


def test_gpu_that_jax_does_not_use_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    answer = SimpleNamespace(stdout="NVIDIA H100, 575.57, 81559 MiB\n")
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: answer)
    found = surroundings({})
    assert found.nvidia == ("NVIDIA H100, 575.57, 81559 MiB",)
    assert found.gpu_unused


def test_failing_nvidia_smi_gives_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda _: "/usr/bin/nvidia-smi")

    def fail(*_, **__):
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(module.subprocess, "run", fail)
    assert module._nvidia() == ()
