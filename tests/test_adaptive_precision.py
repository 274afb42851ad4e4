"""Runs that change their precision: what they keep, what they compile, and which trouble it cures."""

from __future__ import annotations

import json
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
# A storm below x64 that never ends. The patience of guards is three iterations, that of the ladder two.
BELOW_X64 = storm(below="x64")


def climbing(ladder: dict[str, Any] | None = None, recovery: dict[str, Any] | None = None, **sections: Any) -> Config:
    own = {"patience": 2, "down_after": 100} | (ladder or {})
    base = config(recovery).supervise.recovery.model_dump(mode="json")
    supervise = {"ladder": own, "recovery": base, "incident": {"enabled": False}}
    return config(**{"supervise": supervise, "fault": BELOW_X64} | sections)


@pytest.fixture(scope="module")
def cured(tmp_path_factory: pytest.TempPathFactory) -> TrainingLoop:
    runner = TrainingLoop(climbing(checkpoint={"every": 1, "asynchronous": False}), tmp_path_factory.mktemp("cured"))
    runner.run()
    return runner


def test_without_the_ladder_the_storm_ends_the_run(tmp_path: Path) -> None:
    runner = TrainingLoop(climbing({"enabled": False}, {"attempts": 2}), tmp_path)
    assert runner.run().stop_reason is StopReason.physics_unstable


def test_with_the_ladder_the_run_climbs_to_x64_and_completes(cured: TrainingLoop) -> None:
    left = read_result(cured.run_dir)
    assert left is not None and (left["stop_reason"], left["rollbacks"]) == ("completed", 0)
    (change,) = events(cured.run_dir, "precision_changed")
    # Three iterations are good and two are bad; on a CPU all levels except x64 give the same products.
    assert change["step"] == 5 * ITERATION
    assert (change["before"], change["level"], change["cause"]) == ("default/float32", "x64/float32", "quarantine")
    rows = [json.loads(line) for line in (cured.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["training/valid_share"] for row in rows] == [1.0] * 3 + [0.0] * 2 + [1.0] * 15
    assert np.isfinite(load_policy(cured.run_dir).act(np.zeros(4, np.float32))).all()


def test_change_of_precision_keeps_parameters_optimizer_and_counters(tmp_path: Path) -> None:
    """Bit for bit, from the last iteration at one level to the first at the next."""
    before: list[Any] = []
    kept = ("params", "opt_state", "normalizer", "key", "counters", "tuning", "guard_memory")

    def parts() -> list[np.ndarray]:
        return [np.array(leaf) for name in kept for leaf in jax.tree.leaves(getattr(runner.single.state, name))]

    kept_on_disk = {"every": 1, "asynchronous": False}  # the run stops in bad states, which are never saved
    config = climbing(checkpoint=kept_on_disk)
    runner = TrainingLoop(config, tmp_path, lambda step, _: before.append(parts()) or step == 5 * ITERATION)
    assert runner.run().stop_reason is StopReason.stopped
    assert runner.single.state.env_state.pipeline_state.q.dtype == jnp.float64
    same(parts(), before[-1])


def test_run_resumed_at_another_precision_equals_the_uninterrupted_run(tmp_path: Path, cured: TrainingLoop) -> None:
    kept = {"every": 1, "asynchronous": False}
    part = TrainingLoop(climbing(checkpoint=kept), tmp_path, lambda step, _: step == 8 * ITERATION)
    assert part.run().stop_reason is StopReason.stopped
    rest = TrainingLoop(climbing(checkpoint=kept, resume="auto"), tmp_path)
    assert rest.single.state.env_state.pipeline_state.q.dtype == jnp.float64
    same(rest.single.state, part.single.state)
    rest.run()
    same(rest.single.state, cured.single.state)
    assert rest.single.host.rungs == cured.single.host.rungs


def test_precision_typed_on_resume_starts_at_the_bottom_of_its_ladder(tmp_path: Path) -> None:
    """The saved physics is float64, that of the new level float32; parameters are kept."""
    part = TrainingLoop(climbing(), tmp_path, lambda step, _: step == 8 * ITERATION)
    part.run()
    typed = climbing(resume="auto", precision={"matmul": "highest"}, fault=storm(below="highest"))
    rest = TrainingLoop(typed, tmp_path)
    assert rest.single.host.rungs.matmul == 0
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
    runner = TrainingLoop(climbing({"down_after": 3}, total_steps=24 * ITERATION), tmp_path)
    assert runner.run().stop_reason is StopReason.completed
    levels = [event["level"].split("/")[0] for event in events(tmp_path, "precision_changed")]
    assert levels[:4] == ["x64", "default", "x64", "default"]
    assert compiled == ["default", "x64"]


def test_remedy_raise_precision_climbs_the_ladder(tmp_path: Path) -> None:
    """The ladder itself does not climb here: recovery raises the precision and rolls back to before the storm."""
    recovery = {"remedies": ["raise_precision"], "attempts": 2}
    runner = TrainingLoop(climbing({"patience": 1000}, recovery), tmp_path)
    assert runner.run().stop_reason is StopReason.completed
    (back,) = events(tmp_path, "rolled_back")
    assert (back["remedy"], back["to_iteration"]) == ("raise_precision", 2)
    (change,) = events(tmp_path, "precision_changed")
    assert (change["level"], change["cause"]) == ("x64/float32", "remedy")
    assert runner.single.state.env_state.pipeline_state.q.dtype == jnp.float64
    steps = [event["step"] for event in (change, back)]
    assert steps == [6 * ITERATION] * 2


@pytest.mark.slow
def test_networks_whose_loss_scale_collapses_climb_to_float32(tmp_path: Path) -> None:
    """The loss overflows float16 at every scale down to the floor, and no update is accepted until then."""
    narrow = {"network": "float16", "loss_scale": {"initial": 2.0**60, "floor": 2.0**59, "cap": 2.0**60}}
    runner = TrainingLoop(climbing(fault={}, precision=narrow), tmp_path)
    assert runner.run().stop_reason is StopReason.completed
    (change,) = events(tmp_path, "precision_changed")
    assert (change["before"], change["level"], change["cause"]) == ("default/float16", "default/float32", "loss_scale")
    assert float(runner.single.state.tuning.loss_scale) == 1.0
    accepted = [row["training/accepted_share"] for row in runner.single.log.history]
    assert accepted[0] == 0.0 and accepted[-1] == 1.0


def test_precision_that_the_device_ignores_is_logged_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some GPUs ignore the flag: the run logs the level and skips it."""
    from rlstable.supervise.arithmetic import Accuracy

    tf32 = Accuracy(1e-3, 1e-4, 11.0)
    monkeypatch.setattr("rlstable.supervise.arithmetic.measure", lambda levels: dict.fromkeys(levels, tf32))
    runner = TrainingLoop(climbing(), tmp_path)
    assert runner.run().stop_reason is StopReason.completed
    told = [(event["level"], event["measured"]) for event in events(tmp_path, "precision_not_delivered")]
    assert told == [("highest", "tf32")]
    assert [event["level"] for event in events(tmp_path, "precision_changed")] == ["x64/float32"]
