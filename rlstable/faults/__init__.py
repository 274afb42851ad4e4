"""Injects faults: the failures of real runs, deterministic for a given seed.

Site, time, probability and value of a fault are data of the training state, so one compiled program runs all faults.
A fault is injected at the place of the real failure, for example between environment and guards. The code of training
itself does not know about faults.
"""

from rlstable.faults.env import PROBES, faulty_env
from rlstable.faults.host import FailingCheckpoints, FailingSink, strikes
from rlstable.faults.injection import SITES, Fault, as_data
from rlstable.faults.training import after_rollback, arm, armed_state

__all__ = [
    "PROBES", "SITES", "FailingCheckpoints", "FailingSink", "Fault", "after_rollback", "arm", "armed_state", "as_data",
    "faulty_env", "strikes",
]  # fmt: skip
