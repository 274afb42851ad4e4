"""Runs that a guard would end are rolled back, retried with a remedy, and complete."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import GUARDS_OFF, tiny_config

from rlstable import load_policy
from rlstable.config import Config
from rlstable.guards.base import GuardState, Verdict, count_first, no_trips
from rlstable.guards.state import StateContext, StormGuard
from rlstable.guards.update import UpdateContext
from rlstable.io.run_folder import read_result
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ITERATION = 64
PATIENCE = 3


def config(recovery: dict[str, Any] | None = None, limit: float | None = None, **sections: Any) -> Config:
    """20 iterations. Three bad ones are a storm, every second state is kept, four good ones undo a remedy."""
    own = {"every": 2, "relax_after": 4, "remedies": ["fresh_resets", {"scale_learning_rate": 0.5}]}
    off = {"enabled": False}  # another precision would have to be compiled
    defaults: dict[str, Any] = {
        "guards": {"storm": {"patience": PATIENCE}}, "devices": 1, "total_steps": 20 * ITERATION,
        "eval": {"num_evals": 2, "num_envs": 4}, "logging": {"console": "off"}, "checkpoint": {"asynchronous": False},
        "supervise": {"recovery": own | (recovery or {}), "ladder": off, "incident": off, "max_wall_time": limit},
    }  # fmt: skip
    return tiny_config(**defaults | sections)


def storm(**fields: Any) -> dict[str, Any]:
    """Every sample is bad from the fourth iteration on."""
    return {"site": "reward", "probability": 1.0, "start": 3, **fields}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def _learned(row: dict[str, Any]) -> bool:
    return bool(row["training/accepted_share"] > 0)


def same(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def recovered(tmp_path_factory: pytest.TempPathFactory) -> TrainingLoop:
    """A storm of seven iterations: two attempts fail, the third completes."""
    runner = TrainingLoop(config(fault=storm(iterations=7)), tmp_path_factory.mktemp("recovered"))
    runner.run()
    return runner


def test_without_supervision_the_storm_ends_the_run(tmp_path: Path) -> None:
    runner = TrainingLoop(config({"enabled": False}, fault=storm(iterations=7)), tmp_path)
    assert runner.run().stop_reason is StopReason.physics_unstable
    assert runner.single.host.iteration == 3 + PATIENCE
    assert not events(tmp_path, "rolled_back")


def test_with_supervision_the_run_is_rolled_back_and_completes(recovered: TrainingLoop) -> None:
    left = read_result(recovered.run_dir)
    assert left is not None
    assert (left["stop_reason"], left["step"], left["rollbacks"]) == ("completed", 20 * ITERATION, 2)
    back = events(recovered.run_dir, "rolled_back")
    assert [(event["attempt"], event["remedy"], event["to_iteration"]) for event in back] == [
        (1, "fresh_resets", 2),
        (2, "scale_learning_rate 0.5", 2),
    ]
    assert {event["cause"] for event in back} == {"physics_unstable"}
    # Three iterations are good before the storm and three are bad: each rollback to iteration 2 gives up four or three.
    assert [event["lost_steps"] for event in back] == [4 * ITERATION, 3 * ITERATION]
    assert np.isfinite(load_policy(recovered.run_dir).act(np.zeros(4, np.float32))).all()


def test_logged_steps_never_run_backwards(recovered: TrainingLoop) -> None:
    rows = [json.loads(line) for line in (recovered.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == [ITERATION * n for n in range(1, len(steps) + 1)]
    assert len(steps) == 20 + 4 + 3
    counted = [row["supervise/rollbacks"] for row in rows]
    assert counted == [0] * 6 + [1] * 3 + [2] * 18
    trained = [row["training/iteration"] for row in rows]
    assert trained == [1, 2, 3, 4, 5, 6, 3, 4, 5, *range(3, 21)]


def test_remedy_takes_effect_and_is_taken_back_after_healthy_iterations(recovered: TrainingLoop) -> None:
    rates = {n: row["training/learning_rate"] for n, row in enumerate(recovered.single.log.history, 1) if _learned(row)}
    full = recovered.config.ppo.learning_rate
    back = events(recovered.run_dir, "remedy_taken_back")
    assert [(event["remedy"], event["step"] // ITERATION) for event in back] == [("scale_learning_rate 0.5", 14)]
    np.testing.assert_allclose([rates[n] for n in (1, 2, 3)], full, rtol=1e-6)
    np.testing.assert_allclose([rates[n] for n in range(11, 15)], full / 2, rtol=1e-6)
    np.testing.assert_allclose([rates[n] for n in range(15, 28)], full, rtol=1e-6)


@pytest.mark.slow
def test_every_attempt_has_other_random_numbers(tmp_path: Path) -> None:
    """The third iteration of each attempt starts from the same parameters, with another key and other environments."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def look(step: int, row: dict[str, Any]) -> None:
        if row["training/iteration"] == 3:
            seen.append((np.asarray(runner.single.state.key), np.asarray(runner.single.state.env_state.obs)))

    runner = TrainingLoop(config(fault=storm(iterations=7), total_steps=8 * ITERATION), tmp_path, look)
    runner.run()
    assert len(seen) == 3
    for first, second in itertools.combinations(seen, 2):
        assert not np.array_equal(first[0], second[0])
        assert not np.array_equal(first[1], second[1])


def test_storm_that_never_ends_uses_up_the_attempts_and_ends_by_name(tmp_path: Path) -> None:
    runner = TrainingLoop(config({"attempts": 3}, fault=storm()), tmp_path)
    result = runner.run()
    assert result.stop_reason is StopReason.physics_unstable
    assert len(events(tmp_path, "rolled_back")) == 3
    left = read_result(tmp_path)
    assert left is not None
    assert (left["cause"], left["exit_code"]) == ("physics_unstable", 5)
    assert left["advice"].startswith(
        "Rolled back to the last good state 3 times, with fresh_resets (2 times), scale_learning_rate 0.5; "
    )
    assert "The environment's reward was not finite" in left["advice"]
    # The last good state is on disk.
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(runner.single.state.params))
    assert load_policy(tmp_path).act(np.zeros(4, np.float32)).shape == (2,)


def test_divergence_that_no_remedy_cures_ends_as_recovery_exhausted(tmp_path: Path) -> None:
    guards = GUARDS_OFF | {"finite_state": {"enabled": True, "patience": 1}}
    fault = {"site": "gradient", "probability": 1.0, "start": 1}
    result = TrainingLoop(config({"attempts": 2}, guards=guards, fault=fault), tmp_path).run()
    assert result.stop_reason is StopReason.recovery_exhausted
    left = read_result(tmp_path)
    assert left is not None and (left["cause"], left["exit_code"]) == ("state_not_finite", 9)


@dataclasses.dataclass(frozen=True)
class Scripted(StormGuard):
    """Trips in set iterations."""

    bad: tuple[int, ...] = ()

    def apply(self, ctx: StateContext, state: GuardState) -> Verdict:
        number = state.memory.scale + 1.0
        return self._verdict(ctx, ~jnp.isin(number, jnp.array(self.bad))[None], state, number)


@pytest.mark.parametrize(
    ("before", "every", "iteration"),
    [((3,), 2, 4), ((2, 3), 2, 0), ((1, 2), 2, 4), ((2, 3), 1, 4)],
    ids=["1", "2", "2 2", "2, at most 1"],
)
def test_state_counts_as_good_after_as_many_healthy_iterations_as_bad_ones(
    tmp_path: Path, before: tuple[int, ...], every: int, iteration: int
) -> None:
    """Iterations 5 to 7 are bad; the state after 4 is due to be kept, but may follow bad ones too soon."""
    guard = Scripted(PATIENCE, 1.0, (*before, 5, 6, 7))
    own = config({"attempts": 1, "every": every}, total_steps=8 * ITERATION, eval={"num_evals": 0})
    TrainingLoop(own, tmp_path, more_guards={"state": {"scripted": guard}}).run()
    assert [event["to_iteration"] for event in events(tmp_path, "rolled_back")][:1] == [iteration]


def test_resumed_run_knows_how_many_healthy_iterations_it_still_needs(tmp_path: Path) -> None:
    """Three bad iterations and a healthy one, then a resume: the state after the fifth, which is due, is too soon."""
    guard = Scripted(4, 1.0, (1, 2, 3, 6, 7, 8, 9))
    for iterations, resume in ((4, None), (10, "auto")):
        sections = {"total_steps": iterations * ITERATION, "eval": {"num_evals": 0}, "resume": resume}
        own = config({"attempts": 1, "every": 5}, **sections)
        TrainingLoop(own, tmp_path, more_guards={"state": {"scripted": guard}}).run()
    assert [event["to_iteration"] for event in events(tmp_path, "rolled_back")][:1] == [0]


@dataclasses.dataclass(frozen=True)
class RejectsIteration:
    """Guard of the update site that rejects every update of one iteration."""

    number: int
    updates: int  # per iteration
    causes: tuple[str, ...] = ("rejected",)

    def init(self) -> GuardState:
        return GuardState(no_trips(self.causes), jnp.zeros((), jnp.int32))

    def apply(self, ctx: UpdateContext, state: GuardState) -> Verdict:
        ok = state.memory // self.updates != self.number - 1
        return Verdict(ctx.value, ok, GuardState(state.trips + count_first(~ok[None]), state.memory + 1))


def test_iteration_without_an_update_does_not_make_up_for_a_bad_one(tmp_path: Path) -> None:
    """Without the idle third iteration, the state after the fourth would be good."""
    own = config({"attempts": 1}, total_steps=8 * ITERATION, eval={"num_evals": 0})
    guards = {
        "state": {"scripted": Scripted(PATIENCE, 1.0, (1, 2, 5, 6, 7))},
        "update": {"rejects": RejectsIteration(3, own.ppo.num_minibatches * own.ppo.num_updates_per_batch)},
    }
    loop = TrainingLoop(own, tmp_path, more_guards=guards)
    loop.run()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [_learned(row) for row in rows[:4]] == [True, True, False, True]
    assert [event["to_iteration"] for event in events(tmp_path, "rolled_back")][:1] == [0]


def test_state_that_a_guard_rejects_is_never_kept_for_a_rollback(tmp_path: Path) -> None:
    """Parameters are NaN from the third iteration on, and the patience is five: the run goes back to the second."""
    guards = GUARDS_OFF | {"finite_state": {"enabled": True, "patience": 5}}
    fault = {"site": "gradient", "probability": 1.0, "start": 2, "iterations": 2}
    runner = TrainingLoop(config({"every": 1}, guards=guards, fault=fault, checkpoint={"every": 1}), tmp_path)
    assert runner.run().stop_reason is StopReason.completed
    (back,) = events(tmp_path, "rolled_back")
    assert (back["cause"], back["to_iteration"], back["lost_steps"]) == ("state_not_finite", 2, 5 * ITERATION)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(runner.single.state.params))


SAVED = {"every": 1, "asynchronous": False}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> TrainingLoop:
    """The same storm in a run that saves every iteration."""
    runner = TrainingLoop(config(fault=storm(iterations=7), checkpoint=SAVED), tmp_path_factory.mktemp("saved"))
    runner.run()
    return runner


@pytest.mark.parametrize("cut", [6, 9], ids=["after the first rollback", "after the second"])
def test_run_resumed_after_a_rollback_equals_the_uninterrupted_run(
    tmp_path: Path, saved: TrainingLoop, cut: int
) -> None:
    """Attempts, active remedies and the number of healthy iterations are saved with the state."""
    fault = storm(iterations=7)
    # The callback at the first row after a rollback stops the run; the next iteration is saved.
    part = TrainingLoop(
        config(fault=fault, checkpoint=SAVED), tmp_path / "part", lambda step, _: step > cut * ITERATION
    )
    assert part.run().stop_reason is StopReason.stopped
    rest = TrainingLoop(config(fault=fault, checkpoint=SAVED, resume="auto"), tmp_path / "part")
    assert rest.single.host.attempts == part.single.host.attempts
    rest.run()
    same(rest.single.state, saved.single.state)
    assert rest.single.host.attempts == saved.single.host.attempts
    steps = [json.loads(line)["step"] for line in (tmp_path / "part" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [ITERATION * n for n in range(1, 27)]  # the rollback goes to the saved third iteration


# Guards, a fault after five iterations, and the iteration that the run is rolled back to.
STOPPED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "between two copies": ({"storm": {"patience": PATIENCE}}, storm(start=6, iterations=4), 4),
    "nothing accepted": (
        GUARDS_OFF | {"finite_update": {"enabled": True, "patience": PATIENCE}},
        {"site": "gradient", "probability": 1.0, "start": 5, "iterations": 4}, 5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STOPPED)
def test_resumed_run_is_rolled_back_to_the_same_iteration_as_the_uninterrupted_run(tmp_path: Path, case: str) -> None:
    """The latest checkpoint is not the last good state: that iteration was not kept, or was not good enough."""
    guards, fault, to = STOPPED[case]
    every = 4 if to == 4 else 1
    sections = {"guards": guards, "fault": fault, "eval": {"num_evals": 0}, "total_steps": 14 * ITERATION}

    def runner(folder: str, *more: Any, **resume: Any) -> TrainingLoop:
        return TrainingLoop(
            config({"every": every, "relax_after": 100}, **sections, **resume), tmp_path / folder, *more
        )

    whole = runner("whole")
    whole.run()
    part = runner("part", lambda step, _: step == 6 * ITERATION)
    assert part.run().stop_reason is StopReason.stopped
    # Stopped twice, so that the last good state is read from a checkpoint and saved into one.
    again = runner("part", lambda step, _: step == 7 * ITERATION, resume="auto")
    assert (again.single.host.step, again.run().stop_reason) == (6 * ITERATION, StopReason.stopped)
    rest = runner("part", resume="auto")
    rest.run()
    assert {
        event["to_iteration"] for name in ("whole", "part") for event in events(tmp_path / name, "rolled_back")
    } == {to}
    assert rest.single.host.attempts == whole.single.host.attempts
    same(rest.single.state, whole.single.state)


def test_run_in_many_parts_with_time_limits_equals_the_uninterrupted_run(
    tmp_path: Path, recovered: TrainingLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue restarts it with resume=auto. Every part has time for six iterations; two parts contain rollbacks."""

    class Clock:  # the run reads it twice at the start and three times per iteration
        seconds = itertools.count()
        monotonic = staticmethod(lambda: float(next(Clock.seconds)))

    monkeypatch.setattr("rlstable.runner.stopping.time", Clock)
    kept = {"every": 2, "asynchronous": False}
    limited = config(limit=17.5, fault=storm(iterations=7), resume="auto", checkpoint=kept)
    ends: list[tuple[str, int]] = []
    while not ends or ends[-1][0] == "time_limit":
        runner = TrainingLoop(limited, tmp_path)
        ends.append((runner.run().stop_reason.name, runner.single.host.iteration))
    # The first two parts end in the storm, unsaved; the later parts resume from the checkpoint of the rollback.
    assert ends == [*(("time_limit", iteration) for iteration in (2, 5, 11, 17)), ("completed", 20)]
    same(runner.single.state, recovered.single.state)
    assert runner.single.host.attempts == recovered.single.host.attempts


def test_full_disk_does_not_change_where_a_run_is_rolled_back_to(tmp_path: Path) -> None:
    """The rollback goes to the state of iteration 4, not to the checkpoint that was saved late."""
    sections = {
        "guards": GUARDS_OFF | {"finite_update": {"enabled": True, "patience": PATIENCE}},
        "eval": {"num_evals": 0},
    }
    recovery = {"every": 100}
    fault = {"site": "gradient", "probability": 1.0, "start": 5, "iterations": 4}
    saves = {"every": 4, "asynchronous": False}
    runner = TrainingLoop(config(recovery, fault=fault, checkpoint=saves, **sections), tmp_path)
    save, failed = runner.single.checkpoints.save, []

    def full(iteration: int, *args: Any, **kwargs: Any) -> bool:
        if iteration == 4 and not failed:
            failed.append(iteration)
            runner.single.checkpoints._give_up(iteration, OSError("No space left on device"))
            return False
        return save(iteration, *args, **kwargs)

    runner.single.checkpoints.save = full  # type: ignore[method-assign]
    runner.run()
    assert failed == [4]
    assert [event["iteration"] for event in events(tmp_path, "checkpoint_saved_again")] == [5]
    (back,) = events(tmp_path, "rolled_back")
    assert back["to_iteration"] == 4


def test_crash_in_the_middle_of_an_attempt_neither_loses_nor_repeats_the_attempt(tmp_path: Path) -> None:
    """The second attempt crashes in its first iteration; after the resume it is still the second attempt."""

    class Crash(Exception):
        pass

    def crash(step: int, row: dict[str, Any]) -> None:
        if row["supervise/rollbacks"] == 2:
            raise Crash

    first = TrainingLoop(config(fault=storm()), tmp_path, crash)
    with pytest.raises(Crash):
        first.run()
    second = TrainingLoop(config({"attempts": 3}, fault=storm(), resume="auto"), tmp_path)
    assert second.single.host.attempts.count == 2
    assert second.run().stop_reason is StopReason.physics_unstable
    assert second.single.host.attempts.count == 3


@pytest.mark.slow
def test_run_on_two_devices_is_rolled_back_and_completes(tmp_path: Path) -> None:
    runner = TrainingLoop(config(fault=storm(iterations=4), devices=2), tmp_path)
    assert runner.run().stop_reason is StopReason.completed
    assert runner.single.host.attempts.count == 1


def test_supervision_does_not_change_a_healthy_run(tmp_path: Path) -> None:
    never = storm(start=1000)
    on = TrainingLoop(config(fault=never), tmp_path / "on")
    off = TrainingLoop(config({"enabled": False}, fault=never), tmp_path / "off")
    assert on.run().metrics["eval/episode_reward"] == off.run().metrics["eval/episode_reward"]
    same(on.single.state, off.single.state)
