"""Stop reasons with their exit codes, and the summary of a finished run."""

from __future__ import annotations

import re
from pathlib import Path

from rlstable.runner.summary import describe
from rlstable.supervise.stop_reasons import StopReason, nothing_to_train, stays_ended

FIELDS = {"step": 1000, "return": 12.345, "best_return": 20.0, "last_return": 12.345, "seconds": 3.21}


def test_every_stop_reason_has_a_meaning_and_three_are_successes() -> None:
    assert all(ending.meaning for ending in StopReason)
    assert [ending.name for ending in StopReason if ending.succeeded] == ["completed", "target_reached", "stopped"]


def test_page_of_stop_reasons_has_every_reason_with_its_code() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "stop_reasons.md"
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", page.read_text(), flags=re.MULTILINE)
    assert len(rows) == len(StopReason)
    assert {name: int(code) for name, code in rows} == {ending.name: ending.exit_code for ending in StopReason}
    assert [int(code) for _, code in rows] == sorted(int(code) for _, code in rows)


def test_summary_names_the_next_commands(here: Path) -> None:
    folder = here / "runs" / "ant" / "1"
    signs = {"critic_behind": {"text": "the value network lags behind", "recovered_step": 0}}
    rows = dict(describe(StopReason.completed, FIELDS | {"signs": signs}, folder, folder))
    assert rows["stop reason"] == "completed: all steps were trained"
    assert rows["sign"] == "the value network lags behind"
    assert rows["return"] == "12.3, not confirmed (best single evaluation 20.0)"
    assert rows["run folder"] == "runs/ant/1"
    assert rows["resume"].endswith(" -m rlstable.train resume=runs/ant/1 total_steps=2000")
    stopped = dict(describe(StopReason.preempted, FIELDS, folder, folder))
    assert stopped["resume"].endswith(" -m rlstable.train resume=runs/ant/1")  # to the end that was asked for
    solved = dict(describe(StopReason.target_reached, FIELDS, folder, folder))
    assert solved["resume"].endswith(" resume=runs/ant/1 eval.target_return=null")  # or it would stop at once
    assert rows["load"] == 'rlstable.load_policy("runs/ant/1")'
    assert rows["evaluate"].endswith("-m rlstable.evaluate run=runs/ant/1")
    assert rows["render"].endswith("-m rlstable.render run=runs/ant/1")
    assert "report" not in rows
    folder.mkdir(parents=True)
    (folder / "report.html").touch()
    rows = dict(describe(StopReason.completed, FIELDS, folder, folder))
    assert rows["report"] == "runs/ant/1/report.html"


def test_ruined_policy_is_not_offered(tmp_path: Path) -> None:
    ruined = {"name": "loss_not_finite", "text": "no finite loss since step 0"}
    rows = dict(describe(StopReason.completed, FIELDS | {"warnings": [ruined]}, tmp_path, tmp_path))
    assert rows.keys().isdisjoint({"resume", "evaluate", "render", "load"})
    seeds = {seed: FIELDS | {"stop_reason": "completed"} for seed in (0, 1)}
    one = FIELDS | {"seeds": seeds, "warnings": [ruined | {"seed": 0}]}
    assert "load" in dict(describe(StopReason.completed, one, tmp_path, tmp_path / "seed-1"))


def test_seed_stays_ended_on_resume_unless_more_steps_or_return_are_asked() -> None:
    def stays(name: str, step: int = 1000, best: float | None = 60.0) -> bool:
        return stays_ended({"stop_reason": name, "step": step, "best_return": best}, 1000, 50.0)

    assert stays("completed") and not stays("completed", step=999)
    assert stays("target_reached") and not stays("target_reached", best=40.0)
    of_guards = {
        "state_not_finite", "no_update_accepted", "physics_unstable", "value_loss_exploded", "policy_diverged",
        "policy_collapsed", "guard_exhausted", "recovery_exhausted", "needs_own_program",
    }  # fmt: skip
    assert {ending.name for ending in StopReason if stays(ending.name, step=5, best=None)} == of_guards
    assert not stays("no such ending")


def test_run_with_nothing_to_train_names_the_keys_that_continue_it() -> None:
    reasons = (StopReason.completed, StopReason.target_reached, StopReason.policy_diverged)
    assert nothing_to_train(reasons, 1000, 50.0) == (
        "nothing to train: all steps of total_steps=1000 are already trained; resume with total_steps=<more>, and "
        "eval.target_return=50.0 is already reached; resume with eval.target_return=<more> or null, and "
        "a seed that was given up can only be resumed alone"
    )
