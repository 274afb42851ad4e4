"""Several processes that train one run together, usually one per host, connected by `jax.distributed`.

Every process runs the same host loop and takes the same decisions in the same iteration. Process 0 is the writer: only
this process writes the run folder, evaluates and prints. In a process that trains alone, each function returns at once.
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
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from rlstable.compilation import compatibility
from rlstable.config import ConfigError
from rlstable.config.distributed import DistributedConfig
from rlstable.device.team import FAREWELL_SECONDS, HEARTBEAT_SECONDS, LONGEST_WAIT, Ending, Team

_CONFIG_ERROR = 2  # exit code
_JOB_INDEX = "JOB_COMPLETION_INDEX"  # set by Kubernetes in the pods of an indexed job

Value = TypeVar("Value")

_team: Team | None = None


def start(config: DistributedConfig) -> None:
    """Connects the processes if the configuration or the cluster says so. Must run before JAX is initialised.

    Raises:
        ConfigError: A setting is missing, or the processes do not find each other. Or the processes are connected
            although the configuration says `false`, or a process has failed or vanished.
    """
    global _team
    if _team is not None and _team.ending is not None:
        raise ConfigError(
            f"distributed: these processes have ended as {_team.ending.stop_reason} ({_team.ending.message}); start "
            "new processes"
        )
    if config.enabled == "false" and _is_connected():
        raise ConfigError(
            "distributed: is false, but jax.distributed has connected this process to other processes; set "
            "distributed=auto, or train separate runs in new processes"
        )
    if _team is None and _is_wanted(config):
        _connect(config)
        _team = Team(*compatibility.coordination())
        atexit.register(leave)
    if _team is not None:
        _team.begin_run()


def _is_wanted(config: DistributedConfig) -> bool:
    """Whether this process is one of several."""
    if config.enabled == "auto" and not config.by_hand:
        return _is_connected() or _count_in_cluster() > 1
    return config.enabled != "false"


def _is_connected() -> bool:
    """Whether `jax.distributed` has connected this process to other processes, here or in the user's script."""
    return jax.distributed.is_initialized() and compatibility.coordination().num_processes > 1


def _count_in_cluster() -> int:
    """Number of processes of a cluster that JAX detects: Slurm, Open MPI, Kubernetes, TPU pods; 1 outside of one.

    Raises:
        ConfigError: This process belongs to an indexed job of Kubernetes that JAX cannot read.
    """
    reason = "the package kubernetes is missing"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a missing package `kubernetes`
        try:
            count = compatibility.processes_of_cluster()
            if count is not None:
                return count
        except Exception as error:  # a pod that belongs to no job, for instance
            reason = " ".join(str(error).split())[:200]
    # Without this error each pod of the job would train a separate run.
    if _JOB_INDEX in os.environ:
        raise ConfigError(
            f"distributed: this pod belongs to an indexed job of Kubernetes, which JAX cannot read: {reason}; install "
            "kubernetes, let the service account read pods and jobs, or set distributed=false for separate runs"
        )
    return 1


def _connect(config: DistributedConfig) -> None:
    """Calls `jax.distributed.initialize`, unless the user's script has called it.

    Raises:
        ConfigError: A setting is missing, or the processes do not find each other.
    """
    if jax.distributed.is_initialized():
        return
    if compatibility.backends_are_initialized():
        raise ConfigError(
            "distributed: JAX is in use already, so the processes cannot be connected; start the script with "
            "jax.config.update('jax_enable_recoverability', True) and jax.distributed.initialize(), or set "
            "distributed=false"
        )
    # Without this flag JAX aborts every process when one vanishes, before the run folder has the stop reason.
    jax.config.update("jax_enable_recoverability", True)
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
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=FAREWELL_SECONDS,
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


def _give_up(seconds: float) -> None:
    """Ends the process with one line, because JAX would abort it when the processes do not find each other."""
    print(
        f"rlstable: distributed: the processes have not found each other within {seconds:g} s; start all of "
        "them, check distributed.coordinator and distributed.num_processes, raise distributed.timeout, or set "
        "distributed=false",
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
        text = _team.client.blocking_key_value_get(key, LONGEST_WAIT)
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
    return [json.loads(_team.client.blocking_key_value_get(f"{key}/{i}", LONGEST_WAIT)) for i in range(_team.count)]


def largest(value: int) -> int:
    """The largest value of any process, an int32, by a collective of JAX: fast enough for every iteration."""
    if _team is None:
        return value
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def require_same(name: str, settings: dict[str, Any], remedy: str) -> None:
    """Checks that this process has the settings of the writer.

    Args:
        name: Name of the exchange, as for `from_writer`.
        settings: Nested JSON data.
        remedy: What the error message advises.

    Raises:
        ConfigError: They differ; names the first key.
    """
    flat = dict(_flat(settings))
    theirs = from_writer(name, lambda: flat)
    for key in flat.keys() | theirs.keys():
        if flat.get(key) != theirs.get(key):
            raise ConfigError(
                f"{key}: is {flat.get(key)!r} in process {index()} and {theirs.get(key)!r} in process 0; {remedy}"
            )


def _flat(settings: Any, path: str = "") -> list[tuple[str, Any]]:
    if not isinstance(settings, dict):
        return [(path, json.loads(json.dumps(settings)))]
    return [item for key, value in settings.items() for item in _flat(value, f"{path}.{key}" if path else str(key))]


def on_ending(finish: Callable[[Ending], None]) -> None:
    """Sets the function that ends the run in another thread, while its own thread waits for other processes."""
    if _team is not None:
        _team.finish = finish


def saving() -> contextlib.AbstractContextManager[Any]:
    """Context manager: if another process ends meanwhile, this process first completes the block, up to a minute."""
    return contextlib.nullcontext() if _team is None else _team.saving


def claim_end(exits: bool = False) -> None:
    """Must be called by the thread that ends the run. If another thread already ends the process, it never returns.

    Args:
        exits: Whether this thread ends the process after the run.
    """
    if _team is not None:
        _team.claim_end(exits)


def announce(stop_reason: str, exit_code: int, message: str) -> Ending:
    """Announces the end to all processes. Returns the first cause, which another process may have announced."""
    ending = Ending(stop_reason, exit_code, message)
    return ending if _team is None else _team.announce(ending)


def cause_of(error: Exception, stop_reason: str, exit_code: int) -> Ending:
    """The first cause of an error: what another process has announced or lost, or the error itself, announced now."""
    if count() > 1 and _team is not None and isinstance(error, jax.errors.JaxRuntimeError):
        _team.wait_for_cause()
    return announce(stop_reason, exit_code, f"process {index()}: {type(error).__name__}: {error}")


def end_run() -> None:
    """Must be called after a run that has ended for the same reason in all processes."""
    if _team is not None:
        _team.end_run()


def leave() -> None:
    """Disconnects this process; may be called again. The writer, which is the coordinator, leaves last."""
    if _team is not None:
        _team.leave()
