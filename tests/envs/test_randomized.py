"""Domain randomisation: each environment has a separate model and keeps it."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brax import envs
from flax import struct
from toys import PointMass, step_alone, tiny_config

from rlstable import ConfigError
from rlstable.envs.load import load
from rlstable.envs.randomized import MODEL, RandomizedEnv
from rlstable.envs.vector import VectorEnv, pool_of
from rlstable.guards.env import Quarantine
from rlstable.policy import playback
from rlstable.policy.evaluator import evaluation_env
from rlstable.runner.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")

NAME = "test_randomized:Weighted"
PATH = "test_randomized:masses"


@struct.dataclass
class Model:
    """A model with two arrays, of which one is randomised."""

    mass: jax.Array
    gravity: jax.Array


class Weighted(PointMass):
    """A point with a mass, and a bad observation wherever an action is beyond 5."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.sys = Model(jnp.ones(1), jnp.ones(3))

    def step(self, state: Any, action: jax.Array) -> Any:
        stepped = super().step(state, jnp.clip(action, -1.0, 1.0) / self.sys.mass)
        bad = jnp.any(action > 5.0)
        return stepped.replace(obs=jnp.where(bad, jnp.nan, stepped.obs))


def masses(model: Model, rng: jax.Array) -> tuple[Model, Model]:
    mass = jax.vmap(lambda key: jax.random.uniform(key, (1,), minval=0.5, maxval=2.0))(rng)
    return model.replace(mass=mass), Model(mass=0, gravity=None)


def heavy_masses(model: Model, rng: jax.Array) -> tuple[Model, Model]:
    heavy, axes = masses(model, rng)
    return heavy.replace(mass=10.0 * heavy.mass), axes


def not_batched(model: Model, rng: jax.Array) -> tuple[Model, Model]:
    return model, Model(mass=None, gravity=None)


def no_tuple(model: Model, rng: jax.Array) -> Model:
    return model


def mass_of(state: Any) -> np.ndarray:
    (mass,) = state.info[MODEL].values()
    return np.asarray(mass)[:, 0]


def randomized_config(**sections: Any) -> Any:
    env = {"name": NAME, "randomization_fn": PATH} | sections.pop("env", {})
    return tiny_config(env=env, **sections)


@pytest.fixture(scope="module")
def env() -> RandomizedEnv:
    return RandomizedEnv(Weighted(), masses)


def test_every_environment_steps_under_its_own_model(env: RandomizedEnv) -> None:
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    state = jax.vmap(env.reset)(keys)
    mass = mass_of(state)
    assert len(set(mass.tolist())) == 4
    assert list(state.info[MODEL]) == [".mass"]
    action = jnp.full((4, 2), 0.5)
    stepped = jax.vmap(env.step)(state, action)
    for index in range(4):
        alone = Weighted()
        alone.sys = alone.sys.replace(mass=jnp.asarray(mass[index : index + 1]))
        expected = alone.step(jax.tree.map(lambda x, i=index: x[i], state), action[index])
        np.testing.assert_allclose(stepped.obs[index], expected.obs, rtol=1e-6)
    np.testing.assert_array_equal(mass_of(stepped), mass)
    np.testing.assert_array_equal(env.unwrapped.sys.mass, [1.0])


def first_obs(state: Any) -> Any:
    return state.info["first_state"].unpacked()["obs"]


def test_quarantine_and_automatic_reset_leave_the_model(env: RandomizedEnv) -> None:
    vector = VectorEnv(env, 3, 1, {"quarantine": Quarantine()}, reset_from_pool=True)
    state = vector.reset(jax.random.split(jax.random.PRNGKey(0), 4))
    pool = pool_of(jax.device_get(vector.reset(jax.random.split(jax.random.PRNGKey(9), 3))))
    mass, first = mass_of(state), np.asarray(first_obs(state))
    guard_state = {name: guard.init() for name, guard in vector.guards.items()}
    step = jax.jit(functools.partial(step_alone, vector))
    action = jnp.zeros((4, 2)).at[2].set(9.0)
    result = step(state, action, pool, jax.random.PRNGKey(1), guard_state)
    assert result.valid.tolist() == [True, True, False, True]
    np.testing.assert_array_equal(mass_of(result.state), mass)
    assert (np.asarray(first_obs(result.state))[2] != first[2]).any()
    for number in range(3):  # every episode ends after three steps
        result = step(result.state, jnp.zeros((4, 2)), pool, jax.random.PRNGKey(2 + number), guard_state)
    assert (np.asarray(first_obs(result.state)) != first).any(axis=1).all()
    np.testing.assert_array_equal(mass_of(result.state), mass)


@pytest.mark.slow
def test_engine_that_carries_masses_steps_with_those_of_the_kept_model() -> None:
    """Brax's spring engine computes masses at the reset only, but a first state may be of another model."""

    def heavier(system: Any, rng: jax.Array) -> Any:
        scale = jax.vmap(lambda key: jax.random.uniform(key, minval=0.5, maxval=2.0))(rng)
        mass = system.link.inertia.mass[None] * scale[:, None]
        in_axes = jax.tree.map(lambda _: None, system)
        return system.tree_replace({"link.inertia.mass": mass}), in_axes.tree_replace({"link.inertia.mass": 0})

    env = RandomizedEnv(envs.get_environment("inverted_pendulum", backend="spring"), heavier)
    first, other = (env.reset(key) for key in jax.random.split(jax.random.PRNGKey(0)))
    mixed = other.replace(info={**other.info, MODEL: first.info[MODEL]})
    stepped = env.step(mixed, jnp.zeros(env.action_size))
    np.testing.assert_allclose(stepped.pipeline_state.mass, first.pipeline_state.mass, rtol=1e-6)
    assert (np.abs(np.asarray(other.pipeline_state.mass - first.pipeline_state.mass)) > 1e-3).any()


@pytest.mark.parametrize(("randomize", "expected"), [(False, PointMass), (True, RandomizedEnv)])
def test_evaluation_is_randomised_only_on_request(
    randomize: bool, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = randomized_config(eval={"randomize": randomize})
    assert isinstance(evaluation_env(config).env, expected)
    run: Any = SimpleNamespace(config=config, policy=None, folder=Path(), trust=True)
    monkeypatch.setattr(playback, "_require_fit", lambda *_: None)
    assert isinstance(playback.load_policy_environment(run, 2, True, None)[1].env, expected)


def test_resume_with_another_randomisation_draws_other_models(tmp_path: Path) -> None:
    first = TrainingLoop(randomized_config(total_steps=64, devices=1), tmp_path)
    first.run()
    changed = {"randomization_fn": "test_randomized:heavy_masses"}
    second = TrainingLoop(randomized_config(total_steps=128, devices=1, resume="auto", env=changed), tmp_path)
    assert mass_of(first.single.state.env_state).max() <= 2.0 < 5.0 <= mass_of(second.single.state.env_state).min()
    second.close()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"randomization_fn": "nowhere:masses"}, r"^env\.randomization_fn: no module 'nowhere'"),
        ({"randomization_fn": "test_randomized:mases"}, r"^env\.randomization_fn: .* has no 'mases'"),
        ({"randomization_fn": "test_randomized:no_tuple"}, r"^env\.randomization_fn: cannot be used: "),
        ({"randomization_fn": "test_randomized:not_batched"}, r"^env\.randomization_fn: in_axes holds no 0"),
        ({"name": "toys:PointMass"}, r"^env\.randomization_fn: PointMass has neither sys \(Brax\) nor mjx_model"),
        ({"backend": "native"}, r"^env\.backend: native cannot simulate .*:Weighted: it has no MuJoCo model"),
    ],
)  # fmt: skip
def test_randomisation_that_cannot_be_is_one_line(env: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(randomized_config(env=env).env)
    assert "\n" not in str(caught.value)
