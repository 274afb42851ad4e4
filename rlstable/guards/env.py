"""The env site: is this simulation still one?

A bad environment is quarantined by `envs.wrappers`: replaced by a clean one, its sample marked invalid.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config.guards import GuardsConfig
from rlstable.guards.base import Guard, GuardState, Verdict, all_within, count_first, no_trips, norm_within

# The names of Brax's engines and of MuJoCo.
COORDINATES = ("q", "qd", "qpos", "qvel")
ACCELERATIONS = ("qacc", "qacc_warmstart", "qdd")


class EnvContext(NamedTuple):
    """Context of the env site: one step, batched `[B]`.

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
    """Trips where any float of a state is not finite, or beyond the limit of its kind.

    Brax's own health tests are comparisons, which NaN passes. Every float leaf of the physics is judged, the solver's
    warm start included, since a NaN there returns after a reset.

    Attributes:
        max_abs_state: Limit of generalized positions and velocities, in the model's units; None for none.
        max_abs_acceleration: Limit of generalized accelerations, the solver's warm start among them.
        max_abs_observation: Limit of every observation element.
        max_abs_reward: Limit of the unscaled reward.
        max_other_norm: Limit of the norm of actions, of all metrics, of `info`, and of the physics as a whole.
    """

    max_abs_state: float | None = None
    max_abs_acceleration: float | None = None
    max_abs_observation: float | None = None
    max_abs_reward: float | None = None
    max_other_norm: float | None = None

    @property
    def causes(self) -> tuple[str, ...]:
        """Why a simulation is bad, in the order in which a bad number travels."""
        return ("action", "physics", "observation", "reward", "done", "metrics", "info")

    def init(self) -> GuardState:
        """No trips."""
        return GuardState(no_trips(self.causes))

    def apply(self, ctx: EnvContext, state: GuardState) -> Verdict:
        """Judges every environment; the value is untouched, the wrapper replaces it."""
        fine = self.fine(ctx)
        trips = state.trips + count_first(~fine & ctx.alive)
        return Verdict(ctx.value, jnp.all(fine, axis=0), state._replace(trips=trips))

    def fine(self, ctx: EnvContext) -> jax.Array:
        """Which parts of every environment are as they should be, bool `[causes, B]`."""
        env = ctx.value
        # Trees that may be empty are judged beside a leaf that has the batch's shape.
        shape = env.reward.astype(jnp.int32)
        return jnp.stack(
            [
                norm_within(ctx.action, self.max_other_norm, 1),
                self._physics_fine(physics(env)),
                all_within(env.obs, self.max_abs_observation, 1),
                all_within(env.reward, self.max_abs_reward, 1),
                all_within(env.done, 1.0, 1),
                norm_within((shape, env.metrics), self.max_other_norm, 1),
                norm_within((shape, env.info), self.max_other_norm, 1),
            ]
        )

    def _physics_fine(self, simulated: Any) -> jax.Array:
        fine = norm_within(simulated, self.max_other_norm, 1)
        for names, limit in ((COORDINATES, self.max_abs_state), (ACCELERATIONS, self.max_abs_acceleration)):
            found = [getattr(simulated, name) for name in names if getattr(simulated, name, None) is not None]
            if found and limit is not None:
                fine &= all_within(found, limit, 1)
        return fine


def env_guards(config: GuardsConfig) -> dict[str, Guard]:
    """The guards of the env site, by name."""
    own = config.quarantine
    if not own.enabled:
        return {}
    return {"quarantine": Quarantine(**own.model_dump(exclude={"enabled"}))}
