"""A leg of the race: its command, and the measurements of its process."""

import dataclasses
import itertools
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstable.cli.compose import compose
from rlstable.config import Config, ConfigError
from scripts.process import REQUIREMENTS, ROOT, Outcome, environment, python_of, watch
from scripts.results import Row

# Options that Brax's PPO lacks; a leg of Brax's must leave them at their defaults.
_OURS = (
    "gae", "normalizer_update", "normalize_values", "normalize_rewards", "learning_rate_warmup",
    "gradient_accumulation", "optimizer",
)  # fmt: skip
_SIZES = ("policy_hidden_layer_sizes", "value_hidden_layer_sizes")
_SCHEDULES = {"constant": None, "adaptive_kl": "ADAPTIVE_KL"}
# Options that a leg of RSL-RL's translates; it must leave all others at their defaults.
_RSL_RL = (
    "num_envs", "batch_size", "num_minibatches", "num_updates_per_batch", "unroll_length", "discounting", "gae_lambda",
    "reward_scaling", "normalize_observations", "entropy_cost", "clipping_epsilon", "vf_loss_coefficient",
    "max_grad_norm", "learning_rate",
)  # fmt: skip
# Rivals that train on the GPU if the machine has one.
ON_GPU = ("brax", "rsl_rl")
_STOPPED = range(3, 11)  # exit codes of runs that guards or the supervisor stopped


@dataclasses.dataclass(frozen=True)
class Leg:
    """A process that is measured."""

    measure: str  # `start`, `threshold` or `floor`
    task: str
    side: str  # `ours`, `floor` or a rival
    case: str  # variant of the side: a physics backend, or `published`; empty without variants
    warm: bool  # whether an earlier process has compiled the same programs and cached them
    settings: tuple[str, ...] | Mapping[str, Any]  # overrides of `rlstable.train`, or settings of `rivals/sb3_ppo.py`
    limit: float  # seconds after which the process is killed
    threshold: float | None = None  # return that ends the leg; None for `start` and `floor`

    def __str__(self) -> str:
        kind = ", ".join(filter(None, (self.case, "warm" if self.warm else "")))
        return f"{self.measure} {self.task}: {self.side}" + (f" ({kind})" if kind else "")

    @property
    def text(self) -> str:
        return json.dumps(self.settings) if isinstance(self.settings, Mapping) else " ".join(self.settings)


class OutOfTime(ConfigError):
    """A process was stopped before it had measured anything."""


class Workshop:
    """Runs legs, and owns the folders of compiled programs."""

    def __init__(self, venvs: Path, gpu: bool, remaining: Callable[[], float] = lambda: math.inf):
        self._venvs = venvs
        self._gpu = gpu
        self._remaining = remaining  # seconds that are left for all legs
        self._caches: dict[tuple[str, str], str] = {}  # by side and settings

    def close(self) -> None:
        for folder in self._caches.values():
            shutil.rmtree(folder, ignore_errors=True)

    def run(self, leg: Leg, seed: int) -> Row:
        """Runs a leg until it ends or reaches its limit, and returns its measurements."""
        key = leg.side, leg.text
        if not leg.warm:
            cache = tempfile.mkdtemp()
            # Our warm process finds what the cold process compiled. Brax's cold process gets no cache folder.
            if leg.side == "ours" and key not in self._caches:
                self._caches[key] = cache
            try:
                return self._run(leg, seed, cache)
            finally:
                if cache not in self._caches.values():
                    shutil.rmtree(cache, ignore_errors=True)
        if key not in self._caches:
            self._caches[key] = tempfile.mkdtemp()
            print(f"race: {leg}: an extra run first, to compile", file=sys.stderr, flush=True)
            self._run(leg, seed, self._caches[key])
            if self._remaining() <= 0:
                raise OutOfTime(f"race: {leg}: no time is left after the run that compiles")
        return self._run(leg, seed, self._caches[key])

    def _run(self, leg: Leg, seed: int, cache: str) -> Row:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            env = environment(**caching(leg, cache))
            limit = min(leg.limit, self._remaining())
            outcome = watch(self._command(leg, seed, folder), env, folder, limit)
            if leg.measure == "floor":
                return _printed(leg, outcome)
            points = read_points(leg, folder)
            ending = ending_of(leg, points, outcome, folder)
        common = {
            "ending": ending,
            "limit": round(limit, 2),
            "ran": round(outcome.seconds, 2),
            "cpu": round(outcome.cpu, 2),
        }
        platform = next((row["platform"] for row in points if "platform" in row), None)
        common |= {"peak_mb": outcome.peak_mb, "platform": platform}
        if leg.measure == "threshold":
            return common | threshold_result(points, leg.threshold or 0.0, outcome)
        return common | start_result(points, self._imports(leg, outcome, points), outcome)

    def _command(self, leg: Leg, seed: int, folder: Path) -> list[str]:
        lines = str(folder / "lines.jsonl")
        if leg.side == "floor":
            return [sys.executable, "-m", "scripts.race.floor", *leg.settings]
        if leg.side == "ours":
            run = (f"seed={seed}", f"hydra.run.dir={folder / 'run'}")
            return [sys.executable, "-m", "rlstable.train", *leg.settings, *run]
        python = str(python_of(leg.side, self._venvs, self._gpu and leg.side in ON_GPU))
        if leg.side == "brax":
            settings = brax_settings(compose(list(leg.settings)), seed, leg.threshold)
            return [python, str(REQUIREMENTS / "brax_ppo.py"), json.dumps(settings), lines]
        if leg.side == "rsl_rl":
            settings = rsl_rl_settings(compose(list(leg.settings)), seed)
            return [python, str(REQUIREMENTS / "rsl_rl_ppo.py"), json.dumps(settings), lines]
        settings = {**leg.settings, "library": leg.side, "seed": seed, "threshold": leg.threshold}  # type: ignore[dict-item]
        return [python, str(REQUIREMENTS / "sb3_ppo.py"), json.dumps(settings), lines]

    def _imports(self, leg: Leg, outcome: Outcome, points: Sequence[Row]) -> Row:
        """Returns the time and the memory after the imports, with the environment made.

        Our command imports modules late and does not log when, so that another process imports them.
        """
        if leg.side != "ours":
            if not points:
                raise OutOfTime(f"race: {leg} was not imported after {outcome.seconds:,.0f} s")
            return {"at": points[0]["time"] - outcome.started, "mb": points[0]["imported_mb"]}
        command = [sys.executable, "-m", "scripts.race.imports", *leg.settings]
        with tempfile.TemporaryDirectory() as folder:
            probe = watch(command, environment(PYTHONPATH=str(ROOT)), Path(folder), leg.limit)
        row = _printed(leg, probe)
        return {"at": row["time"] - probe.started, "mb": row["imported_mb"]}


def caching(leg: Leg, cache: str) -> dict[str, str]:
    """Returns the environment variables that set the folder of compiled programs; Brax has one only if warm."""
    if leg.side in ("ours", "floor"):
        return {"XDG_CACHE_HOME": cache, "PYTHONPATH": str(ROOT)}
    if leg.warm:
        return {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    return {}


def brax_settings(config: Config, seed: int, threshold: float | None) -> Row:
    """Translates a configuration for `rivals/brax_ppo.py`; without evaluations Brax reports after every iteration."""
    ppo, default = config.ppo.model_dump(), type(config.ppo)().model_dump()
    ours = {name: ppo.pop(name) for name in _OURS}
    networks, plain = config.network.model_dump(), type(config.network)().model_dump()
    other = [name for name in _OURS if ours[name] != default[name]]
    other += [name for name in networks if name not in _SIZES and networks[name] != plain[name]]
    if ppo["learning_rate_schedule"] not in _SCHEDULES:
        other.append("learning_rate_schedule")
    if other:
        raise ConfigError(f"race: Brax's PPO has no {', '.join(other)} as the settings want it")
    looks, iterations = config.eval, math.ceil(config.total_steps / config.env_steps_per_iteration)
    train = ppo | {
        "learning_rate_schedule": _SCHEDULES[ppo["learning_rate_schedule"]],
        "num_timesteps": config.total_steps,
        "episode_length": config.env.episode_length,
        "action_repeat": config.env.action_repeat,
        "num_evals": (looks.num_evals or iterations) + 1,
        "run_evals": looks.num_evals > 0,
        "num_eval_envs": looks.num_envs,
        "deterministic_eval": looks.deterministic,
        "seed": seed,
    }
    sizes = {name: list(networks[name]) for name in _SIZES}
    where = {"env": config.env.name, "backend": config.env.backend}
    return {**where, "networks": sizes, "train": train, "threshold": threshold}


def rsl_rl_settings(config: Config, seed: int) -> Row:
    """Translates a configuration without evaluations for `rivals/rsl_rl_ppo.py`."""
    ppo, networks = config.ppo, config.network
    mine, default = ppo.model_dump(), type(ppo)().model_dump()
    own, plain = networks.model_dump(), type(networks)().model_dump()
    other = [name for name in mine if name not in _RSL_RL and mine[name] != default[name]]
    other += [name for name in own if name not in (*_SIZES, "activation") and own[name] != plain[name]]
    if config.eval.num_evals:
        other.append("num_evals")
    if other:
        raise ConfigError(f"race: RSL-RL's PPO has no {', '.join(other)} as the settings want it")
    policy = {
        "class_name": "ActorCritic", "init_noise_std": 1.0, "activation": networks.activation,
        "actor_hidden_dims": list(networks.policy_hidden_layer_sizes),
        "critic_hidden_dims": list(networks.value_hidden_layer_sizes),
        "actor_obs_normalization": ppo.normalize_observations, "critic_obs_normalization": ppo.normalize_observations,
    }  # fmt: skip
    algorithm = {
        "class_name": "PPO", "num_learning_epochs": ppo.num_updates_per_batch, "num_mini_batches": ppo.num_minibatches,
        "clip_param": ppo.clipping_epsilon, "gamma": ppo.discounting, "lam": ppo.gae_lambda,
        "value_loss_coef": ppo.vf_loss_coefficient / 2,  # RSL-RL has the squared error, we and Brax half of it
        "use_clipped_value_loss": False, "entropy_coef": ppo.entropy_cost,
        "learning_rate": ppo.learning_rate, "schedule": "fixed", "normalize_advantage_per_mini_batch": True,
        "max_grad_norm": math.inf if ppo.max_grad_norm is None else ppo.max_grad_norm,
    }  # fmt: skip
    runner = {
        "num_steps_per_env": ppo.batch_size * ppo.num_minibatches * ppo.unroll_length // ppo.num_envs,
        "save_interval": 50,  # Playground's
        "obs_groups": {"policy": ["state"], "critic": ["state"]}, "policy": policy, "algorithm": algorithm,
    }  # fmt: skip
    env = config.env
    wrapper = {
        "num_actors": ppo.num_envs, "seed": seed, "episode_length": env.episode_length,
        "action_repeat": env.action_repeat,
    }  # fmt: skip
    return {
        "env": env.name, "backend": env.backend, "reward_scaling": ppo.reward_scaling, "wrapper": wrapper,
        "runner": runner, "iterations": math.ceil(config.total_steps / config.env_steps_per_iteration),
    }  # fmt: skip


def read_points(leg: Leg, folder: Path) -> list[Row]:
    """Returns the lines that a side wrote: `time`, and after training began `step`, `value` and `evaluating`.

    The last line of a killed process can be torn and does not count.
    """
    path = folder / ("run/metrics.jsonl" if leg.side == "ours" else "lines.jsonl")
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    if leg.side != "ours":
        return rows
    names = {"value": "eval/episode_reward", "evaluating": "eval/epoch_eval_time"}
    names |= {name: f"timing/{name}" for name in ("rollout_sps", "learning_sps", "learning_share")}
    names |= {"device_peak_mb": "memory/device_peak_mb", "time": "time", "step": "step"}
    return [{short: row.get(long) for short, long in names.items()} for row in rows]


def ending_of(leg: Leg, points: Sequence[Row], outcome: Outcome, folder: Path) -> str:
    """Returns how a leg ended: `reached`, `time limit`, `all steps`, or our stop reason."""
    good = [row for row in points if row.get("step") is not None]
    if leg.threshold is not None and _first_at(good, leg.threshold) is not None:
        return "reached"
    if outcome.code is None:
        return "time limit"
    if outcome.code == 0 and good:
        return "all steps"
    if leg.side == "ours" and outcome.code in _STOPPED:
        return str(json.loads((folder / "run" / "result.json").read_text())["stop_reason"])
    raise ConfigError(f"race: {leg} ended with exit code {outcome.code}: {outcome.last_line[:300]}")


def start_result(points: Sequence[Row], imports: Row, outcome: Outcome) -> Row:
    points = [row for row in points if row.get("step") is not None]
    late = points[1:]
    gaps = [(b["step"] - a["step"]) / (b["time"] - a["time"]) for a, b in itertools.pairwise(late)]
    last = points[-1] if points else {}
    above = outcome.peak_mb - imports["mb"] if outcome.peak_mb and imports["mb"] else None
    return {
        "imports": round(imports["at"], 2),
        "first": round(points[0]["time"] - outcome.started, 2) if points else None,
        "steady_sps": statistics.median(gaps) if gaps else None,
        **{name: last.get(name) for name in ("rollout_sps", "learning_sps", "learning_share", "device_peak_mb")},
        "above_imports_mb": above,
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
        "evaluations": end,
        "curve": curve,
    }


def _first_at(points: Sequence[Row], threshold: float) -> int | None:
    return next((n for n, row in enumerate(points) if row.get("value") is not None and row["value"] >= threshold), None)


def _printed(leg: Leg, outcome: Outcome) -> Row:
    """Returns the JSON in the last line of a process."""
    if outcome.code is None:
        raise OutOfTime(f"race: {leg} was stopped after {outcome.seconds:,.0f} s")
    try:
        if outcome.code == 0:
            return dict(json.loads(outcome.last_line))
    except (json.JSONDecodeError, ValueError):
        pass
    raise ConfigError(f"race: {leg} ended with exit code {outcome.code}: {outcome.last_line[:300]}")
