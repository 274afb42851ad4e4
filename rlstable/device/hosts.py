"""Several processes that train one run together, usually one per host, connected by `jax.distributed`.

Every process runs the same host loop and takes the same decisions in the same iteration. Process 0 is the writer: only
this process writes the run folder, evaluates and prints. In a process that trains alone, each function returns at once.

If a process is lost, JAX aborts the other processes after 25 seconds: a collective cannot be interrupted. A process
that fails announces its `Ending`, so that the others can name the cause if their collective fails first.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from rlstable.config import ConfigError
from rlstable.config.distributed import DistributedConfig
from rlstable.config.schema import first_line, flat
from rlstable.device import compatibility

_CONFIG_ERROR = 2  # exit code
_JOB_INDEX = "JOB_COMPLETION_INDEX"  # set by Kubernetes in the pods of an indexed job

_HEARTBEAT = 25  # seconds after which JAX aborts the others of a silent process
_LONGEST = 24 * 3600 * 1000  # milliseconds of one wait for another process; JAX aborts it if that process is lost
_ANSWER = 2000  # milliseconds in which the coordinator answers
_ENDING_KEY = "rlstable/ending"

Value = TypeVar("Value")


class Ending(NamedTuple):
    """The first cause for which all processes end."""

    stop_reason: str
    exit_code: int
    message: str
    process: int  # with the cause; -1 if a process was lost

    @property
    def is_own(self) -> bool:
        return self.process == index()

    @property
    def advice(self) -> str | None:
        """The message for the user; None in a process that trains alone, which explains its errors itself."""
        return None if _service is None else self.message


_service: Any = None  # JAX's coordination service; None in a process that trains alone
_ending: Ending | None = None
_calls: Counter[str] = Counter()


def start(config: DistributedConfig) -> None:
    """Connects the processes if the configuration or the cluster says so. Must run before JAX is initialised.

    Raises `ConfigError` if they cannot be connected, or are connected although the configuration says `false`.
    """
    global _service
    if config.enabled == "false" and _is_connected():
        raise ConfigError(
            "distributed: is false, but jax.distributed has connected this process to other processes; set "
            "distributed=auto, or train separate runs in new processes"
        )
    if _service is None and _is_wanted(config):
        _connect(config)
        _service = compatibility.coordination()
        atexit.register(leave)


def _is_wanted(config: DistributedConfig) -> bool:
    if config.enabled == "auto" and not config.by_hand:
        return _is_connected() or _count_in_cluster() > 1
    return config.enabled != "false"


def _is_connected() -> bool:
    """Whether `jax.distributed` has connected this process to other processes, here or in the user's script."""
    return jax.distributed.is_initialized() and compatibility.coordination().num_processes > 1


def _count_in_cluster() -> int:
    """Number of processes of a cluster that JAX detects: Slurm, Open MPI, Kubernetes, TPU pods; 1 outside of one."""
    count = None
    # The package `kubernetes` may be missing, and a pod may belong to no job.
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        count = compatibility.processes_of_cluster()
    if count is None and _JOB_INDEX in os.environ:  # else each pod of the job would train a separate run
        raise ConfigError(
            "distributed: JAX cannot read the indexed job of Kubernetes that this pod belongs to; install kubernetes, "
            "let the service account read pods and jobs, or set distributed=false for separate runs"
        )
    return count or 1


def _connect(config: DistributedConfig) -> None:
    """Calls `jax.distributed.initialize`, unless the user's script has called it."""
    if jax.distributed.is_initialized():
        return
    if compatibility.backends_are_initialized():
        raise ConfigError(
            "distributed: JAX is in use already, so the processes cannot be connected; start the script with "
            "jax.distributed.initialize(), or set distributed=false"
        )
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is rlstable's
    late = threading.Timer(config.timeout, _give_up, [config.timeout])
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.num_processes,
            config.process_id,
            initialization_timeout=2 * math.ceil(config.timeout),
            heartbeat_timeout_seconds=_HEARTBEAT,
        )
    except ValueError:
        raise ConfigError(
            "distributed.coordinator: must be set together with distributed.process_id and distributed.num_processes, "
            "because JAX detects no cluster here; or set distributed=false"
        ) from None
    except Exception as error:
        raise ConfigError(f"distributed.coordinator: cannot connect the processes: {first_line(error)}") from None
    finally:
        late.cancel()


def _give_up(seconds: float) -> None:
    # Otherwise JAX would abort the process when the processes do not find each other.
    print(
        f"rlstable: distributed: the processes have not found each other within {seconds:g} s; start all of "
        "them, check distributed.coordinator and distributed.num_processes, raise distributed.timeout, or set "
        "distributed=false",
        file=sys.stderr,
        flush=True,
    )
    os._exit(_CONFIG_ERROR)


def count() -> int:
    return 1 if _service is None else _service.num_processes


def index() -> int:
    return 0 if _service is None else _service.process_id


def is_writer() -> bool:
    """Whether this process writes the run folder, evaluates and prints."""
    return index() == 0


def of_writer(value: Value, otherwise: Value) -> Value:
    return value if is_writer() else otherwise


def from_writer(name: str, value: Callable[[], Value]) -> Value:
    """Calls a function in the writer only, and returns its result, which is JSON data, in every process.

    The processes make the calls of a name in the same order. If the function raises a `ConfigError`, all raise it.
    """
    if _service is None:
        return value()
    key = _key(name)
    if is_writer():
        try:
            result: dict[str, object] = {"value": value()}
        except ConfigError as error:
            result = {"mistake": str(error)}
        text = json.dumps(result)
        _service.client.key_value_set(key, text)
    else:
        text = _service.client.blocking_key_value_get(key, _LONGEST)
    received = json.loads(text)  # also in the writer, because JSON turns a tuple into a list
    if "mistake" in received:
        raise ConfigError(received["mistake"])
    return received["value"]


def gather(name: str, value: Value) -> list[Value]:
    """The values of all processes, which are JSON data, in their order; `name` as for `from_writer`."""
    if _service is None:
        return [value]
    key, get = _key(name), _service.client.blocking_key_value_get
    _service.client.key_value_set(f"{key}/{index()}", json.dumps(value))
    return [json.loads(get(f"{key}/{i}", _LONGEST)) for i in range(count())]


def _key(name: str) -> str:
    _calls[name] += 1
    return f"rlstable/{name}/{_calls[name]}"


def largest(value: int) -> int:
    """The largest value of any process, an int32, by a collective of JAX: fast enough for every iteration."""
    if _service is None:
        return value
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def require_same(name: str, settings: Mapping[str, object], remedy: str) -> None:
    """Raises the same ConfigError in all processes unless all have the same settings, which are nested JSON data."""
    first, *others = gather(name, flat(settings))
    for number, other in enumerate(others, 1):
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                raise ConfigError(
                    f"{key}: is {other.get(key)!r} in process {number} and {first.get(key)!r} in process 0; {remedy}"
                )


def announce(stop_reason: str, exit_code: int, message: str, error: BaseException | None = None) -> Ending:
    """Announces that this process ends the run. Returns the first cause; that of another process is printed.

    An `error` of a collective is not announced: it means that another process has failed or is lost.
    """
    global _ending
    ending = Ending(stop_reason, exit_code, message, index())
    if _service is None:
        return ending
    if _ending is None:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            lost = f"process {index()} has lost another process: {first_line(error)}"
            ending = ending._replace(message=lost, process=-1)
        else:
            with contextlib.suppress(Exception):  # another process was first, or the coordinator is lost
                _service.client.key_value_set(_ENDING_KEY, json.dumps(ending))
        _ending = ending
        with contextlib.suppress(Exception):  # no process has announced anything, or the coordinator is lost
            _ending = Ending(*json.loads(_service.client.blocking_key_value_get(_ENDING_KEY, _ANSWER)))
        if not _ending.is_own:
            print(f"rlstable: {_ending.stop_reason}: {_ending.message}", file=sys.stderr, flush=True)
    return _ending


def leave(exit_code: int | None = None) -> None:
    """Disconnects this process, after all processes have come here. May be called again.

    After a failure this process ends soon, and JAX then aborts the processes that have not failed for the same reason.
    `exit_code` is that of a failure; None for that of its stop reason.
    """
    global _service
    if _service is None:
        return
    if _ending is not None or hasattr(sys, "last_exc"):  # `last_exc` has ended the user's script
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            # An error of all processes: the coordinator must not end first, because JAX then aborts the others.
            _service.client.wait_at_barrier("rlstable/failed", _ANSWER)
        os._exit(exit_code or (1 if _ending is None else _ending.exit_code))
    _service = None
    with contextlib.suppress(Exception):
        jax.distributed.shutdown()
