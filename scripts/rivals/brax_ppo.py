"""Trains Brax's PPO as published, in its own virtual environment without rlstable.

.rivals/brax/bin/python scripts/rivals/brax_ppo.py '<settings as JSON>' lines.jsonl

The settings: `env`, `backend` (null for the default), `networks` (arguments of `make_ppo_networks`), `train` (arguments
of `ppo.train`, others are ignored) and `threshold`, the return that ends the training (null for none). There is a line
per epoch.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from brax import envs
from brax_trainer import train
from rival_log import Reached, write_line


def main(settings: dict[str, Any], path: Path) -> None:
    backend = {} if settings["backend"] is None else {"backend": settings["backend"]}
    env = envs.get_environment(settings["env"], **backend)
    threshold = settings["threshold"]

    def progress(step: int, metrics: dict[str, Any]) -> None:
        """Writes a line; Brax calls this function after every epoch and evaluation."""
        value = metrics.get("eval/episode_reward")
        shown = None if value is None else float(value)
        write_line(lines, step=int(step), value=shown, evaluating=float(metrics.get("eval/epoch_eval_time", 0.0)))
        if value is not None and threshold is not None and value >= threshold:
            raise Reached

    with path.open("w", buffering=1) as lines, contextlib.suppress(Reached):
        train(env, settings, progress_fn=progress)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
