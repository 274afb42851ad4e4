"""Faults of the host: a full disk, and a metrics service that does not answer."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlstable.config.faults import FaultConfig
from rlstable.io.checkpoint import Checkpoints


class FailingCheckpoints(Checkpoints):
    """Checkpoints on a disk that is full in some iterations."""

    def __init__(self, fault: FaultConfig, *args: Any):
        self._fault = fault
        super().__init__(*args)

    def _begin(self, number: int, *args: Any) -> None:
        if strikes(self._fault, number):
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._begin(number, *args)


class FailingSink:
    """A sink whose metrics service is down in some iterations."""

    def __init__(self, fault: FaultConfig):
        self._fault = fault

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if strikes(self._fault, int(metrics.get("training/iteration") or 0)):
            raise ConnectionError("the service does not answer")

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Does nothing: this sink has no output."""

    def close(self) -> None:
        """Has nothing to close."""


def strikes(config: FaultConfig, iteration: int) -> bool:
    """Whether a host fault is active in an iteration, counted from 1, by its window and its probability."""
    end = np.inf if config.iterations is None else config.start + config.iterations
    chance = np.random.default_rng(iteration).random()
    return config.start <= iteration - 1 < end and bool(chance < config.chance)
