"""Runs that change their precision: what they keep, what they compile, and which trouble it cures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_recovered_runs import ITERATION, config, events, same, storm

from rlstable import load_policy
from rlstable.config import Config
from rlstable.io.run_folder import read_result
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.setup import TrainingSetup
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
# A storm below x64 that never ends. The patience of guards is three iterations, every second state is kept.
BELOW_X64 = storm(below="x64")
REMEDIES = ["fresh_resets", "raise_precision"]


def climbing(recovery: dict[str, Any] | None = None, ladder: bool = True, **sections: Any) -> Config:
    own = {"remedies": REMEDIES, "relax_after": 100} | (recovery or {})
    base = config(own).supervise.recovery.model_dump(mode="json")
    supervise = {"ladder": {"enabled": ladder}, "recovery": base, "incident": {"enabled": False}}
    return config(**{"supervise": supervise, "fault": BELOW_X64} | sections)


@pytest.fixture(scope="module")
def cured(tmp_path_factory: pytest.TempPathFactory) -> TrainingLoop:
    runner = TrainingLoop(climbing(checkpoint={"every": 1, "asynchronous": False}), tmp_path_factory.mktemp("cured"))
    runner.run()
    return runner


def test_without_higher_precision_the_storm_ends_the_run(tmp_path: Path) -> None:
    runner = TrainingLoop(climbing({"attempts": 2}, ladder=False), tmp_path)
    assert runner.run().stop_reason is StopReason.physics_unstable


def test_storm_that_precision_cures_rolls_back_to_x64_and_completes(cured: TrainingLoop) -> None:
    left = read_result(cured.run_dir)
    assert left is not None and (left["stop_reason"], left["rollbacks"]) == ("completed", 1)
    (change,) = events(cured.run_dir, "precision_changed")
    # Three iterations are good and three are bad; on a CPU all levels except x64 give the same products.
    assert change["step"] == 6 * ITERATION
    assert (change["before"], change["level"], change["cause"]) == (
        "default/float32",
        "x64/float32",
        "physics_unstable",
    )
    (back,) = events(cured.run_dir, "rolled_back")
    assert (back["remedy"], back["to_iteration"]) == ("raise_precision", 3)
    assert cured.single.state.env_state.pipeline_state.q.dtype == jnp.float64
    assert np.isfinite(load_policy(cured.run_dir).act(np.zeros(4, np.float32))).all()


def test_change_of_precision_keeps_parameters_and_optimizer_of_the_good_state(tmp_path: Path) -> None:
    at: dict[int, Any] = {}
    kept = ("params", "opt_state", "normalizer", "counters", "guard_memory")

    def stop(step: int, _: Any) -> bool:
        at[step] = [np.array(leaf) for name in kept for leaf in jax.tree.leaves(getattr(loop.single.state, name))]
        return step == 5 * ITERATION

    loop = TrainingLoop(climbing(checkpoint={"every": 1, "asynchronous": False}), tmp_path, stop)
    assert loop.run().stop_reason is StopReason.stopped
    run = loop.single
    good = at[run.supervisor.snapshots.last_good.step]
    decision = run.supervisor.decide(StopReason.physics_unstable, finished=False)
    state = run.supervisor.roll_back(decision, run.state, run.keys.rollback)
    assert state.env_state.pipeline_state.q.dtype == jnp.float64
    same([leaf for name in kept for leaf in jax.tree.leaves(getattr(state, name))], good)


def test_run_resumed_at_another_precision_equals_the_uninterrupted_run(tmp_path: Path, cured: TrainingLoop) -> None:
    kept = {"every": 1, "asynchronous": False}
    part = TrainingLoop(climbing(checkpoint=kept), tmp_path, lambda step, _: step == 8 * ITERATION)
    assert part.run().stop_reason is StopReason.stopped
    rest = TrainingLoop(climbing(checkpoint=kept, resume="auto"), tmp_path)
    assert rest.single.state.env_state.pipeline_state.q.dtype == jnp.float64
    same(rest.single.state, part.single.state)
    rest.run()
    same(rest.single.state, cured.single.state)
    assert rest.single.host.attempts == cured.single.host.attempts


def test_precision_typed_on_resume_is_not_raised(tmp_path: Path) -> None:
    """The saved physics is float64, that of the new level float32; parameters are kept."""
    part = TrainingLoop(climbing(), tmp_path, lambda step, _: step == 8 * ITERATION)
    part.run()
    typed = climbing(resume="auto", precision={"matmul": "highest"}, fault=storm(below="highest"))
    rest = TrainingLoop(typed, tmp_path)
    assert rest.single.host.attempts.precision_steps == 0
    assert rest.single.state.env_state.pipeline_state.q.dtype == jnp.float32
    same(rest.single.state.params, part.single.state.params)
    assert rest.run().stop_reason is StopReason.completed


@pytest.mark.slow
def test_each_precision_compiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    original = TrainingSetup.compiled

    def counting(self: TrainingSetup, state: Any) -> Any:
        compiled.append("x64" if self.precision.x64 else "default")
        return original(self, state)

    monkeypatch.setattr(TrainingSetup, "compiled", counting)
    runner = TrainingLoop(climbing({"relax_after": 3, "attempts": 20}, total_steps=24 * ITERATION), tmp_path)
    assert runner.run().stop_reason is StopReason.completed
    levels = [event["level"].split("/")[0] for event in events(tmp_path, "precision_changed")]
    assert levels[:4] == ["x64", "default", "x64", "default"]
    assert compiled == ["default", "x64"]


@pytest.mark.slow
def test_networks_whose_loss_scale_collapses_are_raised_to_float32(tmp_path: Path) -> None:
    """The loss overflows float16 at every scale down to the floor, and no update is accepted until then."""
    narrow = {"network": "float16", "loss_scale": {"initial": 2.0**60, "floor": 2.0**59, "cap": 2.0**60}}
    guards = {"finite_update": {"patience": 3}}
    runner = TrainingLoop(climbing(fault={}, precision=narrow, guards=guards), tmp_path)
    assert runner.run().stop_reason is StopReason.completed
    (change,) = events(tmp_path, "precision_changed")
    expected = ("default/float16", "default/float32", "no_update_accepted")
    assert (change["before"], change["level"], change["cause"]) == expected
    assert float(runner.single.state.tuning.loss_scale) == 1.0
    accepted = [row["training/accepted_share"] for row in runner.single.log.history]
    assert accepted[0] == 0.0 and accepted[-1] == 1.0
