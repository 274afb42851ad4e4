"""Loading environments: those of Brax by name, those of the user by import path, and errors that name the remedy."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brax import envs
from brax.io import mjcf
from commands import printed_by

from rlstable.config import ConfigError
from rlstable.config.guards import GuardsConfig
from rlstable.config.run import EnvConfig
from rlstable.envs.episodes import run_episodes
from rlstable.envs.load import load_env
from rlstable.envs.vector import VectorEnv
from rlstable.ppo.guards import env_guards

NAMES = sorted(envs._envs)
BACKENDS = ("mjx", "spring", "generalized", "positional")
REFUSED = {("swimmer", backend) for backend in BACKENDS if backend != "generalized"}

OWN = """
import functools
class Ruin:
    def reset(self, rng):
        return None
class Room(Ruin):
    action_size = 1
    def __init__(self, size=3, walls=None, backend="none"):
        self.size, self.walls, self.backend = size, walls, backend
    def step(self, state, action):
        return None
def build(size=3):
    return Room(size=2 * size)
@functools.cache
def build_once():
    return Room(size=7)
SIZE = 4
"""


@pytest.fixture
def rooms(here, monkeypatch) -> str:
    """A module of the user's in the folder the command is typed in."""
    (here / "rlstable_test_rooms.py").write_text(OWN)
    (here / "rlstable_test_broken.py").write_text("import rlstable_test_no_such_dependency\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "rlstable_test_rooms"
    sys.modules.pop("rlstable_test_rooms", None)


def refusal(config: EnvConfig, extra: dict[str, Any] | None = None) -> str:
    """What `load_env` says when it refuses: always one line that begins with a key."""
    with pytest.raises(ConfigError) as refused:
        load_env(config, extra)
    text = str(refused.value)
    assert "\n" not in text and text.split(": ")[0] in ("env.name", "env.kwargs", "env.backend")
    return text


def imported(name: str, **kwargs: Any) -> EnvConfig:
    return EnvConfig(source="import", name=name, kwargs=kwargs or None)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("fast", None), *(("ant", backend) for backend in BACKENDS), ("swimmer", "mjx"), ("halfcheetah", "mjx")],
)
def test_environments_of_brax_load_with_their_backends(name, backend, here):
    """MuJoCo warns about the half cheetah's model, but writes no file in the working folder."""
    config = EnvConfig(name=name, backend=backend)
    if (name, backend) in REFUSED:
        text = refusal(config)
        assert name in text and f"Unsupported backend: {backend}" in text and "env.backend" in text
        return
    env = load_env(config)
    if name != "fast":  # it has no physics to choose
        assert env.backend == (backend or "generalized")
    assert list(here.iterdir()) == []


def test_swimmer_of_brax_steps():
    """The only environment of Brax with a fluid, whose model JAX 0.10 does not accept unchanged."""
    env = load_env(EnvConfig(name="swimmer"))
    step = jax.eval_shape(lambda key: env.step(env.reset(key), jnp.zeros(env.action_size)), jax.random.PRNGKey(0))
    assert step.obs.shape == (8,)


@pytest.mark.parametrize(
    ("name", "hint"), [("humanoyd", "did you mean humanoid?"), ("half_cheetah", "did you mean halfcheetah?"), ("zzz",
    "choose one of ant, fast")]
)  # fmt: skip
def test_unknown_environment_name_gets_a_suggestion(name, hint):
    text = refusal(EnvConfig(name=name))
    assert repr(name) in text and hint in text


def test_user_environment_is_a_class_or_a_function(rooms):
    """Imported from the working folder, called with its arguments."""
    assert load_env(imported(f"{rooms}:Room")).size == 3
    assert load_env(imported(f"{rooms}:Room", size=5)).size == 5
    assert load_env(imported(f"{rooms}:Room", size=5, walls=[1]), {"size": 6}).size == 6
    assert load_env(imported(f"{rooms}:build", size=5)).size == 10
    assert load_env(imported(f"{rooms}:build_once")).size == 7
    assert load_env(EnvConfig(source="import", name=f"{rooms}:Room", backend="mjx")).backend == "mjx"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rlstable_test_no_such_module:Room", ["no module 'rlstable_test_no_such_module'", "install it"]),
        ("rlstable_test_broken:Room", ["no module 'rlstable_test_no_such_dependency'", "rlstable_test_broken:Room"]),
        ("rlstable_test_rooms:Roam", ["no 'Roam'", "did you mean Room?"]),
        ("rlstable_test_rooms:SIZE", ["is not called: it must be a class", "in a module of your own"]),
        ("rlstable_test_rooms:Ruin", ["no method step", "Brax's Env interface"]),
    ],
)
def test_error_about_a_missing_module_or_class_names_the_cause(rooms, name, said):
    text = refusal(imported(name))
    for part in said:
        assert part in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rlstable.io.files:write_atomically", "is not called"),
        ("brax.io.model:load_params", "is not called"),  # it unpickles
        ("rlstable.io.lock:RunLock", "has no method reset"),
    ],
)
def test_only_environment_classes_of_known_packages_are_called(rooms, tmp_path, name, said):
    called = tmp_path / "called"
    for kwargs in ({"command": f"touch {called}"}, {"args": ["touch", str(called)]}, {"path": str(called)}):
        assert said in refusal(imported(name, **kwargs))
    assert not called.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["generalized", "mjx", "spring"])
def test_random_actions_trip_the_default_quarantine_in_no_environment_of_brax(name, backend):
    """First states included; compiled in full, because with `quick_compile` the pusher takes minutes per step."""
    if (name, backend) in REFUSED or (name == "fast" and backend != "mjx"):
        pytest.skip("not supported")
    env = load_env(EnvConfig(name=name, backend=backend))
    vector, keys = VectorEnv(env, 50, 1, env_guards(GuardsConfig())), jax.random.split(jax.random.PRNGKey(0), 4)

    def policy(_: Any, key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, (4, env.action_size), minval=-1.0, maxval=1.0)

    assert not jax.jit(lambda: run_episodes(vector, policy, keys, keys[0]).aborted)().any()


@pytest.mark.filterwarnings("ignore:Brax System")
@pytest.mark.parametrize("backend", ["generalized", "mjx"])
def test_model_of_brax_built_without_copies_has_the_same_arrays(backend: str) -> None:
    ours = load_env(EnvConfig(name="inverted_pendulum", backend=backend))
    theirs = envs.get_environment("inverted_pendulum", backend=backend)
    a, b = (jax.tree.leaves(one.sys) for one in (ours.unwrapped, theirs))
    assert [(x.shape, x.dtype, x.weak_type) for x in a] == [(x.shape, x.dtype, x.weak_type) for x in b]
    for mine, other in zip(a, b, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert mjcf.jp is jnp


def test_loading_a_task_of_mujoco_prints_no_message_about_a_missing_warp() -> None:
    """MJX prints it at its first import, so a new process shows it."""
    code = "from rlstable.envs.load import load_env; from rlstable.cli.compose import compose; "
    code += "print('loaded', load_env(compose(['env=gymnasium', 'env.name=InvertedPendulum-v5']).env).action_size)"
    assert printed_by(code) == ["loaded 1"]
