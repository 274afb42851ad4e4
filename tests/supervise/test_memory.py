"""Memory of programs, devices and containers, and plans that divide the work, for invented sizes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import psutil
import pytest
from toys import mesh, tiny_config

from rlstable.config import Config, ConfigError
from rlstable.supervise import memory
from rlstable.supervise.memory import (
    Footprint,
    MemoryPlan,
    MemoryPlanner,
    OutOfMemory,
    footprint,
    host_total,
    limit,
    require_states,
    smaller,
)

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
    counts = {"ppo.num_envs": config.ppo.num_envs, "eval.num_envs": config.eval.num_envs}
    counts["env.reset_pool_size"] = config.env.reset_pool_size
    count = counts[key]
    states = {"q": jax.ShapeDtypeStruct((config.ppo.num_envs, 10), jnp.float32)}  # 40 bytes each
    with pytest.raises(ConfigError) as caught:
        require_states(states, config.ppo.num_envs, counts)
    assert str(caught.value) == (
        f"{key}: the states of {count} environments take at least {40 * count} bytes of the 320 bytes memory of this "
        "machine; at most 8 could fit"
    )


GIB = 2**30


def config(limit: float | None = 1.0, adapt: bool = True, **ppo: Any) -> Config:
    sizes = {"num_envs": 64, "batch_size": 24, "num_minibatches": 8} | ppo
    return tiny_config(ppo=sizes, supervise={"memory": {"limit_gib": limit, "adapt": adapt}})


@pytest.mark.parametrize(
    ("lever", "plan", "factor", "devices", "expected"),
    [
        ("gradient_accumulation", {}, 2, 1, 2),
        ("gradient_accumulation", {}, 5, 1, 6),  # the next that divides the 24 rows
        ("gradient_accumulation", {"gradient_accumulation": 24}, 2, 1, None),
        ("gradient_accumulation", {}, 100, 4, 6),  # each device has six rows
        ("envs_per_pass", {}, 2, 1, 32),
        ("envs_per_pass", {"envs_per_pass": 32}, 3, 1, 10),
        ("envs_per_pass", {"envs_per_pass": 8}, 2, 1, None),
        ("envs_per_pass", {}, 2, 8, None),  # eight on each device already
        ("num_envs", {}, 2, 1, 32),
        ("num_envs", {}, 7, 1, 8),
        ("num_envs", {"num_envs": 1}, 2, 1, None),
        ("num_envs", {}, 2, 4, 32),
    ],
)
def test_lever_takes_the_next_smaller_size(
    lever: str, plan: dict[str, int], factor: int, devices: int, expected: int | None
) -> None:
    found = smaller(config().ppo, config().env, MemoryPlan(**plan), lever, devices, factor)
    assert (None if found is None else getattr(found, lever)) == expected
    if found is not None:
        planned, _ = found.of(config().ppo, config().env)
        planned.require_devices(devices)
        # The steps per iteration do not change, and earlier parts of the plan stay.
        assert planned.env_steps_per_iteration(1) == config().env_steps_per_iteration
        assert all(getattr(found, name) == value for name, value in plan.items() if name != lever)


def program(peak: float) -> Any:
    return SimpleNamespace(executable=SimpleNamespace(peak=int(peak * GIB)))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    monkeypatch.setattr(memory, "footprint", lambda it: Footprint(it.peak, 0, 0, 0))
    return []


def make(told: list[Any], devices: int = 1, **kwargs: Any) -> MemoryPlanner:
    own = config(**kwargs)
    settings = own.supervise.memory, own.ppo, own.env
    return MemoryPlanner(*settings, mesh(devices), lambda kind, **fields: told.append((kind, fields)))


@pytest.mark.parametrize(
    ("peak", "fits", "events"), [(0.79, True, 0), (0.81, True, 1), (0.94, True, 1), (0.96, False, 1)]
)
def test_tight_memory_is_reported_once_and_too_much_does_not_fit(
    told: list[Any], peak: float, fits: bool, events: int
) -> None:
    own = make(told)
    assert [own.fits(own.needed(program(peak))) for _ in range(2)] == [fits, fits]
    assert [kind for kind, _ in told] == ["memory_tight"] * events


def test_devices_of_one_cpu_share_its_memory(told: list[Any]) -> None:
    assert make(told, devices=4, batch_size=24).needed(program(0.1)) == int(0.1 * GIB) * 4


def test_lever_that_does_not_help_is_left_for_the_next_one(told: list[Any]) -> None:
    """Accumulation halves the memory once, then changes nothing; passes change nothing; fewer environments help."""
    own, plan = make(told), MemoryPlan()
    for needed in (4.0, 2.0, 1.95, 1.94):
        plan = own.smaller(plan, int(needed * GIB))
    assert str(plan) == "gradient_accumulation 8, envs_per_pass 32, num_envs 32"
    assert [fields["plan"] for _, fields in told] == [
        "gradient_accumulation 4",
        "gradient_accumulation 8",
        "gradient_accumulation 8, envs_per_pass 32",
        "gradient_accumulation 8, envs_per_pass 32, num_envs 32",
    ]
    assert told[0][1] == {"plan": "gradient_accumulation 4", "needed": "4.0 GiB", "limit": "1.0 GiB"}
    with pytest.raises(
        OutOfMemory, match=r"^Training needs 1\.9 GiB of 1\.0 GiB with .*; a limit of 2.04 GiB would be enough"
    ):
        own.smaller(plan, int(1.938 * GIB))


def test_plan_after_out_of_memory_uses_all_levers_without_an_estimate(told: list[Any]) -> None:
    own, plan = make(told), MemoryPlan()
    steps = 0
    with pytest.raises(OutOfMemory, match="The device refused memory with"):
        while True:
            plan, steps = own.smaller(plan, None), steps + 1
    assert plan == MemoryPlan(24, 8, 1)
    assert steps == len(told)


def test_adapt_off_ignores_the_estimate_and_fails_on_out_of_memory(told: list[Any]) -> None:
    own = make(told, adapt=False)
    assert own.fits(own.needed(program(2.0)))
    with pytest.raises(OutOfMemory, match=r"set supervise\.memory\.adapt=true"):
        own.smaller(MemoryPlan(), None)
