"""Runs with too little memory divide the work and compute the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_recovered_runs import events
from toys import mesh, tiny_config

from rlstable.config import Config
from rlstable.io.run_folder import read_result
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.setup import Program, TrainingSetup
from rlstable.supervise.memory import footprint
from rlstable.supervise.memory_plan import MemoryPlan
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ITERATION = 512 * 2 * 16  # environment steps: rows times unroll length


def config(limit: float | None = None, **sections: Any) -> Config:
    """Layers that are wide compared with the batch, so that dividing the batch saves memory; the limit is in bytes."""
    wide = [128, 128, 128, 128]
    off = {"enabled": False}
    own: dict[str, Any] = {
        "devices": 1, "guards": {}, "logging": {"console": "off"}, "eval": {"num_evals": 0},
        "total_steps": 4 * ITERATION, "checkpoint": {"every": 1, "asynchronous": False},
        "ppo": {"num_envs": 256, "batch_size": 512, "num_minibatches": 2, "unroll_length": 16},
        "network": {"policy_hidden_layer_sizes": wide, "value_hidden_layer_sizes": wide},
        "supervise": {
            "memory": {"limit_gib": None if limit is None else limit / 2**30}, "ladder": off, "incident": off,
        },
    }  # fmt: skip
    return tiny_config(**own | sections)


def small(**sections: Any) -> Config:
    return config(network={"policy_hidden_layer_sizes": [8], "value_hidden_layer_sizes": [8]}, **sections)


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, TrainingLoop]:
    """Bytes that training needs, and the run without a limit."""
    assembly = TrainingSetup(config(), mesh())
    needs = footprint(assembly.compiled(assembly.shapes()).executable)
    assert needs is not None
    runner = TrainingLoop(config(total_steps=ITERATION), tmp_path_factory.mktemp("unlimited"))
    runner.run()
    return needs.peak, runner


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 4])  # what cannot be divided is a fifth
def test_limit_that_is_too_small_is_met_by_dividing_minibatches(
    tmp_path: Path, unlimited: tuple[int, TrainingLoop], times: int
) -> None:
    """The loss of the first iteration, on the same data, agrees to 1e-5."""
    needed, whole = unlimited
    runner = TrainingLoop(config(needed / times, total_steps=ITERATION), tmp_path)
    assert runner.run().stop_reason is StopReason.completed
    planned = events(tmp_path, "memory_planned")
    assert planned and all(event["step"] == 0 for event in planned)
    assert runner.single.host.plan.gradient_accumulation is not None
    assert (runner.single.host.plan.envs_per_pass, runner.single.host.plan.num_envs) == (None, None)
    for name in ("training/total_loss", "training/policy_loss", "training/v_loss", "training/grad_norm"):
        expected = whole.single.log.history[0][name]
        assert runner.single.log.history[0][name] == pytest.approx(expected, rel=1e-5, abs=1e-6), name
    for ours, theirs in zip(
        jax.tree.leaves(runner.single.state.params), jax.tree.leaves(whole.single.state.params), strict=True
    ):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_limit_that_cannot_be_met_ends_the_run_and_names_a_limit_that_would_do(
    tmp_path: Path, unlimited: tuple[int, TrainingLoop]
) -> None:
    result = TrainingLoop(config(unlimited[0] / 50), tmp_path).run()
    assert (result.stop_reason, result.stop_reason.exit_code, result.step) == (StopReason.out_of_memory, 10, 0)
    left = read_result(tmp_path)
    assert left is not None
    assert "GiB would be enough" in left["advice"] and "smaller networks" in left["advice"]


class Refusing:
    """A program that runs out of memory in the given iterations."""

    def __init__(self, program: Program, refused: list[int]):
        self.executable, self.seed_devices = program.executable, program.seed_devices
        self._program = program
        self._refused = refused

    def __call__(self, state: Any) -> Any:
        return self.each((state,))[0]

    def each(self, states: tuple[Any, ...]) -> Any:
        (state,) = states
        iteration = int(state.counters.iterations)
        if iteration in self._refused:
            self._refused.remove(iteration)
            jax.tree.map(lambda leaf: leaf.delete(), state)  # it was donated
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.")
        return self._program.each(states)


def refuse(monkeypatch: pytest.MonkeyPatch, iterations: list[int]) -> None:
    original = TrainingSetup.compiled
    monkeypatch.setattr(TrainingSetup, "compiled", lambda self, state: Refusing(original(self, state), iterations))


def test_out_of_memory_while_training_rolls_back_and_continues_with_smaller_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, [2])
    runner = TrainingLoop(small(), tmp_path)
    assert runner.run().stop_reason is StopReason.completed
    (planned,) = events(tmp_path, "memory_planned")
    assert (planned["plan"], planned["step"]) == ("gradient_accumulation 2", 2 * ITERATION)
    # Two iterations were done and saved, so nothing is lost, and it does not count as an attempt of recovery.
    assert runner.single.host.attempts.count == 0
    assert [row["step"] for row in runner.single.log.history] == [ITERATION * n for n in (1, 2, 3, 4)]
    again = TrainingLoop(small(resume="auto", total_steps=5 * ITERATION), tmp_path)
    assert again.single.host.plan.gradient_accumulation == 2
    assert again.run().stop_reason is StopReason.completed
    assert len(events(tmp_path, "memory_planned")) == 1
    # The plan was made for another batch, so it is dropped.
    ppo = {"num_envs": 256, "batch_size": 512, "num_minibatches": 2, "unroll_length": 8}
    other = TrainingLoop(small(resume="auto", total_steps=6 * ITERATION, ppo=ppo), tmp_path)
    other.close()
    assert other.single.host.plan == MemoryPlan()


def test_device_that_always_runs_out_of_memory_gets_fewer_environments_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: TrainingSetup, state: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.")

    monkeypatch.setattr(TrainingSetup, "compiled", never)
    result = TrainingLoop(small(), tmp_path).run()
    assert result.stop_reason is StopReason.out_of_memory
    assert events(tmp_path, "memory_planned")[-1]["plan"] == "gradient_accumulation 512, envs_per_pass 8, num_envs 1"


def test_out_of_memory_without_a_kept_state_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, [2])
    result = TrainingLoop(small(supervise={"recovery": {"enabled": False}}), tmp_path).run()
    assert (result.stop_reason, result.step) == (StopReason.out_of_memory, 2 * ITERATION)
    left = read_result(tmp_path)
    assert left is not None and "supervise.recovery.enabled=true" in left["advice"]


def test_out_of_memory_in_the_first_iteration_continues_with_smaller_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, [0])
    runner = TrainingLoop(small(), tmp_path)
    assert runner.run().stop_reason is StopReason.completed
    assert runner.single.host.step == 4 * ITERATION


def test_other_errors_of_the_device_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: TrainingSetup, state: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is on fire")

    monkeypatch.setattr(TrainingSetup, "compiled", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="on fire"):
        TrainingLoop(small(), tmp_path).run()


@pytest.mark.slow
def test_environments_stepped_in_passes_give_the_same_states(tmp_path: Path) -> None:
    """Seven at a time; the last pass is shorter."""
    whole = TrainingLoop(small(total_steps=ITERATION), tmp_path / "whole")
    passes = TrainingLoop(
        small(total_steps=ITERATION, env={"name": "toys:PointMass", "envs_per_pass": 7}), tmp_path / "passes"
    )
    whole.run(), passes.run()
    for ours, theirs in zip(jax.tree.leaves(passes.single.state), jax.tree.leaves(whole.single.state), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-5, atol=1e-5)
