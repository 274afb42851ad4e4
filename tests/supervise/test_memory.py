"""Memory needed by programs, memory of devices and containers, and formatted bytes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import psutil
import pytest
from toys import tiny_config

from rlstable.config import ConfigError
from rlstable.supervise import memory
from rlstable.supervise.memory import footprint, host_total, limit, require_states

GPU = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 60 << 30, "bytes_in_use": 5 << 30})


def outer_product(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    square = jnp.sin(x)[:, None] * jnp.cos(x)[None, :]
    return jnp.sort(square, axis=0)[3], x + 1


def test_footprint_counts_arguments_outputs_temporaries_and_donation() -> None:
    x = jax.ShapeDtypeStruct((512,), jnp.float32)
    plain = footprint(jax.jit(outer_product).lower(x).compile())
    assert (plain.arguments, plain.aliased) == (4 * 512, 0)
    assert 2 * 4 * 512 <= plain.outputs < 2 * 4 * 512 + 200  # plus the table of the tuple
    assert plain.temporary >= 4 * 512 * 512
    donated = footprint(jax.jit(outer_product, donate_argnums=0).lower(x).compile())
    assert donated.aliased == 4 * 512


def test_memory_limit_is_the_configured_one_or_that_of_the_device_or_the_host() -> None:
    cpu = jax.devices()[0]
    assert limit(GPU, configured=0.5) == 1 << 29
    assert limit(GPU) == 60 << 30
    assert limit(cpu) == host_total()
    assert limit(SimpleNamespace(platform="tpu", memory_stats=lambda: None)) is None


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {"memory.max": "1048576"}, 1 << 20),
        ("0::/", {"memory.max": "max"}, None),
        ("0::/a/b", {"a/memory.max": "2097152", "a/b/memory.max": "max"}, 2 << 20),
        ("0::/gone/on/the/host", {"memory.max": "3145728"}, 3 << 20),
        ("7:cpu,cpuacct:/", {"memory.max": "1048576"}, None),
        (None, {}, None),
    ],
)
def test_host_memory_is_limited_by_the_container(
    membership: str | None, files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    if membership is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(membership + "\n")
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert host_total(tmp_path) == (expected or psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("ppo.num_envs", {"ppo": {"num_envs": 16}, "eval": {"num_envs": 9}}),
        ("eval.num_envs", {"eval": {"num_envs": 9}}),
        ("env.reset_pool_size", {"env": {"reset_pool_size": 9}}),
    ],
)
def test_first_states_larger_than_memory_and_swap_are_one_line(
    key: str, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "host_total", lambda: 300)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=20))
    config = tiny_config(**{"eval": {"num_envs": 8}, "env": {"reset_pool_size": 8}} | sections)
    count = {"ppo.num_envs": config.ppo.num_envs}.get(key, 9)
    states = {"q": jax.ShapeDtypeStruct((config.ppo.num_envs, 10), jnp.float32)}  # 40 bytes each
    with pytest.raises(ConfigError) as caught:
        require_states(config, states)
    assert str(caught.value) == (
        f"{key}: the states of {count} environments take at least {40 * count} bytes of the 320 bytes memory of this "
        "machine; at most 8 could fit"
    )
