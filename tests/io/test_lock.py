"""The lock of a run folder: one process at a time, released when the process dies."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from rlstable.config import ConfigError
from rlstable.io.lock import RunLock

HOLD = """
import sys, pathlib
from rlstable.io.lock import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_second_lock_of_a_folder_is_an_error_that_names_the_holder(tmp_path):
    first = RunLock(tmp_path)
    message = (
        f"hydra.run.dir: {tmp_path} is in use by process {os.getpid()} on {socket.gethostname()}; "
        "wait until that run has ended, stop it, or choose another folder"
    )
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            RunLock(tmp_path)
    first.release()
    first.release()
    assert list(tmp_path.iterdir()) == []
    second = RunLock(tmp_path)
    first.release()  # must not take the second one's away
    with pytest.raises(ConfigError, match="is in use"):
        RunLock(tmp_path)
    second.release()


def test_lock_of_a_killed_process_is_free(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"is in use by process {holder.pid} on "):
            RunLock(tmp_path)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert (tmp_path / ".lock").exists()  # held by no process
    RunLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []
