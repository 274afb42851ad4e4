"""The report page links recorded episodes, and shows the newest one inside the page."""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np
import pytest
from browser import DESKTOP, opened

from rlstable.render.page import page as page_of_episodes
from rlstable.render.recording import RecordedEpisodes, Recording
from rlstable.report.episodes import episodes, recordings
from rlstable.report.page import page
from rlstable.report.run_record import RunRecord, read_record


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    folder = tmp_path / "my run"
    (folder / "episodes").mkdir(parents=True)
    (folder / "config.yaml").write_text("env: {name: ant}\n")
    return read_record(folder)


def write(record: RunRecord, *names: str, text: str = "") -> None:
    for name in names:
        (record.folder / "episodes" / name).write_text(text)


def test_run_without_recordings_has_no_section(record: RunRecord) -> None:
    assert episodes([record]) == ""
    write(record, "best.mp4", "5.gif")
    assert episodes([record]) == ""


def test_pages_of_render_come_first_and_then_the_newest_recordings(record: RunRecord) -> None:
    write(record, "900.html", "episodes.html", "10000.html", "64.html")
    assert [path.stem for path in recordings(record.folder)] == ["episodes", "10000", "900", "64"]
    text = episodes([record])
    assert '<a href="episodes/10000.html">step 10,000</a>, <a href="episodes/900.html">step 900</a>' in text
    assert "older" not in text


def test_browser_shows_the_newest_episode_inside_the_report(record: RunRecord) -> None:
    body = '<body pos="0 0 1"><freejoint/><geom size="0.2"/></body>'
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{body}</worldbody></mujoco>")
    positions = np.tile([0.0, 0, 1, 1, 0, 0, 0], (4, 1))
    recorded = RecordedEpisodes("ball", model, 0.1, (Recording("episode", positions, np.ones(3), aborted=False),))
    write(record, "64.html", text=page_of_episodes(recorded))
    report = record.folder / "report.html"
    report.write_text(page([record]))
    with opened(report, DESKTOP) as found:
        assert found.requests == []  # not before the user looks
        assert found.page.locator("iframe").get_attribute("sandbox") == "allow-scripts"
        found.page.get_by_text("watch step 64").click()
        frame = found.page.frame_locator("iframe")
        frame.locator("#numbers", has_text="return").wait_for()
        assert frame.locator("h1").inner_text() == "ball"
        assert [Path(request).name for request in found.requests] == ["64.html"]
        assert [text for text in found.complaints if "GPU stall" not in text and "software" not in text.lower()] == []
        with found.page.expect_navigation():
            found.page.get_by_role("link", name="step 64").click()
        found.page.locator("#numbers", has_text="return").wait_for()
