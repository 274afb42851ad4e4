"""Memory plans: exact plans that divide the work, for invented sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from toys import mesh, tiny_config

from rlstable.config import Config
from rlstable.device.seed_devices import SeedDevices
from rlstable.supervise import memory
from rlstable.supervise.memory import Footprint, MemoryPlan, MemoryPlanner, OutOfMemory, smaller

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
    found = smaller(config(), MemoryPlan(**plan), lever, devices, factor)
    assert (None if found is None else getattr(found, lever)) == expected
    if found is not None:
        planned = found.of(config())
        planned.require_devices(devices)
        # The steps per iteration do not change, and earlier parts of the plan stay.
        assert planned.env_steps_per_iteration == config().env_steps_per_iteration
        assert all(getattr(found, name) == value for name, value in plan.items() if name != lever)


def program(peak: float, seed_devices: SeedDevices | None = None) -> Any:
    return SimpleNamespace(executable=SimpleNamespace(peak=int(peak * GIB)), seed_devices=seed_devices)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    monkeypatch.setattr(memory, "footprint", lambda it: Footprint(it.peak, 0, 0, 0))
    return []


def make(told: list[Any], devices: int = 1, **kwargs: Any) -> MemoryPlanner:
    return MemoryPlanner(config(**kwargs), mesh(devices), lambda kind, **fields: told.append((kind, fields)))


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
    assert make(told).needed(program(0.1, SeedDevices(2))) == int(0.1 * GIB) * 2


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
