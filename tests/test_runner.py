"""The host loop of one run: its files, its stop reasons and its exact resume."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from saved import events, lines
from short_runs import short_config
from toys import LIMITERS_OFF

from rlstable.config import Config, ConfigError
from rlstable.device import hosts
from rlstable.device.counter import WideCounter
from rlstable.device.mesh import make_mesh
from rlstable.device.precision import SINGLE
from rlstable.io.run_folder import read_result, steps_in
from rlstable.listeners import listeners_of
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.programs import mesh_of
from rlstable.runner.seeds import Result
from rlstable.runner.setup import Program
from rlstable.runner.stopping import StopRequest
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ITERATION = 64  # environment steps of `tiny_config`: 16 unrolls of 4
OFF = {"enabled": False}
Trained = tuple[TrainingLoop, Result]


def quick(**sections: Any) -> Config:
    """A run of a few iterations on one device."""
    return short_config(**{"total_steps": 4 * ITERATION, "eval": {"num_evals": 2, "num_envs": 4}} | sections)


def limited(seconds: float) -> dict[str, Any]:
    return {"recovery": OFF, "incident": OFF, "max_wall_time": seconds}


def leaves(state: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One complete run, read by several tests."""
    listeners = listeners_of(quick().render, quick().logging)
    runner = TrainingLoop(quick(), tmp_path_factory.mktemp("run"), listeners=listeners)
    return runner, runner.run()


def test_run_completes_and_writes_its_result(run: Trained) -> None:
    _, result = run
    assert result.stop_reason is StopReason.completed
    assert result.step == 4 * ITERATION
    left = read_result(result.run_dir)
    assert left is not None
    assert (left["stop_reason"], left["exit_code"], left["step"]) == ("completed", 0, 4 * ITERATION)
    assert left["last_return"] == result.metrics["eval/episode_reward"]
    assert left["return"] == left["confirmed_return"] == result.policy_return


def test_run_folder_has_these_files_rows_and_events(run: Trained) -> None:
    _, result = run
    names = {path.name for path in result.run_dir.iterdir()}
    files = {"config.yaml", "machine.json", "metrics.jsonl", "events.jsonl", "result.json", "report.html"}
    assert names == files | {"checkpoints"}
    rows = lines(result.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [64, 128, 192, 256]
    assert [row["step"] for row in rows if "eval/episode_reward" in row] == [128, 256]
    assert lines(result.run_dir / "events.jsonl")[-1]["kind"] == "stopped"


def test_every_health_metric_is_logged_and_finite(run: Trained) -> None:
    _, result = run
    row = next(row for row in reversed(result.history) if "episode/length" in row and "eval/episode_reward" in row)
    wanted = [
        *(f"training/{name}" for name in (
            "grad_norm", "update_norm", "kl_mean", "policy_distance", "clip_fraction",
            "explained_variance", "entropy", "learning_rate", "value_learning_rate",
            "policy_dist_min_std", "policy_dist_mean_std", "policy_dist_max_std", "valid_share", "sps", "walltime",
            "total_loss", "policy_loss", "v_loss", "accepted_share", "updates", "episodes",
        )),
        *(f"guards/{name}/trips" for name in (
            "quarantine", "finite_samples", "finite_update", "spike", "finite_state", "storm",
            "value_loss", "policy",
        )),
        *(f"eval/{name}" for name in ("episode_reward", "episode_reward_std", "avg_episode_length", "aborted_share")),
        "episode/sum_reward", "episode/length", "memory/host_mb",
    ]  # fmt: skip
    for name in wanted:
        assert name in row, name
        assert np.isfinite(row[name]), name
    assert result.history[-1]["training/updates"] == 4 * 2 * 2
    assert row["guards/quarantine/trips"] == 0


def test_default_limiters_are_idle_and_limiters_that_are_off_report_nothing(tmp_path: Path, run: Trained) -> None:
    idle = {name: value for name, value in run[1].history[-1].items() if name.startswith("limiters/")}
    assert idle == {
        f"limiters/{name}/active": 0.0
        for name in (
            "reward_outlier", "observation", "observation_outlier", "observation_shift", "advantage_std", "value_range",
            "log_ratio", "policy_std", "kl", "gradient_norm", "update_norm", "normalizer",
        )
    }  # fmt: skip
    row = TrainingLoop(quick(guards={"limiters": LIMITERS_OFF}, eval={"num_evals": 0}), tmp_path).run().history[-1]
    assert not [name for name in row if name.startswith("limiters/")]


def test_range_of_rewards_is_kept_from_iteration_to_iteration(run: Trained) -> None:
    runner, result = run
    least, greatest = runner.single.state.tuning.reward_range.tolist()
    assert least <= 0.0 <= greatest
    assert max(-least, greatest) == max(row["training/reward_greatest"] for row in result.history) > 0.0


def test_training_counts_steps_beyond_the_limits_of_narrow_counters(tmp_path: Path) -> None:
    """int32 wraps at 2^31, and float64 loses single steps at 2^53."""
    start = 2**53 - 1000
    total = start + 32 * ITERATION
    schedule = {"learning_rate_schedule": "linear", "learning_rate_schedule_min_lr": 1e-5}
    config = quick(total_steps=total, eval={"num_evals": 0}, ppo=schedule)
    runner = TrainingLoop(config, tmp_path)
    counters = dataclasses.replace(runner.single.state.counters, env_steps=WideCounter.of(start))
    placed = jax.device_put(counters, runner.single.state.key.sharding)
    runner.single.state = dataclasses.replace(runner.single.state, counters=placed)
    runner.single.host.step = start
    result = runner.run()
    assert result.stop_reason is StopReason.completed
    assert result.step == total
    steps = [row["step"] for row in result.history]
    assert steps == [start + (n + 1) * ITERATION for n in range(32)]
    # The schedule reads the same counter, and nearly the whole run lies before the start.
    assert result.history[-1]["training/learning_rate"] == pytest.approx(1e-5, rel=1e-2)


def test_resume_on_another_number_of_devices_is_an_error(run: Trained) -> None:
    with pytest.raises(ConfigError, match=r"was trained on 1 devices, not on 2, .*; resume it with devices=1"):
        TrainingLoop(quick(devices=2, resume="auto"), run[1].run_dir)


def test_more_devices_than_the_machine_has_are_an_error() -> None:
    with pytest.raises(ConfigError, match="devices: 99 requested, but only 8 cpu available"):
        TrainingLoop(quick(devices=99), "nowhere")


def test_resume_of_a_run_that_reached_its_target_trains_nothing_and_says_how_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(target: float | None, console: str = "off") -> Result:
        sections = {"eval": {"num_evals": 4, "num_envs": 4, "target_return": target}, "logging": {"console": console}}
        return TrainingLoop(quick(resume="auto", **sections), tmp_path).run()

    run(-1e6)
    fields = json.loads((tmp_path / "result.json").read_text())
    again = run(-1e6, "lines")
    assert (again.stop_reason, again.step) == (StopReason.target_reached, ITERATION)
    assert json.loads((tmp_path / "result.json").read_text()) == fields
    line = "nothing to train: eval.target_return=-1000000.0 is already reached; resume with eval.target_return=<more> "
    assert line + "or null\n" in capsys.readouterr().out
    longer = run(None)
    assert (longer.stop_reason, longer.step) == (StopReason.completed, 4 * ITERATION)


def test_exit_of_a_callback_is_announced_to_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced = []
    announce = hosts.announce
    monkeypatch.setattr(hosts, "announce", lambda *ending: announced.append(ending[:3]) or announce(*ending))

    def callback(step: int, row: dict[str, Any]) -> None:
        raise SystemExit("enough")

    with pytest.raises(SystemExit, match="enough"):
        TrainingLoop(quick(), tmp_path, callback).run()
    assert announced == [("error", 1, "process 0: SystemExit: enough")]
    assert read_result(tmp_path)["stop_reason"] == "error"


def test_signal_in_the_middle_of_an_iteration_saves_no_incomplete_state(tmp_path: Path) -> None:
    """A resume would miss the reset, the evaluation or the remedy that belongs to the last iteration."""
    saved: list[list[int]] = []

    def look(*_: Any) -> None:
        runner.single.saving.save_if_due(runner.single.state)
        saved.append(runner.single.checkpoints.all())

    runner = TrainingLoop(quick(eval={"num_evals": 0}), tmp_path, look)
    assert not runner.advance()
    assert saved == [[]]
    runner.single.saving.save_if_due(runner.single.state)
    runner.close()
    assert steps_in(tmp_path / "checkpoints") == [1]


def test_run_ends_before_its_time_limit(tmp_path: Path) -> None:
    """It ends after a complete iteration, saved, with the exit code that makes a queue start it again."""
    config = quick(total_steps=10**9, eval={"num_evals": 0}, supervise=limited(1e5))

    def late(step: int, _: Any) -> None:
        runner._stop_request._started -= 1e5 if step == 3 * ITERATION else 0.0

    runner = TrainingLoop(config, tmp_path, late)
    result = runner.run()
    assert (result.stop_reason, result.stop_reason.exit_code) == (StopReason.time_limit, 75)
    assert result.step == 3 * ITERATION
    assert TrainingLoop(quick(total_steps=10**9, resume="auto"), tmp_path).single.host.step == result.step


def test_run_whose_time_limit_passes_while_compiling_trains_one_iteration(tmp_path: Path) -> None:
    result = TrainingLoop(quick(supervise=limited(1e-3)), tmp_path).run()
    assert (result.stop_reason, result.step) == (StopReason.time_limit, ITERATION)


def test_reset_pool_is_refilled_and_the_environments_are_reset_when_that_is_due(tmp_path: Path) -> None:
    """A reset is due at the end, after which no step was taken."""
    env = {"name": "toys:PointMass", "reset": "pool", "reset_pool_refresh": 2, "reset_pool_size": 8}
    runner = TrainingLoop(quick(env=env, eval={"num_evals": 0}, ppo={"num_resets_per_eval": 1}), tmp_path)
    before = np.asarray(runner.single.state.reset_pool.matrices["float32"])
    runner.run()
    after = np.asarray(runner.single.state.reset_pool.matrices["float32"])
    assert len(runner.single.state.reset_pool) == 8 and before.shape == after.shape
    assert not np.array_equal(before, after)
    assert not np.asarray(runner.single.state.env_state.info["steps"]).any()


def test_nothing_compiles_after_the_first_iteration_and_evaluation(tmp_path: Path) -> None:
    compiled: list[str] = []
    armed = False

    def listen(name: str, *_: Any, **__: Any) -> None:
        if armed and name == "/jax/core/compile/backend_compile_duration":
            compiled.append(name)

    def callback(step: int, row: dict[str, Any]) -> None:
        nonlocal armed
        armed = step >= 4 * ITERATION

    jax.monitoring.register_event_duration_secs_listener(listen)
    config = quick(total_steps=8 * ITERATION, eval={"num_evals": 8, "num_envs": 4}, checkpoint={"every": 1})
    TrainingLoop(config, tmp_path, callback).run()
    assert armed
    assert compiled == []


def test_narrow_networks_keep_float32_parameters(tmp_path: Path) -> None:
    runner = TrainingLoop(quick(precision={"network": "float16"}), tmp_path)
    result = runner.run()
    assert result.stop_reason is StopReason.completed
    trained = (runner.single.state.params, runner.single.state.opt_state, runner.single.state.normalizer)
    assert {str(leaf.dtype) for leaf in leaves(trained) if leaf.dtype.kind == "f"} == {"float32"}
    assert all(np.isfinite(leaf).all() for leaf in leaves(trained))
    row = result.history[-1]
    assert row["training/accepted_share"] == 1.0 and "training/loss_scale" in row
    assert runner.single.setup.ppo.networks.dtype == np.float16


def test_signal_while_the_first_seed_opens_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread ends the run, while the constructor of the loop still compiles the program of resets."""
    save_and_end, found = [], []

    class Request(StopRequest):
        def __init__(self, console: Any, save: Any, *args: Any):
            save_and_end.append(save)
            super().__init__(console, save, *args)

    def first_state(*_: Any, **__: Any) -> None:
        found.append(save_and_end[0](StopReason.preempted))
        raise KeyboardInterrupt

    monkeypatch.setattr("rlstable.runner.loop.StopRequest", Request)
    monkeypatch.setattr("rlstable.runner.setup.TrainingSetup.first_state", first_state)
    with pytest.raises(KeyboardInterrupt):
        TrainingLoop(quick(), tmp_path)
    assert found == [StopReason.preempted]


def test_failing_program_is_logged_and_raises_the_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state was donated to the failed iteration, so no code may read it."""
    runner = TrainingLoop(quick(), tmp_path)

    class Failing:
        def memory_analysis(self) -> None:
            """Unknown."""

        def __call__(self, state: Any) -> Any:
            jax.tree.map(lambda leaf: leaf.delete(), state)
            raise jax.errors.JaxRuntimeError("INTERNAL: the device is on fire")

    monkeypatch.setattr(runner.single.setup, "compiled", lambda _: Program(Failing(), SINGLE))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the device is on fire"):
        runner.run()
    left = read_result(tmp_path)
    assert left is not None
    assert left["stop_reason"] == "error"
    [error, _] = events(tmp_path, "error", "stopped")
    assert (error["kind"], error["message"]) == ("error", "JaxRuntimeError: INTERNAL: the device is on fire")


@pytest.mark.parametrize("schedules", [("linear", "constant"), ("constant", "linear")])
def test_resume_with_another_schedule_trains_with_the_total_that_the_schedule_needs(
    tmp_path: Path, schedules: tuple[str, str]
) -> None:
    """The total belongs to the training state and to its snapshots, but only with a schedule."""
    before, after = schedules
    recovery = {"recovery": {"every": 2}, "incident": OFF}

    def config(schedule: str, iterations: int, **sections: Any) -> Config:
        ppo = {"learning_rate_schedule": schedule, "learning_rate_schedule_min_lr": 1e-3}
        return quick(total_steps=iterations * ITERATION, ppo=ppo, supervise=recovery, **sections)

    TrainingLoop(config(before, 3), tmp_path).run()
    resumed = TrainingLoop(config(after, 6, resume="auto"), tmp_path)
    snapshots = resumed.single.snapshots
    for tuning in (resumed.single.state.tuning, snapshots.last_good._parts["tuning"]):
        total = tuning.total_steps
        assert (None if total is None else int(total)) == (6 * ITERATION if after == "linear" else None)
    rates = [row["training/learning_rate"] for row in resumed.run().history]
    expected = [3e-3 - 2e-3 * i / 6 if after == "linear" else 3e-3 for i in (4, 5, 6)]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


def test_learning_rate_and_epochs_typed_on_resume_take_effect(tmp_path: Path) -> None:
    TrainingLoop(quick(), tmp_path).run()
    other = {"learning_rate": 1e-5, "num_updates_per_batch": 1}
    result = TrainingLoop(quick(ppo=other, resume="auto", total_steps=5 * ITERATION), tmp_path).run()
    assert result.history[-1]["training/learning_rate"] == pytest.approx(1e-5)
    assert result.history[-1]["training/updates"] == 4 * 4 + 2


@pytest.mark.parametrize(
    ("sections", "inline"),
    [
        ({"env": {"backend": "native"}}, True),
        ({"env": {"backend": "spring", "kwargs": {"backend": "native"}}}, True),
        ({"env": {"backend": "spring"}, "eval": {"env_kwargs": {"backend": "auto"}}}, True),
        ({"env": {"backend": "mjx", "kwargs": {"n_frames": 3}}, "eval": {"env_kwargs": {"n_frames": 5}}}, False),
    ],
)
def test_programs_with_native_physics_are_dispatched_inline_from_before_jax_is_first_used(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], inline: bool
) -> None:
    """Both of training and of evaluations: with JAX's default dispatch they could deadlock."""
    order: list[str] = []
    monkeypatch.setattr("rlstable.runner.programs.disable_async_dispatch", lambda: order.append("inline"))
    devices = lambda count: order.append("devices") or make_mesh(count)  # noqa: E731
    monkeypatch.setattr("rlstable.runner.programs.make_mesh", devices)
    config = Config(**{**sections, "env": {"name": "ant", **sections.get("env", {})}})
    mesh_of(config.devices, config.env, config.eval)
    assert order == ["inline"] * inline + ["devices"]
