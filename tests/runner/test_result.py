"""The result of a run: one printed line, and a policy that is loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstable.runner import result
from rlstable.runner.result import Result
from rlstable.supervise.stop_reasons import StopReason

RESULT = Result(
    StopReason.completed, Path("runs/ant/1"), 4096, {"eval/episode_reward": 9.0}, [{"step": 4096}],
    policy_return=1234.56,
)  # fmt: skip


def test_result_is_printed_as_one_line() -> None:
    assert repr(RESULT) == "Result(completed, step 4,096, return 1,234.6, folder runs/ant/1)"
    fleet = Result(StopReason.time_limit, Path("runs/ant/2"), 0, {"eval/episode_reward": None}, [], (RESULT, RESULT))
    assert repr(fleet) == "Result(2 seeds, time_limit, step 0, no return, folder runs/ant/2)"


def test_policy_of_a_result_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []
    monkeypatch.setattr(result, "load_policy", lambda folder: loaded.append(folder) or "policy")
    own = Result(StopReason.completed, Path("runs/ant/1"), 0, {}, [])
    assert (own.policy, own.policy) == ("policy", "policy")
    assert loaded == [Path("runs/ant/1")]
