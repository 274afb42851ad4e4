"""The training state: everything an iteration takes and returns."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from rlstable.device import sharding
from rlstable.device.counter import WideCounter
from rlstable.device.packed import PackedDict, PackedRows
from rlstable.ppo.normalizer import Statistics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counters:
    """Everything that counts; none of it wraps.

    Attributes:
        env_steps: Environment steps over all devices, action repeat included.
        iterations: Calls of `iteration`.
        updates: Minibatch updates that were accepted.
        episodes: Finished episodes, quarantined ones not among them.
        trips: By guard, a counter with one entry per cause, behind one WideCounter.
    """

    env_steps: WideCounter
    iterations: WideCounter
    updates: WideCounter
    episodes: WideCounter
    trips: PackedDict

    def after(self, env_steps: int, updates: jax.Array, episodes: jax.Array, trips: PackedDict) -> Counters:
        """The counters after one iteration with so many steps, accepted updates, episodes and trips."""
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
    """The few numbers that schedules and remedies move: traced, so that a change compiles nothing.

    A rejected update does not put them back.

    Attributes:
        learning_rate: The adaptive-KL rate; with another schedule the base rate.
        learning_rate_scale: A factor on whatever the schedule says.
        step_scale: A factor on the policy's rate, below 1 after its steps overshot `guards.limiters.kl`. The critic's
            rate follows it down to `optimizer.CRITIC_RATE` and no further.
        policy_rate_scale: A factor on the policy's rate alone; remedies lower it.
        critic_rate_scale: A factor on the critic's rate alone; remedies raise it.
        policy_hold: int32, iterations left in which only the critic learns.
        clip_scale: A factor on the bounds of ratio, value, gradient and update; read where a remedy may tighten them.
        loss_scale: Dynamic loss scale of float16 networks, 1 otherwise.
        good_steps: int32, minibatches with finite gradients since the loss scale changed.
        epochs: int32, passes over the batch; 0 collects experience and learns nothing.
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
    epochs: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slot:
    """Record of the first bad environment, one slot per device; `envs.capture` fills it.

    Attributes:
        taken: bool `[devices]`, whether anything is in it; what is taken stays as it is.
        clock: int32 `[devices]`, environment steps since the iteration began, repeats of an action counted; 0 after it.
        record: `[devices]`, the environment before and after its step, the action, and why it is bad.
    """

    taken: Any
    clock: Any
    record: PackedRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The whole state of training on the devices.

    Attributes:
        params: `{"policy", "value"}`, float32.
        opt_state: The optimizer's, float32.
        normalizer: Observation statistics.
        env_state: Environments, split over devices by their leading axis.
        reset_pool: Clean first states to draw from, `packed.Rows`, split over devices; None where nothing draws.
        guard_memory: What guards remember from iteration to iteration, by name.
        tuning: Numbers that schedules and remedies move.
        key: Random key, the same on every device.
        counters: What counts.
        return_statistics: Of discounted returns, which rewards are divided by; None where they are not.
        running_return: The discounted return of every environment so far, split over devices; None likewise.
        fault: What `rlstable.faults` injects, as data; None where nothing is.
        incident: The first bad environment of every device, split over devices; None where none is caught.
    """

    params: Any
    opt_state: Any
    normalizer: Statistics
    env_state: Any
    reset_pool: Any
    guard_memory: dict[str, Any]
    tuning: Tuning
    key: jax.Array
    counters: Counters
    return_statistics: Statistics | None = None
    running_return: jax.Array | None = None
    fault: Any = None
    incident: Slot | None = None


# How a training state lies on the devices: environments are split, everything else is the same on all.
_placement: dict[str, Any] = dict.fromkeys(
    (field.name for field in dataclasses.fields(TrainState)), sharding.REPLICATED
)
_split = dict.fromkeys(("env_state", "reset_pool", "running_return", "incident"), sharding.SPLIT)
SPECS = TrainState(**_placement | _split)


class Metrics(NamedTuple):
    """Report of an iteration, the same on every device.

    Attributes:
        values: float32 scalars by name.
        trips: int32 `[causes]` of this iteration by guard.
        counters: A copy, since the state is donated to the next iteration.
        healthy: Verdict of the state site.
        exhausted: Whether its patience has ended, by state guard.
    """

    values: PackedDict
    trips: PackedDict
    counters: Counters
    healthy: jax.Array
    exhausted: PackedDict
