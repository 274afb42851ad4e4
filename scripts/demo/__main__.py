"""Trains the policies of `rlstable demo` by their plain commands, and packs them into the package.

python -m scripts.demo                 # what runs/demo has not; an hour on two cores
python -m scripts.demo --only humanoid
python -m scripts.demo --films              # only the moving pictures of the README, in docs/films
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import rlstable
from rlstable.config.run import CheckpointConfig
from rlstable.demo.__main__ import WORDS, open_demo, packed
from rlstable.io.checkpoint import Checkpoints, restore_policy
from rlstable.render.recording import record
from scripts.demo import films
from scripts.process import ROOT, environment

POLICIES = {
    "quadruped": ["env=robot_velocity", "seed=1"],
    "halfcheetah": ["env=halfcheetah"],
    "humanoid": ["env=humanoid", "total_steps=4000000"],
}
ROBOTS = {"quadruped": ROOT / "tests/robot/models/quadruped.xml"}
DRAWN = {"halfcheetah": "brax:half_cheetah.xml", "humanoid": "brax:humanoid.xml"}  # models of the pages
PACKED = Path(rlstable.__file__).parent / "demo"


def train(name: str, run: Path) -> None:
    model = [f"env.xml={ROBOTS[name]}"] if name in ROBOTS else []
    command = [sys.executable, "-m", "rlstable.train", *POLICIES[name], *model, f"hydra.run.dir={run}"]
    subprocess.run(command, env=environment(PYTHONPATH=str(ROOT)), check=True)


def pack(name: str, run: Path) -> Path:
    """Packs the policy that the run hands over, its settings and an episode, without the state of its training."""
    folder = PACKED / name
    shutil.rmtree(folder, ignore_errors=True)
    arrays, host = restore_policy(run)
    kept = {key: host[key] for key in ("step", "policy", "level", "backend") if key in host}
    kept["host"] = {"iteration": host["host"]["iteration"]}
    kept["config"] = {"env": {"name": host["config"]["env"]["name"]}}
    with tempfile.TemporaryDirectory() as new:
        with Checkpoints(new, CheckpointConfig(asynchronous=False)) as checkpoints:
            checkpoints.save(kept["host"]["iteration"], {"none": np.zeros(1)}, arrays, kept)
        # Orbax also writes the absolute path of the folder, and nothing reads it.
        left_out = shutil.ignore_patterns("state", "commit_success.txt")
        shutil.copytree(Path(new, "checkpoints"), folder / "checkpoints", ignore=left_out)
    words = list(POLICIES[name])
    if name in ROBOTS:
        words.append(f"env.xml={Path(shutil.copy(ROBOTS[name], folder)).name}")
    (folder / WORDS).write_text(json.dumps(words) + "\n")
    packed(record(open_demo(name), episodes=1), DRAWN.get(name, f"{name}.xml"), folder)
    return folder


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the runs")
    parser.add_argument("--only", action="append", choices=POLICIES, help="default: all")
    parser.add_argument("--films", action="store_true", help="draw docs/films from the packed policies")
    asked = parser.parse_args(argv)
    if asked.films:
        return films.draw(ROOT / "docs" / "films")
    for name in asked.only or POLICIES:
        run = asked.out / name
        if not (run / "result.json").exists():
            train(name, run)
        folder = pack(name, run)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{name}: return {json.loads((run / 'result.json').read_text())['return']:,.1f}, {size:,} bytes")


if __name__ == "__main__":
    main()
