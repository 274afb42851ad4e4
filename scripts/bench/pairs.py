"""Times guards=off and guards=default in turn, an iteration at a time, and prints one line of JSON.

python -m scripts.bench.pairs env=halfcheetah

Both runs are in one process, without the supervisor. Default guards capture incidents. The order alternates.
"""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rlstable.cli.compose import compose
from rlstable.policy.statistics import estimate
from rlstable.runner.loop import TrainingLoop
from scripts import results

SIDES = {"off": ("guards=off",), "default": ("guards=default", "supervise.incident.enabled=true")}
QUIET = (
    "supervise=off", "supervise.incident.enabled=false", "logging=quiet", "checkpoint=off", "eval.num_evals=0",
    f"total_steps={2**40}",
)  # fmt: skip
WARM_UP, PAIRS = 4, 60


def in_turn(calls: Sequence[Callable[[], object]], pairs: int) -> np.ndarray:
    """Returns the seconds of two functions, `[2, pairs]`; in odd pairs the second goes first."""
    times = np.empty((2, WARM_UP + pairs))
    for number in range(WARM_UP + pairs):
        for side in (1, 0) if number % 2 else (0, 1):
            started = time.perf_counter()
            calls[side]()
            times[side, number] = time.perf_counter() - started
    return times[:, WARM_UP:]


def main(overrides: Sequence[str], pairs: int = PAIRS) -> None:
    with contextlib.ExitStack() as stack:
        runs = []
        for own in SIDES.values():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
            runs.append(TrainingLoop(compose([*overrides, *QUIET, *own]), folder))
            stack.callback(runs[-1].close)
        times = in_turn([run.advance for run in runs], pairs)
        trips, steps = results.trips(runs[1].single.log.history[-1]), runs[0].config.env_steps_per_iteration
    ratio, *interval = estimate(times[0] / times[1], np.median)
    rates = {f"sps_{side}": steps / float(np.median(own)) for side, own in zip(SIDES, times, strict=True)}
    print(json.dumps({"ratio": ratio, "interval": interval, **rates, "pairs": pairs, "steps": steps, "trips": trips}))


if __name__ == "__main__":
    main(sys.argv[1:])
