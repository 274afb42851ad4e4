"""Sizes that do not fit into memory with any memory plan are an error at the start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toys import PointMass, mesh, tiny_config

from rlstable.config import ConfigError
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.setup import TrainingSetup
from rlstable.supervise import memory
from rlstable.supervise.memory_bound import experience_bytes, require_memory

STEP = 4 * (4 + 2 + 3)  # observation, action, three scalars of the point mass
BATCH = 16 * (4 * STEP + 16)  # unrolls of 4 steps, each with the observation after it
STATES = {"q": jax.ShapeDtypeStruct((8, 10), jnp.float32)}  # 320 bytes
OBSERVATION = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def require(limit: float, devices: int = 1, adapt: bool = True, local: int | None = None, **sections: Any) -> None:
    """Checks the tiny configuration, with the smallest networks, against a limit in bytes.

    Args:
        limit: Bytes.
        devices: Number of devices.
        adapt: Whether the memory is checked.
        local: Number of devices of this host; None for all.
        **sections: Other sections of the configuration.
    """
    small: dict[str, Any] = {
        "network": {"policy_hidden_layer_sizes": (1,), "value_hidden_layer_sizes": (1,)},
        "eval": {"num_envs": 8},
        "env": {"reset_pool_size": 8},
        "supervise": {"memory": {"limit_gib": limit / 2**30, "adapt": adapt}},
    }
    config = tiny_config(**small | sections)
    used: Any = SimpleNamespace(size=devices, local_devices=mesh(local or devices).local_devices)
    require_memory(config, used, STATES, OBSERVATION, 2)


def test_experience_is_one_copy_of_what_an_iteration_must_keep() -> None:
    assert experience_bytes(tiny_config(), OBSERVATION, 2) == (BATCH, STEP)
    named = {"state": OBSERVATION, "image": jax.ShapeDtypeStruct((8, 2, 2), jnp.uint8)}
    assert experience_bytes(tiny_config(), named, 2)[1] == STEP + 4


@pytest.mark.parametrize("devices", [1, 4])
def test_experience_larger_than_all_memory_is_one_line_with_what_could_fit(devices: int) -> None:
    """CPU devices share one memory."""
    require(BATCH, devices)
    with pytest.raises(ConfigError) as caught:
        require(BATCH - 4, devices)
    assert str(caught.value) == (
        "ppo.batch_size: one iteration is 64 environment steps (ppo.batch_size * ppo.num_minibatches * "
        "ppo.unroll_length) and takes at least 2.5 KiB of 2.5 KiB memory; at most 71 steps could fit"
    )


def test_processes_with_cpus_add_the_memories_of_their_hosts() -> None:
    require(BATCH / 2, devices=4, local=2)
    with pytest.raises(ConfigError, match=r"takes at least 2.5 KiB of 2.5 KiB memory"):
        require(BATCH / 2 - 4, devices=4, local=2)


def test_states_larger_than_the_hosts_memory_and_swap_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_total_and_swap", lambda: 320)
    require(2**30)
    monkeypatch.setattr(memory, "host_total_and_swap", lambda: 300)
    with pytest.raises(ConfigError) as caught:
        require(2**30)
    assert str(caught.value) == (
        "ppo.num_envs: the states of 8 environments take at least 320 bytes of the 300 bytes memory of this machine; "
        "at most 7 could fit"
    )


def test_networks_larger_than_all_memory_are_one_line() -> None:
    config = tiny_config(
        network={"policy_hidden_layer_sizes": (10, 10**6), "value_hidden_layer_sizes": (8,)},
        supervise={"memory": {"limit_gib": 0.1}},
    )
    with pytest.raises(ConfigError) as caught:
        require_memory(config, mesh(1), STATES, {"state": OBSERVATION}, 2)
    assert str(caught.value) == (
        "network.policy_hidden_layer_sizes: the networks have at least 12,000,080 weights and take at least 137.3 MiB "
        "of 102.4 MiB memory; at most 8,947,848 weights could fit"
    )


@pytest.mark.parametrize(
    ("key", "sections"),
    [("eval.num_envs", {"eval": {"num_envs": 9}}), ("env.reset_pool_size", {"env": {"reset_pool_size": 9}})],
)
def test_evaluation_and_pool_states_larger_than_the_hosts_memory_are_one_line(
    key: str, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "host_total_and_swap", lambda: 320)
    with pytest.raises(ConfigError) as caught:
        require(2**30, **sections)
    assert str(caught.value) == (
        f"{key}: the states of 9 environments take at least 360 bytes of the 320 bytes memory of this machine; at most "
        "8 could fit"
    )


def test_without_adaptation_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_total_and_swap", lambda: 1)
    require(1, adapt=False)


def test_swap_space_counts_as_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    monkeypatch.setattr(memory, "host_total", lambda: 5)
    monkeypatch.setattr(psutil, "swap_memory", lambda: type("Swap", (), {"total": 7}))
    assert memory.host_total_and_swap() == 12


@pytest.mark.usefixtures("quick_compile")
def test_program_that_fits_needs_more_than_the_bound() -> None:
    """Otherwise a run that fits would be rejected."""
    config = tiny_config(guards={})
    assembly = TrainingSetup(config, mesh())
    shapes = assembly.shapes()
    needed = memory.needed(memory.footprint(assembly.compiled(shapes).executable), mesh())
    batch, _ = experience_bytes(config, assembly.ppo.networks.select(shapes.env_state.obs), PointMass.action_size)
    assert needed is not None and needed > batch


def test_run_ends_before_anything_is_compiled_or_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, first states were drawn and the program was compiled once per memory plan, for minutes."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is compiled")

    monkeypatch.setattr("rlstable.compilation.programs.Programs.build", never)
    sizes = {"num_envs": 10**6, "batch_size": 10**6, "unroll_length": 10**6}
    with pytest.raises(ConfigError, match=r"one iteration is 2,000,000,000,000 environment steps .* could fit$"):
        TrainingLoop(tiny_config(ppo=sizes, logging={"console": "off"}), tmp_path / "run")
