"""The processes of a run, which all end for the same cause: the first one in any process.

A process that fails, or that a signal stops during compilation, announces its `Ending` to all processes. A thread of
every process waits for the announcement, and another thread watches for processes that vanish. Both threads give the
thread of the run a few seconds and then end the process, because a collective of JAX cannot be interrupted.

JAX aborts the other processes when process 0 vanishes, because the coordinator was part of process 0. A handler of
SIGABRT ends the other processes with the name of the cause instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

HEARTBEAT_SECONDS = 25  # after which a silent process counts as lost
FAREWELL_SECONDS = 15  # in which the other processes end after a failure
# Milliseconds of one wait for another process. If that process is lost, `Team` ends the waiting process sooner.
LONGEST_WAIT = 24 * 3600 * 1000
_GRACE_SECONDS = 5.0  # for the thread of the run to end by itself
_SAVE_SECONDS = 60.0  # for a save that has begun
_EXIT_SECONDS = 5.0  # in which a process that has left exits
_ANSWER_SECONDS = 2.0  # in which the coordinator's host accepts a connection
_WATCH_SECONDS = 1.0  # between two questions for lost processes
_UNKNOWN_HOST = "an unknown host"
_PREFIX = "rlstable"
_ENDING = f"{_PREFIX}/ending"


class Ending(NamedTuple):
    """The first cause for which all processes end.

    Attributes:
        stop_reason: Name of the stop reason.
        exit_code: Its exit code.
        message: One line that explains it.
    """

    stop_reason: str
    exit_code: int
    message: str


class Team:
    """The processes of a run, as this process knows them.

    Attributes:
        client: JAX's client of the coordination service.
        index: Number of this process, from 0.
        count: Number of processes.
        ending: Why all processes end; None until that is known.
        finish: Ends the run in another thread; None outside of a run.
        saving: Lock that the writer holds while it saves a state.

    Args:
        client: JAX's client of the coordination service.
        index: Number of this process, from 0.
        count: Number of processes.
        address: Address of the coordinator, `host:port`.
    """

    def __init__(self, client: Any, index: int, count: int, address: str):
        self.client = client
        self.index = index
        self.count = count
        self._address = address
        self.ending: Ending | None = None
        self.finish: Callable[[Ending], None] | None = None
        self._calls: Counter[str] = Counter()
        self._known = threading.Event()  # whether `ending` is known
        self.saving = threading.Lock()
        self._claiming = threading.Lock()
        self._ender: threading.Thread | None = None  # the thread that ends the run
        self._exits = False  # whether this thread ends the process too
        self._live: set[int] = set()
        self._lost: set[int] = set()
        self._in_run = False
        self._runs_begun = 0
        self._left = False
        self._closed = threading.Event()
        client.key_value_set(f"{_PREFIX}/host/{index}", socket.gethostname(), allow_overwrite=True)
        self._coordinator = self._name(0)  # the coordinator cannot answer after process 0 has vanished
        self._pid = os.getpid()
        self._abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._end_if_coordinator_vanished)  # kept alive
        self._earlier_handler = _set_abort_handler(self._abort_handler) if index > 0 else None
        watches = (self._wait_for_ending, self._wait_for_lost_processes)
        self._threads = [threading.Thread(target=watch, daemon=True) for watch in watches]
        for thread in self._threads:
            thread.start()

    def key(self, name: str) -> str:
        """A new key for an exchange; every process makes the same calls of a name in the same order."""
        self._calls[name] += 1
        return f"{_PREFIX}/{name}/{self._calls[name]}"

    def begin_run(self) -> None:
        """Must be called before every run of these processes."""
        self._in_run = True
        self._runs_begun += 1
        self.finish = None  # holds the training state of the last run
        with self._claiming:
            if not self._exits:
                self._ender = None

    def end_run(self) -> None:
        """Must be called after a run that has ended for the same reason in all processes."""
        self._in_run = False
        self.finish = None

    def claim_end(self, exits: bool = False) -> None:
        """Must be called by the thread that ends the run. If another thread has claimed the end, never returns.

        Args:
            exits: Whether this thread ends the process after the run.
        """
        if not self._claim(exits):
            while True:  # until the other thread ends the process, also if the user presses Ctrl-C
                with contextlib.suppress(KeyboardInterrupt):
                    threading.Event().wait()

    def _claim(self, exits: bool) -> bool:
        with self._claiming:
            if self._ender not in (None, threading.current_thread()):
                return False
            self._ender, self._exits = threading.current_thread(), self._exits or exits
            return True

    def announce(self, ending: Ending) -> Ending:
        """Announces the end to all processes. Returns the first cause, which another process may have announced."""
        if self.ending is None:
            with contextlib.suppress(Exception):  # another process was first, or the coordinator is lost
                self.client.key_value_set(_ENDING, json.dumps(ending))
            with contextlib.suppress(Exception):
                ending = Ending(*json.loads(self.client.blocking_key_value_get(_ENDING, 1000 * FAREWELL_SECONDS)))
            self._learn(ending)
        return self.ending or ending

    def wait_for_cause(self) -> None:
        """Waits until it is known whether another process has ended; a collective fails before that is known."""
        self._known.wait(HEARTBEAT_SECONDS + _GRACE_SECONDS)

    def leave(self) -> None:
        """Disconnects this process; may be called again."""
        if self._left:
            return
        if self._in_run and self.ending is None:  # an exception in the user's script, for example
            error = getattr(sys, "last_value", None)  # the exception that ended the script
            why = "" if error is None else f": {type(error).__name__}: {error}"
            self.announce(Ending("error", 1, f"process {self.index} left before the run had ended{why}"))
        with self._claiming:
            if not self._exits:  # a run that has ended may have had another thread
                self._ender = None
        self.claim_end(exits=True)
        self._say_farewell()
        with contextlib.suppress(Exception):
            jax.distributed.shutdown()
        if self.index > 0:
            _set_abort_handler(self._earlier_handler)
        self._closed.set()
        for thread in self._threads:  # Python's exit would abort in a thread that is inside JAX's client
            thread.join(_EXIT_SECONDS)

    def _learn(self, ending: Ending) -> None:
        self.ending = self.ending or ending
        self._known.set()

    def _say_farewell(self) -> None:
        """Announces that this process leaves. The coordinator exits last, because JAX then aborts all processes."""
        self._left = True
        with contextlib.suppress(Exception):  # the coordinator is lost
            self.client.key_value_set(f"{_PREFIX}/left/{self.index}", str(self._runs_begun))
        if self.index > 0:
            return
        deadline: float | None = None
        while self._remaining() and (deadline is None or time.monotonic() < deadline):
            if deadline is None and self.ending is not None:
                deadline = time.monotonic() + FAREWELL_SECONDS
            time.sleep(0.1)
        deadline = time.monotonic() + _EXIT_SECONDS
        while self._live != {0} and time.monotonic() < deadline:
            time.sleep(0.1)

    def _remaining(self) -> set[int]:
        """The other processes that have neither left nor vanished."""
        return set(range(self.count)) - self._runs_of_left().keys() - self._lost - {self.index}

    def _runs_of_left(self) -> dict[int, int]:
        """The number of runs that each process had begun when it left."""
        with contextlib.suppress(Exception):  # no process has left
            entries = self.client.key_value_dir_get(f"{_PREFIX}/left/")
            return {int(key.rsplit("/", 1)[1]): int(runs) for key, runs in entries}
        return {}

    def _wait_for_ending(self) -> None:
        """Ends this process after another process has announced that all end."""
        while not self._closed.is_set():
            try:
                text = self.client.blocking_key_value_get(_ENDING, LONGEST_WAIT)
            except Exception as error:
                if "DEADLINE_EXCEEDED" in str(error):  # the run takes longer
                    continue
                return  # the connection is closed
            self._end(Ending(*json.loads(text)))
            return

    def _wait_for_lost_processes(self) -> None:
        """Ends this process after another process has vanished.

        `get_live_nodes` answers after every live process has asked, so every process asks once a second.
        """
        everyone = list(range(self.count))
        while not self._closed.wait(_WATCH_SECONDS):
            if self._coordinator.endswith(_UNKNOWN_HOST):
                self._coordinator = self._name(0)
            try:
                self._live = set(self.client.get_live_nodes(everyone))
            except Exception:  # the connection is closed, or one question failed
                continue
            lost = sorted(self._remaining() - self._live)
            self._lost.update(lost)
            if lost:
                self._end_without(lost, f"vanished: no heartbeat for {HEARTBEAT_SECONDS} s")
            left = [i for i, begun in self._runs_of_left().items() if begun < self._runs_begun]
            if left and self._in_run:
                self._end_without(left, "left before this run")
                return

    def _end_without(self, others: list[int], why: str) -> None:
        """Ends this process in another thread, because processes are missing."""
        if not self._left:
            ending = Ending("error", 1, f"{' and '.join(map(self._name, others))} {why}")
            threading.Thread(target=self._end, args=(ending,), daemon=True).start()

    def _end_if_coordinator_vanished(self, _: int) -> None:
        """Ends this process in place of JAX's abort, with one line. Any other abort continues.

        This handler runs in the thread that aborts. It must take no lock and not call the client, which waits for it.
        """
        _set_abort_handler(self._earlier_handler)
        if os.getpid() != self._pid or _answers(self._address):
            return
        text = f"error: {self._coordinator} vanished, the coordinator of all processes; see the message of JAX above"
        ending = self.ending or Ending("error", 1, "")
        if self.ending is not None:
            text = f"{ending.stop_reason}: {ending.message}"
        os.write(2, f"rlstable: {text}\n".encode())
        os._exit(ending.exit_code)

    def _name(self, index: int) -> str:
        host = _UNKNOWN_HOST
        with contextlib.suppress(Exception):
            host = self.client.key_value_try_get(f"{_PREFIX}/host/{index}")
        return f"process {index} on {host}"

    def _end(self, ending: Ending) -> None:
        """Ends this process, unless the thread of the run does so within the grace period."""
        self._learn(ending)
        time.sleep(_GRACE_SECONDS)
        if self.saving.acquire(timeout=_SAVE_SECONDS):  # the state would be lost
            self.saving.release()
        if self._left or not self._claim(exits=True):
            return
        ending = self.ending or ending
        try:
            print(f"rlstable: {ending.stop_reason}: {ending.message}", file=sys.stderr, flush=True)
            if self.finish is not None:
                self.finish(ending)
        finally:
            # Connected to the end, because the thread of the run would fail if its call of the client were cancelled.
            self._say_farewell()
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(ending.exit_code)


def _answers(address: str) -> bool:
    """Whether a process listens at an address, `host:port`."""
    host, port = address.rsplit(":", 1)
    with contextlib.suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
        return True
    return False


def _set_abort_handler(handler: Any) -> Any:
    """Sets the handler of SIGABRT in C, which also runs in an abort, where handlers of Python do not.

    Args:
        handler: A function of `ctypes`, or an earlier result; None for the default action.

    Returns:
        The handler before, as a pointer; None for the default action.
    """
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    return set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
