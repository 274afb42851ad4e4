"""Trains Brax's PPO as published, in its own virtual environment without rlstable.

.rivals/brax/bin/python scripts/rivals/brax_ppo.py '<settings as JSON>' lines.jsonl

The settings: `env`, `backend` (null for the default), `networks` (arguments of `make_ppo_networks`), `train` (arguments
of `ppo.train`, others are ignored) and `threshold`, the return that ends the training (null for none). There is a line
per epoch.
"""

import contextlib
import functools
import inspect
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from brax import envs
from brax.training.agents.ppo import networks as ppo_networks
from brax.training.agents.ppo import train as ppo
from replicated import device_put_replicated
from rival_log import Reached, write_line


def main(settings: dict[str, Any], path: Path) -> None:
    backend = {} if settings["backend"] is None else {"backend": settings["backend"]}
    env = envs.get_environment(settings["env"], **backend)
    threshold = settings["threshold"]

    def progress(step: int, metrics: dict[str, Any]) -> None:
        """Writes a line; `ppo.train` calls this function after every epoch and evaluation."""
        value = metrics.get("eval/episode_reward")
        shown = None if value is None else float(value)
        write_line(lines, step=int(step), value=shown, evaluating=float(metrics.get("eval/epoch_eval_time", 0.0)))
        if value is not None and threshold is not None and value >= threshold:
            raise Reached

    known = inspect.signature(ppo.train).parameters
    train = {name: value for name, value in settings["train"].items() if name in known}
    factory = functools.partial(ppo_networks.make_ppo_networks, **settings["networks"])
    lost = not hasattr(jax, "device_put_replicated")
    back = mock.patch.object(jax, "device_put_replicated", device_put_replicated, create=True)
    with path.open("w", buffering=1) as lines, contextlib.suppress(Reached), back if lost else contextlib.nullcontext():
        ppo.train(env, network_factory=factory, progress_fn=progress, **train)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
