"""Gymnasium's MuJoCo tasks: equal to Gymnasium itself in every step, trained, and refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("imageio")  # which Gymnasium's MuJoCo tasks import

import rlstable  # noqa: E402
from rlstable.cli.compose import compose  # noqa: E402
from rlstable.config import ConfigError  # noqa: E402
from rlstable.config.run import EnvConfig  # noqa: E402
from rlstable.envs.gymnasium_specs import NAMES, spec_of  # noqa: E402
from rlstable.envs.load import load, load_env  # noqa: E402
from rlstable.envs.vector import VectorEnv  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compile")
STEPS, CLOSE = 50, 1e-4


def task(name: str, backend: str = "native", **kwargs: Any) -> Any:
    return load(EnvConfig(source="gymnasium", name=name, backend=backend, kwargs=kwargs or None)).env


def relative(own: Any, theirs: Any) -> float:
    return float(np.max(np.abs(np.asarray(own) - theirs) / np.maximum(1.0, np.abs(theirs))))


def check_parity(own: Any, theirs: Any, steps: int = STEPS) -> None:
    """Both play one episode from one state with equal actions, in float64, because contacts amplify rounding."""
    observation, _ = theirs.reset(seed=1)
    low, high, rng = theirs.action_space.low, theirs.action_space.high, np.random.default_rng(0)
    blank = jax.jit(own.reset)(jax.random.PRNGKey(0))
    data = own.simulator.start(own._mjx_model, qpos=jnp.asarray(theirs.data.qpos), qvel=jnp.asarray(theirs.data.qvel))
    state, step = blank.replace(data=data), jax.jit(own.step)
    first = own._view(data.replace(qpos=jnp.asarray(theirs.data.qpos)), True)
    assert relative(own._observe(first), observation) < CLOSE
    for _ in range(steps):
        action = rng.uniform(-1.0, 1.0, own.action_size)
        state = step(state, jnp.asarray(action))
        observation, reward, terminated, _, info = theirs.step((low + high) / 2 + (high - low) / 2 * action)
        assert relative(state.obs, observation) < CLOSE
        assert float(state.reward) == pytest.approx(reward, rel=CLOSE, abs=CLOSE)
        assert bool(state.done) == terminated
        parts = {name: x for name, x in state.metrics.items() if name in info}
        assert len(parts) >= len(state.metrics) - 1
        for name, part in parts.items():
            assert float(part) == pytest.approx(info[name], rel=CLOSE, abs=CLOSE)
        if terminated:
            break


WITHOUT_CONTACTS = ("InvertedPendulum-v5", "InvertedDoublePendulum-v5", "Reacher-v5", "Swimmer-v5")
ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    ("Ant-v5", {"include_cfrc_ext_in_observation": False, "contact_cost_weight": 0, "main_body": "torso"}),
    ("Ant-v5", {"exclude_current_positions_from_observation": False, "healthy_z_range": (0.5, 0.7)}),
    ("Hopper-v5", {"terminate_when_unhealthy": False, "healthy_reward": 2.0}),
]


@pytest.mark.parametrize(
    ("name", "backend", "kwargs"),
    [
        *((name, "native", {}) for name in NAMES),
        *(pytest.param(name, "mjx", {}, marks=pytest.mark.slow) for name in WITHOUT_CONTACTS),
        *((name, "native", kwargs) for name, kwargs in ARGUMENTS),
    ],
)
def test_task_equals_that_of_gymnasium(name: str, backend: str, kwargs: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        check_parity(task(name, backend, **kwargs), gymnasium.make(name, **kwargs).unwrapped, 20 if kwargs else STEPS)


@pytest.mark.parametrize("name", ["Ant-v5", "Pusher-v5", "Reacher-v5", "Walker2d-v5"])
def test_first_states_are_drawn_like_those_of_gymnasium(name: str) -> None:
    """Mean and deviation of every observation element over many resets."""
    own = np.asarray(jax.jit(jax.vmap(task(name).reset))(jax.random.split(jax.random.PRNGKey(0), 2000)).obs, float)
    theirs = gymnasium.make(name).unwrapped
    drawn = np.array([theirs.reset(seed=seed)[0] for seed in range(500)])
    spread = np.maximum(drawn.std(axis=0), 1e-3)
    np.testing.assert_array_less(np.abs(own.mean(axis=0) - drawn.mean(axis=0)) / spread, 0.3)
    np.testing.assert_allclose(own.std(axis=0), drawn.std(axis=0), rtol=0.2, atol=1e-5)


def test_result_of_a_row_does_not_depend_on_the_other_rows() -> None:
    """Contact forces are computed from what a batch keeps of every simulation."""
    ant = VectorEnv(task("Ant-v5"), 1000, 1, {})
    keys = jax.random.split(jax.random.PRNGKey(0), 6)

    def play(keys: jax.Array) -> jax.Array:
        def step(state: Any, _: None) -> tuple[Any, None]:
            return ant.step(state, 0.5 * jnp.ones((len(keys), 8)), None, keys[0], {}).state, None

        return jax.lax.scan(step, ant.reset(keys), None, length=30)[0].obs

    together = np.asarray(jax.jit(play)(keys))
    assert np.abs(together[:, 27:]).max() > 0.5  # legs have touched the floor
    np.testing.assert_array_equal(jax.jit(play)(keys[::-1])[::-1], together)


def test_task_is_trained_by_its_name_and_played_in_gymnasium(tmp_path: Path) -> None:
    result = rlstable.fit(
        "gymnasium:HalfCheetah-v5", run_dir=tmp_path, total_steps=2_000, network="small", eval={"num_evals": 0},
        ppo={"num_envs": 8, "batch_size": 8, "num_minibatches": 2, "unroll_length": 4, "num_updates_per_batch": 1},
        logging={"console": "off"}, devices=1, guards="off",
    )  # fmt: skip
    assert result.stop_reason.name == "completed"
    policy = rlstable.load_policy(tmp_path)
    env = gymnasium.wrappers.RescaleAction(gymnasium.make("HalfCheetah-v5"), -1.0, 1.0)
    observation, _ = env.reset(seed=0)
    assert observation.dtype == np.float64
    for _ in range(5):
        observation, reward, *_ = env.step(np.asarray(policy.act(observation)))
    assert np.isfinite(reward)


def test_time_limit_is_that_of_gymnasium() -> None:
    limits = {name: compose(["env=gymnasium", f"env.name={name}"]).env.episode_length for name in NAMES}
    assert limits == {**dict.fromkeys(NAMES, 1000), "Pusher-v5": 100, "Reacher-v5": 50}
    assert compose(["env=gymnasium", "env.name=Ant-v5", "env.episode_length=7"]).env.episode_length == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "Ant-v4"}, "env.name: rlstable has no formula of Gymnasium's task 'Ant-v4'; did you mean Ant-v5?"),
        ({"name": "CartPole-v1"}, "'CartPole-v1'; choose one of Ant-v5"),
        ({"kwargs": {"healthy": 1}}, "env.kwargs: Ant-v5 has no argument 'healthy'; did you mean healthy_reward?"),
        ({"kwargs": {"frame_skip": 5}}, "env.kwargs: Ant-v5 has no argument 'frame_skip'; it has contact_cost_weight"),
        ({"backend": "spring"}, "env.backend: spring is for Brax's environments; choose auto, native or mjx"),
    ],
)
def test_what_rlstable_cannot_simulate_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_env(EnvConfig(**{"source": "gymnasium", "name": "Ant-v5", "backend": "native", **settings}))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_missing_gymnasium_and_missing_name_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^env\.name: is missing; name a task of Gymnasium"):
        compose(["env=gymnasium"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^env: gymnasium is not installed; pip install .*\[gymnasium\]"):
        spec_of("Ant-v5")
