"""The policies that come with the package: their pages open at once, and they act as recorded."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from browser import PHONE, opened
from commands import exit_code

import rlstable
from rlstable.config import ConfigError
from rlstable.demo.__main__ import main, open_demo, unpacked
from rlstable.io.run_folder import demos, located
from rlstable.policy.playback import evaluate_run

run = functools.partial(exit_code, main)


def test_package_has_policies_of_at_most_a_megabyte_without_paths_of_a_machine() -> None:
    assert demos() == ["halfcheetah", "humanoid", "quadruped"]
    files = [path for name in demos() for path in located(f"demo:{name}").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2**20
    assert not any(re.search(rb"/(work|tmp|home|root)/", path.read_bytes()) for path in files)


@pytest.mark.parametrize("name", demos())
def test_policy_of_the_package_is_loaded_and_acts(name: str) -> None:
    policy = rlstable.load_policy(f"demo:{name}")
    size = int(re.search(r"observation size (\d+)", repr(policy))[1])
    obs = {policy.networks.config.policy_obs_key: np.ones(size)} if name == "quadruped" else np.ones(size)
    action = np.asarray(policy.act(obs))
    assert np.isfinite(action).all() and np.abs(action).max() > 0.01


def test_other_name_is_a_mistake_that_lists_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no policy demo:ant; there are demo:halfcheetah, demo:humanoid, demo:quad"):
        rlstable.load_policy("demo:ant")
    assert run("ant") == 2
    assert "there is no policy ant; there are halfcheetah, humanoid, quadruped" in capsys.readouterr().err


def test_pages_of_all_policies_link_each_other(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("humanoid") == 0
    assert "trained by rlstable train env=humanoid" in capsys.readouterr().out.splitlines()[0]
    assert run("--json") == 0
    written = {Path(one["file"]).stem: one for one in json.loads(capsys.readouterr().out)}
    assert sorted(written) == demos()
    assert written["quadruped"]["trained"] == ["env=robot_velocity", "seed=1", "env.xml=quadruped.xml"]
    for name, one in written.items():
        assert one["return"] == round(unpacked(located(f"demo:{name}")).recordings[0].total, 1) > 80
    with opened(Path(written["quadruped"]["file"]), PHONE) as found:
        found.page.locator("#numbers", has_text="return").wait_for()
        assert found.page.locator("#asked").inner_text() == "0.00 m/s forward, 0.00 m/s sideways, 0.00 rad/s"
        assert found.overflow == 0
        found.page.get_by_role("link", name="humanoid").click()
        found.page.locator("h1", has_text="humanoid").wait_for()
        assert not found.page.locator("#motion").is_visible()


def test_file_of_the_user_is_not_replaced_by_a_page(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("humanoid.html").write_text("mine")
    assert run("humanoid", "--out", ".") == 2
    assert "humanoid.html would be replaced, and rlstable did not write it" in capsys.readouterr().err
    assert Path("humanoid.html").read_text() == "mine"


def test_folder_that_is_called_demo_is_a_folder(here: Path) -> None:
    assert located("demo") == Path("demo") and located("runs/demo:x") == Path("runs/demo:x")


def test_viewer_replaces_no_file_of_the_user(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("quadruped").mkdir()
    Path("quadruped", "play.py").write_text("mine")
    assert run("quadruped", "--viewer", "--out", ".") == 2
    assert "play.py would be replaced, and rlstable did not write it" in capsys.readouterr().err


def test_viewer_is_for_the_robot_that_follows_commands(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("halfcheetah", "--viewer") == 2
    assert "--viewer: is for quadruped" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", demos())
def test_policy_returns_what_its_recorded_episode_shows(name: str) -> None:
    returns = evaluate_run(open_demo(name), 16).returns
    assert returns is not None
    assert returns["mean"].value > 0.85 * unpacked(located(f"demo:{name}")).recordings[0].total
