"""The benchmark of scaling: its measurements and its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlstable.cli.compose import compose
from scripts import pages
from scripts.bench import __main__ as bench
from scripts.bench import scaling


class Fake:
    """A run whose iterations take a fixed time plus a time per step, without a real clock."""

    def __init__(self, overrides: Sequence[str], folder: Path):
        assert folder.is_dir()
        self.steps = compose(list(overrides)).env_steps_per_iteration
        self.closed = False

    def __call__(self) -> float:
        assert not self.closed
        return 1e-3 + 1e-6 * self.steps

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("task", scaling.TASKS)
def test_iteration_does_the_same_work_per_step_at_every_size(task: str) -> None:
    for envs in scaling.ENVS:
        config = compose(list(scaling.settings(task, envs, 500)))
        ppo = config.ppo
        assert config.env_steps_per_iteration == envs * scaling.UNROLL
        assert (ppo.num_minibatches, ppo.num_updates_per_batch) == (scaling.MINIBATCHES, 1)
        assert config.env.episode_length == 500


@pytest.mark.slow
def test_every_point_is_measured_and_plotted(tmp_path: Path) -> None:
    said: list[str] = []
    points = [point for point in scaling.POINTS.values() if point.task == "inverted_pendulum"]
    rows = [row for point in points for row in scaling.run(point, 0.01, Fake, said.append)]
    assert len(rows) == len(said) == len(scaling.ENVS) + len(scaling.LENGTHS) + scaling.AGES
    by_envs = [row for row in rows if row["over"] == "envs"]
    for row in by_envs:
        steps = row["at"] * scaling.UNROLL
        assert row["sps"] == pytest.approx([steps / (1e-3 + 1e-6 * steps)] * 4)
    done = [row["at"] for row in rows if row["over"] == "done"]
    assert done == sorted(set(done)) and done[0] == scaling.AMONG * scaling.UNROLL
    section = scaling.section(rows, "Fake GPU", tmp_path)
    assert (tmp_path / "scaling_fake_gpu.png").stat().st_size > 10_000
    assert [cells[:4] for cells in section.cells] == [
        ("inverted_pendulum", "environments", "64", "8,192"),
        ("inverted_pendulum", "episode length", "125", "8,000"),
        ("inverted_pendulum", "steps done", f"{done[0]:,}", f"{done[-1]:,}"),
    ]
    ends, least, greatest = section.cells[0][4:]
    assert (ends, least, greatest) == ("338,624\n984,971", "338,624", "984,971")
    few = scaling.section(rows[:2], "Fake GPU", tmp_path)
    assert few.cells == [("inverted_pendulum", "environments", "64", "128", "338,624\n505,929", "338,624", "505,929")]
    page = pages.device_part(section, {"kind": "k", "platform": "p", "cpus": 1}, {})
    assert "![how cost grows](scaling_fake_gpu.png)" in page


def test_every_point_is_a_part_with_its_own_settings() -> None:
    assert len(scaling.PARTS) == len(scaling.TASKS) * (len(scaling.ENVS) + len(scaling.LENGTHS) + 1)
    assert scaling.PARTS["ant, envs 64"] == scaling.settings("ant", 64, 1000)
    assert scaling.PARTS["ant, length 125"] == scaling.settings("ant", scaling.AMONG, 125)
    assert scaling.PARTS["ant, done"] == scaling.settings("ant", scaling.AMONG, 1000)


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "soon"])
def test_invalid_seconds_are_a_one_line_error(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(["scaling", f"--seconds={given}"])
    assert stopped.value.code == 2
    assert f"{given!r} must be a number of seconds, more than 0" in capsys.readouterr().err
