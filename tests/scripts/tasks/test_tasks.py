"""The study of all tasks: its list of tasks, its page, and the thresholds of `make learn`."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlstable.config import ConfigError
from rlstable.config.defaults import config_dir
from scripts import results
from scripts.process import Outcome
from scripts.study import Run
from scripts.tasks import __main__ as study
from scripts.tasks import learn, page


def row(seed, returns, recipe="a", **more):
    steps = [500_000 * (number + 1) for number in range(len(returns))]
    fields = {"task": "brax:hopper", "recipe": recipe, "name": "cpu", "minutes": 3.1, "handed_over": max(returns)}
    return {**fields, "trips": {}, "seed": seed, "steps": steps, "returns": returns, **more}


def test_every_brax_task_and_the_control_suite_are_listed():
    listed = study.tasks()
    files = {name.stem for name in (config_dir() / "env").glob("*.yaml") if not name.stem.startswith("robot")}
    own = files - {"fast", "gymnasium", "import", "playground"}
    assert {task.name for task in listed.values() if task.source == "brax"} == own
    assert len([task for task in listed.values() if task.source == "playground"]) == 54


def test_command_of_a_task_is_the_plain_one_with_a_model_that_exists():
    listed = study.tasks()
    assert listed["brax:walker2d"].command == ["env=walker2d"]
    assert listed["playground:CheetahRun"].command == ["env=playground", "env.name=CheetahRun"]
    robots = [task for task in listed.values() if task.source == "robot"]
    assert robots and all(Path(task.command[1].removeprefix("env.xml=")).is_file() for task in robots)
    assert listed["robot:ant_velocity"].command[::4] == ["env=robot_velocity", "env.task.actions.damping=10"]


def test_recipe_of_a_robot_does_not_depend_on_the_folder_of_its_model(tmp_path):
    command = study.tasks()["robot:hopper_velocity"].command
    copy = tmp_path / "other.xml"
    copy.write_bytes(Path(command[1].removeprefix("env.xml=")).read_bytes())
    assert study.recipe(command) == study.recipe([command[0], f"env.xml={copy}"])


def test_page_shows_the_newest_recipe_and_marks_it_if_it_has_changed_since():
    now = {**row(0, [1.0]), "recipe": study.recipe(study.tasks()["brax:hopper"].command)}
    older = {**row(1, [2.0]), "recipe": "older"}
    again = {**now, "returns": [3.0]}
    assert page.latest([older, now, again], "brax:hopper") == [again]
    assert not study.stale([], "brax:hopper") and not study.stale([older, now], "brax:hopper")
    assert study.stale([now, older], "brax:hopper")
    assert study.recipe(["env=hopper", "ppo.discounting=0.5"]) != now["recipe"]


def test_every_threshold_is_far_above_what_a_trivial_policy_returns():
    listed = study.tasks()
    for name, wanted in yaml.safe_load((study.FOLDER / "learn.yaml").read_text())["tasks"].items():
        low, high = wanted["mean"]
        assert 1.5 * (listed[name].trivial or 0) <= wanted["least"] <= low < high


def test_share_of_the_best_counts_from_the_first_return_if_returns_are_negative():
    np.testing.assert_allclose(page.kept(np.array([-10.0, 0.0, -2.0])), [0.0, 1.0, 0.8])
    np.testing.assert_allclose(page.kept(np.array([5.0, 10.0, 2.0])), [0.5, 1.0, 0.2])
    np.testing.assert_allclose(page.kept(np.array([0.0, 0.0])), [1.0, 1.0])
    # A task with a greatest return: the fall is after a best return, though the last one is greater by rounding.
    assert page.fell(np.array([0.9999, 0.4, 1.0])) and not page.fell(np.array([0.9, 0.4, 1.0, 0.81]))


def test_seed_that_learned_next_to_nothing_is_stuck_and_cannot_fall():
    curves = [np.array([0.0, 100.0, 90.0]), np.array([0.0, 9.0, 0.0]), np.array([0.0, 50.0, 0.0])]
    assert page.stuck(curves).tolist() == [False, True, False] and page.falls(curves) == (1, 1)
    assert page.stuck([np.array([-50.0, -10.0]), np.array([-50.0, -47.0])]).tolist() == [False, True]


def test_last_return_is_compared_with_the_policy_handed_over_not_with_the_luckiest_evaluation():
    lucky, fallen = row(0, [0.0, 130.0, 95.0], handed_over=100.0), row(1, [0.0, 130.0, 95.0], handed_over=125.0)
    assert page.lost([lucky, fallen]) == 1 and page.falls([page.returns_of(lucky), page.returns_of(fallen)]) == (2, 2)
    negative = [row(seed, [-300.0, -100.0, last], handed_over=-100.0) for seed, last in enumerate((-139.0, -141.0))]
    assert page.lost(negative) == 1  # 200 was gained, of which 160 must stay
    assert page.lost([row(0, [0.0, 100.0]), row(1, [0.0, 0.0], handed_over=9.0)]) == 0  # learned nothing, lost nothing
    unlucky, again = row(0, [0.0, 130.0, 75.0], handed_over=100.0), row(1, [0.0, 130.0, 95.0], handed_over=100.0)
    assert page.lost([{**unlucky, "last_again": 85.0}, {**again, "last_again": 75.0}]) == 1


def test_curve_has_no_gaps_and_seeds_with_different_numbers_of_evaluations_are_drawn():
    np.testing.assert_array_equal(page.returns_of(row(0, [3.0, 7.0]) | {"returns": [3.0, None, 7.0]}), [3.0, 0.0, 7.0])
    assert page.sparkline([np.array([0.0, 4.0, 8.0]), np.array([0.0, 0.0, 0.0, 0.0, 8.0])]) == "▁▃█"


@pytest.mark.parametrize(
    ("returns", "least", "reached"),
    [((9.0, 11.0), 5.0, True), ((9.0, 11.0), 7.0, False), ((8.0, 9.0), 5.0, False), ((None, 30.0), 5.0, False)],
)
def test_threshold_is_reached_by_the_mean_last_return_and_the_least_handed_over(returns, least, reached):
    rows = [{"returns": [0.0, value], "handed_over": 6.0} for value in returns]
    assert learn.judge(rows, {"mean": [10.0, 12.0], "least": least}) is reached


def test_missed_threshold_is_named_and_stays_in_the_history(tmp_path, capsys):
    wanted = {"mean": [10, 15], "least": 5}
    tasks = {"brax:hopper": {"command": "env=hopper", "short": True, **wanted}}
    tasks["brax:ant"] = {"command": "env=ant total_steps=1", **wanted}
    file, out = tmp_path / "learn.yaml", tmp_path / "learn.jsonl"
    file.write_text(yaml.safe_dump({"seeds": 2, "tasks": tasks}, sort_keys=False))

    def train(overrides, seeds):
        last = {("env=hopper",): 20.0, ("env=ant", "total_steps=1"): 4.0}[tuple(overrides)]
        return [{"returns": [0.0, last], "handed_over": 9.0}] * len(seeds)

    assert learn.main(True, train, {"commit": "abc"}, out, file) is None
    assert learn.main(False, train, {"commit": "def"}, out, file) == "learn: too low a return: brax:ant"
    assert "brax:hopper                  20 (handed over at least 9); above the interval" in capsys.readouterr().out
    assert [row["missed"] for row in results.read(out)] == [[], ["brax:ant"]]
    assert "**4 (handed over at least 9)**" in (tmp_path / "tasks.md").read_text()


@pytest.mark.parametrize("fails", [False, "no checkpoint", "every episode aborted"])
def test_fallen_seeds_are_evaluated_again_and_failures_after_training_keep_the_rows(
    fails, monkeypatch, tmp_path, capsys
):
    @contextlib.contextmanager
    def trained(overrides, seeds):
        runs = [Run(seed, tmp_path / str(seed)) for seed in seeds]
        for run, returned in zip(runs, (5.0, 9.0, 7.0), strict=True):
            run.folder.mkdir()
            (run.folder / "result.json").write_text('{"return": 9.0, "stop_reason": "completed"}')
            metrics = {"step": 10, "eval/episode_reward": returned, "training/valid_share": 0.75}
            (run.folder / "metrics.jsonl").write_text(json.dumps(metrics))
        yield runs, Outcome(0.0, 60.0, 90.0, 0, None, "recipe: cpu (recipe_for=auto)\n")

    def evaluate(module, *words):
        if fails == "no checkpoint":
            raise ConfigError(fails)
        mean = 8.0 if "which=best" in words else 7.5
        found = json.dumps({"return": None if fails else {"mean": {"value": mean}}}, indent=2)
        return Outcome(0.0, 1.0, 1.0, 0, None, f"playing\n{found}\n")

    monkeypatch.setattr(study.study, "trained", trained)
    monkeypatch.setattr(study.process, "run", evaluate)
    rows = list(study.train(["env=hopper"], range(2, 5), tmp_path / "kept"))
    assert [(row["name"], row["seed"], row["returns"]) for row in rows] == [
        ("cpu", 2, [5.0]), ("cpu", 3, [9.0]), ("cpu", 4, [7.0])
    ]  # fmt: skip
    fallen = (9.0, None) if fails else (8.0, 7.5)
    again = [(row["handed_over"], row["last_again"]) for row in rows]
    assert again == [fallen, (9.0, None), fallen]  # 5 and 7 are below 0.8 of 9
    assert capsys.readouterr().err.count("tasks: a fall is not confirmed: ") == 2 * bool(fails)
    assert [(row["masked"], row["minutes"], row["cpu_minutes"]) for row in rows] == [(0.25, 1.0, 1.5)] * 3
    assert json.loads((tmp_path / "kept/metrics.jsonl").read_text())["eval/episode_reward"] == 7.0  # of the median seed


@pytest.mark.slow
def test_two_tasks_still_reach_their_thresholds(tmp_path):
    with pytest.raises(SystemExit) as ended:
        study.main(["--learn", "--short", "--out", str(tmp_path / "tasks.jsonl")])
    assert ended.value.code is None
