"""Estimates the time of an iteration on a CPU before anything compiles, from the physics and the gradient's flops."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rlstable.config import Config
from rlstable.device.machine import share_of_cores
from rlstable.envs.load import Loaded
from rlstable.envs.mujoco_model import model_of, physics_steps

REMEDY = "ppo=cpu has iterations of seconds"
_LONG = 60.0  # seconds of an iteration from which a user is told
_FEWEST_STEPS = 4096  # fewer steps are never measured: they take seconds
_MEASURED = 0.1  # seconds of a measurement
_FLOPS = 6  # per sample and parameter, forward and backward
_TRAINING_SHARE = 0.5  # of the rate of large matrix products that training reaches
_MJX = 4.0  # times the cost of C MuJoCo, measured with ants and humanoids (docs/benchmarks.md)


def long_iteration(config: Config, loaded: Loaded, parameters: int) -> str | None:
    """A sentence about an iteration that takes longer than a minute; None if it is shorter or unknown.

    Args:
        config: The configuration.
        loaded: The environment with its physics backend.
        parameters: Number of parameters of the networks.
    """
    seconds = expected_seconds(config, loaded, parameters)
    if seconds is None or seconds <= _LONG:
        return None
    steps = config.env_steps_per_iteration
    return f"an iteration of {steps:,} steps will take about {seconds / 60:,.0f} min on this machine"


def expected_seconds(config: Config, loaded: Loaded, parameters: int) -> float | None:
    """Seconds of one iteration of all seeds on this CPU; None on an accelerator, and for an iteration of few steps."""
    steps = config.env_steps_per_iteration * config.seeds
    if jax.default_backend() != "cpu" or steps < _FEWEST_STEPS:
        return None
    samples = steps // config.env.action_repeat * config.ppo.num_updates_per_batch
    gradients = samples * parameters * _FLOPS / (_matmul_rate() * _TRAINING_SHARE)
    return gradients + steps * _step_seconds(loaded)


def _matmul_rate() -> float:
    """Floating point operations per second of all cores, from matrices so small that NumPy uses one core."""
    matrix = np.ones((64, 64), np.float32)
    return 2 * 64**3 / _seconds_of(lambda: matrix @ matrix) * share_of_cores(1)


def _step_seconds(loaded: Loaded) -> float:
    """Seconds of an environment step, on all cores; 0 without a MuJoCo model."""
    model = model_of(loaded.env)
    if model is None:
        return 0.0
    import mujoco

    data = mujoco.MjData(model)
    env: Any = getattr(loaded.env, "unwrapped", loaded.env)
    factor = 1.0 if loaded.backend == "native" else _MJX

    def first_step() -> None:  # many steps without control could become unstable
        mujoco.mj_resetData(model, data)
        mujoco.mj_step(model, data)

    return _seconds_of(first_step) * physics_steps(env) * factor / share_of_cores(1)


def _seconds_of(work: Callable[[], Any]) -> float:
    """Seconds of the fastest call, so that other programs on this machine hardly matter."""
    fastest, end = math.inf, time.perf_counter() + _MEASURED
    while (started := time.perf_counter()) < end or fastest == math.inf:
        work()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest
