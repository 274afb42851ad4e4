"""Processes that train one run together: when they are detected, and that a single process pays nothing."""

from __future__ import annotations

import sys

import pytest
from jax._src import distributed

from rlstable.config import ConfigError
from rlstable.config.distributed import DistributedConfig
from rlstable.config.schema import validate
from rlstable.device import hosts

CLUSTERS = ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CLUSTERS:
        monkeypatch.delenv(name, raising=False)


def slurm(monkeypatch: pytest.MonkeyPatch, tasks: int) -> None:
    environment = {"JOB_ID": "7", "STEP_NODELIST": "node[1-2]", "NTASKS": str(tasks), "PROCID": "0", "LOCALID": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def wanted(**settings: object) -> bool:
    return hosts._is_wanted(validate(DistributedConfig, settings))


def test_process_outside_of_a_cluster_trains_alone() -> None:
    assert not wanted()


@pytest.mark.parametrize(("tasks", "several"), [(1, False), (2, True)])
def test_slurm_step_with_more_than_one_task_is_several_processes(
    monkeypatch: pytest.MonkeyPatch, tasks: int, several: bool
) -> None:
    slurm(monkeypatch, tasks)
    assert wanted() is several
    assert not wanted(enabled=False)


def test_pod_of_an_indexed_job_that_jax_cannot_read_does_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigError) as caught:
        wanted()
    assert str(caught.value) == (
        "distributed: JAX cannot read the indexed job of Kubernetes that this pod belongs to; install kubernetes, "
        "let the service account read pods and jobs, or set distributed=false for separate runs"
    )
    assert not wanted(enabled=False)


def test_coordinator_on_the_command_line_means_several_processes() -> None:
    assert wanted(coordinator="node1:1234")


def test_processes_are_not_connected_after_jax_is_in_use() -> None:
    hosts.jax.devices()
    with pytest.raises(ConfigError, match=r"^distributed: JAX is in use already") as caught:
        hosts.start(validate(DistributedConfig, {"enabled": True}))
    assert "\n" not in str(caught.value)
    assert hosts.count() == 1


def test_connected_processes_do_not_train_separate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.global_state, "client", object())
    hosts.start(validate(DistributedConfig, {"enabled": False}))
    monkeypatch.setattr(distributed.global_state, "num_processes", 2)
    with pytest.raises(ConfigError, match=r"^distributed: is false, but jax\.distributed has connected this process"):
        hosts.start(validate(DistributedConfig, {"enabled": False}))
