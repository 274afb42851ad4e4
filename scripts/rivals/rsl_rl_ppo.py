"""Trains RSL-RL's PPO through MuJoCo Playground's wrapper, in its own virtual environment without rlstable.

.rivals/rsl_rl/bin/python scripts/rivals/rsl_rl_ppo.py '<settings as JSON>' lines.jsonl

The settings: `env`, one of Brax's, `backend` (null for the default), `reward_scaling`, `wrapper` (arguments of
Playground's `RSLRLBraxWrapper`), `runner` (configuration of RSL-RL's `OnPolicyRunner`) and `iterations`. There is a
line per iteration. RSL-RL's own files go into a temporary folder.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import torch
from brax import envs
from mujoco_playground import State, wrapper_torch
from rival_log import write_line
from rsl_rl.runners import OnPolicyRunner


class PlaygroundEnv(envs.Wrapper):
    """A Brax environment with Playground's `State`, whose field `data` is Brax's `pipeline_state`."""

    def __init__(self, env: envs.Env, reward_scaling: float):
        super().__init__(env)
        self._reward_scaling = reward_scaling

    def reset(self, rng: jax.Array) -> State:
        return self._converted(self.env.reset(rng))

    def step(self, state: State, action: jax.Array) -> State:
        brax_state = envs.State(state.data, state.obs, state.reward, state.done, state.metrics, state.info)
        return self._converted(self.env.step(brax_state, action))

    def _converted(self, state: envs.State) -> State:
        reward = state.reward * self._reward_scaling
        return State(state.pipeline_state, state.obs, reward, state.done, state.metrics, state.info)


class Runner(OnPolicyRunner):
    """RSL-RL's runner, which also writes a line after each iteration."""

    def __init__(self, lines: Any, steps: int, *arguments: Any):
        super().__init__(*arguments)
        self._lines = lines
        self._steps = steps

    def log(self, locs: dict[str, Any], *arguments: Any) -> None:
        """Writes the line; `learn` calls this method after every iteration."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        write_line(self._lines, step=(locs["it"] + 1) * self._steps)
        super().log(locs, *arguments)


def main(settings: dict[str, Any], path: Path) -> None:
    backend = {} if settings["backend"] is None else {"backend": settings["backend"]}
    env = PlaygroundEnv(envs.get_environment(settings["env"], **backend), settings["reward_scaling"])
    with path.open("w", buffering=1) as lines, tempfile.TemporaryDirectory() as folder:
        on_gpu = jax.default_backend() == "gpu"
        device, rank = ("cuda:0", 0) if on_gpu else ("cpu", None)
        wrapper, runner = settings["wrapper"], settings["runner"]
        torch.manual_seed(wrapper["seed"])
        many = wrapper_torch.RSLRLBraxWrapper(env, device_rank=rank, **wrapper)
        many.device = device  # the wrapper sets no device without a GPU
        steps = wrapper["num_actors"] * runner["num_steps_per_env"] * wrapper["action_repeat"]
        Runner(lines, steps, many, runner, folder, device).learn(settings["iterations"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
