"""Trains tasks of MuJoCo Playground with Brax's PPO and with `rlstable.brax_ppo`, one import apart.

python -m scripts.drop_in                           # all tasks, sides and seeds; resumes where it stopped
python -m scripts.drop_in --task PendulumSwingup    # one task
python -m scripts.drop_in --page                    # docs/drop_in.md from the results

It needs MuJoCo Playground: `make dropin` makes an environment that has it.
"""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from rlstable.config import ConfigError
from scripts import arguments, pages, results
from scripts.drop_in.side import MODULES
from scripts.process import ROOT, environment, last_line
from scripts.results import Row, matching

TASKS = {"CartpoleBalance": 30, "PendulumSwingup": 30}  # iterations
DIVISOR = 16


def run_seed(task: str, side: str, seed: int) -> Row:
    """Trains a seed in a new process with low priority and returns the row of its evaluations."""
    words = [side, task, str(seed), str(DIVISOR), str(TASKS[task])]
    command = ["nice", sys.executable, "-m", "scripts.drop_in.side", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{' '.join(words)}: {last_line(done.stderr) or 'no error message'}")
    evaluations = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    named = {name: [row[name] for row in evaluations] for name in ("steps", "return", "seconds")}
    versions = results.versions() | {"playground": importlib.metadata.version("playground")}
    row = {"task": task, "side": side, "seed": seed, "divisor": DIVISOR, **named}
    return row | {"commit": results.commit(), "versions": versions, "device": results.device()}


def run(tasks: Sequence[str], seeds: int, at_once: int, out: Path) -> None:
    """Trains what the file of results does not have yet; the sides of a seed one after the other."""
    known = results.read(out)
    missing = [
        (task, side, seed)
        for seed in range(seeds)
        for task in tasks
        for side in MODULES
        if not matching(known, task=task, side=side, seed=seed)
    ]
    with ThreadPoolExecutor(at_once) as pool:
        for row in pool.map(lambda one: run_seed(*one), missing):
            results.add(out, [row])
            print(f"{row['task']:16} {row['side']:8} seed {row['seed']} returns {row['return']}", flush=True)


def page(rows: Sequence[Row]) -> str:
    """Returns the table of the tasks that both sides have trained."""
    cells = []
    for task in TASKS:
        sides = [matching(rows, task=task, side=side) for side in MODULES]
        if not all(sides):
            continue
        for index, steps in enumerate(sides[0][0]["steps"]):
            columns = [[row["return"][index] for row in side] for side in sides]
            cells.append((task, f"{steps:,}", *(_returns(values) for values in columns)))
    header = ("task", "steps", *(f"`{module}`" for module in MODULES.values()))
    latest = rows[-1]
    versions = ", ".join(f"{name} {version}" for name, version in latest["versions"].items())
    counts = ", ".join(str(len(matching(rows, task=task, side="rlstable"))) for task in TASKS)
    return "\n".join(
        (
            *pages.table(header, cells, (0,)),
            "",
            f"Seeds: {counts}. Environments and batch are Playground's divided by {latest['divisor']}. "
            f"Device: {latest['device']['kind']}, {latest['device']['cpus']} CPUs. Versions: {versions}.",
        )
    )


def _returns(values: Sequence[float]) -> str:
    return f"{np.median(values):,.0f} [{min(values):,.0f}, {max(values):,.0f}]"


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments.study_parser(__doc__, Path("docs/drop_in.jsonl"))
    arguments.add_choice(parser, "--task", TASKS)
    parser.add_argument("--seeds", type=arguments.whole(1), default=3, help="default: 3")
    parser.add_argument("--at-once", type=arguments.whole(1), default=2, help="processes at the same time; default: 2")
    asked = parser.parse_args(argv)
    if not asked.page:
        results.check_writable(asked.out)
        run(asked.task or list(TASKS), asked.seeds, asked.at_once, asked.out)
    rows = results.read(asked.out)
    if rows:
        pages.fill(asked.out.parent / "drop_in.md", {"results": page(rows)})


if __name__ == "__main__":
    main()
