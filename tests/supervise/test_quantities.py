"""Bad numbers of a step, and the order in which a bad number spreads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlstable.config.guards import QuarantineConfig
from rlstable.supervise.incident import find_bad_numbers, group, in_causal_order, magnitude

LIMITS = QuarantineConfig()
NOTHING_ELSE = QuarantineConfig(**dict.fromkeys(name for name in QuarantineConfig.model_fields if name != "enabled"))
HEALTHY = {
    "action": np.ones(2, np.float32),
    "pipeline_state/qpos": np.ones(3, np.float32),
    "pipeline_state/qacc": np.full(3, 1e7, np.float32),
    "pipeline_state/contact/dist": np.full(2, 1e7, np.float32),
    "obs/state": np.ones(4, np.float32),
    "reward": np.float32(1.0),
    "done": np.float32(1.0),
    "metrics/speed": np.float32(1e7),
    "info/key": np.array([7, 2**32 - 1], np.uint32),
}  # fmt: skip


def bad(limits: QuarantineConfig = LIMITS, **changed: Any) -> list[str]:
    arrays = HEALTHY | {name: np.asarray(x) for name, x in changed.items()}
    return [str(one) for one in find_bad_numbers(arrays, limits)]


def test_healthy_step_has_no_bad_number() -> None:
    assert bad() == []


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("pipeline_state/qpos", [0.0, np.nan, np.inf], "pipeline_state/qpos[1] = nan (not finite)"),
        (
            "pipeline_state/qpos",
            [0.0, 0.0, -2e10],
            "pipeline_state/qpos[2] = -2e+10 (beyond guards.quarantine.max_abs_state=1e+10)",
        ),
        (
            "pipeline_state/qacc",
            [2e10, 0.0, 0.0],
            "pipeline_state/qacc[0] = 2e+10 (beyond guards.quarantine.max_abs_acceleration=1e+10)",
        ),
        (
            "obs/state",
            [[0.0, 0.0], [2e12, 0.0]],
            "obs/state[1, 0] = 2e+12 (beyond guards.quarantine.max_abs_observation=1e+12)",
        ),
        ("reward", -np.inf, "reward = -inf (not finite)"),
        ("done", 2.0, "done = 2 (beyond 1)"),
        ("info/energy", np.float32([1.0, 2e15]), "info/energy[1] = 2e+15 (the norm of all info is beyond 1e+15)"),
    ],
)
def test_number_beyond_the_limit_of_its_kind_is_bad(name: str, value: Any, text: str) -> None:
    assert bad(**{name: np.asarray(value, np.float32)}) == [text]


def test_without_limits_only_non_finite_numbers_are_bad() -> None:
    assert bad(NOTHING_ELSE, **{"pipeline_state/qpos": np.float32([1e30, 0, 0])}) == []
    assert bad(NOTHING_ELSE, reward=np.float32(np.nan)) == ["reward = nan (not finite)"]


def test_arrays_are_sorted_in_the_order_in_which_a_bad_number_spreads() -> None:
    names = ["info/x", "reward", "obs", "pipeline_state/xpos", "pipeline_state/qpos", "pipeline_state/qvel", "action"]
    names += ["pipeline_state/qacc", "done", "metrics/a", "other"]
    assert in_causal_order(names) == [
        "action", "pipeline_state/qacc", "pipeline_state/qvel", "pipeline_state/qpos", "pipeline_state/xpos", "obs",
        "reward", "done", "metrics/a", "info/x", "other",
    ]  # fmt: skip
    assert group("data/qpos") == group("pipeline_state/q") == "physics"


def test_magnitude_is_the_largest_finite_number() -> None:
    assert magnitude(np.float32([1, -3, np.nan, np.inf])) == 3.0
    assert magnitude(np.float32([np.nan])) == magnitude(np.zeros(0)) == 0.0
