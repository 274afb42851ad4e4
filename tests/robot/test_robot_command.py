"""Training a robot from its model file on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import SIZES, typed
from moments import MODELS

from rlstable.train import main

WORDS = ["env=robot_swingup", f"env.xml={MODELS / 'cart_pole.xml'}", "ppo=default", "total_steps=128", *SIZES]


def test_robot_trains_from_a_file_and_reports_each_term(tmp_path: Path) -> None:
    assert typed(main, *WORDS, "eval.num_evals=1", f"hydra.run.dir={tmp_path}") == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["stop_reason"] == "completed" and result["step"] == 128
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line}
    assert {f"episode/reward/{term}" for term in ("raised", "joint_speed", "action_rate")} <= names
    assert "Reward by term" in (tmp_path / "report.html").read_text()


MISTAKES = {
    "unknown term": (["+env.task.rewards.uprigth={weight: 1}"], None, "env.task.rewards.uprigth: there is no term"),
    "missing file": (["env.xml=/missing.xml"], None, "env.xml: there is no file /missing.xml; give the path of an"),
    "no actuator": ([], (r"<actuator>.*</actuator>", ""), "env.xml: {path} has no actuator; add <actuator>"),
    "no XML": ([], (r"</worldbody>.*", ""), "env.xml: {path} cannot be read: XML parse error"),
    "missing mesh": (
        [], ("<worldbody>", '<asset><mesh file="link.stl"/></asset><worldbody>'),
        "env.xml: {path} cannot be compiled: Error: Error opening file 'link.stl'",
    ),
    "keyframe of the wrong size": (
        [], ("</mujoco>", '<keyframe><key name="home" qpos="0 0 0"/></keyframe></mujoco>'),
        "env.xml: {path} cannot be compiled: Error: keyframe 'home': invalid qpos size, expected 2, got 3",
    ),
    "reversed range of a joint": (
        [], ('range="-1.8 1.8"', 'range="2 -2"'),
        "env.xml: {path}: range of joint slider is reversed, [2, -2]; write the lower number first",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_line_and_exit_code_2(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words, change, message = MISTAKES[name]
    path = tmp_path / "robot.xml"
    text = (MODELS / "cart_pole.xml").read_text()
    path.write_text(text if change is None else re.sub(*change, text, flags=re.DOTALL))
    own = [] if any(word.startswith("env.xml=") for word in words) else [f"env.xml={path}"]
    assert typed(main, WORDS[0], *own, *WORDS[2:], *words, f"hydra.run.dir={tmp_path / 'run'}") == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("rlstable: ")]
    assert line.startswith(f"rlstable: {message.format(path=path)}")
    assert not (tmp_path / "run").exists()
