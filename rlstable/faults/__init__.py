"""Faults on purpose: what goes wrong in real runs, injected deterministically from the seed.

Which fault, when, how often and how large are data of the training state, so that one compiled program runs them all.
An injection stands where the real thing would: between environment and guards, between loss and optimizer. Training
itself knows nothing of it.
"""

from rlstable.faults.env import PROBES, faulty_env
from rlstable.faults.host import FailingCheckpoints, FailingSink, strikes
from rlstable.faults.injection import SITES, Fault, as_data
from rlstable.faults.training import after_rollback, arm, armed_state

__all__ = [
    "PROBES",
    "SITES",
    "FailingCheckpoints",
    "FailingSink",
    "Fault",
    "after_rollback",
    "arm",
    "armed_state",
    "as_data",
    "faulty_env",
    "strikes",
]
