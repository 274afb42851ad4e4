"""Signs of trouble in whole runs: event, console, `result.json`, page, several seeds and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_runner import ITERATION, lines, quick

from rlstable.io.run_folder import read_result
from rlstable.report.page import page
from rlstable.report.run_record import read_record
from rlstable.report.timeline import lanes
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.summary import describe
from rlstable.supervise import diagnosis
from rlstable.supervise.recovery import Attempts
from rlstable.supervise.stop_reasons import StopReason
from rlstable.supervise.tally import Tally

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
NAME = "policy_steps_shortened"
TEXT = (
    "the KL limiter has shortened the policy's steps to 1 of their length for 50 iterations; "
    "lower ppo.learning_rate (ppo.desired_kl if its schedule is adaptive_kl)"
)
LINE = f"! step {3 * ITERATION}  sign {NAME}: {TEXT}"

BOUND = [2.0]  # of the step length, below which an iteration is a hit


@pytest.fixture(autouse=True)
def every_step_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    BOUND[0] = 2.0
    (sign,) = (sign for sign in diagnosis.SIGNS if sign.name == NAME)
    short = sign._replace(is_hit=lambda value, row: value < BOUND[0], hits=3, rows=3)
    monkeypatch.setattr(diagnosis, "SIGNS", (short,))


def signs(folder: Path) -> list[dict[str, Any]]:
    return [event for event in lines(folder / "events.jsonl") if event["kind"] == "sign"]


def test_run_says_a_sign_once_and_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TrainingLoop(quick(logging={"console": "plain"}, total_steps=6 * ITERATION), tmp_path).run()
    (event,) = signs(tmp_path)
    assert (event["step"], event["sign"], event["text"], event["value"]) == (3 * ITERATION, NAME, TEXT, 1.0)
    printed = capsys.readouterr().out.splitlines()
    assert printed.count(LINE) == 1
    assert any(line.lstrip().startswith("sign ") and line.endswith(TEXT) for line in printed)
    left = read_result(tmp_path)
    assert left is not None
    said = {"count": 1, "first_step": 3 * ITERATION, "last_step": 6 * ITERATION, "text": TEXT, "lasts": True}
    said |= {"recovered_step": 0}
    assert left["signs"] == {NAME: said}
    story = read_record(tmp_path)
    assert [mark.text for mark in lanes(story)["signs"]] == [f"sign {NAME}: {TEXT}"]
    shown = (tmp_path / "report.html").read_text()
    assert shown == page([story])
    assert f"<li><strong>{NAME}</strong>, step {3 * ITERATION}, to the end: the KL limiter has shortened" in shown


def test_run_says_that_a_sign_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def recover(step: int, _: Any) -> None:
        if step == 4 * ITERATION:
            BOUND[0] = 0.0

    TrainingLoop(quick(logging={"console": "plain"}, total_steps=8 * ITERATION), tmp_path, recover).run()
    printed = capsys.readouterr().out.splitlines()
    assert printed.count(f"- step {7 * ITERATION}  sign {NAME} recovered") == 1
    words = f"recovered at step {7 * ITERATION}"
    assert any(line.lstrip().startswith("sign ") and line.endswith(f"{TEXT}; {words}") for line in printed)
    left = read_result(tmp_path)
    assert left is not None and left["signs"][NAME]["recovered_step"] == 7 * ITERATION
    assert f"<li><strong>{NAME}</strong>, step {3 * ITERATION}, {words}: " in (tmp_path / "report.html").read_text()


def test_run_without_the_key_says_nothing(tmp_path: Path) -> None:
    TrainingLoop(quick(logging={"console": "off", "signs": False}), tmp_path).run()
    assert signs(tmp_path) == []
    left = read_result(tmp_path)
    assert left is not None and left["signs"] == {}
    assert "Signs of trouble" not in (tmp_path / "report.html").read_text()


def test_resumed_run_says_the_same_signs(tmp_path: Path, cut: int = 2) -> None:
    TrainingLoop(quick(total_steps=5 * ITERATION), tmp_path / "whole").run()
    TrainingLoop(quick(total_steps=cut * ITERATION), tmp_path / "parts").run()
    TrainingLoop(quick(total_steps=5 * ITERATION, resume="auto"), tmp_path / "parts").run()

    def left(folder: Path) -> list[Any]:
        said = [{key: event[key] for key in event if key != "time"} for event in signs(folder)]
        return [said, (read_result(folder) or {})["signs"]]

    assert left(tmp_path / "parts") == left(tmp_path / "whole")
    assert len(left(tmp_path / "whole")[0]) == 1


def test_seeds_say_their_signs_by_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TrainingLoop(quick(seeds=2, logging={"console": "plain"}), tmp_path).run()
    printed = capsys.readouterr().out.splitlines()
    for seed in (0, 1):
        assert printed.count(f"! step {3 * ITERATION}  sign {NAME} of seed {seed}: {TEXT}") == 1
    assert any(line.lstrip().startswith("sign ") and line.endswith(f"seeds 0, 1: {TEXT}") for line in printed)
    left = read_result(tmp_path)
    assert left is not None
    assert [left["seeds"][seed]["signs"][NAME]["count"] for seed in ("0", "1")] == [1, 1]


def test_summary_has_three_signs_at_most(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"step": 1000, "return": 1.0, "best_return": 2.0, "seconds": 3.0}
    for count, rows in ((0, []), (3, ["sign"] * 3), (5, ["sign"] * 3 + ["signs"])):
        said = {f"sign_{n}": {"text": f"text {n}", "first_step": n} for n in range(count)}
        found = describe(StopReason.completed, fields | {"signs": said}, tmp_path, None)
        own = [(name, value) for name, value in found if name.startswith("sign")]
        assert [name for name, _ in own] == rows
        if count == 5:
            assert own[2:] == [("sign", "text 2"), ("signs", "and 2 more in the report")]


@pytest.mark.parametrize("cause", [StopReason.policy_collapsed, StopReason.policy_diverged])
def test_advice_names_the_signs(cause: StopReason) -> None:
    said = {"critic_behind": {"first_step": 12000}, NAME: {"first_step": 30000}}
    over = said | {"reward_scale": {"first_step": 40000, "recovered_step": 50000}}
    assert "reward_scale (step 40,000, recovered at step 50,000)." in diagnosis.advice(cause, Attempts(), over, Tally())
    text = diagnosis.advice(cause, Attempts(), said, Tally())
    assert text.endswith(f" Signs before it: critic_behind (step 12,000), {NAME} (step 30,000).")
    assert "Signs" not in diagnosis.advice(StopReason.physics_unstable, Attempts(), said, Tally())
    assert "Signs" not in diagnosis.advice(cause, Attempts(), {}, Tally())
