"""Versions of the installed packages, and the differences between two runs."""

from __future__ import annotations

import platform
from importlib import metadata

import rlstable
from rlstable.io.versions import differences, versions


def test_versions_are_those_installed() -> None:
    found = versions()
    assert list(found) == [
        "rlstable", "python", "jax", "jaxlib", "brax", "mujoco", "mujoco-mjx", "flax", "optax", "orbax-checkpoint",
        "numpy",
    ]  # fmt: skip
    assert found["rlstable"] == rlstable.__version__
    assert found["python"] == platform.python_version()
    assert found["mujoco-mjx"] == metadata.version("mujoco-mjx")


def test_changed_versions_are_listed_by_name() -> None:
    old = {"jax": "0.10.1", "brax": "0.14.2", "mujoco": "none", "gone": "1"}
    new = {"jax": "0.10.2", "brax": "0.14.2", "mujoco": "4.0.0", "fresh": "1"}
    assert differences(old, new) == {"jax": "0.10.1 -> 0.10.2", "mujoco": "none -> 4.0.0"}
    assert differences({}, new) == {}
