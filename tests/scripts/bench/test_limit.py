"""Times of an iteration beside physics, inference and plain SGD alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench import limit

CART_POLE = Path(__file__).parents[2] / "robot" / "models" / "cart_pole.xml"
SMALL = ("ppo.num_envs=2", "ppo.batch_size=2", "ppo.num_minibatches=2", "ppo.unroll_length=4", "network=small")


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    "task", [("env=fast",), ("env=robot_swingup", f"env.xml={CART_POLE}")], ids=["functional", "native"]
)
def test_iteration_and_its_parts_are_timed_in_turn(task: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    limit.main([*task, *SMALL, "ppo.num_updates_per_batch=1"], pairs=3)
    found = json.loads(capsys.readouterr().out)
    least, most = found["interval"]
    assert 0 < least <= found["ratio"] <= most
    assert (found["pairs"], found["steps"]) == (3, 16)
    assert found["share"] > 0 and all(found[f"{name}_ms"] > 0 for name in ("physics", "inference", "sgd"))


def test_order_of_functions_is_reversed_from_round_to_round() -> None:
    called: list[str] = []
    times = limit.in_turn([lambda: called.append("a"), lambda: called.append("b")], 2)
    assert times.shape == (2, 2) and "".join(called) == "abba" * 3
