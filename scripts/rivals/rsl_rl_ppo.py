"""RSL-RL's PPO through MuJoCo Playground's wrapper, in an environment of its own; nothing of rlstable is imported.

.rivals/rsl_rl/bin/python scripts/rivals/rsl_rl_ppo.py '<settings as JSON>' lines.jsonl

The settings: `env`, one of Brax's, `backend` (null for none), `reward_scaling`, `wrapper` (arguments of Playground's
`RSLRLBraxWrapper`), `runner` (what RSL-RL's `OnPolicyRunner` is configured with) and `iterations`. Every line says when
it was written (`time`): the first after imports and environment, then one per iteration. What RSL-RL itself writes
goes into a temporary folder.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import torch
from brax import envs
from mujoco_playground import State, wrapper_torch
from rival_memory import memory_now_mb
from rsl_rl.runners import OnPolicyRunner


class Presented(envs.Wrapper):
    """An environment of Brax's as one of Playground's, whose automatic reset knows `data` for `pipeline_state`.

    Args:
        env: The environment.
        reward_scaling: Factor of rewards, for which RSL-RL has no setting.
    """

    def __init__(self, env: envs.Env, reward_scaling: float):
        super().__init__(env)
        self._reward_scaling = reward_scaling

    def reset(self, rng: jax.Array) -> State:
        """Starts an episode."""
        return self._presented(self.env.reset(rng))

    def step(self, state: State, action: jax.Array) -> State:
        """Takes a step."""
        own = envs.State(state.data, state.obs, state.reward, state.done, state.metrics, state.info)
        return self._presented(self.env.step(own, action))

    def _presented(self, own: envs.State) -> State:
        reward = own.reward * self._reward_scaling
        return State(own.pipeline_state, own.obs, reward, own.done, own.metrics, own.info)


class Runner(OnPolicyRunner):
    """RSL-RL's, which writes a line per iteration as soon as all of it is done.

    Args:
        lines: The file that is written.
        steps: Environment steps of an iteration.
        arguments: Those of `OnPolicyRunner`.
    """

    def __init__(self, lines: Any, steps: int, *arguments: Any):
        super().__init__(*arguments)
        self._lines = lines
        self._steps = steps

    def log(self, locs: dict[str, Any], *arguments: Any) -> None:
        """What `learn` calls after every iteration."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        say(self._lines, step=(locs["it"] + 1) * self._steps)
        super().log(locs, *arguments)


def say(lines: Any, **fields: Any) -> None:
    """One line."""
    print(json.dumps({"time": time.time(), **fields}), file=lines)


def main(settings: dict[str, Any], path: Path) -> None:
    """Trains."""
    backend = {} if settings["backend"] is None else {"backend": settings["backend"]}
    env = Presented(envs.get_environment(settings["env"], **backend), settings["reward_scaling"])
    with path.open("w", buffering=1) as lines, tempfile.TemporaryDirectory() as folder:
        say(lines, imported_mb=memory_now_mb(), platform=jax.default_backend())
        on_gpu = jax.default_backend() == "gpu"
        device, rank = ("cuda:0", 0) if on_gpu else ("cpu", None)
        wrapper, runner = settings["wrapper"], settings["runner"]
        torch.manual_seed(wrapper["seed"])
        many = wrapper_torch.RSLRLBraxWrapper(env, device_rank=rank, **wrapper)
        many.device = device  # without a GPU it has none
        steps = wrapper["num_actors"] * runner["num_steps_per_env"] * wrapper["action_repeat"]
        Runner(lines, steps, many, runner, folder, device).learn(settings["iterations"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
