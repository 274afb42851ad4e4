"""Times guards=off and guards=default in turn, an iteration at a time, and prints one line of JSON.

python -m scripts.bench.pairs env=inverted_pendulum env.backend=generalized

Both runs are in one process and unsupervised. The order alternates from pair to pair.
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
from rlstable.runner.loop import TrainingLoop
from scripts import results

SIDES = ("off", "default")
QUIET = (
    "supervise=off", "supervise.incident.enabled=false", "logging=quiet", "checkpoint=off", "eval.num_evals=0",
    f"total_steps={2**40}",
)  # fmt: skip
WARM_UP, PAIRS = 4, 30
_RESAMPLES = 10_000


def in_turn(first: Callable[[], object], second: Callable[[], object], pairs: int) -> np.ndarray:
    """Returns the seconds of two functions, `[2, pairs]`; in odd pairs the second goes first."""

    def seconds(call: Callable[[], object]) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    for _ in range(WARM_UP):
        first()
        second()
    times = np.empty((2, pairs))
    for number in range(pairs):
        for side in (1, 0) if number % 2 else (0, 1):
            times[side, number] = seconds((first, second)[side])
    return times


def median_and_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Returns the median and the ends of its 95 % percentile bootstrap interval, with a fixed seed."""
    rng = np.random.default_rng(0)
    medians = np.median(values[rng.integers(len(values), size=(_RESAMPLES, len(values)))], axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(np.median(values)), float(low), float(high)


def main(overrides: Sequence[str], pairs: int = PAIRS) -> None:
    with contextlib.ExitStack() as stack:
        runs = []
        for guards in SIDES:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
            runs.append(TrainingLoop(compose([*overrides, *QUIET, f"guards={guards}"]), folder))
            stack.callback(runs[-1].close)
        times = in_turn(runs[0].advance, runs[1].advance, pairs)
        trips, steps = results.trips(runs[1].single.log.history[-1]), runs[0].config.env_steps_per_iteration
    ratio, low, high = median_and_interval(times[0] / times[1])
    rates = {f"sps_{side}": steps / float(np.median(own)) for side, own in zip(SIDES, times, strict=True)}
    print(
        json.dumps({"ratio": ratio, "interval": [low, high], **rates, "pairs": pairs, "steps": steps, "trips": trips})
    )


if __name__ == "__main__":
    main(sys.argv[1:])
