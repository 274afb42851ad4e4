"""A measurement: one process, its command, and the numbers that it leaves."""

import dataclasses
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstable.cli.compose import compose
from rlstable.config import Config, ConfigError
from scripts.process import REQUIREMENTS, ROOT, Outcome, environment, python_of, watch
from scripts.results import Row

_SIZES = ("policy_hidden_layer_sizes", "value_hidden_layer_sizes")
_SCRIPTS = {"brax": "brax_ppo.py", "sb3": "sb3_ppo.py", "sbx": "sb3_ppo.py"}
ONE_CORE = "1 core"  # case of a process that may use one core only
_STOPPED = range(3, 11)  # exit codes of runs that guards or the supervisor stopped
_COLUMNS = {"time": "time", "step": "step", "value": "eval/episode_reward", "evaluating": "eval/epoch_eval_time"}


class OutOfTime(ConfigError):
    """The time for all measurements ended before a process did."""


@dataclasses.dataclass(frozen=True)
class Leg:
    measure: str  # `start`, `threshold` or `guards`
    task: str
    side: str  # `ours` or a rival
    case: str  # variant of the side: a physics backend, or `published`; empty without variants
    warm: bool  # whether an earlier process has compiled the same programs and cached them
    settings: tuple[str, ...] | Mapping[str, Any]  # overrides of `rlstable.train`, or settings of `rivals/sb3_ppo.py`
    limit: float  # seconds after which the process is killed
    threshold: float | None = None  # return that ends a leg of `threshold`

    def __str__(self) -> str:
        kind = ", ".join(filter(None, (self.case, "warm" if self.warm else "")))
        return f"{self.measure} {self.task}: {self.side}" + (f" ({kind})" if kind else "")

    @property
    def text(self) -> str:
        return json.dumps(self.settings) if isinstance(self.settings, Mapping) else " ".join(self.settings)


def run(leg: Leg, seed: int, end: float = math.inf) -> Row:
    """Runs a leg until it ends or reaches its limit, and returns its measurements.

    A warm leg runs twice with one folder of compiled programs; the second process is measured.

    Raises:
        OutOfTime: The leg was still running at the time `end` of the monotonic clock.
    """
    with tempfile.TemporaryDirectory() as cache:
        if leg.warm:
            _run(leg, seed, cache, end)
        return _run(leg, seed, cache, end)


def _run(leg: Leg, seed: int, cache: str, end: float) -> Row:
    with tempfile.TemporaryDirectory() as name:
        folder, limit = Path(name), min(leg.limit, end - time.monotonic())
        outcome = watch(command_of(leg, seed, folder), environment(**caching(leg, cache)), limit)
        common = {"limit": round(limit, 2), "ran": round(outcome.seconds, 2), "cpu": round(outcome.cpu, 2)}
        points = read_points(leg, folder)
        common |= {"ending": ending_of(leg, points, outcome, folder), "peak_mb": outcome.peak_mb}
    if common["ending"] == "time limit" and (limit < leg.limit or leg.measure == "guards"):
        raise OutOfTime(f"{leg} was stopped after {outcome.seconds:,.0f} s")
    if leg.measure == "guards":
        return common | dict(json.loads(outcome.last_line))
    if leg.measure == "threshold":
        return common | threshold_result(points, leg.threshold or 0.0, outcome)
    return common | start_result(points, outcome)


def command_of(leg: Leg, seed: int, folder: Path) -> list[str]:
    if leg.measure == "guards":
        cores = ("taskset", "--cpu-list", "0") if leg.case == ONE_CORE else ()
        return [*cores, sys.executable, "-m", "scripts.bench.limit", *leg.settings]
    if leg.side == "ours":
        own = (f"seed={seed}", f"hydra.run.dir={folder / 'run'}")
        return [sys.executable, "-m", "rlstable.train", *leg.settings, *own]
    if isinstance(leg.settings, Mapping):
        settings = {**leg.settings, "library": leg.side, "seed": seed, "threshold": leg.threshold}
    else:
        settings = brax_settings(compose(list(leg.settings)), seed, leg.threshold)
    script = REQUIREMENTS / _SCRIPTS[leg.side]
    return [str(python_of(leg.side)), str(script), json.dumps(settings), str(folder / "lines.jsonl")]


def caching(leg: Leg, cache: str) -> dict[str, str]:
    """Returns the environment variables that set the folder of compiled programs; a cold rival has none."""
    if leg.side == "ours":
        return {"XDG_CACHE_HOME": cache, "PYTHONPATH": str(ROOT)}
    if leg.warm:
        return {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    return {}


def brax_settings(config: Config, seed: int, threshold: float | None = None) -> Row:
    """Translates a configuration for `rivals/brax_ppo.py`; without evaluations Brax reports after every iteration."""
    iterations = math.ceil(config.total_steps / config.env_steps_per_iteration)
    schedules = {"constant": None, "adaptive_kl": "ADAPTIVE_KL"}  # all that Brax has
    train = config.ppo.model_dump() | {
        "learning_rate_schedule": schedules[config.ppo.learning_rate_schedule],
        "num_timesteps": config.total_steps, "episode_length": config.env.episode_length,
        "action_repeat": config.env.action_repeat, "num_evals": (config.eval.num_evals or iterations) + 1,
        "run_evals": config.eval.num_evals > 0, "num_eval_envs": config.eval.num_envs,
        "deterministic_eval": config.eval.deterministic, "seed": seed,
    }  # fmt: skip
    networks = {name: list(getattr(config.network, name)) for name in _SIZES}
    where = {"env": config.env.name, "backend": config.env.backend}
    return {**where, "networks": networks, "train": train, "threshold": threshold}


def read_points(leg: Leg, folder: Path) -> list[Row]:
    """Returns the iterations that a side logged: `time`, `step`, `value` and `evaluating`.

    The last line of a killed process can be torn and does not count.
    """
    path = folder / ("run/metrics.jsonl" if leg.side == "ours" else "lines.jsonl")
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    if leg.side == "ours":
        rows = [{short: row.get(long) for short, long in _COLUMNS.items()} for row in rows]
    return [row for row in rows if row.get("step") is not None]


def ending_of(leg: Leg, points: Sequence[Row], outcome: Outcome, folder: Path) -> str:
    """Returns how a leg ended: `reached`, `time limit`, `all steps`, or our stop reason."""
    if leg.threshold is not None and _first_at(points, leg.threshold) is not None:
        return "reached"
    if outcome.code is None:
        return "time limit"
    if outcome.code == 0 and (points or leg.measure == "guards"):
        return "all steps"
    if leg.side == "ours" and outcome.code in _STOPPED:
        return str(json.loads((folder / "run" / "result.json").read_text())["stop_reason"])
    raise ConfigError(f"{leg} ended with exit code {outcome.code}: {outcome.last_line[:300]}")


def start_result(points: Sequence[Row], outcome: Outcome) -> Row:
    late = points[1:]
    gaps = [(b["step"] - a["step"]) / (b["time"] - a["time"]) for a, b in itertools.pairwise(late)]
    return {
        "first": round(points[0]["time"] - outcome.started, 2) if points else None,
        "steady_sps": statistics.median(gaps) if gaps else None,
        "iterations": len(points),
    }


def threshold_result(points: Sequence[Row], threshold: float, outcome: Outcome) -> Row:
    """Returns when the threshold was reached (None if never), and the curve as (seconds, steps, return)."""
    evaluated = [row for row in points if row.get("value") is not None]
    found = _first_at(evaluated, threshold)
    end = len(evaluated) if found is None else found + 1
    curve = [(round(row["time"] - outcome.started, 2), row["step"], row["value"]) for row in evaluated[:end]]
    return {
        "seconds": None if found is None else curve[-1][0],
        "steps": curve[-1][1] if curve else 0,
        "evaluating": round(sum(row["evaluating"] or 0.0 for row in evaluated[:end]), 2),
        "curve": curve,
    }


def _first_at(points: Sequence[Row], threshold: float) -> int | None:
    return next((n for n, row in enumerate(points) if row.get("value") is not None and row["value"] >= threshold), None)
