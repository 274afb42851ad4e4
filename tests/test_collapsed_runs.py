"""Runs whose return collapses are rolled back exactly to their best state, and end by name when no attempt is left."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys import GUARDS_OFF, tiny_config

from rlstable import load_policy
from rlstable.config import Config
from rlstable.io.outcome import outcome_of
from rlstable.io.run_folder import read_result
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.result import Result
from rlstable.runner.seed_run import SeedRun
from rlstable.supervise.snapshots import NAMES
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ITERATION = 64
OFF = {"enabled": False}
START = 40  # iterations before the fault
TOTAL = 60
# Only the return watch detects the fault.
BLIND = {
    "limiters": {"kl": None, "update_norm": None}, "policy": OFF, "value_loss": OFF, "spike": OFF,
}  # fmt: skip


def config(
    watch: bool = True, recovery: dict[str, Any] | None = None, fault: dict[str, Any] | None = None, **sections: Any
) -> Config:
    """Each iteration has 16 episodes, one look of the watch; one update at 1000 times the rate ruins the policy."""
    strikes = {"site": "learning_rate", "value": 1000.0, "start": START, "iterations": 1} | (fault or {})
    learns = {"learning_rate": 5e-3, "entropy_cost": 1e-3, "discounting": 0.5, "num_updates_per_batch": 4}
    defaults: dict[str, Any] = {
        "guards": BLIND | {"return_watch": {"enabled": watch}}, "devices": 1, "total_steps": TOTAL * ITERATION,
        "env": {"name": "toys:Target", "episode_length": 4}, "ppo": learns, "fault": strikes,
        "eval": {"num_evals": 2, "num_envs": 64}, "logging": {"console": "off"}, "checkpoint": {"asynchronous": False},
        "supervise": {"recovery": recovery or {}, "ladder": OFF, "incident": OFF},
    }  # fmt: skip
    return tiny_config(**defaults | sections)


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if not kinds or line["kind"] in kinds]


def same(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def returns(run: Result | TrainingLoop | SeedRun, start: int = 0, end: int | None = None) -> float:
    if isinstance(run, TrainingLoop):
        run = run.single
    history = run.history if isinstance(run, Result) else run.log.history
    return float(np.mean([row["episode/sum_reward"] for row in history[start:end]]))


@pytest.fixture(scope="module")
def recovered(tmp_path_factory: pytest.TempPathFactory) -> TrainingLoop:
    """A run that collapses after 40 iterations and is rolled back."""
    runner = TrainingLoop(config(), tmp_path_factory.mktemp("recovered"))
    runner.run()
    return runner


def test_without_the_return_watch_the_policy_is_lost(tmp_path: Path) -> None:
    runner = TrainingLoop(config(watch=False), tmp_path)
    assert runner.run().stop_reason is StopReason.completed
    assert returns(runner, START - 10, START) > 3.0
    assert returns(runner, -10) < 1.0
    assert not events(tmp_path, "return_collapsed", "rolled_back")


def test_run_whose_return_collapses_ends_near_its_best_return(recovered: TrainingLoop) -> None:
    left = read_result(recovered.run_dir)
    assert left is not None
    assert (left["stop_reason"], left["step"], left["rollbacks"]) == ("completed", TOTAL * ITERATION, 1)
    assert returns(recovered, -10) > 0.8 * returns(recovered, START - 10, START)


def test_collapse_trips_the_guard_is_logged_and_is_rolled_back_in_this_order(recovered: TrainingLoop) -> None:
    found = events(recovered.run_dir, "guard_tripped", "return_collapsed", "return_fall_refuted", "rolled_back")
    assert [event["kind"] for event in found] == ["guard_tripped", "return_collapsed", "rolled_back"]
    tripped, collapsed, back = found
    assert (tripped["guard"], tripped["collapsed"]) == ("return_watch", 1)
    assert collapsed["return"] < 1.0 < 3.0 < collapsed["best_return"]
    assert collapsed["best_iteration"] == back["to_iteration"] <= START
    assert (back["cause"], back["remedy"], back["attempt"]) == ("policy_collapsed", "refit_critic 10", 1)
    # At least four looks, and not many more.
    assert START + 4 <= collapsed["step"] // ITERATION <= START + 8
    trips = [row["guards/return_watch/trips"] for row in recovered.single.log.history]
    at = collapsed["step"] // ITERATION
    assert trips == [0] * (at - 1) + [1] * (len(trips) - at + 1)


def test_policy_does_not_change_while_the_critic_is_refitted(recovered: TrainingLoop) -> None:
    (back,) = events(recovered.run_dir, "rolled_back")
    after = recovered.single.log.history[back["step"] // ITERATION :]
    assert all(row["training/learning_rate"] == 0.0 < row["training/value_learning_rate"] for row in after[:10])
    assert all(row["training/learning_rate"] > 0.0 for row in after[10:])


@pytest.fixture(scope="module")
def exhausted(tmp_path_factory: pytest.TempPathFactory) -> TrainingLoop:
    """A run that collapses again after its only attempt."""
    runner = TrainingLoop(
        config(recovery={"attempts": 1}, fault={"iterations": None}), tmp_path_factory.mktemp("exhausted")
    )
    runner.run()
    return runner


def test_return_that_collapses_again_ends_the_run_by_name(exhausted: TrainingLoop) -> None:
    left = read_result(exhausted.run_dir)
    assert left is not None
    assert (left["stop_reason"], left["exit_code"], left["cause"]) == ("policy_collapsed", 12, "policy_collapsed")
    assert "guards.return_watch.tolerance" in left["advice"]
    assert len(events(exhausted.run_dir, "return_collapsed")) == 2
    assert len(events(exhausted.run_dir, "rolled_back")) == 1


def test_collapsed_run_saves_its_best_policy(exhausted: TrainingLoop) -> None:
    best = exhausted.single.supervisor.snapshots.best
    *_, last = events(exhausted.run_dir, "return_collapsed")
    assert best.iteration == last["best_iteration"] < exhausted.single.host.iteration
    same((exhausted.single.state.params, exhausted.single.state.normalizer), best.policy)
    policy = load_policy(exhausted.run_dir, "latest")
    assert policy.host["host"]["iteration"] == exhausted.single.host.iteration
    assert policy.host["host"]["last_return"] == policy.host["return"] == last["best_return"]
    assert float(policy.act(np.zeros(2, np.float32))[0]) == pytest.approx(0.6, abs=0.3)
    left = read_result(exhausted.run_dir)
    assert left is not None and left["step"] == exhausted.single.host.step
    assert (left["last_return"], left["fallen_return"]) == (last["best_return"], last["return"])
    assert left["return"] == left["confirmed_return"] <= left["best_return"]
    # Logged steps never decrease.
    steps = [row["step"] for row in exhausted.single.log.history]
    assert steps == sorted(steps) and events(exhausted.run_dir)[-1]["step"] == steps[-1]


@pytest.fixture(scope="module")
def fallen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, str]:
    """A run whose policy is ruined two iterations before its end, and its console."""
    shown = io.StringIO()
    own = config(fault={"start": TOTAL - 2}, logging={"console": "plain"}, eval={"num_evals": 1, "num_envs": 64})
    with contextlib.redirect_stdout(shown):
        return TrainingLoop(own, tmp_path_factory.mktemp("fallen")).run(), shown.getvalue()


def test_run_that_falls_at_its_end_has_one_outcome_on_console_page_and_result(fallen: tuple[Result, str]) -> None:
    result, console = fallen
    left = read_result(result.run_dir)
    assert left is not None
    (collapsed,) = events(result.run_dir, "return_collapsed")
    assert (left["policy_iteration"], left["fallen_return"]) == (collapsed["best_iteration"], collapsed["return"])
    assert left["fallen_return"] < left["return"] == left["confirmed_return"] <= left["best_return"]
    assert result.policy_return == left["return"] and f"return {left['return']:,.1f}" in repr(result)

    outcome = outcome_of(left)
    policy = f"iteration {left['policy_iteration']}, step {left['policy_step']:,}"
    policy += f"; the last state had fallen to {left['fallen_return']:,.1f}"
    rows = [line.strip().split(maxsplit=1) for line in console.splitlines()]
    assert [row[1] for row in rows if row[0] == "return"] == [outcome.return_text]
    assert [row[1] for row in rows if row[0] == "policy"] == [policy]

    page = (result.run_dir / "report.html").read_text()
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert (facts["return"], facts["best evaluation"]) == (f"{left['return']:,.1f}", f"{left['best_return']:,.1f}")
    assert f"Return: {outcome.return_text}. Policy: {policy}." in page
    assert float(load_policy(result.run_dir).act(np.zeros(2, np.float32))[0]) == pytest.approx(0.6, abs=0.3)


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(START + 2, id="in the collapse"),
        pytest.param(30, id="before the fault", marks=pytest.mark.slow),
        pytest.param(47, id="after the rollback", marks=pytest.mark.slow),
    ],
)
def test_run_stopped_around_a_collapse_and_resumed_equals_the_uninterrupted_run(
    tmp_path: Path, recovered: TrainingLoop, cut: int
) -> None:
    part = TrainingLoop(config(), tmp_path, lambda step, _: step == cut * ITERATION)
    assert part.run().stop_reason is StopReason.stopped
    rest = TrainingLoop(config(resume="auto"), tmp_path)
    assert rest.single.host.watch == part.single.host.watch
    for name in NAMES:
        ours, theirs = (getattr(run.single.supervisor.snapshots, name) for run in (rest, part))
        assert (ours.iteration, ours.step, ours.empty) == (theirs.iteration, theirs.step, theirs.empty)
        same(ours._parts, theirs._parts)
    rest.run()
    same(rest.single.state, recovered.single.state)
    assert rest.single.host.watch == recovered.single.host.watch
    assert rest.single.host.attempts == recovered.single.host.attempts
    told = ("return_collapsed", "rolled_back")
    assert [dict(event, time=0) for event in events(tmp_path, *told)] == [
        dict(event, time=0) for event in events(recovered.run_dir, *told)
    ]


@pytest.mark.slow
def test_only_the_seed_that_collapses_is_rolled_back(tmp_path: Path) -> None:
    def train(name: str, start: int) -> TrainingLoop:
        # The rollback draws other first states, and a policy that knows only eight of them may fail there.
        env = {"name": "toys:Target", "episode_length": 4, "reset": "pool", "reset_pool_size": 64}
        found = TrainingLoop(config(seeds=2, fault={"seed": 1, "start": start}, env=env), tmp_path / name)
        assert found.run().stop_reason is StopReason.completed
        return found

    struck, spared = train("struck", START), train("spared", 1000)
    assert [len(events(tmp_path / "struck" / f"seed-{seed}", "rolled_back")) for seed in (0, 1)] == [0, 1]
    (back,) = events(tmp_path / "struck" / "seed-1", "rolled_back")
    assert back["cause"] == "policy_collapsed"
    ours, theirs = (load_policy(tmp_path / name / "seed-0", "latest") for name in ("struck", "spared"))
    same((ours.params, ours.statistics), (theirs.params, theirs.statistics))
    assert [row["episode/sum_reward"] for row in struck.seeds[0].log.history] == [
        row["episode/sum_reward"] for row in spared.seeds[0].log.history
    ]
    assert struck.seeds[0].host.watch == spared.seeds[0].host.watch
    assert returns(struck.seeds[1], -10) > 2.5


def test_reward_that_drops_by_half_is_no_collapse_of_the_policy(tmp_path: Path) -> None:
    env = {"name": "toys:Target", "episode_length": 4, "kwargs": {"drop_at": 8 * START}}
    runner = TrainingLoop(config(env=env, fault={"start": 1000}), tmp_path)
    assert runner.run().stop_reason is StopReason.completed
    assert returns(runner, -10) < 0.6 * returns(runner, START - 10, START)
    (told,) = events(tmp_path, "return_fall_refuted")
    assert START + 4 <= told["step"] // ITERATION <= START + 10
    assert not events(tmp_path, "return_collapsed", "rolled_back", "guard_tripped")
    assert runner.single.host.watch.collapses == 0


@pytest.mark.parametrize("off", ["guards", "supervise"])
def test_return_is_not_watched_without_guards_or_recovery(tmp_path: Path, off: str) -> None:
    sections: dict[str, Any] = {"guards": GUARDS_OFF} if off == "guards" else {"recovery": OFF}
    runner = TrainingLoop(config(**sections, total_steps=8 * ITERATION, eval={"num_evals": 0}), tmp_path)
    runner.run()
    assert not runner.single.return_check.enabled
    snapshots = runner.single.supervisor.snapshots
    assert snapshots.best.empty and snapshots.candidate.empty
    assert runner.single.host.watch.training.recent == []
    assert "guards/return_watch/trips" not in runner.single.log.history[-1]
    host = load_policy(tmp_path, "latest").host
    assert host["best"] is None and host["candidate"] is None


def test_rollback_after_out_of_memory_keeps_no_best_state_of_a_later_iteration(tmp_path: Path) -> None:
    """The iteration comes again with another state, and a checkpoint tells states apart by their iteration."""
    runner = TrainingLoop(config(total_steps=14 * ITERATION, eval={"num_evals": 0}), tmp_path, lambda *_: False)
    runner.run()
    seed, snapshots = runner.single, runner.single.supervisor.snapshots
    assert seed.host.iteration == 14
    snapshots.last_good.keep(seed.state, 10, 10 * ITERATION)
    snapshots.best.keep(seed.state, 12, 12 * ITERATION)
    seed.supervisor.shrink_after_oom(seed.state, jax.random.PRNGKey(0))
    assert seed.host.iteration == 10
    assert (snapshots.best.iteration, snapshots.best.step) == (10, 10 * ITERATION)
    assert snapshots.candidate.empty
