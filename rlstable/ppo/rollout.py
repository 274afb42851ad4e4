"""Collects experience: policy and environment alternate. Each device collects alone, without communication."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from rlstable.config.schema import INT32_MAX
from rlstable.device import sharding
from rlstable.device.counter import WideCounter
from rlstable.device.packed import PackedRows
from rlstable.device.trees import TRAINED_STEPS, EnvState, PyTree
from rlstable.guards import masked
from rlstable.guards.base import Guard, GuardState, initial_states
from rlstable.ppo.gradient import estimate_values, parts_of_batch
from rlstable.ppo.networks import Networks, joined
from rlstable.ppo.records import Collected, swap_axes
from rlstable.ppo.settings import Settings
from rlstable.ppo.state import Slot, TrainState
from rlstable.ppo.teacher import Teacher


class Step(NamedTuple):
    """Result of one step of a vectorised training environment, with finished and bad environments already reset.

    Attributes:
        valid: Whether the sample is usable, bool `[B]`; None without env guards.
        incident: Record of the first bad environment so far; None without capture.
    """

    state: EnvState
    valid: jax.Array | None
    guard_state: dict[str, GuardState]
    incident: Slot | None = None


class TrainingEnv(Protocol):
    """Interface of the environments that `collect` needs; `envs.vector` implements it."""

    @property
    def guards(self) -> Mapping[str, Guard]:
        """The env site's guards, by name."""

    def begin(self, state: EnvState, pool: PackedRows | None) -> EnvState:
        """The states before the steps of an iteration."""

    def packed(self, state: EnvState) -> PackedRows:
        """The parts of the states before their next step that an incident records."""

    def step(
        self,
        state: EnvState,
        action: jax.Array,
        pool: PackedRows | None,
        key: jax.Array,
        guard_state: dict[str, GuardState],
        incident: Slot | None = None,
    ) -> Step:
        """Steps every environment of this device once."""

    def end(self, state: EnvState, pool: PackedRows | None) -> EnvState:
        """The states after the steps of an iteration."""

    def empty_slot(self, state: EnvState, action_size: int, devices: int) -> Slot:
        """Empty slots for the first bad environment of every device."""


class Rollout(NamedTuple):
    """One iteration's experience, and environments, env guards and incident after the last step.

    Attributes:
        data: Experience of this device, `[rows, T]`.
        metrics: float32 scalars over all devices, by name.
        episodes: Finished episodes on all devices, int32.
    """

    env_state: EnvState
    guard_state: dict[str, GuardState]
    data: Collected
    metrics: dict[str, jax.Array]
    episodes: jax.Array
    incident: Slot | None


class _Episodes(NamedTuple):
    """Sums over the episode so far by metric, and whether it is whole; None if all are."""

    totals: PackedRows
    whole: jax.Array | None


_Running = tuple[EnvState, dict[str, GuardState], Slot | None]


def collect(
    state: TrainState,
    key: jax.Array,
    *,
    env: TrainingEnv,
    networks: Networks,
    settings: Settings,
    teacher: Teacher | None = None,
) -> Rollout:
    """Runs every environment for as many unrolls as one iteration needs, with a random key of this device."""
    ppo = settings.ppo

    def ready(env_state: EnvState, guard_state: dict[str, GuardState], incident: Slot | None) -> _Running:
        env_state = _with_trained_steps(env_state, state.counters.env_steps)
        if incident is not None:
            incident = dataclasses.replace(incident, before=env.packed(env_state))
        return env_state, guard_state, incident

    def act_and_step(
        running: _Running, random: tuple[jax.Array, jax.Array]
    ) -> tuple[_Running, tuple[dict[str, PyTree], _Episodes]]:
        (env_state, guard_state, incident), (key, noise) = running, random
        observation = networks.select(env_state.obs)
        memory = networks.memory(env_state.obs)
        distribution, memory = networks.act(state.params, state.normalizer, observation, memory)
        raw = distribution.sample(noise)
        action = joined(distribution.action(raw), memory)
        step = env.step(env_state, action, state.reset_pool, key, guard_state, incident)
        info = step.state.info
        sample = {
            "observation": observation,
            "raw_action": raw,
            "log_prob": distribution.log_prob(raw),
            "distribution": distribution,
            "value": None,  # below, of all steps at once; there the reward is scaled, too
            "reward": step.state.reward,
            "truncation": info["truncation"],
            "termination": step.state.done * (1.0 - info["truncation"]),
            "valid": step.valid,
            "time_out": info["time_out"] if ppo.bootstrap_on_timeout else None,
            "lesson": None if teacher is None else teacher.lesson(ppo, state, env_state.obs),
        }
        totals = info["episode_metrics"]
        # The first episode of an environment is not whole.
        whole = info["steps"] == totals.unpacked()["length"] if settings.staggered else None
        return ready(step.state, step.guard_state, step.incident), (sample, _Episodes(totals, whole))

    def unroll(
        carry: tuple[_Running, jax.Array], _: None
    ) -> tuple[tuple[_Running, jax.Array], tuple[Collected, _Episodes]]:
        running, (key, next_key) = carry[0], jax.random.split(carry[1])
        # The same keys as Brax. Noise for all steps is drawn at once: drawing per step takes longer than the networks.
        keys = _step_keys(key, ppo.unroll_length)
        noise = jax.vmap(lambda key: jax.random.normal(key, (running[0].reward.shape[0], networks.action_size)))(keys)
        first = networks.memory(running[0].obs)
        running, (samples, episodes) = jax.lax.scan(act_and_step, running, (keys, noise))
        last, memory = jax.tree.map(lambda x: x[None], (networks.select(running[0].obs), first))
        return (running, next_key), (Collected(**samples, bootstrap_observation=last, memory=memory), episodes)

    begun, guards = env.begin(state.env_state, state.reset_pool), initial_states(env.guards, state.guard_memory)
    running = ready(begun, guards, state.incident)
    ((env_state, guard_state, incident), _), collected = jax.lax.scan(
        unroll, (running, key), None, length=ppo.rows // ppo.num_envs
    )
    env_state = env.end(env_state, state.reset_pool)
    if incident is not None:
        incident = dataclasses.replace(incident, clock=jnp.zeros_like(incident.clock), before=None)
    # `[unrolls, T, envs, ...]` to `[rows, T, ...]`
    data, episodes = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], *x.shape[3:]), collected)
    metrics, count = _episode_metrics(episodes, data)
    data = data._replace(reward=data.reward * ppo.reward_scaling)
    if ppo.bootstrap_on_timeout or ppo.clipping_epsilon_value is not None or ppo.gae == "per_iteration":
        observation = swap_axes(data.observation)
        values = estimate_values(networks, state.params, state.normalizer, observation, parts_of_batch(ppo))
        data = data._replace(value=swap_axes(values))
    return Rollout(env_state, guard_state, data, metrics, count, incident)


def _with_trained_steps(env_state: EnvState, steps: WideCounter) -> EnvState:
    """The states of environments that have a curriculum, with the steps trained before this iteration."""
    if TRAINED_STEPS not in env_state.info:
        return env_state
    trained = jnp.where(steps > INT32_MAX, INT32_MAX, steps.lo).astype(jnp.int32)
    entry = jnp.full_like(env_state.info[TRAINED_STEPS], trained)
    return env_state.replace(info={**env_state.info, TRAINED_STEPS: entry})


def _step_keys(key: jax.Array, length: int) -> jax.Array:
    """One key per step, `[length]`: each step splits the key that the previous step left, as in Brax."""

    def split(key: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        step_key, next_key = jax.random.split(key)
        return next_key, step_key

    return jax.lax.scan(split, key, None, length=length)[1]


def _episode_metrics(episodes: _Episodes, data: Collected) -> tuple[dict[str, jax.Array], jax.Array]:
    """Mean metrics of the episodes that finished in this iteration, NaN without any, and their number."""
    finished = data.truncation + data.termination > 0
    for condition in (episodes.whole, data.valid):
        finished = finished if condition is None else finished & condition
    count = sharding.total(jnp.sum(finished, dtype=jnp.int32))
    metrics = {}
    for name, values in episodes.totals.unpacked().items():
        metrics[f"episode/{name}"] = sharding.total(jnp.sum(jnp.where(finished, values, 0.0))) / count
    mean = masked.mean(data.reward, data.valid, masked.share(data.valid))
    metrics["training/reward_mean"] = sharding.mean(mean)
    return metrics, count
