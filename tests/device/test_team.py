"""The end of a process after another process has failed, with a stand-in for JAX's client."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlstable.device import team as teams
from rlstable.device.team import Ending, Team

# JAX calls `abort` when process 0 vanishes. In a crash for another reason, process 0 still listens.
PROCESS = """
import ctypes, socket, sys, threading
from rlstable.device.team import Ending, Team

class Client:
    def key_value_set(self, key, value, allow_overwrite=False): pass
    def blocking_key_value_get(self, key, milliseconds):
        if key.endswith("ending"):
            threading.Event().wait(1)
            raise RuntimeError("CANCELLED")
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


class Client:
    """A stand-in for JAX's client in a process whose first question of each kind fails."""

    def __init__(
        self, ending: Ending | None = None, live: tuple[int, ...] = (0, 1), left: dict[int, str] | None = None
    ) -> None:
        self.left = left or {}
        self.values: dict[str, str] = {} if ending is None else {"rlstable/ending": json.dumps(ending)}
        self.live = live
        self.asked: set[str] = set()
        self.closed = threading.Event()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.values[key] = value

    def key_value_try_get(self, key: str) -> str:
        return "node1"

    def key_value_dir_get(self, key: str) -> list[Any]:
        return [(f"{key}{index}", runs) for index, runs in self.left.items()]

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        if self._is_first("get"):
            raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
        if key not in self.values:
            self.closed.wait(60)
            raise RuntimeError("CANCELLED")
        return self.values[key]

    def get_live_nodes(self, nodes: list[int]) -> list[int]:
        if self._is_first("live"):
            raise RuntimeError("UNAVAILABLE")
        return [node for node in nodes if node in self.live]

    def _is_first(self, kind: str) -> bool:
        first = kind not in self.asked
        self.asked.add(kind)
        return first


@pytest.mark.parametrize(
    ("ending", "live"),
    [
        (Ending("preempted", 143, "a signal"), (0, 1)),
        (Ending("error", 1, "process 1 on node1 vanished: no heartbeat for 25 s"), (0,)),
    ],
)
def test_process_learns_why_all_end_although_a_question_failed(
    monkeypatch: pytest.MonkeyPatch, ending: Ending, live: tuple[int, ...]
) -> None:
    """A wait for an announcement times out after a day, and a question for lost processes may fail."""
    ended: queue.Queue[Ending] = queue.Queue()
    monkeypatch.setattr(Team, "_end", lambda self, ending: ended.put(ending))
    client = Client(ending if live == (0, 1) else None, live)
    team = Team(client, index=0, count=2, address="localhost:1")
    assert ended.get(timeout=60) == ending
    client.closed.set()
    team._closed.set()


def test_process_that_left_after_an_earlier_run_is_missed_in_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: queue.Queue[Ending] = queue.Queue()
    monkeypatch.setattr(Team, "_end", lambda self, ending: ended.put(ending))
    client = Client(live=(0,), left={1: "1"})
    team = Team(client, index=0, count=2, address="localhost:1")
    team.begin_run()
    with pytest.raises(queue.Empty):  # it left at the end of this run
        ended.get(timeout=4)
    team.end_run()
    team.begin_run()
    assert ended.get(timeout=60) == Ending("error", 1, "process 1 on node1 left before this run")
    client.closed.set()
    team._closed.set()


@pytest.mark.parametrize("ends", [True, False])
def test_process_that_leaves_inside_a_run_announces_the_exception_of_its_script(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("a mistake"), raising=False)
    client = Client()
    team = Team(client, index=1, count=2, address="localhost:1")
    team.begin_run()
    if ends:
        team.end_run()
    client.closed.set()
    team.leave()
    announced = client.values.get("rlstable/ending")
    text = "process 1 left before the run had ended: ValueError: a mistake"
    assert announced == (None if ends else json.dumps(Ending("error", 1, text)))


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    """A team in a run, without grace period."""
    monkeypatch.setattr(teams, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(teams, "_EXIT_SECONDS", 0.0)
    client = Client()
    team = Team(client, index=1, count=2, address="localhost:1")
    team.begin_run()
    yield team
    client.closed.set()
    team._closed.set()
    teams._set_abort_handler(team._earlier_handler)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_process_leaves_and_trains_again_although_another_thread_has_ended_the_run(team: Team) -> None:
    for _ in range(2):
        in_thread(team.claim_end).join(60)
        team.end_run()
        team.begin_run()
    team.claim_end()
    team.end_run()
    team.client.closed.set()
    leaving = in_thread(team.leave)
    leaving.join(60)
    assert not leaving.is_alive()


def test_thread_waits_while_another_thread_ends_the_process(team: Team) -> None:
    in_thread(lambda: team.claim_end(exits=True)).join(60)
    for function in (team.claim_end, team.leave):
        waiting = in_thread(function)
        waiting.join(1)
        assert waiting.is_alive()


def test_save_that_has_begun_is_completed_before_the_process_ends(
    team: Team, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(teams.os, "_exit", lambda code: done.put(f"exit code {code}"))
    team.finish = lambda ending: done.put(ending.message)
    with team.saving:
        ending = in_thread(lambda: team._end(Ending("error", 1, "process 0 failed")))
        ending.join(1)
        done.put("saved")
    ending.join(60)
    assert [done.get(timeout=60) for _ in range(3)] == ["saved", "process 0 failed", "exit code 1"]
    assert "rlstable: error: process 0 failed" in capfd.readouterr().err


def test_team_forgets_the_last_run(team: Team) -> None:
    team.finish = print  # in a run: a method of the training loop, which holds the training state
    team.end_run()
    assert team.finish is None
