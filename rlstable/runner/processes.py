"""Connects the processes that train one run together, and checks that they can."""

from __future__ import annotations

from jax.sharding import Mesh

from rlstable.config import Config, ConfigError
from rlstable.device import hosts
from rlstable.runner.seed_run import mesh_of


def connect(config: Config) -> Mesh:
    """The devices of all processes of the run. Must run before JAX is initialised.

    Raises:
        ConfigError: The processes do not find each other, or cannot train this configuration together.
    """
    hosts.start(config.distributed)
    mesh = mesh_of(config)
    if hosts.count() == 1:
        return mesh
    if config.seeds > 1:
        raise ConfigError(
            f"seeds: {config.seeds} seeds train together in one process, not in {hosts.count()}; set seeds=1, or "
            "distributed=false"
        )
    hosts.require_same(
        "configuration",
        config.model_dump(mode="json"),
        "start all processes with the same command, or set distributed=false if they train separate runs",
    )
    own = hosts.gather("devices", len(mesh.local_devices))
    if len(set(own)) > 1:
        raise ConfigError(f"distributed: the processes have {own} devices; start them with equally many each")
    return mesh
