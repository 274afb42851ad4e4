"""Brax's PPO as published, in an environment of its own; nothing of rlstable is imported.

.rivals/brax/bin/python scripts/rivals/brax_ppo.py '<settings as JSON>' lines.jsonl

The settings: `env`, `backend` (null for none), `networks` (arguments of `make_ppo_networks`), `train` (arguments of
`ppo.train`) and `threshold`, the return that ends the training, null for none. Every line says when it was written
(`time`): the first after imports and environment, then one per epoch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
from brax import envs
from brax.training.agents.ppo import networks as ppo_networks
from brax.training.agents.ppo import train as ppo
from rival_memory import memory_now_mb


class Reached(Exception):
    """The threshold is."""


class Progress:
    """Writes a line per epoch, and ends the training at the threshold.

    Args:
        path: Of the lines.
        threshold: The return, None to train on.
    """

    def __init__(self, path: Path, threshold: float | None):
        self._file = path.open("w", buffering=1)
        self._threshold = threshold

    def say(self, **fields: Any) -> None:
        """One line."""
        print(json.dumps({"time": time.time(), **fields}), file=self._file)

    def __call__(self, step: int, metrics: dict[str, Any]) -> None:
        """What `ppo.train` calls after every epoch and evaluation."""
        value = metrics.get("eval/episode_reward")
        stats = jax.local_devices()[0].memory_stats() or {}
        self.say(
            step=int(step),
            value=None if value is None else float(value),
            evaluating=float(metrics.get("eval/epoch_eval_time", 0.0)),
            device_peak_mb=stats["peak_bytes_in_use"] / 2**20 if "peak_bytes_in_use" in stats else None,
        )
        if value is not None and self._threshold is not None and value >= self._threshold:
            raise Reached


def main(settings: dict[str, Any], path: Path) -> None:
    """Trains."""
    backend = {} if settings["backend"] is None else {"backend": settings["backend"]}
    env = envs.get_environment(settings["env"], **backend)
    progress = Progress(path, settings["threshold"])
    progress.say(imported_mb=memory_now_mb(), platform=jax.default_backend())
    factory = functools.partial(ppo_networks.make_ppo_networks, **settings["networks"])
    with contextlib.suppress(Reached):
        ppo.train(env, network_factory=factory, progress_fn=progress, **settings["train"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
