"""The render command without a run: an environment with random actions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import SIZES, exit_code

from rlstable.cli.compose import compose
from rlstable.render.__main__ import main
from rlstable.render.recording import record_random

pytestmark = pytest.mark.usefixtures("quick_compile")
ARM = Path(__file__).parents[1] / "robot" / "models" / "arm.xml"
WORDS = ["env=robot_reach", f"env.xml={ARM}", *SIZES]


def test_robot_is_drawn_with_random_actions_before_any_training(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, "--json", "episodes=3", *WORDS) == 0
    (page,) = json.loads(capsys.readouterr().out)
    assert page["file"] == "runs/random/robot_reach/episodes.html"
    assert [one["episode"] for one in page["episodes"]] == ["best", "median", "worst"]
    assert "robot_reach, native, random actions" in (here / page["file"]).read_text()


def test_seed_decides_the_random_actions() -> None:
    first, same, other = (record_random(compose(WORDS), 1, seed).recordings[0].positions for seed in (1, 1, 2))
    assert (first == same).all()
    assert not (first == other).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["env=robot_reach"], "env.xml: is missing"),
        ([*WORDS, "episodes=0"], "episodes: "),
        ([*WORDS, "which=best"], "which: "),
    ],
)
def test_mistake_is_one_line_with_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(main, *words) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"rlstable: {message}")
