"""The training state: the input and output of an iteration."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from rlstable.device import sharding
from rlstable.device.counter import WideCounter
from rlstable.device.packed import PackedDict, PackedRows
from rlstable.device.trees import EnvState, Params, PyTree
from rlstable.guards.outlier import Magnitudes
from rlstable.ppo.normalizer import Statistics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counters:
    """Counters of a run; none of them overflows.

    Attributes:
        env_steps: Environment steps over all devices, action repeat included.
        updates: Accepted minibatch updates.
        episodes: Finished episodes, without quarantined ones.
        trips: Guard trips by guard, one entry per cause, packed into one WideCounter.
    """

    env_steps: WideCounter
    iterations: WideCounter
    updates: WideCounter
    episodes: WideCounter
    trips: PackedDict

    def after(self, env_steps: int, updates: jax.Array, episodes: jax.Array, trips: PackedDict) -> Counters:
        """The counters after one more iteration."""
        return Counters(
            env_steps=self.env_steps + env_steps,
            iterations=self.iterations + 1,
            updates=self.updates + updates,
            episodes=self.episodes + episodes,
            trips=dataclasses.replace(self.trips, whole=self.trips.whole + trips.whole),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tuning:
    """Numbers that schedules, limiters and remedies change during a run.

    They are traced, so a change needs no compilation. A rejected update does not reset them.

    Attributes:
        learning_rate: Rate of the `adaptive_kl` schedule; the base rate of any other schedule.
        learning_rate_scale: Factor on the scheduled rate.
        step_scale: Factor on the policy's rate, below 1 after the policy overshot `guards.limiters.kl`. The critic's
            rate follows this factor, but not below `optimizer.CRITIC_RATE`.
        policy_rate_scale: Factor on the policy's rate only; remedies lower it.
        critic_rate_scale: Factor on the critic's rate only; remedies raise it.
        policy_hold: Remaining iterations in which only the critic learns, int32.
        clip_scale: Factor on the bounds of ratio, value, gradient and update. Used only if a remedy may tighten bounds.
        loss_scale: Dynamic loss scale of float16 networks, 1 otherwise.
        good_steps: Minibatches with finite gradients since the loss scale changed, int32.
        reward_range: Least and greatest reward so far with 0 between them, `[2]`, for `guards.limiters.value_range`.
        total_steps: Environment steps of the whole run; None if the learning rate does not depend on the total.
    """

    learning_rate: jax.Array
    learning_rate_scale: jax.Array
    step_scale: jax.Array
    policy_rate_scale: jax.Array
    critic_rate_scale: jax.Array
    policy_hold: jax.Array
    clip_scale: jax.Array
    loss_scale: jax.Array
    good_steps: jax.Array
    reward_range: jax.Array
    total_steps: WideCounter | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slot:
    """Record of the first bad environment, one slot per device; `envs.capture` fills it.

    Attributes:
        taken: Whether the slot holds a record, bool `[devices]`. A taken slot is never overwritten.
        clock: Environment steps since the iteration began, int32 `[devices]`, action repeats included; 0 between
            iterations.
        record: The environment before and after its step, the action, and the causes, `[devices]`.
        before: Arguments of the next environment step, `[B]`, kept apart from the states: XLA copies each array of a
            state that is read after its successor is written. None between iterations.
    """

    taken: Any  # a NumPy array on the host
    clock: Any
    record: PackedRows
    before: Any = None  # `PackedRows`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The whole state of training on the devices.

    Attributes:
        env_state: Environments, split over devices by their leading axis.
        reset_pool: Clean first states to draw from, split over devices; None if no environment draws.
        guard_memory: Memories of the guards between iterations, by name.
        key: Random key, the same on every device.
        reward_magnitudes: Recent rewards; None without `guards.limiters.reward_outlier`.
        fault: A `rlstable.faults.Fault` to inject; None for no fault.
        incident: Record of the first bad environment of every device, split over devices; None without capture.
    """

    params: Params
    opt_state: PyTree
    normalizer: Statistics
    env_state: EnvState
    reset_pool: PackedRows | None
    guard_memory: dict[str, PyTree]
    tuning: Tuning
    key: jax.Array
    counters: Counters
    reward_magnitudes: Magnitudes | None = None
    fault: Any = None
    incident: Slot | None = None


# Placement of the training state on devices: environments are split, all other fields are replicated.
_split = ("env_state", "reset_pool", "incident")
_specs: dict[str, PyTree] = {
    field.name: sharding.SPLIT if field.name in _split else sharding.REPLICATED
    for field in dataclasses.fields(TrainState)
}
SPECS = TrainState(**_specs)


class Metrics(NamedTuple):
    """Report of an iteration, the same on every device.

    Attributes:
        values: float32 scalars by name.
        trips: int32 `[causes]` of this iteration by guard.
        counters: Copy, because the next iteration reuses the memory of the state.
        healthy: Whether every guard of the state site accepted the new state.
        exhausted: Whether the patience of a state guard is exhausted, by guard.
    """

    values: PackedDict
    trips: PackedDict
    counters: Counters
    healthy: jax.Array
    exhausted: PackedDict
