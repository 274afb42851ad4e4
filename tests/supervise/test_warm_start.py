"""How a warm start grows: exact sizes and exact iterations, no training."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from toys import tiny_config

from rlstable.config import Config
from rlstable.config.schema import ConfigError
from rlstable.supervise.memory_plan import MemoryPlan
from rlstable.supervise.warm_start import Growth, WarmStart


def config(action_repeat: int = 1, **fields: Any) -> Config:
    return tiny_config(
        ppo={"num_envs": 64, "batch_size": 32, "num_minibatches": 4},
        env={"episode_length": 100 * action_repeat, "action_repeat": action_repeat},
        supervise={"warm_start": {"enabled": True, "grow_after": 3, **fields}},
    )


def sizes(warm: WarmStart, healthy: list[bool]) -> list[tuple[int, int]]:
    found = []
    for good in healthy:
        warm.watch(good)
        found.append((warm.now.ppo.num_envs, warm.now.env.episode_length))
    return found


def test_it_grows_after_healthy_stretches_to_the_configured_size() -> None:
    warm = WarmStart(config(), 1, Growth())
    assert (warm.now.ppo.num_envs, warm.now.env.episode_length) == (16, 25)
    assert sizes(warm, [True] * 7) == [(16, 25)] * 2 + [(32, 50)] * 3 + [(64, 100)] * 2
    assert warm.grown and warm.growth == Growth(2, 0)
    assert warm.now == warm.config


def test_an_iteration_that_was_not_healthy_begins_the_stretch_anew() -> None:
    warm = WarmStart(config(), 1, Growth())
    assert sizes(warm, [True, True, False, True, True, True]) == [(16, 25)] * 5 + [(32, 50)]


def test_each_of_the_two_has_a_share_of_its_own() -> None:
    warm = WarmStart(config(num_envs=1.0, episode_length=0.1, factor=5.0), 1, Growth())
    assert sizes(warm, [False]) + sizes(warm, [True] * 6) == [(64, 10)] * 3 + [(64, 50)] * 3 + [(64, 100)]


def test_it_is_off_by_default() -> None:
    warm = WarmStart(tiny_config(), 1, Growth())
    assert warm.grown and warm.now is warm.config
    assert not warm.watch(True)


def test_what_was_saved_goes_on() -> None:
    warm = WarmStart(config(), 1, Growth(stage=1, healthy=2))
    assert sizes(warm, [True]) == [(64, 100)]


def test_a_plan_for_memory_bounds_it_from_above() -> None:
    warm, plan = WarmStart(config(), 1, Growth()), MemoryPlan(num_envs=32)
    assert [plan.of(warm.now).ppo.num_envs, plan.of(warm.config).ppo.num_envs] == [16, 32]


@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(0, 9))
def test_every_size_can_be_trained(envs: float, length: float, devices: int, repeat: int, stage: int) -> None:
    now = WarmStart(config(repeat, num_envs=envs, episode_length=length), devices, Growth(stage)).now
    now.require_devices(devices)
    Config.model_validate(now.model_dump())
    assert 0 < now.env.episode_length <= 100 * repeat and now.env.episode_length % repeat == 0


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_envs", 0.0, "greater than 0"),
        ("episode_length", 1.5, "less than or equal to 1"),
        ("factor", 1.0, "greater than 1"),
        ("grow_after", 0, "greater than 0"),
    ],
)
def test_mistakes(field: str, value: float, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"supervise\.warm_start\.{field}.*{said}"):
        config(**{field: value})
