"""Learning curves: rows of a small training, comparison of two sides, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import TINY

from scripts import pages, results
from scripts.curves import __main__ as curves

GUARDS = {"off": ("guards=off",), "default": ("guards=default",)}


def rows(task: str, side: str, *returns: list[float | None]) -> list[dict[str, Any]]:
    own = {"task": task, "side": side, "steps": [10, 20], "finite": True, "trips": {}, "seconds": 1.0}
    return [{**own, "seed": seed, "returns": values} for seed, values in enumerate(returns)]


@pytest.mark.slow
def test_row_of_a_curve_has_a_seed_with_its_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations at equal distances, the last one at the end."""
    monkeypatch.setattr(curves, "TASKS", {"toy": TINY})
    out = tmp_path / "curves.jsonl"
    curves.run_task(curves.Comparison("Guards", GUARDS, ("toy",)), "toy", "default", range(2), out)
    found = results.read(out)
    assert [row["seed"] for row in found] == [0, 1]
    assert all(row["steps"] == [256 * n for n in range(1, 6)] for row in found)
    assert all(len(row["returns"]) == 5 and np.isfinite(row["returns"]).all() for row in found)
    assert all(row["finite"] and row["trips"] == {} for row in found)
    assert found[0]["returns"] != found[1]["returns"]


def test_difference_is_a_share_of_the_curve_of_the_first_side() -> None:
    off, default = np.array([[10.0, 20.0], [10.0, 20.0]]), np.array([[10.0, 17.0], [10.0, 17.0]])
    assert curves.difference(off, default) == pytest.approx((-0.1, -0.1, -0.1))
    share, low, high = curves.difference(np.array([[8.0], [12.0], [10.0]]), np.array([[12.0], [8.0], [10.0]]))
    assert share == 0 and low < -0.1 and high > 0.1
    # With negative returns, a smaller loss is an improvement.
    assert curves.difference(np.array([[-10.0]] * 2), np.array([[-9.0]] * 2))[0] == pytest.approx(0.1)


def test_each_seed_is_compared_with_the_same_seed() -> None:
    """The differences between seeds do not matter."""
    measure = np.array([[10.0], [100.0], [1000.0]])
    assert curves.paired(measure, measure * 0.9) == pytest.approx((-0.1, -0.1))
    low, high = curves.paired(np.array([[8.0], [12.0]]), np.array([[12.0], [8.0]]))
    assert low < 0 < high


def test_page_of_curves_shows_tasks_with_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "TASKS", {"toy": ("env=fast", "seed=3"), "half": ("env=fast",)})
    out = tmp_path / "curves.jsonl"
    both = rows("toy", "off", [1.0, 10.0], [2.0, 20.0], [3.0, None]) + rows("toy", "default", [1.0, 12.0], [2.0, 18.0])
    both[-1]["trips"] = {"spike": 2}
    half = rows("half", "off", [1.0, 2.0])
    none = curves.Comparison("Nothing", {"a": (), "b": ()}, ("toy",), picture="none.png")
    guards = curves.Comparison("Guards", GUARDS, ("toy", "half"), ("precision=highest",))
    curves.write(both + half, out, {"guards": guards, "none": none})
    page = (tmp_path / "curves.md").read_text()
    assert "| toy | 10 [0, 20] | 15 [12, 18] |" in page and "| spike 1 |" in page
    assert "- `env=fast seed=3 precision=highest`: 3 and 2" in page and "half" not in page
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert "Nothing" not in page and not (tmp_path / "none.png").exists()


def test_new_results_replace_the_old_results_and_keep_the_prose(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nProse.\n\n<!-- results -->\n\nold\n\n<!-- end of results -->\n\nAfterword.\n")
    pages.fill(page, {"results": "new"})
    expected = "# Title\n\nProse.\n\n<!-- results -->\n\nnew\n\n<!-- end of results -->\n\nAfterword.\n"
    assert page.read_text() == expected
    pages.fill(page, {"results": "new", "more": "added"})
    assert page.read_text() == f"{expected}\n<!-- more -->\n\nadded\n\n<!-- end of more -->\n"


def test_no_page_is_written_without_a_task_with_both_sides(tmp_path: Path) -> None:
    guards = curves.Comparison("Guards", GUARDS, ("toy",))
    curves.write(rows("toy", "off", [1.0, 2.0]), tmp_path / "curves.jsonl", {"guards": guards})
    assert not list(tmp_path.iterdir())


def test_curves_that_are_known_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "curves.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows("humanoid", "off", [1.0, 2.0], [1.0, 3.0])))
    asked: list[Any] = []
    monkeypatch.setattr(curves, "run_task", lambda _, task, side, seeds, __: asked.append((side, [*seeds])))
    curves.main(["--task", "humanoid", "--seeds", "3", "--out", str(out)])
    assert asked == [("off", [2]), ("default", [0, 1, 2])]


def test_one_seed_is_rejected_since_it_has_no_spread(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        curves.main(["--seeds", "1"])
    assert "2 or more" in capsys.readouterr().err
