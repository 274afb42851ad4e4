"""Environments on C MuJoCo: equal to MJX, independent of device and order, with explosions in quarantine."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ball import Stick
from brax.envs.base import State
from jax.sharding import PartitionSpec
from parity import ATTRIBUTES, bounds, differences
from quick_compile import ordinarily
from toys import assert_same, finite, mesh, step_alone

from rlstable.config import ConfigError
from rlstable.config.guards import GuardsConfig
from rlstable.config.run import EnvConfig
from rlstable.device import sharding
from rlstable.envs import native
from rlstable.envs.load import load, load_env
from rlstable.envs.vector import VectorEnv, pool_of
from rlstable.ppo.guards import env_guards

pytestmark = pytest.mark.usefixtures("quick_compile")
ROOT = Path(__file__).resolve().parents[2]
STICK = {"source": "import", "name": "ball:Stick"}
NAMES = (
    "ant", "halfcheetah", "hopper", "humanoid", "humanoidstandup", "inverted_double_pendulum", "inverted_pendulum",
    "pusher", "reacher", "swimmer", "walker2d",
)  # fmt: skip


class OwnPhysics(Stick):
    """A class that takes no argument `backend`."""

    def __init__(self, own: str):
        super().__init__(backend=own)


class NeedsMjx(Stick):
    """Its step fails with any physics but MJX."""

    def step(self, state: State, action: jax.Array) -> State:
        assert not isinstance(state.pipeline_state, native.State), "no MJX"
        return super().step(state, action)


def stick(backend: str = "native", **kwargs: Any) -> Any:
    return load_env(EnvConfig(**STICK, backend=backend, kwargs=kwargs or None))


def play(env: Any, state: Any, steps: int = 10) -> Any:
    """Steps under controls that depend on the observation alone, not on the position in the batch; `[B]` to `[B]`."""

    def step(state: Any, index: jax.Array) -> tuple[Any, None]:
        draw = jnp.sin(index + 10.0 * state.obs[..., :1])
        action = jnp.broadcast_to(draw, (*draw.shape[:-1], env.action_size))
        stepped = jax.vmap(env.step)(state, action)
        return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), stepped, state), None

    return jax.lax.scan(step, state, jnp.arange(steps))[0]


@functools.cache
def first(env: Any, count: int) -> Any:
    return jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.PRNGKey(0), count))


# --- the same as in MJX, step by step from the same state


def test_native_step_equals_that_of_mjx():
    """A thousand random steps with contacts, a limit, sensors and derived parts."""
    check_parity(EnvConfig(**STICK, kwargs={"reads": ("sensordata", "site_xpos", "xmat", "qfrc_bias")}))


@pytest.mark.slow
def test_native_step_under_randomised_models_equals_that_of_mjx():
    """Every environment has its own masses, friction, damping, armature, gears and joint limits in both engines."""
    check_parity(EnvConfig(**STICK, randomization_fn="ball:each_its_own"))


def test_every_environment_keeps_its_own_model_in_native_physics():
    """Environments from one first state come apart, and the original model is unchanged."""
    env = load_env(EnvConfig(**STICK, backend="native", randomization_fn="ball:each_its_own"))
    state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.PRNGKey(0), 4))
    start = state.replace(pipeline_state=jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), state.pipeline_state))
    stepped = jax.jit(jax.vmap(env.step))(start, jnp.ones((4, 1)))
    assert len(np.unique(np.asarray(stepped.pipeline_state.qpos), axis=0)) == 4
    assert_same(stepped.info["model"], state.info["model"])
    plain = load_env(EnvConfig(**STICK, backend="native"))
    alone = jax.jit(jax.vmap(plain.step))(start.replace(info={}), jnp.ones((4, 1)))
    assert len(np.unique(np.asarray(alone.pipeline_state.qpos), axis=0)) == 1


@pytest.mark.slow
@ordinarily()  # quickly compiled, the pusher takes minutes per step
@pytest.mark.parametrize("name", NAMES)
def test_native_steps_and_resets_equal_those_of_mjx_in_every_environment(name):
    check_parity(EnvConfig(name=name), resets=True)


def check_parity(config: EnvConfig, resets: bool = False) -> None:
    found = differences(config, resets)
    allowed = bounds(config)
    assert found.keys() >= {"obs", "reward", "done", *ATTRIBUTES}
    beyond = {
        name: (value, allowed[name])
        for name, value in found.items()
        if not (value.most <= allowed[name].most and value.of_99 <= allowed[name].of_99)
    }
    assert not beyond


# --- batches, seeds and devices


def over_devices(env: Any, devices: int, steps: int) -> Any:
    """Plays on several devices, with a reduction over all devices in every step."""
    split = PartitionSpec(sharding.AXIS)

    def run(state: Any) -> Any:
        def once(state: Any, _: None) -> tuple[Any, jax.Array]:
            state = play(env, state, 1)
            return state, sharding.mean(jnp.mean(state.reward))

        return jax.lax.scan(once, state, None, length=steps)

    return sharding.over_devices(run, mesh(devices), (split,), (split, PartitionSpec()))


def test_native_steps_on_two_devices_equal_those_on_one():
    env = stick()
    start = first(env, 16)
    state, rewards = over_devices(env, 2, 300)(start)
    assert np.isfinite(rewards).all()
    assert_same(state.pipeline_state, over_devices(env, 1, 300)(start)[0].pipeline_state)


# --- supported environments


READS_MISSING = {**STICK, "kwargs": {"reads": ("cfrc_ext",)}}
MISSING = "it reads pipeline_state.cfrc_ext, which native physics"
OWN = {"source": "import", "name": "test_native:OwnPhysics"}
CHOICES: tuple[tuple[dict[str, Any], str, str | None], ...] = (
    (READS_MISSING, "mjx", MISSING),
    ({**STICK, "randomization_fn": "ball:other_sizes"}, "mjx", "it cannot randomise geom_size"),
    ({"source": "import", "name": "toys:PointMass"}, "toy", None),
    ({**OWN, "kwargs": {"own": "mjx"}}, "native", None),
    ({**OWN, "kwargs": {"own": "spring"}}, "spring", "its class simulates with spring"),
    ({"source": "import", "name": "test_native:NeedsMjx"}, "mjx", "AssertionError: no MJX"),
)


@pytest.mark.parametrize(("config", "backend", "reason"), CHOICES)
def test_auto_takes_native_physics_where_the_class_allows_it_and_else_names_the_reason(config, backend, reason):
    loaded = load(EnvConfig(**config, backend="auto"))
    assert loaded.backend == backend
    assert loaded.fallback_reason is None if reason is None else reason in str(loaded.fallback_reason)


def test_native_backend_that_cannot_simulate_is_one_line():
    with pytest.raises(ConfigError, match=f"env.backend: native cannot simulate .*{MISSING}.*set env.backend=auto"):
        load(EnvConfig(**READS_MISSING, backend="native"))


def test_auto_backend_depends_on_the_accelerator(monkeypatch):
    assert load(EnvConfig(name="ant", backend="auto"))[1:3] == ("native", None)
    assert load(EnvConfig(name="swimmer", backend="auto"))[1:3] == ("native", None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert load(EnvConfig(name="ant", backend="auto"))[1:3] == ("mjx", None)
    swimmer = load(EnvConfig(name="swimmer", backend="auto"))
    assert swimmer.backend == "generalized" and "Unsupported backend: mjx" in str(swimmer.fallback_reason)
    with pytest.raises(ConfigError) as rejected:
        load(EnvConfig(name="ant", backend="native"))
    assert str(rejected.value) == (
        "env.backend: native steps C MuJoCo on a CPU, but JAX uses a gpu here; "
        "set env.backend=auto for physics on that device, or JAX_PLATFORMS=cpu to train on the CPU"
    )


# --- explosions


def test_quarantine_catches_an_explosion_of_native_physics():
    """One environment of eight has controls of NaN, another one a motor that is far too strong."""
    env = stick(gear=1e8)
    vector = VectorEnv(env, 1000, 1, env_guards(GuardsConfig()))
    key = jax.random.PRNGKey(0)
    start = jax.jit(vector.reset)(jax.random.split(key, 8))
    guard_state = {name: guard.init() for name, guard in vector.guards.items()}
    action = jnp.zeros((8, 1)).at[2].set(jnp.nan).at[5].set(1.0)
    pool = pool_of(jax.device_get(start))
    result = jax.jit(functools.partial(step_alone, vector))(start, action, pool, key, guard_state)
    np.testing.assert_array_equal(result.valid, [True, True, False, True, True, False, True, True])
    trips = dict(zip(vector.guards["quarantine"].causes, result.guard_state["quarantine"].trips.tolist(), strict=True))
    assert {cause: count for cause, count in trips.items() if count} == {"action": 1, "physics": 1}
    assert finite(result.state)


@pytest.mark.slow
def test_native_run_of_thousands_of_iterations_does_not_deadlock(tmp_path: Path) -> None:
    """With evaluations, which compile meanwhile, and checkpoints; the rate is low, as batches of 32 steps are noisy."""
    small = [
        "ppo.num_envs=8", "ppo.batch_size=8", "ppo.num_minibatches=1", "ppo.unroll_length=4", "env.episode_length=50",
        "ppo.num_updates_per_batch=1", "total_steps=160_000", "eval.num_evals=250", "eval.target_return=null",
        "checkpoint.every=20", "logging=quiet", "seed=3", "compile_cache=null", "ppo.learning_rate=1e-5",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "rlstable.train", "env=inverted_pendulum", "env.backend=auto", *small]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=900, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert json.loads((tmp_path / "run" / "result.json").read_text())["stop_reason"] == "completed"
    assert '"kind": "backend_chosen", "backend": "native"' in (tmp_path / "run" / "events.jsonl").read_text()
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == 160_000 and sum("eval/episode_reward" in row for row in rows) == 250
