"""The wheel contains its configuration files and trains from any folder, and the lock has pins for every Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "env=fast", "ppo.num_envs=8", "ppo.batch_size=8", "ppo.num_minibatches=2", "ppo.num_updates_per_batch=1",
    "network.policy_hidden_layer_sizes=[8]", "network.value_hidden_layer_sizes=[8]", "total_steps=100",
    "eval.num_evals=0", "devices=1", "hydra.run.dir=run",
]  # fmt: skip


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_lock_pins_every_dependency_within_its_range(python: str) -> None:
    system = {"python_version": python, "python_full_version": f"{python}.9"}
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    pins = {}
    for pin in map(Requirement, lines):
        if pin.marker is None or pin.marker.evaluate(system):
            assert pin.name not in pins
            (pinned,) = pin.specifier
            pins[pin.name] = pinned.version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dev = [line for line in project["optional-dependencies"]["dev"] if not line.startswith("rlstable[")]
    for wanted in map(Requirement, project["dependencies"] + dev):
        assert pins[canonicalize_name(wanted.name)] in wanted.specifier


@pytest.mark.slow
def test_wheel_trains_and_shows_its_policies_from_any_folder(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("rlstable-*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert (site / "rlstable" / "configs" / "env" / "humanoid.yaml").is_file()
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(site)}
    where = [sys.executable, "-c", "import rlstable; print(rlstable.__file__)"]
    found = subprocess.run(where, check=True, cwd=folder, env=environment, capture_output=True, text=True)
    assert found.stdout.startswith(str(site))
    for words in (
        ["train", *TINY],
        ["demo"],
        ["doctor", "env=inverted_pendulum", "--no-compile"],
        ["evaluate", "run=run"],
    ):
        subprocess.run([sys.executable, "-m", "rlstable", *words], check=True, cwd=folder, env=environment)
    assert json.loads((folder / "run" / "result.json").read_text())["stop_reason"] == "completed"
    assert {path.stem for path in (folder / "runs" / "demo").iterdir()} == {"halfcheetah", "humanoid", "quadruped"}
