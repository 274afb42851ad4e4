"""The report of a run: its result, its trouble, escaped HTML, several runs, and errors."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import short_runs
from browser import DESKTOP, PHONE, opened
from commands import exit_code
from toys import GUARDS_OFF

from rlstable.render.episode import RecordedEpisodes, Recording
from rlstable.render.page import page as page_of_episodes
from rlstable.report import panels
from rlstable.report.__main__ import main
from rlstable.report.page import episodes, page, recordings
from rlstable.report.panels import PANELS
from rlstable.report.run_record import RunRecord, differences, read_record
from rlstable.runner.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def trained(folder: Path, **sections: Any) -> TrainingLoop:
    defaults: dict[str, Any] = {"total_steps": 640, "eval": {"num_evals": 5, "num_envs": 4}}
    return short_runs.trained(folder, **defaults | {"logging": {"console": "off", "wandb": {"name": EVIL}}} | sections)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    trained(folder)
    return folder


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with trips, an incident and a rollback, which ends by name."""
    folder = tmp_path_factory.mktemp("troubled")
    trained(
        folder,
        guards={"storm": {"patience": 3}},
        fault={"site": "physics", "probability": 1.0, "start": 3},
        supervise={"recovery": {"every": 2, "attempts": 1}, "ladder": {"enabled": False}},
    )
    return folder


run = functools.partial(exit_code, main)


def test_run_writes_its_report(finished: Path) -> None:
    text = (finished / "report.html").read_text()
    assert text == page([read_record(finished)])
    story = read_record(finished)
    assert f"<dt>return</dt><dd>{story.outcome.value:,.1f}</dd>" in text
    assert '<span class="good" title="all steps were trained">completed</span>' in text
    shown = re.findall(r'class="chart".*?aria-label="(.*?)"', text)
    assert shown[0] == "Return" and sorted(shown) == sorted({panel.title for panel in PANELS} - {"Level of the ground"})
    for key in ("ppo.learning_rate", "guards.quarantine.enabled", "jax", "processors"):
        assert f"<code>{key}</code>" in text


def test_report_of_a_ruined_run_looks_ruined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad physics without guards: a red warning, void evaluations among the events, no return and no policy to use."""
    fault = {"env": {"name": "toys:PointMass", "kwargs": {"fault": "physics", "probability": 0.5}}}
    trained(tmp_path, guards=GUARDS_OFF, logging={"console": "lines"}, **fault)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["warnings"][0]["name"] == "loss_not_finite"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows and all(row.get("episode/sum_reward") is None for row in rows)
    shown = page([read_record(tmp_path)])
    assert '<span class="bad">loss_not_finite, ' in shown and "no finite loss since step 0, so " in shown
    assert shown.count("no finite value was logged") >= 2
    assert "<code>evaluation_void" in shown
    printed = capsys.readouterr().out
    assert "warning      loss_not_finite: " in printed and "rlstable.load_policy" not in printed


def test_report_shows_trips_rollbacks_and_incidents(troubled: Path) -> None:
    story = read_record(troubled)
    text = (troubled / "report.html").read_text()
    assert story.result is not None
    assert f">{story.result['stop_reason']}<" in text and 'class="bad"' in text
    count, first, last = story.trips()["quarantine"]
    assert count > (story.last("guards/quarantine/trips") or 0)  # those of iterations that were given up, too
    assert f"<strong>quarantine</strong>: {count:,.0f}, steps {first:,.0f} to {last:,.0f}" in text
    assert all(f"<code>{kind}" in text for kind in ("rolled_back", "incident", "stopped"))
    assert "What to do" in text
    assert re.search(r"rlstable\.replay [^<]*incidents/", text)


def test_report_escapes_html_and_loads_nothing(finished: Path) -> None:
    text = (finished / "report.html").read_text()
    assert EVIL not in text and "&lt;/script&gt;&lt;script&gt;alert(1)" in text
    assert not re.search(r"""(src|href)=["']|url\(|@import|https?://""", text)


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    return folder


def test_malformed_log_lines_are_counted_as_unreadable(copied: Path) -> None:
    """Also those of a killed run, which has no result."""
    (copied / "result.json").unlink()
    before = len(read_record(copied).rows)
    odd = ('{"step": "x"}', '{"step": null}', '{"step": 9, "time": "now"}', '{"time": -9e10}', "[" * 100_000)
    for name in ("metrics.jsonl", "events.jsonl"):
        with (copied / name).open("a") as file:
            file.write("\n".join(odd) + "\n")
    with (copied / "metrics.jsonl").open("a") as file:
        large = {"training/kl_mean": 1e308, "training/policy_loss": 10**400, "training/value_loss": -1.7e308}
        file.write(json.dumps({"step": 1000, **large}) + "\n")
    story = read_record(str(copied))
    assert len(story.rows) == before + 1
    text = page([story])
    assert "10 unreadable lines" in text and ">not ended<" in text
    assert not re.search(r'="[^"]*\b(nan|inf)\b', "".join(re.findall(r"<svg.*?</svg>", text, re.S)))


def test_interval_in_the_report_leaves_out_aborted_episodes() -> None:
    rows = [
        {"step": step, "eval/episode_reward": 5.0, "eval/episode_reward_std": deviation, "eval/aborted_share": share}
        for step, share, deviation in ((10, 0.0, 2.0), (20, 0.5, 2.0), (30, 0.9, 0.0))
    ]
    story = RunRecord(Path("run"), {"eval.num_envs": 10}, rows, [], None, {}, 0)
    [line] = panels._lines(PANELS[0], story, 0, 1)
    half = [1.96 * 2.0 / math.sqrt(9), 1.96 * 2.0 / math.sqrt(4), 0.0]
    np.testing.assert_allclose(line.band[1] - line.y, half, rtol=1e-3)


def test_report_of_one_run_draws_each_term_of_the_reward_the_greatest_first() -> None:
    rows = [{"step": step, "episode/reward/energy": 1.0, "episode/reward/upright": -5.0} for step in (10, 20)]
    story = RunRecord(Path("run"), {}, rows, [], None, {}, 0)
    [panel] = panels._by_term([story])
    lines = panels._lines(panel, story, 0, 1)
    assert [(line.name, line.dashed) for line in lines] == [("upright", False), ("energy", False)]
    assert "Reward by term" in panels.curves([story], False)
    assert panels._by_term([story, story]) == []


def test_report_compares_several_runs(finished: Path, troubled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stories = [read_record(finished), read_record(troubled)]
    found = differences(stories)
    assert found["guards.storm.patience"][1] == 3 and "ppo.learning_rate" not in found
    assert run(f"run={finished}", f"run={troubled}", f"out={finished / 'two.html'}", "--json") == 0
    path = Path(json.loads(capsys.readouterr().out)["file"])
    text = path.read_text()
    assert text == page(stories)
    assert "<code>guards.storm.patience</code>" in text and "2 runs" in text
    assert text.count("<tr>") > 10


def test_browser_shows_the_report_on_a_dark_phone(troubled: Path, tmp_path: Path) -> None:
    with opened(troubled / "report.html", PHONE, dark=True) as found:
        assert found.page.title() == f"rlstable: {read_record(troubled).name}"
        assert found.overflow == 0
        first = found.page.locator("svg.chart:visible").first
        first.hover()
        assert "step" in found.page.locator(".tip").inner_text()
        found.page.mouse.move(0, 0)
        assert found.page.locator(".tip").count() == 0
        assert found.overflow == 0
        found.page.screenshot(path=str(tmp_path / "page.png"))
        assert (found.requests, found.complaints) == ([], [])


def test_browser_saves_a_chart_and_its_data_and_smooths_the_lines(finished: Path) -> None:
    with opened(finished / "report.html") as found:
        chart = found.page.locator("figure.large")
        for button, start in (("PNG", b"\x89PNG"), ("CSV", b"line,step,value\n")):
            with found.page.expect_download() as download:
                chart.get_by_text(button, exact=True).click()
            assert download.value.suggested_filename == f"return.{button.lower()}"
            assert Path(download.value.path()).read_bytes().startswith(start)
        line = found.page.locator("figure.large polyline.line").first
        before = line.get_attribute("points")
        found.page.locator("#smoothing").fill("0.9")
        smooth = line.get_attribute("points")
        assert before is not None and smooth is not None
        assert smooth != before and len(smooth.split()) == len(before.split())
        assert (found.requests, found.complaints) == ([], [])


def test_return_is_first_and_large_with_its_target_its_best_evaluation_and_rollbacks(finished: Path) -> None:
    record = read_record(finished)
    record.settings["eval.target_return"] = 950
    record.events.append({"kind": "rolled_back", "step": 128, "time": 1.0})
    shown = page([record])
    assert shown.index("<figcaption>Return") < shown.index('class="facts"') < shown.index("Value loss")
    large = shown[shown.index('card large"') : shown.index('class="facts"')]
    assert "target 950" in large and "best evaluation: " in large and "step 128: rolled_back" in large
    assert '<i class="key b0"></i>evaluation' in large and '<i class="key b1 dash"></i>training' in large
    assert "environment steps" in large


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    folder = tmp_path / "my run"
    (folder / "episodes").mkdir(parents=True)
    (folder / "config.yaml").write_text("env: {name: ant}\n")
    return read_record(folder)


def write(record: RunRecord, *names: str, text: str = "") -> None:
    for name in names:
        (record.folder / "episodes" / name).write_text(text)


def test_pages_of_render_come_first_and_then_the_newest_recordings(record: RunRecord) -> None:
    write(record, "900.html", "episodes.html", "10000.html", "64.html")
    assert [path.stem for path in recordings(record.folder)] == ["episodes", "10000", "900", "64"]
    text = episodes([record])
    assert '<a href="#episodes">' in page([record]) and '<h2 id="episodes">' in text
    assert '<a href="episodes/10000.html">step 10,000</a>, <a href="episodes/900.html">step 900</a>' in text
    assert "older" not in text


def test_episode_in_the_page_of_a_running_run_is_loaded_when_the_user_unfolds_it(record: RunRecord) -> None:
    write(record, "64.html")
    assert "<details open " in page([record]) and "<details open " not in page([record], refresh=True)


def test_browser_shows_the_newest_episode_inside_the_report(record: RunRecord) -> None:
    body = '<body pos="0 0 1"><freejoint/><geom size="0.2"/></body>'
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{body}</worldbody></mujoco>")
    positions = np.tile([0.0, 0, 1, 1, 0, 0, 0], (4, 1))
    recorded = RecordedEpisodes("ball", model, 0.1, (Recording("episode", positions, np.ones(3), aborted=False),))
    write(record, "64.html", text=page_of_episodes(recorded))
    report = record.folder / "report.html"
    report.write_text(page([record]))
    with opened(report, DESKTOP) as found:
        assert found.page.locator("iframe").get_attribute("sandbox") == "allow-scripts"
        found.page.locator("iframe").scroll_into_view_if_needed()  # a browser pauses frames outside of the window
        frame = found.page.frame_locator("iframe")
        frame.locator("#numbers", has_text="return").wait_for()
        assert frame.locator("h1").inner_text() == "ball"
        assert [Path(request).name for request in found.requests] == ["64.html"]
        assert [text for text in found.complaints if "GPU stall" not in text and "software" not in text.lower()] == []
        with found.page.expect_navigation():
            found.page.get_by_role("link", name="step 64").click()
        found.page.locator("#numbers", has_text="return").wait_for()


def test_next_commands_of_a_robot_play_its_exported_policy(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    ended, settings = {"stop_reason": "completed"}, {"env.source": "robot"}
    robot, other = (page([RunRecord(tmp_path, own, [], [], ended, {}, 0)]) for own in (settings, {}))
    assert f"rlstable.play {tmp_path}/export/policy.onnx --video walk.mp4" in robot
    assert "rlstable.play" not in other


@pytest.mark.parametrize("result", [{"warnings": ["x"]}, {"warnings": 5}, {"signs": ["a"]}, {"signs": {"x": 5}}])
def test_report_of_a_damaged_result_has_no_warnings_and_no_signs(record: RunRecord, result: dict[str, Any]) -> None:
    damaged = dataclasses.replace(record, result=result, events=[{"kind": "sign", "sign": "x", "step": 1}])
    assert damaged.warnings == [] and damaged.signs == {}
    assert "Signs of trouble" in page([damaged])
