"""The host loop: iterate, evaluate, log, checkpoint, stop by name."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlstable import __version__, faults, sharding
from rlstable.config import Config, ConfigError
from rlstable.endings import Ending, describe
from rlstable.envs.load import load_env
from rlstable.envs.resets import Resets, make_resets
from rlstable.envs.wrappers import VectorEnv
from rlstable.evaluation import make_evaluator
from rlstable.guards.base import MoreGuards, check_more
from rlstable.guards.env import env_guards
from rlstable.io.checkpoint import Checkpoints
from rlstable.io.console import Console
from rlstable.io.lock import RunLock
from rlstable.io.logbook import Logbook
from rlstable.io.rundir import open_run_dir, write_config, write_result
from rlstable.policy import Policy, load_policy, policy_arrays, policy_spec
from rlstable.ppo.build import init_state, make_ppo
from rlstable.ppo.iteration import PPO
from rlstable.ppo.state import SPECS, Metrics, TrainState
from rlstable.signals import Signals
from rlstable.telemetry import Telemetry
from rlstable.versions import differences, versions

Row = dict[str, float | int | None]
Callback = Callable[[int, Row], Any]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves.

    Attributes:
        ending: Why it stopped.
        run_dir: Its folder.
        step: Environment steps trained.
        metrics: The last evaluation's metrics, None where a number does not exist.
        history: Every logged row, `step` among its keys.
    """

    ending: Ending
    run_dir: Path
    step: int
    metrics: Row
    history: list[Row]

    @property
    def policy(self) -> Policy:
        """The best policy of the run."""
        return load_policy(self.run_dir)


@dataclasses.dataclass
class HostState:
    """The little that lives on the host; saved with the training state.

    Attributes:
        iteration: Iterations done.
        last_return: Of the last evaluation; None where every episode was aborted.
        best_return: Best evaluation so far.
        idle: Iterations in a row of which no update was accepted.
        drawn: Whether anything was drawn from the pool of clean first states since it was filled.
        elapsed: Seconds of training so far, over all processes.
        wandb_run_id: To go on with the same wandb run.
    """

    iteration: int = 0
    last_return: float | None = None
    best_return: float | None = None
    idle: int = 0
    drawn: bool = False
    elapsed: float = 0.0
    wandb_run_id: str | None = None


class Runner:
    """One run, from its configuration to its ending.

    Attributes:
        state: The training state.
        host: What is saved beside it.
        step: Environment steps trained, as a number that outlives the donated state.
        history: Every logged row.

    Args:
        config: What to run.
        run_dir: Where it is kept.
        callback: Called as `callback(step, row)` with every logged row; returning True ends the run.
        more_guards: Guards of your own, by site (`env`, `batch`, `update`, `state`) and name.

    Raises:
        ConfigError: Anything about the configuration, the environment or the folder that cannot work.
    """

    def __init__(
        self,
        config: Config,
        run_dir: str | Path,
        callback: Callback | None = None,
        more_guards: MoreGuards | None = None,
    ):
        more = more_guards or {}
        check_more(more, config.guards.model_dump().keys())
        self.config = config
        self.run_dir = Path(run_dir)
        self._callback = callback
        self._mesh = sharding.make_mesh(config.devices)
        config.require_devices(self._mesh.size)
        self._env = load_env(config.env)
        self._vector_env = VectorEnv(
            self._env,
            config.env.episode_length,
            config.env.action_repeat,
            {**env_guards(config.guards), **more.get("env", {})},
            config.env.reset == "pool",
        )
        faulty = config.fault.site is not None
        if faulty:
            self._vector_env = faults.faulty_env(self._vector_env, config.fault)
        self.ppo: PPO = make_ppo(config, self._vector_env, self._env.action_size, more)
        if faulty:
            self.ppo = faults.arm(self.ppo)
        self.host = HostState()
        self._checkpoints = self._open_checkpoints()
        self._console = Console(config.sinks.console, config.total_steps, config.env.name)
        broken = [faults.FailingSink(config.fault)] if config.fault.site == "sinks" else []
        self._sinks = Logbook(config, self.run_dir, self._console, broken)
        self._telemetry = Telemetry(config, self.ppo)
        self._last_evaluation: Row = {}
        self.history: list[Row] = []
        self.step = 0
        self._signal: int | None = None
        self._stopped_by_callback = False
        key = jax.random.PRNGKey(config.seed)
        self._key_init, self._key_resets, self._key_eval, self._key_redraw = jax.random.split(key, 4)
        self._lock: RunLock | None = None
        try:
            resumes, self._lock = open_run_dir(self.run_dir, config.resume)
            if self._lock.unsupported is not None:
                self._event("lock_unsupported", error=self._lock.unsupported)
            self._evaluator = make_evaluator(config, self.ppo.networks, self._console.compiling)
            self.state = self._first_state()
            if resumes:
                self._resume()
            self.step = int(self.state.counters.env_steps)
            write_config(self.run_dir, config.model_dump(mode="json"))
            self._sinks.start(self.host.wandb_run_id, None if config.resume is None else self.step)
        except BaseException:
            self.close()
            raise

    def run(self) -> Result:
        """Trains to an ending. Whatever the ending, the run folder says which."""
        ending = Ending.error
        try:
            with self._listening():
                ending = self._loop()
        except KeyboardInterrupt:
            ending = Ending.interrupted  # the second one, which does not wait for the iteration
            raise
        except Exception as error:
            self._event("error", message=f"{type(error).__name__}: {error}")
            raise
        finally:
            with contextlib.closing(self):
                result = self._finish(ending)
        return result

    def close(self) -> None:
        """Gives the run folder free, as `run` does at its end; for a run that is not to be run. May be called again."""
        self._checkpoints.close()
        self._sinks.close()
        if self._lock is not None:
            self._lock.release()

    def _open_checkpoints(self) -> Checkpoints:
        config = self.config
        args = (self.run_dir, config.checkpoint, lambda kind, fields: self._event(kind, **fields))
        if config.fault.site == "disk":
            return faults.FailingCheckpoints(config.fault, *args)
        return Checkpoints(*args)

    def _first_state(self) -> TrainState:
        """Environments on clean first states, fresh parameters, everything placed where the program leaves it."""
        config = self.config
        size = min(config.env.reset_pool_size, config.ppo.num_envs)
        self._resets: Resets = make_resets(self._vector_env, size)
        with self._console.compiling("resets"):
            env_state, pool = self._draw(self._key_resets)
        if config.ppo.bootstrap_on_timeout and "time_out" not in env_state.info:
            raise ConfigError(
                f"ppo.bootstrap_on_timeout: {config.env.name} has no info['time_out'] that would tell a time limit "
                "from an end; set it to false"
            )
        state = init_state(self.ppo, self._key_init, env_state, pool)
        if config.fault.site is not None:
            state = faults.armed_state(state, config.fault)
        return sharding.place(state, self._mesh, SPECS)

    def _draw(self, key: jax.Array) -> tuple[Any, Any]:
        """First states for every environment, and a pool for every device."""
        key_envs, key_pool = jax.random.split(key)
        env_state = self._resets.draw(key_envs, self.config.ppo.num_envs)
        if not self._vector_env.draws:
            return env_state, None
        return env_state, self._resets.pool(key_pool, self.config.env.reset_pool_size * self._mesh.size)

    def _require_devices(self, host: Mapping[str, Any]) -> None:
        trained_on = host["devices"]
        if trained_on != self._mesh.size:
            raise ConfigError(
                f"devices: the run in {self.run_dir} was trained on {trained_on} devices, here are {self._mesh.size}; "
                f"its environments and random numbers are theirs, so resume it with devices={trained_on}"
            )

    def _resume(self) -> None:
        fresh = self.state.tuning
        self.state, host = self._checkpoints.restore(self.state, check=self._require_devices)
        # What schedules and searches moved goes on; what was typed anew counts from here.
        old, new = host["config"], self.config.model_dump(mode="json")
        changed: dict[str, Any] = {}
        if old["ppo"]["learning_rate"] != new["ppo"]["learning_rate"]:
            changed["learning_rate"] = fresh.learning_rate
        if old["ppo"]["num_updates_per_batch"] != new["ppo"]["num_updates_per_batch"]:
            changed["epochs"] = fresh.epochs
        if old["precision"] != new["precision"]:
            changed["loss_scale"] = fresh.loss_scale
        self.state = dataclasses.replace(self.state, tuning=dataclasses.replace(self.state.tuning, **changed))
        self.host = HostState(**host["host"])
        self._event("resumed", iteration=self.host.iteration, version=host["version"])
        different = differences(host.get("versions", {"rlstable": host["version"]}), self._versions())
        if different:
            self._event("versions_changed", **different)

    def _versions(self) -> dict[str, str]:
        return {**versions(), "device": sharding.device_kind(self._mesh)}

    def _compile(self) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
        """The training program, compiled once and ahead of its first call."""
        with self._console.compiling("training"):
            program = sharding.over_devices(
                self.ppo.iteration, self._mesh, (SPECS,), (SPECS, sharding.REPLICATED), donate=(0,)
            )
            return program.lower(self.state).compile()

    def _loop(self) -> Ending:
        if self.step >= self.config.total_steps:
            return Ending.completed
        iterate = self._compile()
        while True:
            started = time.perf_counter()
            before = self.step
            with self._console.working(f"iteration {self.host.iteration + 1}", self._telemetry.last_seconds):
                self.state, metrics = iterate(self.state)
                metrics = jax.device_get(metrics)
            self.step = int(metrics.counters.env_steps)
            elapsed = time.perf_counter() - started
            self.host.iteration += 1
            self.host.idle = 0 if metrics.values["training/accepted_share"] > 0 else self.host.idle + 1
            bad = any(metrics.trips[name].any() for name in self._vector_env.guards)
            self.host.drawn |= bad or self.config.env.reset == "pool"
            self.host.elapsed += elapsed
            self._telemetry.add(metrics, elapsed)
            for name, causes in self._telemetry.trips(metrics).items():
                self._event("guard_tripped", guard=name, **causes)
            if self._telemetry.split_is_due(self.host.iteration):
                self._telemetry.measure_split(iterate, self.state)
            ending = self._after_iteration(before, metrics)
            if ending is not None:
                return ending

    def _after_iteration(self, before: int, metrics: Metrics) -> Ending | None:
        """Evaluates, logs, saves and redraws where these are due, and says whether the run is over."""
        config = self.config
        finished = self.step >= config.total_steps
        row: Row = {}
        healthy = bool(metrics.healthy)
        if healthy and self._crossed(before, config.eval.num_evals):
            row = self._evaluate()
        if row or finished or self._signal is not None or self.host.iteration % config.sinks.log_every == 0:
            self._log(self._telemetry.flush(self.host.elapsed) | row)
        lost = self._lost(metrics, finished)
        if lost is not None:
            return lost
        self._redraw(before)  # before saving: what is saved is what the next iteration starts from
        wanted = self._wants_to_stop(row)
        ending = wanted or (Ending.completed if finished else None)
        due = self._checkpoints.due(self.host.iteration) or bool(row) or ending is not None
        if due and healthy:
            self._save(row.get("eval/episode_reward"))
        return ending

    def _lost(self, metrics: Metrics, finished: bool) -> Ending | None:
        """The ending by a guard whose patience is at its end; a run must not complete with a state that is bad."""
        for name, exhausted in metrics.exhausted.items():
            if exhausted or (finished and name == "state" and metrics.trips[name].any()):
                return Ending.of_guard(name)
        update = self.config.guards.update
        return Ending.no_update_accepted if update.enabled and self.host.idle >= update.patience else None

    def _wants_to_stop(self, row: Row) -> Ending | None:
        if self._signal is not None:
            return Ending.interrupted if self._signal == signal.SIGINT else Ending.preempted
        value, target = row.get("eval/episode_reward"), self.config.eval.target_return
        if target is not None and value is not None and value >= target:
            return Ending.target_reached
        return Ending.stopped if self._stopped_by_callback else None

    def _crossed(self, before: int, times: int) -> bool:
        """Whether one of `times` equal parts of the run ended between the step before and now."""
        total = self.config.total_steps
        return min(self.step, total) * times // total > min(before, total) * times // total

    def _evaluate(self) -> Row:
        key = jax.random.fold_in(self._key_eval, self.host.iteration)
        row = self._evaluator.run(self.state, key)
        self._last_evaluation = row
        value = row["eval/episode_reward"]
        self.host.last_return = value
        if value is None:
            self._event("evaluation_void", aborted_share=row["eval/aborted_share"])
        elif self.host.best_return is None or value > self.host.best_return:
            self.host.best_return = float(value)
        return row

    def _log(self, row: Row) -> None:
        self._sinks.log(self.step, row)
        self.history.append({"step": self.step, **row})
        if self._callback is not None and self._callback(self.step, row) is True:
            self._stopped_by_callback = True

    def _event(self, kind: str, **fields: Any) -> None:
        self._sinks.event(self.step, kind, fields)

    def _save(self, score: float | None) -> None:
        if not self.config.checkpoint.enabled:
            return
        self.host.wandb_run_id = self._sinks.wandb_run_id
        host = {
            "host": dataclasses.asdict(self.host),
            "policy": policy_spec(self.ppo.networks, self.config.precision.matmul),
            "config": self.config.model_dump(mode="json"),
            "devices": self._mesh.size,
            "step": self.step,
            "return": score,
            "version": __version__,
            "versions": self._versions(),
        }
        self._checkpoints.save(self.host.iteration, self.state, policy_arrays(self.state), host, score=score)

    def _redraw(self, before: int) -> None:
        """Brax's `num_resets_per_eval` and the refill of the pool, both from clean resets."""
        ppo, env = self.config.ppo, self.config.env
        key = jax.random.fold_in(self._key_redraw, self.host.iteration)
        changes: dict[str, Any] = {}
        if ppo.num_resets_per_eval and self._crossed(
            before, max(self.config.eval.num_evals, 1) * ppo.num_resets_per_eval
        ):
            changes["env_state"] = self._resets.draw(key, ppo.num_envs)
            if self.state.running_return is not None:
                changes["running_return"] = np.zeros(ppo.num_envs, np.float32)
        due = env.reset_pool_refresh and self.host.iteration % env.reset_pool_refresh == 0
        if due and self.host.drawn:
            self.host.drawn = False
            count = env.reset_pool_size * self._mesh.size
            changes["reset_pool"] = self._resets.pool(jax.random.fold_in(key, 1), count)
        for field, value in changes.items():
            placed = sharding.place(value, self._mesh, sharding.SPLIT)
            self.state = dataclasses.replace(self.state, **{field: placed})

    def _listening(self) -> Signals:
        return Signals(lambda number: setattr(self, "_signal", number))

    def _finish(self, ending: Ending) -> Result:
        self._checkpoints.close()
        result = Result(ending, self.run_dir, self.step, self._last_evaluation, self.history)
        fields = {
            "stop_reason": ending.name,
            "exit_code": ending.exit_code,
            "step": self.step,
            "return": self.host.last_return,
            "best_return": self.host.best_return,
            "seconds": round(self.host.elapsed, 1),
        }
        self._event("stopped", **fields)
        try:
            write_result(self.run_dir, fields)
        except OSError as error:
            self._console.message(f"result.json could not be written: {error}")
        self._console.summary(describe(ending, fields, self.run_dir, self._checkpoints.latest() is not None))
        return result
