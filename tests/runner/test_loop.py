"""Several seeds in one program: each seed equals its run alone, and trouble of one seed does not affect the others."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from saved import lines, rows
from toys import assert_same, tiny_config

from rlstable import load_policy
from rlstable.config import Config, ConfigError
from rlstable.io.outcome import outcome_of
from rlstable.io.run_folder import read_result
from rlstable.listeners import listeners_of
from rlstable.policy.saved_run import open_run
from rlstable.policy.statistics import estimate, interquartile_mean
from rlstable.report.run_record import read_records
from rlstable.runner import loop
from rlstable.runner.after_iteration import finish_iteration
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.seed import Seed
from rlstable.runner.seeds import Result, over_seeds
from rlstable.runner.setup import Program, TrainingSetup
from rlstable.runner.summary import fields_of
from rlstable.supervise.memory import MemoryPlan
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ITERATION = 64
OFF = {"enabled": False}
Trained = tuple[TrainingLoop, Result]


def together(seeds: int = 3, remedies: Any = None, ladder: Any = None, **sections: Any) -> Config:
    """Ten iterations. A storm is three bad iterations; every second state is kept for a rollback.

    By default a fault is compiled in that no seed gets, so that all fleets here share one program.
    """
    recovery = {"every": 2, "remedies": remedies or [{"scale_learning_rate": 0.5}]}
    defaults: dict[str, Any] = {
        "guards": {"storm": {"patience": 3}}, "devices": 1, "total_steps": 10 * ITERATION, "seeds": seeds,
        "eval": {"num_evals": 2, "num_envs": 4}, "logging": {"console": "off"}, "checkpoint": {"asynchronous": False},
        "supervise": {"recovery": recovery, "ladder": ladder or OFF, "incident": OFF}, "fault": storm(seed=99),
    }  # fmt: skip
    return tiny_config(**defaults | sections)


def storm(**fields: Any) -> dict[str, Any]:
    """Every sample of seed 1 is bad in the iterations four to seven."""
    return {"site": "reward", "probability": 1.0, "start": 3, "iterations": 4, "seed": 1, **fields}


def numbers(state: Any) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(jax.device_get(state))]


def endings(result: Result) -> list[str]:
    return [own.stop_reason.name for own in result.seeds]


def assert_same_run(ours: Result, theirs: Result) -> None:
    """Requires equal rows and, in the last checkpoint, equal parameters."""
    assert rows(ours.run_dir) == rows(theirs.run_dir)
    assert_same(load_policy(ours.run_dir, "latest").params, load_policy(theirs.run_dir, "latest").params)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    listeners = listeners_of(together().render, together().logging)
    fleet = TrainingLoop(together(), tmp_path_factory.mktemp("healthy"), listeners=listeners)
    return fleet, fleet.run()


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Seed 1 has a storm and recovers."""
    fleet = TrainingLoop(together(fault=storm()), tmp_path_factory.mktemp("struck"))
    return fleet, fleet.run()


def test_every_seed_of_a_fleet_has_a_complete_run_folder(healthy: Trained) -> None:
    _, result = healthy
    assert result.stop_reason is StopReason.completed
    assert [own.run_dir.name for own in result.seeds] == ["seed-0", "seed-1", "seed-2"]
    assert {path.name for path in result.run_dir.iterdir() if path.is_file()} == {
        "config.yaml", "result.json", "report.html",
    }  # fmt: skip
    for seed, own in enumerate(result.seeds):
        assert (own.stop_reason, own.step) == (StopReason.completed, 10 * ITERATION)
        names = {path.name for path in own.run_dir.iterdir()}
        files = {"config.yaml", "machine.json", "metrics.jsonl", "events.jsonl", "result.json", "report.html"}
        assert names == files | {"checkpoints"}
        assert f"seed: {seed}\nseeds: 1\n" in (own.run_dir / "config.yaml").read_text()
        assert np.isfinite(own.policy.act(np.zeros(4))).all()


def test_result_of_a_fleet_has_the_result_of_each_seed(healthy: Trained) -> None:
    _, result = healthy
    returns = [lines(seed.run_dir / "metrics.jsonl")[-1]["eval/episode_reward"] for seed in result.seeds]
    left = read_result(result.run_dir)
    assert left is not None
    assert (left["stop_reason"], left["exit_code"], left["step"]) == ("completed", 0, 10 * ITERATION)
    assert [left["seeds"][str(seed)]["last_return"] for seed in range(3)] == returns
    assert left["last_return"] == pytest.approx(interquartile_mean(np.array(returns)))


def test_console_has_one_line_for_the_rows_of_all_seeds() -> None:
    rows = [
        {"training/v_loss": 1.0, "training/sps": 10.0, "guards/storm/trips": 2, "eval/episode_reward": None},
        {"training/v_loss": 2.0, "training/sps": 20.0, "guards/storm/trips": 1, "eval/episode_reward": 4.0},
    ]
    assert over_seeds(rows) == {
        "training/v_loss": 1.5, "training/sps": 30.0, "guards/storm/trips": 3, "eval/episode_reward": 4.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("stop_reason", "expected"), [(None, ("policy_collapsed", 12)), (StopReason.preempted, ("preempted", 143))]
)
def test_fields_of_several_seeds_have_the_worst_stop_reason_unless_all_were_ended(
    stop_reason: StopReason | None, expected: tuple[str, int]
) -> None:
    def seed(reason: StopReason, value: float | None, **fields: Any) -> dict[str, Any]:
        returns = {"return": value, "best_return": value, "last_return": value}
        own = {"stop_reason": reason.name, "exit_code": reason.exit_code, "step": 64, "warnings": [{"name": "a"}]}
        return own | returns | {"seconds": 1.0, "rollbacks": 1} | fields

    seeds = {4: seed(StopReason.policy_collapsed, None, step=32), 3: seed(StopReason.completed, 8.0, seconds=2.0)}
    fields = fields_of(seeds, stop_reason)
    assert (fields["stop_reason"], fields["exit_code"]) == expected
    assert [fields[key] for key in ("step", "return", "seconds", "rollbacks")] == [64, 8.0, 2.0, 2]
    assert fields["warnings"] == [{"name": "a", "seed": 3}, {"name": "a", "seed": 4}]
    assert list(fields["seeds"]) == [3, 4] and "confirmed_return" not in fields


def test_policy_of_a_fleet_is_that_of_its_best_seed_whose_folder_has_to_be_named(healthy: Trained) -> None:
    _, result = healthy
    best = max(result.seeds, key=lambda own: outcome_of(read_result(own.run_dir)).value or 0.0).run_dir
    assert_same(result.policy.params, load_policy(best).params)
    for use in (load_policy, open_run):
        with pytest.raises(ConfigError, match=rf"holds 3 seeds; give the folder of one, the best is {best}$"):
            use(result.run_dir)
    assert open_run(best).config.seed == int(best.name.removeprefix("seed-"))


def test_page_of_a_fleet_has_every_seed_and_their_summary(healthy: Trained) -> None:
    _, result = healthy
    text = (result.run_dir / "report.html").read_text()
    assert "<h1>3 seeds</h1>" in text
    assert all(f"seed-{seed}" in text for seed in range(3))
    best = [outcome_of(read_result(own.run_dir)).value for own in result.seeds]
    found = estimate(best, interquartile_mean)
    assert f"Return over 3 seeds: interquartile mean <strong>{found.value:,.1f}</strong>" in text
    assert "Differences in the configuration" not in text


def test_page_of_a_killed_fleet_shows_the_seeds_that_had_started(healthy: Trained, tmp_path: Path) -> None:
    _, result = healthy
    shutil.copytree(result.run_dir, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "run" / "seed-2" / "config.yaml").unlink()
    assert [story.folder.name for story in read_records(tmp_path / "run")] == ["seed-0", "seed-1"]


STICK = {"source": "brax", "name": "inverted_pendulum", "backend": "native", "episode_length": 50, "kwargs": None}


@pytest.mark.parametrize(
    ("seeds", "sections"),
    [
        ((0, 2), {"seeds": 3}),
        # C MuJoCo steps the simulations of all seeds in one call.
        pytest.param((1,), {"seeds": 2, "env": STICK, "fault": {}}, marks=pytest.mark.slow),
    ],
    ids=["toy", "native physics"],
)
def test_seed_in_a_fleet_equals_its_run_alone(tmp_path: Path, seeds: tuple[int, ...], sections: dict[str, Any]) -> None:
    """After one iteration, to 1e-5: products of several seeds are summed in another order."""
    config = together(total_steps=ITERATION, **sections)
    fleet = TrainingLoop(config, tmp_path / "fleet")
    fleet.run()
    for seed in seeds:
        alone = TrainingLoop(config.of_seed(seed, "alone"), tmp_path / f"alone-{seed}")
        alone.run()
        ours, theirs = fleet.seeds[seed].state, alone.single.state
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        for a, b in zip(numbers(ours), numbers(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        whole = [x for x in numbers(ours.counters) if x.dtype == np.uint32]
        assert whole and all((a == b).all() for a, b in zip(whole, numbers(theirs.counters), strict=True))


def test_storm_of_one_seed_does_not_change_a_bit_of_the_others(struck: Trained, healthy: Trained) -> None:
    """In every row and parameter, compared with the same program without the storm."""
    (_, result), (_, spared) = struck, healthy
    for seed in (0, 2):
        assert_same_run(result.seeds[seed], spared.seeds[seed])
    assert rows(result.seeds[1].run_dir) != rows(spared.seeds[1].run_dir)


def test_only_the_seed_with_the_storm_is_rolled_back_and_gets_the_remedy(struck: Trained) -> None:
    fleet, result = struck
    assert result.stop_reason is StopReason.completed
    rollbacks = [fleet.seeds[seed].host.attempts.count for seed in range(3)]
    assert rollbacks[0] == rollbacks[2] == 0 and rollbacks[1] >= 1
    rows = {seed: lines(result.seeds[seed].run_dir / "metrics.jsonl") for seed in range(3)}
    rates = [rows[seed][-1]["training/learning_rate"] for seed in range(3)]
    assert rates == pytest.approx([3e-3, 3e-3 * 0.5 ** rollbacks[1], 3e-3])
    assert len(rows[0]) == len(rows[2]) == 10 < len(rows[1])
    trips = {seed: rows[seed][-1]["guards/quarantine/trips"] for seed in range(3)}
    assert trips[0] == trips[2] == 0


def test_storm_that_stays_ends_only_its_seed_by_name_which_stays_ended_on_resume(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    supervise = {"recovery": {"attempts": 0, "every": 2}, "ladder": OFF, "incident": OFF}
    every = {"every": 2, "asynchronous": False}
    config = together(fault=storm(iterations=None), supervise=supervise, checkpoint=every, logging={"console": "lines"})
    whole = TrainingLoop(config, "run").run()
    assert endings(whole) == ["completed", "physics_unstable", "completed"]
    assert (whole.stop_reason, whole.stop_reason.exit_code) == (StopReason.physics_unstable, 5)
    assert whole.seeds[1].step == 6 * ITERATION
    said = capsys.readouterr().out
    assert "stopped: of seed 1, stop_reason physics_unstable" in said
    first = TrainingLoop(config, "parts", lambda step, _: step == 8 * ITERATION).run()
    assert endings(first) == ["stopped", "physics_unstable", "stopped"]
    left = (here / "parts" / "seed-1" / "result.json").read_text()
    again = TrainingLoop(config.model_copy(update={"resume": "parts"}), "parts").run()
    assert endings(again) == ["completed", "physics_unstable", "completed"]
    assert (again.stop_reason, again.seeds[1].step) == (StopReason.physics_unstable, 6 * ITERATION)
    assert (here / "parts" / "seed-1" / "result.json").read_text() == left
    assert rows(again.seeds[1].run_dir) == rows(whole.seeds[1].run_dir)
    for seed in (0, 2):
        assert_same_run(again.seeds[seed], whole.seeds[seed])


def test_remedy_that_needs_another_program_ends_only_its_seed(tmp_path: Path) -> None:
    config = together(fault=storm(iterations=None), remedies=["raise_precision"], ladder={"enabled": True})
    result = TrainingLoop(config, tmp_path).run()
    assert endings(result) == ["completed", "needs_own_program", "completed"]
    left = read_result(tmp_path / "seed-1")
    assert left is not None
    assert (left["exit_code"], left["rollbacks"]) == (11, 0)
    assert re.search(r"continue alone, .*resume=\S*seed-1: its next remedy is raise_precision", left["advice"])
    assert read_result(tmp_path)["stop_reason"] == "needs_own_program"  # type: ignore[index]


def test_fleet_that_a_callback_stops_ends_in_the_same_bits_when_it_is_resumed(healthy: Trained, tmp_path: Path) -> None:
    """The callback gets the rows of each seed; the seeds after the one that stopped the fleet have theirs too."""
    _, whole = healthy
    seen: list[tuple[int, int]] = []

    def callback(step: int, row: dict[str, Any]) -> bool:
        seen.append((step, row["seed"]))
        return len(seen) == 5

    first = TrainingLoop(together(), tmp_path, callback).run()
    assert seen == [(step * ITERATION, seed) for step in (1, 2) for seed in range(3)]
    assert {(own.stop_reason, own.step) for own in first.seeds} == {(StopReason.stopped, 2 * ITERATION)}
    again = TrainingLoop(together(resume=str(tmp_path)), tmp_path).run()
    assert again.stop_reason is StopReason.completed
    for ours, theirs in zip(again.seeds, whole.seeds, strict=True):
        assert_same_run(ours, theirs)


def test_folder_of_a_fleet_is_used_by_one_process(healthy: Trained, tmp_path: Path) -> None:
    used = pytest.raises(ConfigError, match=r"seed-0 is in use by process")
    with contextlib.closing(TrainingLoop(together(), tmp_path)), used:
        TrainingLoop(together(resume="auto"), tmp_path)
    for others in ({}, {"seed": 40}, {"seeds": 1}):
        with pytest.raises(ConfigError, match=r"^hydra.run.dir: .* already holds a run; set resume=auto"):
            TrainingLoop(together(**others), healthy[1].run_dir)


def test_seed_with_an_older_checkpoint_catches_up_first(healthy: Trained, tmp_path: Path) -> None:
    """As after a kill: the last checkpoint of seed 1 is of its fifth iteration, the others are at their eighth."""
    _, whole = healthy

    def stop_at(iteration: int, folder: Path, resume: str | None) -> Result:
        return TrainingLoop(together(resume=resume), folder, lambda step, _: step == iteration * ITERATION).run()

    stop_at(5, tmp_path, None)
    shutil.copytree(tmp_path / "seed-1", tmp_path / "kept")
    stop_at(8, tmp_path, str(tmp_path))
    shutil.rmtree(tmp_path / "seed-1")
    (tmp_path / "kept").rename(tmp_path / "seed-1")
    again = TrainingLoop(together(resume="auto"), tmp_path).run()
    for ours, theirs in zip(again.seeds, whole.seeds, strict=True):
        assert (ours.stop_reason, ours.step) == (StopReason.completed, 10 * ITERATION)
        assert_same_run(ours, theirs)


def test_error_of_one_seed_ends_only_that_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Seed] = []

    def fail(run: Seed, *args: Any) -> Any:
        if run.config.seed == 1:
            asked.append(run)
            if len(asked) == 3:
                raise OSError("the disk of this one is on fire")
        return finish_iteration(run, *args)

    monkeypatch.setattr(loop, "finish_iteration", fail)
    result = TrainingLoop(together(), tmp_path).run()
    assert endings(result) == ["completed", "error", "completed"]
    assert (result.stop_reason.exit_code, len(asked)) == (1, 3)
    assert "the disk of this one is on fire" in capsys.readouterr().err
    errors = [event for event in lines(tmp_path / "seed-1" / "events.jsonl") if event["kind"] == "error"]
    assert [event["message"] for event in errors] == ["OSError: the disk of this one is on fire"]


def test_seed_of_a_fleet_can_be_resumed_alone(tmp_path: Path) -> None:
    TrainingLoop(together(total_steps=5 * ITERATION), tmp_path).run()
    config = together(total_steps=7 * ITERATION).of_seed(1, "alone").model_copy(update={"resume": "auto"})
    runner = TrainingLoop(config, tmp_path / "seed-1")
    assert runner.single.host.step == 5 * ITERATION
    assert runner.run().step == 7 * ITERATION


@pytest.mark.parametrize(
    ("made_by", "resumed_by", "complaint"),
    [
        (3, 1, "seeds: .* holds a run of 3 seeds, not of 1; set seeds=3"),
        (1, 3, "seeds: .* holds a run of a single seed, not of 3; set seeds=1"),
    ],
)
def test_resume_with_another_number_of_seeds_is_an_error(
    tmp_path: Path, made_by: int, resumed_by: int, complaint: str
) -> None:
    TrainingLoop(together(made_by, total_steps=ITERATION), tmp_path).run()
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ConfigError, match=complaint):
        TrainingLoop(together(resumed_by, resume=str(tmp_path)), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_resume_that_leaves_out_a_seed_is_an_error(healthy: Trained, tmp_path: Path) -> None:
    _, result = healthy
    shutil.copytree(result.run_dir, tmp_path / "run")
    left = (tmp_path / "run" / "config.yaml").read_text()
    for others in ({"seed": 40}, {"seeds": 2}, {"seed": 1}):
        with pytest.raises(ConfigError, match=r"^seeds: .* holds seeds 0 to 2, .*; set seed=0 seeds=3, or more$"):
            TrainingLoop(together(resume="auto", **others), tmp_path / "run")
    assert (tmp_path / "run" / "config.yaml").read_text() == left
    assert not (tmp_path / "run" / "seed-40").exists()


def test_fleet_whose_folder_is_replaced_keeps_the_result_in_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fleet = TrainingLoop(together(2, total_steps=4 * ITERATION), folder)
    fleet.advance()
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    (folder / "result.json").write_text("of another run")
    assert fleet.run().stop_reason is StopReason.not_saved
    assert (folder / "result.json").read_text() == "of another run"


def test_seeds_train_on_the_first_of_several_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = TrainingLoop(together(2, devices=None, logging={"console": "lines"}), tmp_path)
    homes = {home for seed in fleet.seeds.values() for x in jax.tree.leaves(seed.state) for home in x.devices()}
    fleet.close()
    assert homes == {jax.devices()[0]}
    assert f"1 of {jax.device_count()} devices trains all 2 seeds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"seeds": 0}, "^seeds: "),
        ({"seeds": 100_000}, "^seeds: input should be less than or equal to 1000, got 100000$"),
        ({"seeds": 2, "devices": 2}, "^devices: 2 devices cannot train seeds=2 together; train the seeds on one "),
        ({"seeds": 2, "seed": 2**32 - 1}, r"^seeds: the last of 2 seeds from seed=4294967295 must be below 2\*\*32"),
        ({"fault": {"site": "counters", "seed": 1}}, "^fault.seed: must be null: a fault at this site"),
        ({"fault": {"site": "reward", "eval": True, "seed": 0}}, "^fault.seed: must be null: a fault at this site"),
    ],
)
def test_seeds_and_faults_that_cannot_train_together_are_rejected(sections: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        tiny_config(**sections)


class Refused:
    """A program that runs out of memory once, after its arrays were donated."""

    def __init__(self, executable: Any, calls: list[int]):
        self._executable = executable
        self._calls = calls

    def memory_analysis(self) -> Any:
        return self._executable.memory_analysis()

    def __call__(self, states: Any) -> Any:
        self._calls.append(len(self._calls))
        if len(self._calls) == 9:  # seed 1 has ended by then
            jax.tree.map(lambda leaf: leaf.delete(), states)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
        return self._executable(states)


@pytest.mark.slow
def test_seeds_saved_with_different_memory_plans_take_the_smallest(tmp_path: Path) -> None:
    TrainingLoop(together(), tmp_path, lambda *_: True).run()
    fleet = TrainingLoop(together(resume="auto"), tmp_path)
    fleet.seeds[1].take_plan(MemoryPlan(gradient_accumulation=2))
    fleet.seeds[2].take_plan(MemoryPlan(num_envs=4))
    fleet._seeds.agree_on_program(fleet.seeds[1].level)
    assert {str(run.host.plan) for run in fleet.seeds.values()} == {"gradient_accumulation 2, num_envs 4"}
    assert {run.state.env_state.done.shape for run in fleet.seeds.values()} == {(4,)}
    assert len({run.programs.key(run.host) for run in fleet.seeds.values()}) == 1
    fleet.close()


@pytest.mark.slow
def test_out_of_memory_while_training_takes_all_seeds_back_to_a_smaller_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    compiled: Callable[..., Program] = TrainingSetup.compiled

    def refusing(self: TrainingSetup, *states: Any) -> Program:
        program = compiled(self, *states)
        return program._replace(executable=Refused(program.executable, calls))

    monkeypatch.setattr(TrainingSetup, "compiled", refusing)
    supervise = {"recovery": {"attempts": 0, "every": 2}, "ladder": OFF, "incident": OFF}
    config = together(fault=storm(iterations=None), supervise=supervise)
    result = TrainingLoop(config, tmp_path).run()
    assert endings(result) == ["completed", "physics_unstable", "completed"]
    plans = {
        seed: [event["plan"] for event in lines(tmp_path / f"seed-{seed}" / "events.jsonl") if "plan" in event]
        for seed in range(3)
    }
    assert plans[0] == plans[2] != [] and plans[1] == []
