"""The benchmark of the host's part of an iteration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlstable.cli.compose import compose
from rlstable.runner.loop import TrainingLoop
from scripts import pages
from scripts.bench import host
from scripts.bench.side import QUIET

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_empty_program_counts_iterations_and_changes_nothing_else(tmp_path: Path) -> None:
    loop = TrainingLoop(compose([*host.PARTS["fast"], *QUIET]), tmp_path)
    try:
        host.use_empty_program(loop)
        run = loop.single
        key = np.array(run.state.key)
        for _ in range(3):
            assert loop.advance() == {}
        counters = run.state.counters
        assert (int(counters.iterations), int(counters.env_steps)) == (3, 3 * loop.config.env_steps_per_iteration)
        trips = [count for name, count in run.log.history[-1].items() if name.endswith("/trips")]
        assert len(trips) > 0 and sum(trips) == 0
        np.testing.assert_array_equal(run.state.key, key)
    finally:
        loop.close()


def test_host_is_timed_by_clock_and_by_processor() -> None:
    row = host.run("fast", 20)
    assert (row["task"], row["iterations"]) == ("fast", 20) and row["arrays"] > 50
    for part in ("iteration", "call"):
        for low, median, high in row[part].values():
            assert 0.0 < low <= median <= high
    fixed = {"wall": [1.0, 2.0, 3.0], "processor": [0.5, 1.25, 1.5]}
    section = host.section([row | {"arrays": 133, "iteration": fixed, "call": fixed}])
    assert section.cells == [("fast", "133", "2.00", "1.00", "3.00", "1.25", "1.25")]
    page = pages.device_part(section, {"kind": "k", "platform": "p", "cpus": 1}, {})
    assert "| fast | 133 | 2.00 | 1.00 | 3.00 | 1.25 | 1.25 |" in page
