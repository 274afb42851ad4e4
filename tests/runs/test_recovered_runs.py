"""Runs that fail go back, retry with a remedy and complete, and in parts they end in the same bits."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import ITERATION, OFF, storm, story, train, until
from saved import checkpoint, events, require_same_checkpoint, result, rows
from test_endings import UPDATES, scripted

from rlstable import load_policy
from rlstable.io.outcome import outcome_of
from rlstable.report.page import page
from rlstable.report.run_record import read_record
from rlstable.runner.seeds import Result
from rlstable.supervise.incident import read
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
RATE = 3e-3  # learning rate
START, TOTAL = 40, 60  # of a collapse
# Each iteration has 16 episodes, one look of the watch, and only the watch detects a policy that one update has ruined.
COLLAPSE: dict[str, Any] = {
    "guards": {
        "limiters": {"kl": None, "update_norm": None}, "policy": OFF, "value_loss": OFF, "spike": OFF,
    },
    "env": {"name": "toys:Target", "episode_length": 4}, "total_steps": TOTAL * ITERATION,
    "ppo": {"learning_rate": 5e-3, "entropy_cost": 1e-3, "discounting": 0.5, "num_updates_per_batch": 4},
    "fault": {"site": "learning_rate", "value": 1000.0, "start": START, "iterations": 1},
    "eval": {"num_evals": 2, "num_envs": 64}, "checkpoint": {"asynchronous": False}, "recovery": {},
}  # fmt: skip
PRECISION: dict[str, Any] = {
    "fault": storm(below="x64"),
    "supervise": {
        "recovery": {"every": 2, "remedies": ["fresh_resets", "raise_precision"], "relax_after": 100}, "incident": OFF,
    },
}  # fmt: skip
NATIVE = {"name": "ball:Stick", "backend": "native"}
RUNS: dict[str, dict[str, Any]] = {
    "storm": {
        "fault": storm(iterations=7), "total_steps": 20 * ITERATION, "eval": {"num_evals": 2, "num_envs": 4},
        "recovery": {"every": 2, "relax_after": 4, "remedies": ["fresh_resets", {"scale_learning_rate": 0.5}]},
        "checkpoint": {"every": 2, "asynchronous": False},
    },
    # The last good state is not the last checkpoint, because it was kept before it, or because it was good enough.
    "storm between two copies": {
        "fault": storm(start=6, iterations=4), "total_steps": 14 * ITERATION, "checkpoint": {"asynchronous": False},
        "recovery": {"every": 4, "relax_after": 100},
    },
    "no update between two copies": {
        "guards": UPDATES, "fault": {"site": "gradient", "probability": 1.0, "start": 5, "iterations": 4},
        "total_steps": 14 * ITERATION, "recovery": {"every": 1, "relax_after": 100},
    },
    "no update to the end": {"guards": UPDATES, "fault": {"site": "gradient", "probability": 1.0, "start": 2}},
    "bad and good iterations": {
        "more_guards": scripted(1, 2, 3, 6, 7, 8), "total_steps": 10 * ITERATION,
        "recovery": {"attempts": 1, "every": 5}, "checkpoint": {"asynchronous": False},
    },
    "draws from the pool": {
        "env": {"reset": "pool", "reset_pool_refresh": 2, "reset_pool_size": 8}, "ppo": {"num_resets_per_eval": 1},
        "eval": {"num_evals": 2, "num_envs": 4}, "fault": {"site": "reward", "probability": 0.05, "start": 2},
    },
    "collapse": COLLAPSE,
    # A critic that hardly learns, with raw advantages.
    "lagging critic": {
        "guards": {}, "env": COLLAPSE["env"], "total_steps": 60 * ITERATION,
        "ppo": {"learning_rate": 1e-5, "reward_scaling": 10.0, "discounting": 0.9},
        "recovery": {"relax_after": 5}, "checkpoint": {"asynchronous": False},
    },
    "precision": PRECISION,
    "incidents": {
        "env": {"kwargs": {"fault": "physics", "probability": 0.02}}, "total_steps": 6 * ITERATION,
        "supervise": {"recovery": OFF, "incident": {"window": 2}},
    },
    "recurrent": {
        "env": {"kwargs": {"fault": "physics", "probability": 0.02}}, "total_steps": 6 * ITERATION,
        "supervise": {"recovery": OFF, "incident": {"window": 2}}, "network": {"recurrent": "gru", "recurrent_size": 4},
    },
    "two devices": {"devices": 2, "eval": {"num_evals": 2, "num_envs": 4}},
    "native physics": {"env": NATIVE, "eval": {"num_evals": 2, "num_envs": 4}},
    "native physics on two devices": {"env": NATIVE, "devices": 2, "eval": {"num_evals": 2, "num_envs": 4}},
}  # fmt: skip


Whole = Callable[[str], Path]
# Rows of the whole runs at which the last checkpoint is of the good state, before the storm and after each rollback.
GOOD = {"storm": (3, 7, 10), "precision": (4, 7)}
_seen: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in GOOD}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The folder of an uninterrupted run."""

    @functools.cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")

        def look(step: int, _: Any) -> None:
            if step // ITERATION in GOOD.get(name, ()):
                _seen[name].append(checkpoint(folder)[0])

        return train(folder, look, **RUNS[name]).run_dir

    return run


def good_states(whole: Whole, name: str) -> list[dict[str, np.ndarray]]:
    """The arrays of the good state, before the storm and after each rollback to it."""
    whole(name)
    assert len(_seen[name]) == len(GOOD[name])
    return _seen[name]


def incidents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("incidents/*"))


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("storm", (7,)),  # the first row after a rollback
        pytest.param("storm", (2, 5, 12, 20), marks=pytest.mark.slow),
        pytest.param("storm between two copies", (6, 7), marks=pytest.mark.slow),
        pytest.param("no update between two copies", (6, 7), marks=pytest.mark.slow),
        ("no update to the end", (3,)),
        pytest.param("bad and good iterations", (4,), marks=pytest.mark.slow),
        ("draws from the pool", (4,)),  # where a reset of all environments and a refill are due
        ("collapse", (START + 2,)),
        ("lagging critic", (52,)),  # while the remedy is in effect
        pytest.param("collapse", (30, 47), marks=pytest.mark.slow),
        pytest.param("precision", (8,), marks=pytest.mark.slow),
        ("incidents", (3,)),
        ("recurrent", (3,)),
        ("two devices", (3,)),
        pytest.param("native physics", (2,), marks=pytest.mark.slow),
        pytest.param("native physics on two devices", (2,), marks=pytest.mark.slow),
    ],
)
def test_run_in_parts_ends_in_the_same_bits_as_the_whole_run(
    tmp_path: Path, whole: Whole, name: str, cuts: tuple[int, ...]
) -> None:
    """Each part stops at a row; the state of a storm is not saved, so that the next part starts before it."""
    for cut in cuts:
        part = train(tmp_path, until(cut), resume="auto", **RUNS[name])
        assert part.stop_reason in (StopReason.stopped, StopReason.not_saved)
    train(tmp_path, resume="auto", **RUNS[name])
    other = whole(name)
    require_same_checkpoint(checkpoint(tmp_path), checkpoint(other))
    assert rows(tmp_path) == rows(other)
    assert story(tmp_path) == story(other)
    for key in ("stop_reason", "step", "return", "best_return", "rollbacks", "warnings", "signs"):
        assert result(tmp_path).get(key) == result(other).get(key), key
    assert incidents(tmp_path) == incidents(other)
    for incident in incidents(other):
        ours, theirs = (read(folder / "incidents" / incident).arrays for folder in (tmp_path, other))
        for path, array in theirs.items():
            np.testing.assert_array_equal(ours[path], array)


# --- storms


def test_storm_is_survived_by_two_attempts_and_a_remedy_that_is_taken_back(whole: Whole) -> None:
    folder = whole("storm")
    left = result(folder)
    assert (left["stop_reason"], left["step"], left["rollbacks"]) == ("completed", 20 * ITERATION, 2)
    assert story(folder) == [
        "6: physics_unstable: fresh_resets, back to 2",
        "9: physics_unstable: scale_learning_rate 0.5, back to 2",
        "14: scale_learning_rate 0.5 taken back",
    ]
    assert [event["lost_steps"] for event in events(folder, "rolled_back")] == [4 * ITERATION, 3 * ITERATION]
    logged = rows(folder)
    assert [row["step"] for row in logged] == [ITERATION * n for n in range(1, 28)], "steps never run backwards"
    assert [row["supervise/rollbacks"] for row in logged] == [0] * 6 + [1] * 3 + [2] * 18
    assert [row["training/iteration"] for row in logged] == [1, 2, 3, 4, 5, 6, 3, 4, 5, *range(3, 21)]
    rates = {n: row["training/learning_rate"] for n, row in enumerate(logged, 1) if row["training/accepted_share"] > 0}
    for numbers, rate in ((range(1, 4), RATE), (range(11, 15), RATE / 2), (range(15, 28), RATE)):
        np.testing.assert_allclose([rates[n] for n in numbers], rate, rtol=1e-6)
    assert np.isfinite(load_policy(folder).act(np.zeros(4, np.float32))).all()


def test_every_attempt_has_other_random_numbers(whole: Whole) -> None:
    for ours, theirs in itertools.combinations(good_states(whole, "storm"), 2):
        differing = {path.split("/")[0] for path in ours if not np.array_equal(ours[path], theirs[path])}
        assert {"key", "env_state"} <= differing and not {"params", "opt_state", "normalizer"} & differing


def test_crash_in_the_middle_of_an_attempt_neither_loses_nor_repeats_the_attempt(tmp_path: Path) -> None:
    def crash(step: int, row: dict[str, Any]) -> None:
        if row["supervise/rollbacks"] == 2:
            raise KeyError("a fault on purpose")

    never_ends = RUNS["storm"] | {"fault": storm(), "recovery": RUNS["storm"]["recovery"] | {"attempts": 3}}
    with pytest.raises(KeyError):
        train(tmp_path, crash, **never_ends)
    assert train(tmp_path, resume="auto", **never_ends).stop_reason is StopReason.physics_unstable
    assert [event["attempt"] for event in events(tmp_path, "rolled_back")] == [1, 2, 3]


def test_recovery_does_not_change_a_healthy_run(tmp_path: Path) -> None:
    arrays = []
    for name, recovery in (("on", {}), ("off", None)):
        train(tmp_path / name, fault=storm(start=1000), recovery=recovery)
        arrays.append(checkpoint(tmp_path / name)[0])
    shared = arrays[0].keys() & arrays[1].keys()  # without the states that are kept for a rollback
    assert len(shared) > 40
    for path in shared:
        np.testing.assert_array_equal(arrays[0][path], arrays[1][path])


# --- collapses of the return


def returns(folder: Path, start: int = 0, end: int | None = None) -> float:
    return float(np.mean([row["episode/sum_reward"] for row in rows(folder)[start:end]]))


def test_without_recovery_a_collapsed_policy_is_lost(tmp_path: Path) -> None:
    train(tmp_path, **COLLAPSE | {"recovery": None})
    assert returns(tmp_path, START - 10, START) > 3.0 and returns(tmp_path, -10) < 1.0
    assert story(tmp_path) == [] and result(tmp_path)["stop_reason"] == "completed"


def test_collapse_is_confirmed_rolled_back_to_the_best_state_and_the_critic_refitted(whole: Whole) -> None:
    folder = whole("collapse")
    left = result(folder)
    assert (left["stop_reason"], left["step"], left["rollbacks"]) == ("completed", TOTAL * ITERATION, 1)
    assert returns(folder, -10) > 0.8 * returns(folder, START - 10, START)
    tripped, collapsed, back = events(folder, "guard_tripped", "return_collapsed", "rolled_back")
    assert (tripped["guard"], tripped["collapsed"], back["remedy"]) == ("return_watch", 1, "refit_critic 10")
    assert collapsed["return"] < 1.0 < 3.0 < collapsed["best_return"]
    assert collapsed["best_iteration"] == back["to_iteration"] <= START
    at = collapsed["step"] // ITERATION
    assert START + 4 <= at <= START + 8  # at least four looks, and not many more
    logged = rows(folder)
    assert [row["guards/return_watch/trips"] for row in logged] == [0] * (at - 1) + [1] * (len(logged) - at + 1)
    after = logged[back["step"] // ITERATION :]
    assert all(row["training/learning_rate"] == 0.0 < row["training/value_learning_rate"] for row in after[:10])
    assert all(row["training/learning_rate"] > 0.0 for row in after[10:])


def test_lagging_critic_learns_faster_until_the_remedy_is_taken_back(whole: Whole) -> None:
    folder = whole("lagging critic")
    remedied = ["50: critic_behind: scale_critic_rate 10", "55: scale_critic_rate 10 taken back"]
    assert story(folder) == [*remedied, "60: fall of the return refuted"]
    rates = [row["training/value_learning_rate"] / row["training/learning_rate"] for row in rows(folder)]
    assert rates == pytest.approx([1.0] * 50 + [10.0] * 5 + [1.0] * 5)
    assert result(folder)["rollbacks"] == 0


def test_return_that_collapses_again_ends_the_run_by_name_with_its_best_policy(tmp_path: Path) -> None:
    again = {"recovery": {"attempts": 1}, "fault": COLLAPSE["fault"] | {"iterations": None}}
    assert train(tmp_path, **COLLAPSE | again).stop_reason is StopReason.policy_collapsed
    left, last = result(tmp_path), events(tmp_path, "return_collapsed")[-1]
    assert (left["exit_code"], left["cause"], left["rollbacks"]) == (12, "policy_collapsed", 1)
    assert "guards.return_watch.tolerance" in left["advice"]
    assert (left["last_return"], left["fallen_return"]) == (last["best_return"], last["return"])
    assert left["return"] == left["confirmed_return"] <= left["best_return"]
    assert left["policy_iteration"] == last["best_iteration"]
    assert float(load_policy(tmp_path, "latest").act(np.zeros(2, np.float32))[0]) == pytest.approx(0.6, abs=0.3)


def test_run_that_falls_at_its_end_has_one_outcome_on_console_page_and_result(tmp_path: Path) -> None:
    late = {"fault": COLLAPSE["fault"] | {"start": TOTAL - 2}, "logging": {"console": "lines"}}
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        done: Result = train(tmp_path, **COLLAPSE | late)
    left = result(tmp_path)
    (collapsed,) = events(tmp_path, "return_collapsed")
    assert (left["policy_iteration"], left["fallen_return"]) == (collapsed["best_iteration"], collapsed["return"])
    assert left["fallen_return"] < left["return"] == done.policy_return
    outcome = outcome_of(left).return_text
    policy = f"iteration {left['policy_iteration']}, step {left['policy_step']:,}; "
    policy += f"the last state had fallen to {left['fallen_return']:,.1f}"
    printed = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert f"return {outcome}" in printed and f"policy {policy}" in printed
    assert f"Return: {outcome}. Policy: {policy}." in page([read_record(tmp_path)])


@pytest.mark.slow
def test_reward_that_drops_by_half_is_no_collapse_of_the_policy(tmp_path: Path) -> None:
    drops = COLLAPSE["env"] | {"kwargs": {"drop_at": 8 * START}}
    train(tmp_path, **COLLAPSE | {"env": drops, "fault": {"site": "reward", "start": 1000}})
    assert returns(tmp_path, -10) < 0.6 * returns(tmp_path, START - 10, START)
    (told,) = story(tmp_path)
    assert re.fullmatch(r"4\d: fall of the return refuted", told)


# --- precision


def dtypes(folder: Path) -> set[str]:
    return {str(array.dtype) for array in checkpoint(folder)[0].values()}


def test_storm_that_float64_cures_raises_the_precision_and_completes(whole: Whole) -> None:
    """On a CPU all levels except x64 give the same products."""
    folder = whole("precision")
    assert story(folder) == ["6: default/float32 to x64/float32", "6: physics_unstable: raise_precision, back to 3"]
    assert result(folder)["stop_reason"] == "completed" and "float64" in dtypes(folder)
    assert np.isfinite(load_policy(folder).act(np.zeros(4, np.float32))).all()


def test_change_of_precision_keeps_parameters_and_optimizer_of_the_good_state(whole: Whole) -> None:
    found = good_states(whole, "precision")
    kept = [path for path in found[0] if path.startswith(("params", "opt_state", "normalizer", "counters"))]
    assert len(kept) > 10
    for path in kept:
        np.testing.assert_array_equal(found[0][path], found[1][path])
    assert "float64" in {str(array.dtype) for array in found[1].values()}


@pytest.mark.slow
def test_precision_typed_on_resume_is_not_raised(tmp_path: Path) -> None:
    train(tmp_path, until(8), **PRECISION)
    typed = {"precision": {"matmul": "highest"}, "fault": storm(below="highest"), "resume": "auto"}
    assert train(tmp_path, **PRECISION | typed).stop_reason is StopReason.completed
    assert "float64" not in dtypes(tmp_path)


@pytest.mark.slow
def test_each_precision_compiles_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recovery = PRECISION["supervise"]["recovery"] | {"relax_after": 3, "attempts": 20}
    supervise = PRECISION["supervise"] | {"recovery": recovery}
    sections = PRECISION | {"supervise": supervise, "total_steps": 20 * ITERATION, "logging": {"console": "lines"}}
    assert train(tmp_path, **sections).stop_reason is StopReason.completed
    levels = [event["level"].split("/")[0] for event in events(tmp_path, "precision_changed")]
    assert levels[:4] == ["x64", "default", "x64", "default"]
    assert capsys.readouterr().out.count("compiled training") == 2


# --- incidents and signs


def test_run_saves_one_incident_per_window_with_environment_step_and_cause(whole: Whole) -> None:
    folder = whole("incidents")
    told = events(folder, "incident")
    assert sorted(Path(event["path"]).name for event in told) == incidents(folder)
    iterations = sorted(int(name.split("-")[0]) for name in incidents(folder))
    expected: list[int] = []
    for tripped in sorted({event["step"] // ITERATION for event in events(folder, "guard_tripped")}):
        expected += [tripped] * (not expected or tripped >= expected[-1] + 2)
    assert iterations == expected and len(iterations) >= 2
    assert told[0]["causes"][0] == "quarantine/physics"
    assert told[0]["first"] == "pipeline_state/q[0] = nan (not finite)"
    found = read(Path(told[0]["path"]))
    facts = found.facts
    assert (facts["seed"], facts["fault"], facts["versions"]["rlstable"]) == (0, None, "0.1.0")
    assert 0 <= facts["environment"] < 8 and 0 <= facts["unroll"] < 2 and 0 <= facts["step"] < 4
    np.testing.assert_array_equal(found.arrays["action"], found.arrays["after/pipeline_state/warm_start"])


def test_checkpoint_does_not_depend_on_whether_incidents_are_on(tmp_path: Path) -> None:
    train(tmp_path, until(2), **RUNS["incidents"])
    off = RUNS["incidents"] | {"supervise": {"recovery": OFF, "incident": OFF}}
    assert train(tmp_path, resume="auto", **off).history[-1]["step"] == 6 * ITERATION


def test_sign_of_trouble_is_an_event_and_stands_in_the_result_and_on_the_page(whole: Whole) -> None:
    folder = whole("lagging critic")
    (event,) = [event for event in events(folder, "sign") if event["sign"] == "critic_behind"]
    assert event["step"] == 50 * ITERATION
    sign = result(folder)["signs"][event["sign"]]
    assert (sign["text"], sign["first_step"]) == (event["text"], event["step"])
    assert f"<li><strong>{event['sign']}</strong>, step {event['step']:,}" in page([read_record(folder)])
