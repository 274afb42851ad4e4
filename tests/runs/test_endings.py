"""Every way to end: a configuration with its fault, the stop reason of the run, its events, and what it leaves."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from running import ITERATION, OFF, PATIENCE, config, storm, story, train
from saved import events, result, saved
from toys import GUARDS_OFF

from rlstable import load_policy
from rlstable.guards.base import Guard, GuardState, Verdict, count_first, no_trips
from rlstable.guards.state import StateContext, StormGuard
from rlstable.guards.update import UpdateContext
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
UPDATES = {"storm": {"patience": PATIENCE}, "finite_update": {"patience": PATIENCE}}
NAN_GRADIENTS = {"site": "gradient", "probability": 1.0, "start": 2}
# One attempt, and every second state is kept for it.
ONCE = {"recovery": {"every": 2, "attempts": 1}, "checkpoint": {"asynchronous": False}}

UNSAVED = {"every": 100, "asynchronous": False}
NOTHING_SAVED = {"recovery": {"every": 10}, "checkpoint": UNSAVED}


def only(guard: str, patience: int = PATIENCE) -> dict[str, Any]:
    return GUARDS_OFF | {guard: {"enabled": True, "patience": patience}}


@dataclasses.dataclass(frozen=True)
class Scripted(StormGuard):
    """Trips in set iterations."""

    bad: tuple[int, ...] = ()

    def init(self) -> GuardState:
        state = super().init()
        return state._replace(memory=state.memory._replace(own=jnp.int32(0)))

    def apply(self, ctx: StateContext, state: GuardState) -> Verdict:
        number = state.memory.own + 1
        return self._verdict(ctx, ~jnp.isin(number, jnp.array(self.bad))[None], state, number)


@dataclasses.dataclass(frozen=True)
class Idle(Guard):
    """Rejects the four updates of one iteration."""

    number: int
    causes: ClassVar[tuple[str, ...]] = ("idle",)

    def init(self) -> GuardState:
        return GuardState(no_trips(self.causes), jnp.int32(0))

    def apply(self, ctx: UpdateContext, state: GuardState) -> Verdict:
        ok = state.memory // 4 != self.number - 1
        return Verdict(ctx.value, ok, GuardState(state.trips + count_first(~ok[None]), state.memory + 1))


def scripted(*bad: int, **more: Any) -> dict[str, Any]:
    return {"state": {"scripted": Scripted(PATIENCE, 1.0, bad)}, **more}


@dataclasses.dataclass(frozen=True)
class Ends:
    """The end of a run."""

    reason: str  # name of the stop reason
    iterations: int  # trained, rolled back ones not counted
    story: tuple[str, ...] = ()  # see `running.story`
    saved: list[int] | None = None  # iterations of the checkpoints; None if they do not matter
    advice: str = ""  # part of the advice
    warnings: tuple[str, ...] = ()  # names of the warnings


def first(count: int) -> list[int]:
    return list(range(1, count + 1))


BACK_AGAIN = "back to the last good state 3 times, with fresh_resets (2 times), scale_learning_rate 0.5; "
ENDINGS: dict[str, tuple[dict[str, Any], Ends]] = {
    "storm": (
        {"fault": storm(), "total_steps": 40 * ITERATION},
        Ends("physics_unstable", 3 + PATIENCE, saved=first(3), advice="The environment's reward was not finite"),
    ),
    "storm that is shorter than the patience": (
        {"fault": storm(iterations=2)}, Ends("completed", 8, saved=[1, 2, 3, 6, 7, 8]),
    ),
    "storm at the end, after a save": (
        {"fault": storm(start=7), "guards": {"storm": {"patience": 100}}}, Ends("completed", 8, saved=first(7)),
    ),
    "storm at the end, and nothing saved before": (
        {"fault": storm(start=7), "guards": {"storm": {"patience": 100}}, "checkpoint": UNSAVED},
        Ends("not_saved", 8, saved=[]),
    ),
    "storm that no attempt survives": (
        {
            "fault": storm(), "total_steps": 20 * ITERATION,
            "recovery": {"every": 2, "attempts": 3, "remedies": ["fresh_resets", {"scale_learning_rate": 0.5}]},
        },
        Ends(
            "physics_unstable", 6,
            (
                "6: physics_unstable: fresh_resets, back to 3",
                "9: physics_unstable: scale_learning_rate 0.5, back to 3",
                "12: physics_unstable: fresh_resets, back to 3",
            ),
            advice=BACK_AGAIN, warnings=("transitions_rejected",),
        ),
    ),
    "value loss": (
        {
            "guards": only("value_loss"), "ppo": {"learning_rate": 3e-4}, "total_steps": 40 * ITERATION,
            "fault": {"site": "learning_rate", "value": 1e5, "start": PATIENCE},  # not judged before
        },
        Ends("value_loss_exploded", 2 * PATIENCE, saved=first(PATIENCE)),
    ),
    "policy": (
        {
            "guards": only("policy"), "ppo": {"learning_rate": 3e-4}, "total_steps": 40 * ITERATION,
            "fault": {"site": "learning_rate", "value": 1e4, "start": 2},
        },
        Ends("policy_diverged", 2 + PATIENCE, saved=first(2)),
    ),
    "parameters": (
        {"guards": only("finite_state"), "fault": NAN_GRADIENTS},
        Ends("state_not_finite", 2 + PATIENCE, saved=first(2)),
    ),
    "parameters for two iterations, with recovery": (
        {
            "guards": only("finite_state"), "fault": NAN_GRADIENTS | {"iterations": 2},
            "recovery": {"every": 1, "remedies": ["fresh_resets"]},
        },
        Ends("completed", 8, ("5: state_not_finite: fresh_resets, back to 2",), saved=[1, 2, *range(5, 12)]),
    ),
    "parameters, whatever the remedy": (
        {
            "guards": only("finite_state"), "fault": NAN_GRADIENTS,
            "recovery": {"attempts": 2, "every": 2, "remedies": ["fresh_resets"]},
        },
        Ends(
            "recovery_exhausted", 5,
            tuple(f"{row}: state_not_finite: fresh_resets, back to 2" for row in (5, 8)),
        ),
    ),
    "no update": (
        {"guards": UPDATES, "fault": NAN_GRADIENTS},
        Ends("no_update_accepted", 2 + PATIENCE),
    ),
    "no update in a run that is shorter than the patience": (
        {"fault": NAN_GRADIENTS | {"start": 0}, "total_steps": 4 * ITERATION}, Ends("no_update_accepted", 4),
    ),
    "learning rate far too high": (
        # No guard trips: the KL limiter passes over every minibatch.
        {
            "guards": {"finite_update": {"patience": 2}, "limiters": {"kl": 1e-9}},
            "ppo": {"learning_rate": 1e6}, "total_steps": 20 * ITERATION,
        },
        Ends("no_update_accepted", 2, advice="divide ppo.learning_rate by 100"),
    ),
    "guard of the user": (
        {"more_guards": {"state": {"never": StormGuard(PATIENCE, -1.0)}}}, Ends("guard_exhausted", PATIENCE, saved=[]),
    ),
    "float16 that overflows at every scale": (
        {
            "precision": {"network": "float16", "loss_scale": {"initial": 2.0**60, "floor": 2.0**59, "cap": 2.0**60}},
            "guards": {"finite_update": {"patience": PATIENCE}},
            "supervise": {"recovery": {"remedies": ["raise_precision"]}, "incident": OFF},
        },
        Ends(
            "completed", 8,
            (
                "3: default/float16 to default/float32",
                "3: no_update_accepted: raise_precision, back to 0",
            ),
        ),
    ),
    "full disk": (
        {"fault": {"site": "disk", "start": 2}, "total_steps": 4 * ITERATION},
        Ends(
            "not_saved", 4,
            # The last save is tried again at the end.
            ("3: checkpoint 3 failed", "4: checkpoint 4 failed", "4: checkpoint 4 failed"), saved=first(2),
            advice=", or check its permissions; then ",
        ),
    ),
    "logger that fails": (
        {"fault": {"site": "sinks", "start": 1}, "total_steps": 4 * ITERATION},
        Ends("completed", 4, ("2: FailingSink failed",), saved=first(4)),
    ),
    "most rewards are bad": (
        {"env": {"kwargs": {"fault": "reward", "probability": 0.8}}, "guards": {"storm": OFF}, "eval": {"num_envs": 4}},
        Ends("completed", 8, warnings=("transitions_rejected", "evaluations_void", "no_finite_return")),
    ),
    "all rewards are bad, without guards": (
        {
            "env": {"kwargs": {"fault": "reward", "probability": 1.0}}, "guards": GUARDS_OFF,
            "eval": {"num_evals": 2, "num_envs": 4},
        },
        Ends("state_not_finite", 8, warnings=("loss_not_finite", "evaluations_void")),
    ),
    # A state is good after as many healthy iterations as bad ones before it, and five to seven are bad.
    "scripted, too soon after bad ones": (
        {"more_guards": scripted(2, 3, 5, 6, 7), **ONCE},
        Ends("recovery_exhausted", 7, ("7: guard_exhausted: fresh_resets, back to 0",)),
    ),
    "scripted, two healthy iterations after two bad ones": (
        {"more_guards": scripted(1, 2, 5, 6, 7), **ONCE},
        Ends("recovery_exhausted", 7, ("7: guard_exhausted: fresh_resets, back to 4",)),
    ),
    "scripted, an iteration without an update in between": (
        {"more_guards": scripted(1, 2, 5, 6, 7, update={"idle": Idle(3)}), **ONCE},
        Ends("recovery_exhausted", 7, ("7: guard_exhausted: fresh_resets, back to 0",)),
    ),
    "scripted, bad at the end, and nothing saved before": (
        {"more_guards": scripted(7, 8), **NOTHING_SAVED}, Ends("completed", 8, ("8: 6 handed over",), saved=[8]),
    ),
    "scripted, never good, and nothing saved before": (
        {"more_guards": scripted(1, 2, 4, 5, 7, 8), **NOTHING_SAVED}, Ends("not_saved", 8, saved=[], advice="No good"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_run_ends_by_name_and_leaves_its_good_checkpoints(tmp_path: Path, name: str) -> None:
    sections, ends = ENDINGS[name]
    done, left = train(tmp_path, **sections), result(tmp_path)
    reason = StopReason[ends.reason]
    assert (done.stop_reason, done.step) == (reason, ends.iterations * ITERATION)
    assert (left["stop_reason"], left["exit_code"]) == (ends.reason, reason.exit_code)
    assert story(tmp_path) == list(ends.story)
    assert ends.saved is None or ends.saved == (saved(tmp_path) if (tmp_path / "checkpoints").exists() else [])
    assert ends.advice in (left.get("advice") or "")
    assert "unsaved_steps" in left or ends.reason != "not_saved"
    assert tuple(warning["name"] for warning in left["warnings"]) == ends.warnings
    assert ends.saved == [] or np.isfinite(load_policy(tmp_path).act(np.zeros(4, np.float32))).all()


def test_best_evaluation_is_kept_after_an_iteration_without_an_accepted_update(tmp_path: Path) -> None:
    """Else the return watch has no policy to compare with, and no later fall is a collapse."""
    sections = config(recovery={"every": 2}, eval={"num_evals": 8, "num_envs": 4})
    with contextlib.closing(TrainingLoop(sections, tmp_path, more_guards={"update": {"idle": Idle(1)}})) as loop:
        loop.advance()
        best = loop.single.snapshots.best
        assert (loop.single.host.iterations_without_update, best.empty, best.iteration) == (1, False, 1)


@pytest.mark.parametrize("enabled", [True, False])
def test_evaluation_has_the_fault_only_if_configured(tmp_path: Path, enabled: bool) -> None:
    fault = {"site": "observation", "probability": 0.05, "eval": enabled}
    done = train(tmp_path, fault=fault, eval={"num_evals": 1, "num_envs": 16}, total_steps=4 * ITERATION)
    assert [event["guard"] for event in events(tmp_path, "guard_tripped")][:1] == ["quarantine"]
    share = done.metrics["eval/aborted_share"]
    assert share is not None and ((0.0 < share < 1.0) if enabled else share == 0.0)


def test_row_without_an_accepted_update_lacks_the_means_over_updates(tmp_path: Path) -> None:
    history = train(tmp_path, fault=NAN_GRADIENTS | {"iterations": 1}, total_steps=4 * ITERATION).history
    assert [row["training/accepted_share"] for row in history] == [1.0, 1.0, 0.0, 1.0]
    missing = history[1].keys() - history[2].keys()
    assert {"training/learning_rate", "training/value_learning_rate", "training/v_loss", "training/entropy"} <= missing
    assert all(value is None or np.isfinite(value) for row in history for value in row.values())
