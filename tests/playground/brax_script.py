"""A script as users of Playground write it for Brax's PPO, with one changed import: train, save, restore and play."""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
from brax.training.agents.ppo import networks as ppo_networks
from mujoco_playground import registry, wrapper
from mujoco_playground.config import dm_control_suite_params

from rlstable import brax_ppo as ppo

TINY = {
    "num_envs": 8,
    "batch_size": 8,
    "num_minibatches": 2,
    "num_updates_per_batch": 1,
    "unroll_length": 4,
    "num_resets_per_eval": 1,
    "episode_length": 20,
}

parser = argparse.ArgumentParser()
parser.add_argument("--env_name", default="CartpoleBalance")
parser.add_argument("--logdir", type=Path)
parser.add_argument("--load_checkpoint_path")
parser.add_argument("--play_only", action="store_true")
flags = parser.parse_args()

env_config = registry.get_default_config(flags.env_name)
env_config.impl = "jax"
env = registry.load(flags.env_name, config=env_config)
eval_env = registry.load(flags.env_name, config=env_config)
ppo_params = dict(dm_control_suite_params.brax_ppo_config(flags.env_name, "jax")) | TINY
ppo_params |= {"num_timesteps": 0 if flags.play_only else 128, "num_evals": 3, "num_eval_envs": 4}
network = {"policy_hidden_layer_sizes": (8, 8), "value_hidden_layer_sizes": (8, 8)}


def progress(num_steps, metrics):
    print(json.dumps({"steps": num_steps, "reward": metrics["eval/episode_reward"]}), flush=True)


make_inference_fn, params, _ = ppo.train(
    environment=env,
    eval_env=eval_env,
    progress_fn=progress,
    policy_params_fn=lambda *_: None,
    network_factory=functools.partial(ppo_networks.make_ppo_networks, **network),
    wrap_env_fn=wrapper.wrap_for_brax_training,
    seed=1,
    save_checkpoint_path=flags.logdir / "checkpoints",
    restore_checkpoint_path=flags.load_checkpoint_path,
    run_dir=flags.logdir / "run",
    **ppo_params,
)

inference_fn = jax.jit(make_inference_fn(params, deterministic=True))
state = jax.jit(eval_env.reset)(jax.random.PRNGKey(0))
total = jnp.zeros(())
step = jax.jit(eval_env.step)
for _ in range(20):
    action, _ = inference_fn(state.obs, jax.random.PRNGKey(0))
    state = step(state, action)
    total += state.reward
print(json.dumps({"played": float(total), "action": action.tolist()}))
