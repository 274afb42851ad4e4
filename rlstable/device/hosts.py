"""Several processes that train one run together, usually one per host, connected by `jax.distributed`.

Every process runs the same host loop and takes the same decisions in the same iteration. Process 0 is the writer: only
this process writes the run folder, evaluates and prints. In a process that trains alone every function is free.

A process that fails, or that a signal stops during compilation, announces its `Ending` to the others. A thread of every
process waits for this word, and another thread for processes that vanish. The thread gives the main thread a few
seconds and then ends the process, because a collective of JAX that waits for a missing process cannot be interrupted.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax._src import clusters, distributed, xla_bridge  # no public API for the detection and for the client

from rlstable.config import ConfigError
from rlstable.config.distributed import DistributedConfig

_CONNECT_SECONDS = 60  # until all processes must have started
_HEARTBEAT_SECONDS = 25  # after which a silent process counts as lost
_GRACE_SECONDS = 5.0  # for the main thread to end by itself
_FAREWELL_SECONDS = 15  # in which the others end after a failure
_EXIT_SECONDS = 5  # in which a process that has left exits
_WATCH_SECONDS = 1.0  # between two questions for lost processes
_CONFIG_ERROR = 2  # exit code
_FOREVER = 24 * 3600 * 1000  # milliseconds; the threads end a process that waits for a lost one
_PREFIX = "rlstable"

Value = TypeVar("Value")


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


@dataclasses.dataclass
class _Team:
    """The processes of this run, as this process knows them.

    Attributes:
        client: JAX's client of the coordination service.
        index: Number of this process.
        count: Number of processes.
        calls: Number of exchanges so far, by name.
        ending: Why all processes end; None until that is known.
        known: Set when `ending` is known.
        ends: Held by the thread that ends the run.
        ender: Identifier of this thread; None before the end.
        finish: Ends the run in another thread; None if there is no run.
        live: The processes that JAX has seen last.
        lost: The processes that have vanished.
        left: Whether this process is leaving.
        closed: Set when this process is disconnected.
        threads: The threads that watch the other processes.
    """

    client: Any
    index: int
    count: int
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    ending: Ending | None = None
    known: threading.Event = dataclasses.field(default_factory=threading.Event)
    ends: Any = dataclasses.field(default_factory=threading.Lock)
    ender: int | None = None
    finish: Callable[[Ending], None] | None = None
    live: set[int] = dataclasses.field(default_factory=set)
    lost: set[int] = dataclasses.field(default_factory=set)
    left: bool = False
    closed: threading.Event = dataclasses.field(default_factory=threading.Event)
    threads: list[threading.Thread] = dataclasses.field(default_factory=list)

    def remaining(self) -> set[int]:
        """The other processes that have neither left nor vanished."""
        with contextlib.suppress(Exception):  # no process has left
            gone = self.client.key_value_dir_get(f"{_PREFIX}/left/")
            return set(range(self.count)) - {int(key.rsplit("/", 1)[1]) for key, _ in gone} - self.lost - {self.index}
        return set(range(self.count)) - self.lost - {self.index}

    def key(self, name: str) -> str:
        """A new key for an exchange; every process makes the same calls of a name in the same order."""
        self.calls[name] += 1
        return f"{_PREFIX}/{name}/{self.calls[name]}"


_team: _Team | None = None


def start(config: DistributedConfig) -> None:
    """Connects the processes if the configuration or the cluster says so. Must run before JAX is initialised.

    Raises:
        ConfigError: A setting is missing, the processes do not find each other, or an earlier run of them has failed.
    """
    global _team
    if _team is not None and _team.ending is not None:
        raise ConfigError(
            f"distributed: these processes have ended an earlier run as {_team.ending.stop_reason}; start new processes"
        )
    if _team is not None and _team.ender == threading.get_ident():  # a second run of the same processes
        _team.ender = None
        _team.ends.release()
    if _team is None and _is_wanted(config):
        _connect(config)
        state = distributed.global_state
        client: Any = state.client
        _team = _Team(client, state.process_id, state.num_processes)
        client.key_value_set(f"{_PREFIX}/host/{_team.index}", socket.gethostname(), allow_overwrite=True)
        for watch in (_wait_for_ending, _wait_for_lost_processes):
            _team.threads.append(threading.Thread(target=watch, args=(_team,), daemon=True))
            _team.threads[-1].start()
        atexit.register(leave)


def _is_wanted(config: DistributedConfig) -> bool:
    """Whether this process is one of several."""
    if config.enabled == "auto" and not config.by_hand:
        return distributed.global_state.client is not None or _count_in_cluster() > 1
    return config.enabled != "false"


def _count_in_cluster() -> int:
    """Number of processes of a cluster that JAX detects: Slurm, Open MPI, Kubernetes, TPU pods; 1 outside of one."""
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # a pod that belongs to no job, for instance
        warnings.simplefilter("ignore")  # of a missing package `kubernetes`
        kinds = (kind for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method)
        cluster = next((kind for kind in kinds if kind.is_env_present()), None)
        return 1 if cluster is None else cluster.get_process_count()
    return 1


def _connect(config: DistributedConfig) -> None:
    """Calls `jax.distributed.initialize`, unless the user's script has called it.

    Raises:
        ConfigError: A setting is missing, or the processes do not find each other.
    """
    if distributed.global_state.client is not None:
        return
    if xla_bridge.backends_are_initialized():
        raise ConfigError(
            "distributed: JAX is in use already, so that the processes cannot be connected; call rlstable.fit before "
            "any other computation with JAX, or set distributed=false"
        )
    # Without this flag JAX aborts every process when one vanishes, before the run folder has the stop reason.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is rlstable's
    late = threading.Timer(_CONNECT_SECONDS, _give_up)
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.num_processes,
            config.process_id,
            initialization_timeout=2 * _CONNECT_SECONDS,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_FAREWELL_SECONDS,
        )
    except ValueError:
        raise ConfigError(
            "distributed.coordinator: must be set together with distributed.process_id and distributed.num_processes, "
            "because JAX detects no cluster here; or set distributed=false"
        ) from None
    except Exception as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"distributed.coordinator: cannot connect the processes: {text[:200]}") from None
    finally:
        late.cancel()


def _give_up() -> None:
    """Ends the process with one line, because JAX would abort it when the processes do not find each other."""
    print(
        f"rlstable: distributed: the processes have not found each other within {_CONNECT_SECONDS} s; start all of "
        "them, check distributed.coordinator and distributed.num_processes, or set distributed=false",
        file=sys.stderr,
        flush=True,
    )
    os._exit(_CONFIG_ERROR)


def count() -> int:
    """Number of processes of the run."""
    return 1 if _team is None else _team.count


def index() -> int:
    """Number of this process, from 0."""
    return 0 if _team is None else _team.index


def is_writer() -> bool:
    """Whether this process writes the run folder, evaluates and prints."""
    return index() == 0


def from_writer(name: str, value: Callable[[], Value]) -> Value:
    """Calls a function in the writer only, and returns its result in every process.

    Args:
        name: Name of the exchange; the processes make the calls of a name in the same order.
        value: Function to call; its result is JSON data.

    Raises:
        ConfigError: The function raised it; every process raises it.
    """
    if _team is None:
        return value()
    key = _team.key(name)
    if is_writer():
        try:
            result: Any = {"value": value()}
        except ConfigError as error:
            result = {"mistake": str(error)}
        text = json.dumps(result)
        _team.client.key_value_set(key, text)
    else:
        text = _team.client.blocking_key_value_get(key, _FOREVER)
    result = json.loads(text)  # also in the writer, because JSON turns a tuple into a list
    if "mistake" in result:
        raise ConfigError(result["mistake"])
    received: Value = result["value"]
    return received


def gather(name: str, value: Value) -> list[Value]:
    """The values of all processes, in their order, for rare exchanges.

    Args:
        name: As for `from_writer`.
        value: JSON data.
    """
    if _team is None:
        return [value]
    key = _team.key(name)
    _team.client.key_value_set(f"{key}/{_team.index}", json.dumps(value))
    return [json.loads(_team.client.blocking_key_value_get(f"{key}/{i}", _FOREVER)) for i in range(_team.count)]


def largest(value: int) -> int:
    """The largest value of any process, an int32, by a collective of JAX: fast enough for every iteration."""
    if _team is None:
        return value
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def require_same(name: str, settings: dict[str, Any]) -> None:
    """Checks that this process has the settings of the writer.

    Args:
        name: Name of the exchange, as for `from_writer`.
        settings: Nested JSON data.

    Raises:
        ConfigError: They differ; names the first key.
    """
    flat = dict(_flat(settings))
    theirs = from_writer(name, lambda: flat)
    for key in flat.keys() | theirs.keys():
        if flat.get(key) != theirs.get(key):
            raise ConfigError(
                f"{key}: is {flat.get(key)!r} in process {index()} and {theirs.get(key)!r} in process 0; start all "
                "processes with the same command"
            )


def _flat(settings: Any, path: str = "") -> list[tuple[str, Any]]:
    if not isinstance(settings, dict):
        return [(path, json.loads(json.dumps(settings)))]
    return [item for key, value in settings.items() for item in _flat(value, f"{path}.{key}" if path else str(key))]


def on_ending(finish: Callable[[Ending], None] | None) -> None:
    """Sets the function that ends the run in another thread, while the main thread waits for the other processes."""
    if _team is not None:
        _team.finish = finish


def claim_end() -> None:
    """Must be called by the thread that ends the run. If another thread already ends the process, it never returns."""
    if _team is not None and _team.ender != threading.get_ident():
        _team.ends.acquire()
        _team.ender = threading.get_ident()


def announce(stop_reason: str, exit_code: int, message: str) -> Ending:
    """Tells all processes to end. Returns the first cause, which another process may have announced before."""
    ending = Ending(stop_reason, exit_code, message)
    if _team is None:
        return ending
    if _team.ending is None:
        key = f"{_PREFIX}/ending"
        with contextlib.suppress(Exception):  # another process was first, or the coordinator is lost
            _team.client.key_value_set(key, json.dumps(ending))
        with contextlib.suppress(Exception):
            ending = Ending(*json.loads(_team.client.blocking_key_value_get(key, 1000 * _FAREWELL_SECONDS)))
        _team.ending = _team.ending or ending
        _team.known.set()
    return _team.ending


def cause_of(error: Exception, stop_reason: str, exit_code: int) -> Ending:
    """The first cause of an error: what another process has announced or lost, or the error itself, announced now."""
    if _team is None:
        return Ending(stop_reason, exit_code, str(error))
    if isinstance(error, jax.errors.JaxRuntimeError):
        # A collective fails if another process has ended; wait until it is known why.
        _team.known.wait(_HEARTBEAT_SECONDS + _GRACE_SECONDS)
    return announce(stop_reason, exit_code, f"process {_team.index}: {type(error).__name__}: {error}")


def leave() -> None:
    """Disconnects this process; may be called again. The writer waits for the others, because it is the coordinator."""
    if _team is not None and not _team.left:
        claim_end()
        _say_farewell(_team)
        with contextlib.suppress(Exception):
            jax.distributed.shutdown()
        _team.closed.set()
        for thread in _team.threads:  # Python's exit would abort in a thread that is inside JAX's client
            thread.join(_EXIT_SECONDS)


def _say_farewell(team: _Team) -> None:
    """Tells the others that this process leaves. The coordinator must exit last, since JAX aborts the others then."""
    team.left = True
    with contextlib.suppress(Exception):  # the coordinator is lost
        team.client.key_value_set(f"{_PREFIX}/left/{team.index}", "1")
    if team.index > 0:
        return
    failed_at = time.monotonic() if team.ending is not None else None
    while team.remaining():
        failed_at = failed_at or (time.monotonic() if team.ending is not None else None)
        if failed_at is not None and time.monotonic() - failed_at > _FAREWELL_SECONDS:
            break
        time.sleep(0.1)
    all_left = time.monotonic()
    while team.live != {0} and time.monotonic() - all_left < _EXIT_SECONDS:
        time.sleep(0.1)


def _wait_for_ending(team: _Team) -> None:
    """Ends this process after another process has announced that all end."""
    with contextlib.suppress(Exception):  # the connection is closed
        text = team.client.blocking_key_value_get(f"{_PREFIX}/ending", _FOREVER)
        _end(team, Ending(*json.loads(text)))


def _wait_for_lost_processes(team: _Team) -> None:
    """Ends this process after another process has vanished. Every process must ask again and again."""
    everyone = list(range(team.count))
    while not team.closed.wait(_WATCH_SECONDS):
        try:
            team.live = set(team.client.get_live_nodes(everyone))
        except Exception:
            return  # the connection is closed
        lost = [] if team.left else sorted(team.remaining() - team.live)
        if lost:
            names = [_name(team, index) for index in lost]
            message = f"{' and '.join(names)} vanished: no heartbeat for {_HEARTBEAT_SECONDS} s"
            threading.Thread(target=_end, args=(team, Ending("error", 1, message)), daemon=True).start()
            team.lost.update(lost)


def _name(team: _Team, index: int) -> str:
    host = "an unknown host"
    with contextlib.suppress(Exception):
        host = team.client.key_value_try_get(f"{_PREFIX}/host/{index}")
    return f"process {index} on {host}"


def _end(team: _Team, ending: Ending) -> None:
    """Ends this process, unless the main thread does so within the grace period."""
    team.ending = team.ending or ending
    team.known.set()
    time.sleep(_GRACE_SECONDS)
    if team.left or not team.ends.acquire(blocking=False):
        return
    team.ender = threading.get_ident()
    try:
        print(f"rlstable: {ending.stop_reason}: {ending.message}", file=sys.stderr)
        if team.finish is not None:
            team.finish(team.ending)
    finally:
        # Connected to the end, because the main thread would fail if its call of the client were cancelled.
        _say_farewell(team)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(team.ending.exit_code)
