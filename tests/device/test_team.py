"""How a process ends when another one vanishes, with a stand-in for JAX's client."""

from __future__ import annotations

import subprocess
import sys

import pytest

# JAX calls `abort` when process 0 vanishes. In a crash for another reason, process 0 still listens.
PROCESS = """
import ctypes, socket, sys, threading
from rlstable.device.team import Ending, Team

class Client:
    def key_value_set(self, key, value, allow_overwrite=False): pass
    def blocking_key_value_get(self, key, milliseconds):
        if key.endswith("ending"):
            threading.Event().wait(1)
    def key_value_try_get(self, key): return "node1"
    def key_value_dir_get(self, key): return []
    def get_live_nodes(self, nodes): return nodes

listener = socket.create_server(("localhost", 0))
address = f"localhost:{listener.getsockname()[1]}"
if sys.argv[2] != "crash":
    listener.close()
team = Team(Client(), index=int(sys.argv[1]), count=2, address=address)
if sys.argv[2] == "ending":
    team._learn(Ending("preempted", 143, "a signal"))
if sys.argv[2] == "left":
    team.leave()
threading.Thread(target=ctypes.CDLL(None).abort).start()
threading.Event().wait()
"""

LOST = "rlstable: error: process 0 on node1 vanished, the coordinator of all processes; see the message of JAX above"


@pytest.mark.parametrize(
    ("index", "state", "code", "line"),
    [
        (0, "training", -6, ""),
        (1, "training", 1, LOST),
        (1, "ending", 143, "rlstable: preempted: a signal"),
        (1, "left", -6, ""),
        (1, "crash", -6, ""),
    ],
)
def test_abort_is_an_error_with_the_name_of_process_0_only_if_process_0_has_vanished(
    index: int, state: str, code: int, line: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROCESS, str(index), state], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.strip() == line
