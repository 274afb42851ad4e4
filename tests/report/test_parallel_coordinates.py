"""Parallel coordinates of a sweep: a line per run with a return, readable axes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from rlstable.report.parallel_coordinates import parallel_coordinates
from rlstable.report.sweep import Job


def jobs(values: dict[str, list[str]], scores: list[float | None]) -> list[Job]:
    rows = zip(*values.values(), strict=True)
    overrides = [tuple(f"{key}={value}" for key, value in zip(values, row, strict=True)) for row in rows]
    return [
        Job(str(index), Path(), own, {"best_return": score})
        for index, (own, score) in enumerate(zip(overrides, scores, strict=True))
    ]


def drawn(runs: list[Job], *keys: str) -> tuple[list[list[float]], list[str], list[str]]:
    """Heights of the lines' points, names of the axes and tooltips."""
    root = ElementTree.fromstring(parallel_coordinates(runs, keys))
    lines = [entry for entry in root.iter() if entry.tag == "polyline"]
    heights = [[float(point.split(",")[1]) for point in entry.attrib["points"].split()] for entry in lines]
    names = [entry.text or "" for entry in root.iter() if entry.attrib.get("class") == "lane"]
    return heights, names, ["".join(entry.itertext()) for entry in lines]


def test_parallel_coordinates_have_a_line_per_run_with_a_return() -> None:
    runs = jobs({"lr": ["1e-4", "1e-3", "1e-2", "1e-2"], "net": ["a", "b", "a", "b"]}, [1.0, 2.0, 3.0, None])
    heights, names, tooltips = drawn(runs, "lr", "net")
    assert names == ["lr", "net", "return"]
    assert np.diff([own[0] for own in heights], 2) == pytest.approx([0.0], abs=0.2)  # tenfold steps, equally long
    assert tooltips == ["lr=1e-4, net=a: 1.0", "lr=1e-3, net=b: 2.0", "lr=1e-2, net=a: 3.0"]


def test_few_numbers_that_are_too_close_get_equal_distances() -> None:
    heights, *_ = drawn(jobs({"cost": ["0", "1", "0.01"]}, [1.0, 2.0, 3.0]), "cost")
    least, greatest, middle = (own[0] for own in heights)
    assert middle == pytest.approx((least + greatest) / 2, abs=0.1)


def test_parallel_coordinates_need_two_returns() -> None:
    assert parallel_coordinates(jobs({"lr": ["1", "2"]}, [1.0, None]), ["lr"]) == ""
