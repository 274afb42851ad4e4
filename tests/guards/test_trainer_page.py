"""The programs of docs/guards_in_your_trainer.md run as they stand."""

from __future__ import annotations

import re

import pytest
from commands import ROOT

pytestmark = pytest.mark.usefixtures("quick_compile")
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guards_in_your_trainer.md").read_text(), re.S)


def printed(program: str, capsys: pytest.CaptureFixture[str]) -> str:
    exec(compile(program, "page", "exec"), {"__name__": "page"})
    return capsys.readouterr().out


def test_optax_loop_of_the_page_learns_and_dies_with_plain_adam(capsys: pytest.CaptureFixture[str]) -> None:
    program, guarded, plain = PROGRAMS[0], "guarded(optax.adam(1e-2))", "optax.adam(1e-2)"
    out = printed(program, capsys)
    assert "'finite_update/gradient': 30" in out and "'spike/spike': 10" in out
    assert float(out.split()[-1]) < 1e-3
    before, _, _ = program.replace(guarded, plain).partition("    if exhausted")
    assert printed(f"{before}\nprint(params['w'].max())", capsys).split()[-1] == "nan"


def test_ppo_in_one_file_learns_although_simulations_explode(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(PROGRAMS[1], capsys)
    reward, exploded = re.search(r"reward ([\d.]+) .*'physics': (\d+)", out).groups()
    assert float(reward) > 0.95 and int(exploded) > 100


def test_foreign_loop_goes_back_to_its_best_policy_with_a_lower_rate(capsys: pytest.CaptureFixture[str]) -> None:
    back, end = printed(PROGRAMS[2], capsys).splitlines()
    assert back.endswith("back, with scale_learning_rate 0.5")
    assert abs(float(end.split()[-1])) < 0.05
