"""The env site: is this simulation still one?

A bad environment is quarantined by `envs.wrappers`: replaced by a clean one, its sample marked invalid.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config import QuarantineConfig
from rlstable.guards.base import GuardState, Verdict, all_finite, all_within, count_first, no_trips

_COORDINATES = ("q", "qd", "qpos", "qvel")


class EnvContext(NamedTuple):
    """What the env site sees of one step, batched `[B]`.

    Attributes:
        value: The environment state after the step.
        action: What the policy asked for.
        alive: bool `[B]`, False where an earlier repeat of the same step was bad already and has been counted.
    """

    value: Any
    action: jax.Array
    alive: jax.Array


def physics(state: Any) -> Any:
    """The physics of an environment state: Brax calls it `pipeline_state`, Playground `data`."""
    return state.pipeline_state if hasattr(state, "pipeline_state") else state.data


@dataclasses.dataclass(frozen=True)
class Quarantine:
    """Trips where any float of a state is not finite, or one that has a limit is beyond it.

    Brax's own health tests are comparisons, which NaN passes. Every float leaf of the physics is judged, the solver's
    warm start included, since a NaN there returns after a reset.

    Attributes:
        max_abs_state: Limit of generalized positions and velocities, in the model's units; None for none.
        max_abs_observation: Limit of every observation element.
        max_abs_reward: Limit of the unscaled reward.
    """

    max_abs_state: float | None
    max_abs_observation: float | None
    max_abs_reward: float | None

    @property
    def causes(self) -> tuple[str, ...]:
        """Why a simulation is bad, in the order in which a bad number travels."""
        return ("action", "physics", "observation", "reward", "done", "metrics", "info")

    def init(self) -> GuardState:
        """No trips."""
        return GuardState(no_trips(self.causes))

    def apply(self, ctx: EnvContext, state: GuardState) -> Verdict:
        """Judges every environment; the value is untouched, the wrapper replaces it."""
        env = ctx.value
        fine = jnp.stack(
            [
                all_finite(ctx.action, 1),
                self._physics_fine(physics(env)),
                _within(env.obs, self.max_abs_observation),
                _within(env.reward, self.max_abs_reward),
                all_within(env.done, 1.0, 1),
                _per_env(env.metrics, env.reward),
                _per_env(env.info, env.reward),
            ]
        )
        trips = state.trips + count_first(~fine & ctx.alive)
        return Verdict(env, jnp.all(fine, axis=0), state._replace(trips=trips))

    def _physics_fine(self, simulated: Any) -> jax.Array:
        fine = all_finite(simulated, 1)
        if self.max_abs_state is not None:
            found = [getattr(simulated, name) for name in _COORDINATES if getattr(simulated, name, None) is not None]
            if found:
                fine &= all_within(found, self.max_abs_state, 1)
        return fine


def _within(tree: Any, limit: float | None) -> jax.Array:
    return all_finite(tree, 1) if limit is None else all_within(tree, limit, 1)


def _per_env(tree: Any, reward: jax.Array) -> jax.Array:
    """Finiteness of a tree that may be empty."""
    return all_finite((reward.astype(jnp.int32), tree), 1)


def env_guards(config: QuarantineConfig) -> dict[str, Quarantine]:
    """The guards of the env site, by name."""
    if not config.enabled:
        return {}
    return {"quarantine": Quarantine(config.max_abs_state, config.max_abs_observation, config.max_abs_reward)}
