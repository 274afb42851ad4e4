"""Jobs of a sweep: settings ranked over their seeds, failed and running jobs, how sure the best setting is."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from sweep_folders import add_result, add_run

from rlstable.cli.compose import compose
from rlstable.io.run_folder import write_overrides
from rlstable.policy.statistics import estimate, interquartile_mean
from rlstable.report.sweep import Job, Setting, read_sweep, settings_of, varied_keys
from rlstable.report.sweep_summary import SweepSummary

RATES = ("1e-4", "1e-3", "1e-2")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three rates times four seeds; the greatest rate kills half of them."""
    number = 0
    for index, rate in enumerate(RATES):
        for seed in range(4):
            dead = rate == "1e-2" and seed % 2
            reason, best = ("policy_diverged", None) if dead else ("completed", 100.0 * index + seed)
            overrides = [f"ppo.learning_rate={rate}", "env=ant", f"seed={seed}"]
            add_result(tmp_path / str(number), overrides, best, reason)
            number += 1
    return tmp_path


def test_settings_are_ranked_over_their_seeds(sweep: Path) -> None:
    jobs = read_sweep(sweep)
    assert [job.name for job in jobs] == [str(n) for n in range(12)]
    settings = settings_of(jobs)
    assert [dict(setting.values)["ppo.learning_rate"] for setting in settings] == ["1e-2", "1e-3", "1e-4"]
    assert settings[1].iqm == estimate([100.0, 101.0, 102.0, 103.0], interquartile_mean)
    assert settings[0].iqm == estimate([200.0, 202.0], interquartile_mean)
    assert varied_keys(settings) == ["ppo.learning_rate"]


def test_seeds_of_one_run_count_as_seeds_of_their_setting(tmp_path: Path) -> None:
    for number, rate in enumerate(("1e-4", "1e-3")):
        add_result(tmp_path / str(number), [f"ppo.learning_rate={rate}", "seeds=3"], 1.0)
        for seed in range(3):
            add_result(tmp_path / str(number) / f"seed-{seed}", [], 10.0 * number + seed)
    jobs = read_sweep(tmp_path)
    assert [job.name for job in jobs] == [f"{number}/seed-{seed}" for number in range(2) for seed in range(3)]
    settings = settings_of(jobs)
    assert [setting.values for setting in settings] == [
        (("ppo.learning_rate", "1e-3"),),
        (("ppo.learning_rate", "1e-4"),),
    ]
    assert settings[0].iqm == estimate([10.0, 11.0, 12.0], interquartile_mean)


def test_jobs_that_have_not_ended_are_listed_with_their_setting(sweep: Path) -> None:
    write_overrides(sweep / "1", [])  # the result names the overrides of a job that has ended
    (sweep / "12").mkdir()
    write_overrides(sweep / "12", ["ppo.learning_rate=1e-4", "env=ant", "seed=4"])  # not even its configuration
    for seed in (0, 1):
        add_run(sweep / "13" / f"seed-{seed}", {100: 3.0})
    write_overrides(sweep / "13", ["ppo.learning_rate=1e-4", "env=ant", "seeds=2"])
    (sweep / "15").mkdir()
    (sweep / "15" / "result.json").write_text('{"torn')
    (sweep / "16").mkdir()  # no job
    jobs = read_sweep(sweep)
    assert [job.name for job in jobs[12:]] == ["12", "13/seed-0", "13/seed-1", "15"]
    (slowest,) = (one for one in settings_of(jobs) if dict(one.values).get("ppo.learning_rate") == "1e-4")
    assert [job.result is None for job in slowest.jobs] == [False] * 4 + [True] * 3
    assert slowest.scores == [0.0, 1.0, 2.0, 3.0]
    assert jobs[1].values["seed"] == "1"


HARD = [
    "env=import", "ppo=default", r"env.name=toys\:PointMass", "sweep=joblib", "network.policy_hidden_layer_sizes=[8,8]",
    "env.kwargs={goal: \"it's\", mass: 0.5}", "++compile_cache=null", 'logging.wandb.name="läufe <b> $HOME"',
    "seed=3",
]  # fmt: skip


def test_command_of_a_setting_parses_back_to_its_configuration() -> None:
    best = Setting((), tuple(Job(str(seed), Path(), tuple(HARD), {}) for seed in range(2)))
    words = shlex.split(best.command)
    assert words[1:3] == ["-m", "rlstable.train"]
    assert words[3:] == [word for word in HARD if word not in ("sweep=joblib", "seed=3")]
    assert compose(words[3:]) == compose(HARD).model_copy(update={"seed": 0})


def test_sweep_summary_shows_overrides_unchanged_and_survives_damaged_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a [bold] one"
    for number, override in enumerate(("supervise.recovery.remedies=[a,b]", "x=[/a]")):
        (folder / str(number)).mkdir(parents=True)
        result = {"stop_reason": "completed", "step": 1234, "return": 5.25, "overrides": [override]}
        (folder / str(number) / "result.json").write_text(json.dumps(result))
    for number, damaged in enumerate((b"\xff", b"[]"), 2):
        (folder / str(number)).mkdir()
        (folder / str(number) / "result.json").write_bytes(damaged)
    said = summary_of(folder, capsys)
    for words in ("supervise.recovery.remedies=[a,b]", "x=[/a]", "[bold]", "1,234", "5.2"):
        assert words in said
    assert SweepSummary.exit_codes == [0, 0, 1, 1]
    assert said.splitlines()[-1] == f"page          {folder / 'report.html'}"


def summary_of(sweep: Path, capsys: pytest.CaptureFixture[str]) -> str:
    SweepSummary().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(sweep)}}}))
    return capsys.readouterr().out


def test_sweep_summary_ends_with_the_command_that_trains_the_best_setting_and_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (rate, best) in enumerate((("1", 5.0), ("[2]", 7.0), ("3", None))):
        add_result(tmp_path / str(number), [f"a={rate}", "env=ant"], best, "completed" if best else "error")
    best, train, page = summary_of(tmp_path, capsys).splitlines()[-3:]
    highest = "Highest return: a=[2], return 7.0, interquartile mean of 1 seed"
    assert best == f"{highest}; a tie with 1 other setting, more seeds tell them apart"
    assert train.startswith("train it      ") and train.endswith(" -m rlstable.train 'a=[2]' env=ant")
    assert page == f"page          {tmp_path / 'report.html'}"
    assert best in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("returns, best", [((7.0, 7.1, 7.2), True), ((6.0, 7.0, 8.0), False)])
def test_setting_is_the_best_if_the_intervals_of_its_seeds_are_above_those_of_others(
    returns: tuple[float, ...], best: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, value in enumerate((5.9, 6.0, 6.3, *returns)):
        add_result(tmp_path / str(number), [f"a={number // 3}", f"seed={number % 3}"], value)
    assert ("Best setting: a=1, " in summary_of(tmp_path, capsys)) is best


def test_file_of_the_user_in_the_folder_of_a_sweep_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_result(tmp_path / "0", ["a=1"], 5.0)
    (tmp_path / "report.html").write_text("mine")
    assert "no page       out: " in summary_of(tmp_path, capsys)
    assert (tmp_path / "report.html").read_text() == "mine"


def test_sweep_summary_names_no_best_setting_if_a_run_was_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_result(tmp_path / "0", ["a=1"], 5.0)
    add_result(tmp_path / "1", ["a=2"], 7.0, "interrupted")
    said = summary_of(tmp_path, capsys)
    assert "No setting is the best: 1 of 2 runs have not run to their end." in said and "train it" not in said
