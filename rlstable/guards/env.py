"""Guard of the env site: checks every environment step.

`envs.vector` replaces a bad environment by a clean one and marks its sample invalid.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.device.shared import without_shared
from rlstable.device.trees import EnvState, PyTree
from rlstable.guards.base import Guard, GuardState, Verdict, all_within, count_first, norm_within

# Names in Brax's engines and in MuJoCo.
COORDINATES = ("q", "qd", "qpos", "qvel")
ACCELERATIONS = ("qacc", "qacc_warmstart", "qdd")


class EnvParts(NamedTuple):
    """The parts of a batched environment state that are checked; every leaf has a batch axis `[B]`."""

    physics: PyTree
    obs: PyTree
    reward: jax.Array
    done: jax.Array
    metrics: PyTree = ()
    info: PyTree = ()


class EnvContext(NamedTuple):
    """Context of the env site: one step, batched `[B]`.

    Attributes:
        value: The environment state after the step, or its `EnvParts`. An array without a batch axis is a `Shared`.
        action: Action of the policy.
        alive: bool `[B]`, False where an earlier action repeat of the same step was bad and is already counted.
        contacts: Largest norm of a contact's numbers, `[B]`; None if no contacts are shared between environments.
    """

    value: EnvState
    action: jax.Array
    alive: jax.Array
    contacts: jax.Array | None = None


def physics_field(state: EnvState) -> str:
    """The field of the physics state: `pipeline_state` in Brax, `data` in Playground."""
    return "pipeline_state" if hasattr(state, "pipeline_state") else "data"


def physics(state: EnvState) -> PyTree:
    return getattr(state, physics_field(state))


def without_fields(state: EnvState, *names: str) -> EnvState:
    return state.replace(**dict.fromkeys(names))


def named(simulated: PyTree, names: tuple[str, ...]) -> list[jax.Array]:
    """The arrays of a physics state that have one of the names."""
    get = simulated.get if isinstance(simulated, Mapping) else functools.partial(getattr, simulated)
    return [get(name, None) for name in names if get(name, None) is not None]


def parts_of(state: EnvState) -> EnvParts:
    """The parts of a state of Brax or Playground; `info` has also the fields that a user's class adds."""
    own = without_shared(state)
    rest = without_fields(own, physics_field(own), "obs", "reward", "done", "metrics")
    return EnvParts(physics(own), own.obs, own.reward, own.done, own.metrics, rest)


@dataclasses.dataclass(frozen=True)
class Quarantine(Guard):
    """Trips where any float of an environment state is not finite, or exceeds its limit.

    Brax's own health checks are comparisons, which NaN passes. This guard checks every float leaf of the state,
    including the solver's warm start and the fields that a user's class adds, because a NaN there survives a reset.

    Attributes:
        max_abs_state: Limit of generalized positions and velocities, in the model's units; None for no limit.
        max_abs_acceleration: Limit of generalized accelerations, including the solver's warm start.
        max_abs_observation: Limit of every observation element.
        max_abs_reward: Limit of the unscaled reward.
        max_other_norm: Limit of the norms of the action, of all metrics, of `info`, and of the whole physics state. The
            fields that a user's class adds count as `info`.
    """

    max_abs_state: float | None = None
    max_abs_acceleration: float | None = None
    max_abs_observation: float | None = None
    max_abs_reward: float | None = None
    max_other_norm: float | None = None

    causes: ClassVar[tuple[str, ...]] = ("action", "physics", "observation", "reward", "done", "metrics", "info")

    def apply(self, ctx: EnvContext, state: GuardState) -> Verdict:
        """Checks every environment. Leaves the value unchanged: `VectorEnv` replaces bad environments."""
        fine = self.fine(ctx)
        trips = state.trips + count_first(~fine & ctx.alive)
        return Verdict(ctx.value, jnp.all(fine, axis=0), state._replace(trips=trips))

    def fine(self, ctx: EnvContext) -> jax.Array:
        """Whether each part of every environment is within its limits, bool `[causes, B]`."""
        env = ctx.value if isinstance(ctx.value, EnvParts) else parts_of(ctx.value)
        # Physics, metrics and info may be empty, so a leaf with the batch's shape is added.
        shape = env.reward.astype(jnp.int32)
        return jnp.stack(
            [
                norm_within(ctx.action, self.max_other_norm, 1),
                self._physics_fine(env.physics, (shape, ctx.contacts)),
                all_within(env.obs, self.max_abs_observation, 1),
                all_within(env.reward, self.max_abs_reward, 1),
                all_within(env.done, 1.0, 1),
                norm_within((shape, env.metrics), self.max_other_norm, 1),
                norm_within((shape, env.info), self.max_other_norm, 1),
            ]
        )

    def _physics_fine(self, simulated: PyTree, more: PyTree) -> jax.Array:
        fine = norm_within((simulated, more), self.max_other_norm, 1)
        for names, limit in ((COORDINATES, self.max_abs_state), (ACCELERATIONS, self.max_abs_acceleration)):
            arrays = named(simulated, names)
            if arrays and limit is not None:
                fine &= all_within(arrays, limit, 1)
        return fine
