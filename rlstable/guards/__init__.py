"""Guards check for wrong values and trip; limiters bound values in normal operation.

These names work in any JAX training loop, without the rest of rlstable: docs/guards_in_your_trainer.md.
"""

from rlstable.guards.base import Guard, GuardState, Verdict, count_first, fold, select
from rlstable.guards.batch import BatchContext, FiniteSamplesGuard
from rlstable.guards.env import EnvContext, EnvParts, Quarantine
from rlstable.guards.guarded import GuardedState, exhausted, guarded, trips
from rlstable.guards.quarantined import quarantined
from rlstable.guards.state import FiniteStateGuard, PolicyGuard, StateContext, StormGuard, ValueLossGuard
from rlstable.guards.update import FiniteUpdateGuard, SpikeGuard, UpdateContext

__all__ = [
    "BatchContext", "EnvContext", "EnvParts", "FiniteSamplesGuard", "FiniteStateGuard", "FiniteUpdateGuard", "Guard",
    "GuardState", "GuardedState", "PolicyGuard", "Quarantine", "SpikeGuard", "StateContext", "StormGuard",
    "UpdateContext", "ValueLossGuard", "Verdict", "count_first", "exhausted", "fold", "guarded", "quarantined",
    "select", "trips",
]  # fmt: skip
