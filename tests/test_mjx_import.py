"""MJX is imported without messages about the optional package warp-lang, and with all other messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlstable.mjx_import import print_other_errors

ROOT = Path(__file__).resolve().parents[1]


def test_import_of_mjx_prints_nothing_after_that_of_rlstable() -> None:
    code = "import rlstable\nfrom mujoco import mjx\nassert mjx.warp and mjx.put_model"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ModuleNotFoundError("No module named 'warp'", name="warp"), False),
        (ModuleNotFoundError("No module named 'numba'", name="numba"), True),
        (ImportError("libcuda.so is damaged"), True),
        (RuntimeError("no driver"), True),
    ],
)
def test_only_the_message_that_warp_is_missing_is_left_out(
    error: Exception, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    print_other_errors("Failed to import warp:", error)
    assert capsys.readouterr().out == f"Failed to import warp: {error}\n" * shown
