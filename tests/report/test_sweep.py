"""The report of a sweep: settings ranked over their seeds, failed runs, and the parallel coordinates."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from browser import PHONE, opened

from rlstable.policy.statistics import estimate, interquartile_mean
from rlstable.report.__main__ import main
from rlstable.report.sweep import Job, parallel_coordinates, read_sweep, settings_of
from rlstable.report.sweep_page import sweep_page

RATES = ("1e-4", "1e-3", "1e-2")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three rates times four seeds; the greatest rate kills half of them."""
    number = 0
    for index, rate in enumerate(RATES):
        for seed in range(4):
            dead = rate == "1e-2" and seed % 2
            result: dict[str, Any] = {"stop_reason": "policy_diverged" if dead else "completed", "step": 1000}
            result |= {"best_return": None if dead else 100.0 * index + seed}
            result["overrides"] = [f"ppo.learning_rate={rate}", "env=<b>ant</b>", f"seed={seed}"]
            (tmp_path / str(number)).mkdir()
            (tmp_path / str(number) / "result.json").write_text(json.dumps(result))
            number += 1
    (tmp_path / "12").mkdir()  # under way
    (tmp_path / "13").mkdir()
    (tmp_path / "13" / "result.json").write_text('{"torn')
    return tmp_path


def test_settings_are_ranked_over_their_seeds(sweep: Path) -> None:
    jobs = read_sweep(sweep)
    assert [job.name for job in jobs] == [str(n) for n in range(12)]
    settings = settings_of(jobs)
    assert [dict(setting.values)["ppo.learning_rate"] for setting in settings] == ["1e-2", "1e-3", "1e-4"]
    assert settings[1].iqm == estimate([100.0, 101.0, 102.0, 103.0], interquartile_mean)
    assert settings[0].iqm == estimate([200.0, 202.0], interquartile_mean)
    assert settings[0].stop_reasons == {"completed": 2, "policy_diverged": 2}


def test_seeds_of_one_fleet_count_as_seeds_of_their_setting(tmp_path: Path) -> None:
    for number, rate in enumerate(("1e-4", "1e-3")):
        own = {
            str(seed): {"stop_reason": "completed", "best_return": 10.0 * number + seed, "step": 5} for seed in range(3)
        }
        result = {"stop_reason": "completed", "best_return": 1.0, "seeds": own}
        result["overrides"] = [f"ppo.learning_rate={rate}", "seeds=3"]
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "result.json").write_text(json.dumps(result))
    jobs = read_sweep(tmp_path)
    assert [job.name for job in jobs] == [f"{number}/seed-{seed}" for number in range(2) for seed in range(3)]
    settings = settings_of(jobs)
    assert [setting.values for setting in settings] == [
        (("ppo.learning_rate", "1e-3"),),
        (("ppo.learning_rate", "1e-4"),),
    ]
    assert settings[0].iqm == estimate([10.0, 11.0, 12.0], interquartile_mean)


def test_setting_of_failed_runs_comes_last() -> None:
    confirmed = Job("2", {"a": "2"}, {"stop_reason": "completed", "best_return": 9.0, "confirmed_return": 7.0})
    assert confirmed.score == 7.0  # the best return is that of one lucky evaluation
    dead = Job("0", {"a": "1"}, {"stop_reason": "error", "best_return": None})
    alive = Job("1", {"a": "2"}, {"stop_reason": "completed", "best_return": -5.0})
    assert [setting.iqm is None for setting in settings_of([dead, alive])] == [False, True]


def test_parallel_coordinates_have_a_line_per_run_with_a_return(sweep: Path) -> None:
    root = ElementTree.fromstring(parallel_coordinates(read_sweep(sweep)))
    lines = [entry for entry in root if entry.tag == "polyline"]
    assert len(lines) == 10
    starts = sorted({float(entry.attrib["points"].split()[0].split(",")[1]) for entry in lines})
    assert starts[1] - starts[0] == pytest.approx(starts[2] - starts[1], abs=0.2)  # tenfold steps, equally long
    names = [entry.text for entry in root if entry.attrib.get("class") == "lane"]
    assert names == ["ppo.learning_rate", "best return"]  # the environment is one, the seed no setting


def test_sweep_of_one_setting_has_no_parallel_coordinates(sweep: Path) -> None:
    assert parallel_coordinates(read_sweep(sweep)[:4]) == ""


def test_browser_shows_the_report_of_a_sweep(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([f"sweep={sweep}"])
    path = Path(capsys.readouterr().out.strip())
    assert path == sweep / "report.html"
    assert path.read_text() == sweep_page(sweep, read_sweep(sweep))
    assert "<b>ant</b>" not in path.read_text()
    with opened(path, PHONE, dark=True) as found:
        assert found.overflow == 0
        assert found.page.locator("tbody tr").count() == 3 + 12
        assert (found.requests, found.complaints) == ([], [])
