"""`rlstable.fit` trains like the command."""

from __future__ import annotations

import builtins
import contextlib
import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import TINY

import rlstable
from rlstable.brax_ppo.calls import absolute
from rlstable.cli import command
from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from rlstable.config.overrides import literal
from rlstable.config.ppo import PPOConfig
from rlstable.evaluate import EvaluateOptions
from rlstable.export.__main__ import ExportOptions
from rlstable.io.run_folder import steps_in
from rlstable.policy.saved_run import open_run
from rlstable.render.__main__ import RenderOptions
from rlstable.report.__main__ import ReportOptions
from rlstable.report.run_record import read_records
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")


SMALL: dict[str, Any] = {
    "devices": 1, "logging": "quiet", "env": "toys:PointMass",
    "ppo": {"num_envs": 8, "batch_size": 8, "num_minibatches": 2, "num_updates_per_batch": 1, "unroll_length": 4},
    "network": {"policy_hidden_layer_sizes": (8,), "value_hidden_layer_sizes": [8]},
    "eval": {"num_evals": 1, "num_envs": 2},
}  # fmt: skip


def test_fit_trains_returns_everything_and_resumes_with_the_saved_configuration(tmp_path: Path) -> None:
    rows: list[int] = []
    result = rlstable.fit(
        **SMALL | {"eval": {"num_evals": 1, "num_envs": 2, "env_kwargs": {"bound": 2.0}}},
        run_dir=tmp_path / "run", total_steps=128, guards="strict",
        overrides=["env.episode_length=12", "ppo.discounting=0.5"], callback=lambda step, row: rows.append(step),
    )  # fmt: skip
    assert result.stop_reason is StopReason.completed
    assert rows == [64, 128]
    assert result.run_dir == tmp_path / "run"
    assert result.policy.act(np.zeros(4)).shape == (2,)
    assert result.history[-1]["eval/episode_reward"] == result.metrics["eval/episode_reward"]
    again = rlstable.fit(resume=str(tmp_path / "run"), total_steps=192)
    assert (again.step, again.run_dir) == (192, tmp_path / "run")
    assert "discounting: 0.5" in (tmp_path / "run" / "config.yaml").read_text()


def test_environment_in_the_docs_can_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "python.md").read_text()
    (code,) = re.findall(r"```python\n(# point.py.*?)```", page, re.S)
    (tmp_path / "point.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    own = ["env.kwargs={step_size: 0.05}", "env.episode_length=10"]
    result = rlstable.fit(**SMALL | {"env": "point:Point"}, run_dir=tmp_path / "run", total_steps=64, overrides=own)
    assert result.stop_reason is StopReason.completed
    assert -20.0 < result.metrics["eval/episode_reward"] < 0.0
    assert result.metrics["eval/aborted_share"] == 0.0


def test_tilde_is_the_home_folder_of_every_function(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    words = [*TINY, "total_steps=64", "logging=quiet", "eval.num_evals=1", "eval.num_envs=2", "guards=off"]
    run = here / "run"
    assert rlstable.fit(run_dir="~/run", overrides=words, compile_cache="~/cache").run_dir == run
    assert f"compile_cache: {here}/cache" in (run / "config.yaml").read_text()
    assert rlstable.fit(resume="~/run", run_dir="~/copy", total_steps=128).run_dir == here / "copy"
    assert rlstable.load_policy("~/run").folder == open_run("~/run").folder == run
    assert [record.folder for record in read_records("~/run")] == [run]
    assert command.options(EvaluateOptions, ["run=~/run"]).run == run
    assert command.options(ExportOptions, ["run=~/run", "out=~/out"]).out == here / "out"
    assert command.options(RenderOptions, ["run=~/run", "out=~/out"]).out == here / "out"
    report = command.options(ReportOptions, ["run=~/run", "run=~/copy", "out=~/page.html"])
    assert (report.run, report.out) == ((run, here / "copy"), here / "page.html")
    assert command.options(ReportOptions, ["sweep=~/run"]).sweep == run
    assert absolute("~/brax") == str(here / "brax")
    assert not (here / "~").exists()


@pytest.mark.parametrize("in_notebook", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_script_once_the_run_is_saved_and_a_notebook_gets_the_result(
    number: int, in_notebook: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(*_: Any) -> None:  # of the user's program; the default of SIGTERM would end this process
        saved.append(json.loads((tmp_path / "run" / "result.json").read_text())["stop_reason"])
        raise KeyboardInterrupt

    saved: list[str] = []
    reason = "interrupted" if number == signal.SIGINT else "preempted"
    before = signal.signal(number, handle)
    if in_notebook:
        monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    try:
        with contextlib.nullcontext() if in_notebook else pytest.raises(KeyboardInterrupt):
            kill = lambda *_: signal.raise_signal(number)  # noqa: E731
            result = rlstable.fit(**SMALL, run_dir=tmp_path / "run", total_steps=6400, guards="off", callback=kill)
            assert result.stop_reason.name == reason
    finally:
        signal.signal(number, before)
    assert saved == ([] if in_notebook else [reason])
    assert steps_in(tmp_path / "run" / "checkpoints") == [1]


def test_folder_of_a_run_is_an_argument_of_fit() -> None:
    with pytest.raises(
        ConfigError, match=r"^overrides: hydra.run.dir=mine has no effect in Python; give fit\(run_dir="
    ):
        rlstable.fit(**SMALL, overrides=["hydra.run.dir=mine"])
    with pytest.raises(ConfigError, match=r"^run_dir: has no value; give a folder, or leave it out"):
        rlstable.fit(**SMALL, run_dir="")


def test_mistake_in_fit_is_one_line() -> None:
    with pytest.raises(rlstable.ConfigError, match=r"^ppo.num_env: unknown key; did you mean num_envs"):
        rlstable.fit("ant", ppo={"num_env": 1})
    with pytest.raises(rlstable.ConfigError, match=r"^env: unknown option 'Ant-v5'; did you mean ant\?$"):
        rlstable.fit("Ant-v5")


@pytest.mark.parametrize("env", [None, "fast", "ant"])
def test_fit_on_a_custom_class_inherits_no_recipe(env: str | None, tmp_path: Path) -> None:
    own = ["env.source=import", "env.name=toys:PointMass"]
    with pytest.raises(rlstable.ConfigError, match=r"^env\.source: import alone keeps the recipe of another"):
        rlstable.fit(env, run_dir=tmp_path, overrides=own)
    assert not list(tmp_path.iterdir())


def test_recipe_of_a_custom_class_is_the_default_or_the_chosen_one() -> None:
    own = ["env.source=import", "env.name=toys:PointMass"]
    supported = compose(["env=import", own[1]])
    assert compose(["env=import", own[1], "recipe_for=cpu"]).ppo == compose(["ppo=cpu"]).ppo
    assert compose(["env=import", own[1], "recipe_for=accelerator"]).ppo == PPOConfig()
    assert compose(["env=import", *own]) == supported
    chosen = compose(["env=fast", *own, "ppo=default"])
    assert (chosen.env.source, chosen.env.name, chosen.ppo) == ("import", "toys:PointMass", PPOConfig())
    assert compose(["env=fast", *own, "ppo=fast"]).ppo == compose(["env=fast"]).ppo


VALUES = [
    None, True, 3, 2.5, 1e-7, "ant", "a b, c", "it's", [1, 2], {"a": 1, "b": [True, None]}, "", "a=b", "1e3", "NaN",
    "null", "a/b-c.d", np.float64(1e-3), np.int64(3), np.True_, np.array([[1, 2], [3, 4]]),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_values_passed_to_fit_survive_as_overrides(value: Any) -> None:
    config = compose(["env=ant", "env.kwargs={value: " + literal(value) + "}"])
    expected = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
    assert config.env.kwargs == {"value": expected}


def test_all_public_names_exist_and_unknown_names_are_an_error() -> None:
    for name in rlstable.__all__:
        assert getattr(rlstable, name) is not None
    assert set(rlstable.__all__) == set(dir(rlstable))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = rlstable.nonsense
