"""Whole runs of environments as users write them: counters in `info`, wrappers, units, names, sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from brax.envs.base import Env, Wrapper
from brax.envs.base import State as BraxState
from brax.envs.wrappers import training
from saved import events
from toys import tiny_config

import rlstable
from rlstable import brax_ppo
from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from rlstable.envs.interface import require_unwrapped
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.seeds import Result

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
SENTENCE = (
    "training episodes have a mean length of 1, evaluation episodes of 10: a reset does not restore info; "
    "set env.restore_info=true if step counts or keeps time in info"
)


def test_sign_names_the_key_if_training_episodes_end_at_once(tmp_path: Path) -> None:
    env = {"name": "hostile.users:Limited", "kwargs": {"limit": 10}, "episode_length": 100}
    config = tiny_config(
        guards={}, devices=1, total_steps=8 * 64, env=env, eval={"num_evals": 2, "num_envs": 4},
        logging={"console": "off"}, supervise={}, checkpoint={"enabled": False},
    )  # fmt: skip
    result = TrainingLoop(config, tmp_path).run()
    signs = [event["text"] for event in events(tmp_path, "sign") if event["sign"] == "training_episodes_short"]
    assert signs == [SENTENCE]
    last = result.history[-1]
    assert (last["eval/avg_episode_length"], last["episode/length"]) == (10, 1)


class BraxPoint(Env):
    """A point on a line in Brax's classes."""

    observation_size, action_size, backend = 2, 1, "toy"

    def reset(self, rng: jax.Array) -> BraxState:
        at = jax.random.normal(rng, (2,))
        return BraxState(at, at, jnp.zeros(()), jnp.zeros(()))

    def step(self, state: BraxState, action: jax.Array) -> BraxState:
        at = 0.9 * state.pipeline_state + 0.1 * jnp.concatenate([action, action])
        return state.replace(pipeline_state=at, obs=at, reward=jnp.ones(()))


@pytest.mark.parametrize("vectorised", [False, True])
def test_environment_inside_training_wrappers_ends_with_one_line(tmp_path: Path, vectorised: bool) -> None:
    """Time limits of the wrapper would be terminations."""
    env = training.AutoResetWrapper(Wrapper(training.EpisodeWrapper(BraxPoint(), 12, 2)))
    if vectorised:
        env = training.VmapWrapper(env, 4)
    outermost = "VmapWrapper" if vectorised else "AutoResetWrapper"
    for train in (
        lambda: rlstable.fit(env, run_dir=tmp_path),
        lambda: brax_ppo.train(env, num_timesteps=0, episode_length=20),
        lambda: brax_ppo.train(BraxPoint(), eval_env=env, num_timesteps=256, episode_length=20),
    ):
        with pytest.raises(ConfigError, match=rf"^env\.name: {outermost} is a training wrapper, and"):
            train()


def test_wrapper_of_the_user_is_no_training_wrapper() -> None:
    wrapped = Wrapper(BraxPoint())
    require_unwrapped(wrapped)  # raises nothing
    assert isinstance(wrapped.env, BraxPoint)


UNITS = (
    "env=import", "env.name=users:Units", "env.episode_length=100", "network=small", "ppo.num_envs=32",
    "ppo.batch_size=32", "ppo.num_minibatches=8", "ppo.unroll_length=16", "ppo.learning_rate=1e-3", "eval.num_envs=16",
    "eval.num_evals=1", "logging.console=off", "devices=1",
)  # fmt: skip


def train_units(folder: Path, kwargs: str, *overrides: str) -> tuple[Result, set[str]]:
    """The result, and the kinds of its events; no sample may be masked."""
    result = TrainingLoop(compose([*UNITS, f"env.kwargs={{{kwargs}}}", *overrides]), folder).run()
    row: dict[str, Any] = dict(result.history[-1])
    assert {name: row[name] for name in row if name.startswith("guards/") and row[name]} == {}
    return result, {json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()}


def test_large_units_mask_no_sample_and_change_no_precision(tmp_path: Path) -> None:
    result, kinds = train_units(tmp_path, "observation: 1e8, offset: 1e8, unit: 2e5", "ppo=cpu", "total_steps=16_384")
    assert result.stop_reason.name == "completed"
    assert kinds.isdisjoint({"precision_changed", "incident", "rolled_back", "guard_tripped"})
    assert result.history[-1]["training/reward_greatest"] > 0.1 * 2e5  # a bound would cut all rewards alike


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kwargs", ["unit: 1.0", "unit: 2e4", "unit: 2e5", "observation: 1e8, offset: 1e8"])
def test_policy_learns_in_any_unit(tmp_path: Path, kwargs: str, seed: int) -> None:
    result, _ = train_units(tmp_path, kwargs, "ppo=cpu", "total_steps=240_000", f"seed={seed}", "eval.num_evals=4")
    units = float(kwargs.rsplit(": ", 1)[1]) if kwargs.startswith("unit") else 1.0
    returns = [row["eval/episode_reward"] for row in result.history if "eval/episode_reward" in row]
    assert max(returns) / units > -1.0  # of about -100 for a policy that runs away
