"""Training that records the last steps of one environment, with the same results as training without recording."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.device.packed import PackedRows
from rlstable.device.transforms import apply_if
from rlstable.envs import capture
from rlstable.envs.vector import VectorEnv, without_first_state
from rlstable.ppo.state import Slot
from rlstable.runner.setup import TrainingSetup
from rlstable.runner.setup_cache import Factories


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recording(Slot):
    """An incident slot with the last steps of one environment per device.

    Attributes:
        written: Steps so far with repeats of an action, int32 `[devices]`.
        steps: Ring buffer of steps, matrices `[devices, length, n]`: step `i` is in row `i % length`.
    """

    written: Any
    steps: PackedRows

    def last(self, device: int) -> Any:
        """Returns the recorded steps of a device, oldest first; the recording must be on the host."""
        length = next(iter(self.steps.matrices.values())).shape[1]
        written = int(self.written[device])
        rows = dataclasses.replace(self.steps, matrices={kind: x[device] for kind, x in self.steps.matrices.items()})
        return rows.take(np.arange(max(written - length, 0), written) % length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedEnv(VectorEnv):
    """Environments; one of them is recorded on every device.

    Attributes:
        watched: Index of the recorded environment on its device.
        length: Number of steps in the ring buffer.
    """

    watched: int
    length: int

    def empty_slot(self, state: Any, action_size: int, devices: int) -> Recording:
        """Returns empty slots for incidents and steps of every device, on the host.

        Args:
            state: Batched state, `[B]`; only its shapes matter.
            action_size: Elements of an action.
            devices: Number of devices.
        """
        slot = super().empty_slot(state, action_size, devices)

        def step(state: Any, action: jax.Array) -> Any:
            return capture.history_row(capture.StepRecord(state, action, state, action, action), self.watched)

        action = jax.ShapeDtypeStruct((state.reward.shape[0], action_size), jnp.float32)
        with jax.enable_x64(True):  # so that float64 arrays keep their type
            shapes = jax.eval_shape(step, without_first_state(state), action)
        rows = PackedRows.of(jax.tree.map(lambda x: np.zeros((devices * self.length, *x.shape), x.dtype), shapes))
        ring = {kind: x.reshape(devices, self.length, -1) for kind, x in rows.matrices.items()}
        steps = dataclasses.replace(rows, matrices=ring)
        return Recording(slot.taken, slot.clock, slot.record, np.zeros(devices, np.int32), steps)

    def catch(self, incident: Slot, seen: capture.StepRecord, bad: jax.Array) -> Recording:
        """Records the step, then catches incidents as in training.

        Args:
            incident: The `Recording` of this device.
            seen: One step of every environment.
            bad: Environments that went bad in the step, bool `[B]`.
        """
        assert isinstance(incident, Recording)
        slot = super().catch(Slot(incident.taken, incident.clock, incident.record), seen, bad)
        written = incident.written[0]

        def write(ring: dict[str, jax.Array]) -> dict[str, jax.Array]:
            row = PackedRows.of(jax.tree.map(lambda x: x[None], capture.history_row(seen, self.watched)))
            return {kind: x.at[0, written % self.length].set(row.matrices[kind][0]) for kind, x in ring.items()}

        # `apply_if` runs `write` in a loop, as training on a CPU does for incidents: XLA computes and stores the arrays
        # as in training. Without the loop XLA could fuse `write` with their computation and change the rounding.
        ring = apply_if(written >= 0, write, incident.steps.matrices)
        steps = dataclasses.replace(incident.steps, matrices=ring)
        return Recording(slot.taken, slot.clock, slot.record, incident.written + 1, steps)


def recording(watched: int, length: int) -> Factories:
    """Returns the factories of recording training, for `TrainingLoop`.

    Args:
        watched: Index of the recorded environment on its device.
        length: Number of steps in the ring buffer.
    """

    def record(*args: Any) -> TrainingSetup:
        setup = TrainingSetup(*args)
        fields = {field.name: getattr(setup.env, field.name) for field in dataclasses.fields(VectorEnv)}
        setup.env = RecordedEnv(**fields, watched=watched, length=length)
        setup.ppo = dataclasses.replace(setup.ppo, env=setup.env)
        return setup

    return Factories(setup=record)
