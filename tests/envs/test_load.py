"""Loading environments: every one of Brax's, a user's own by import path, and refusals that say what to mend."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from brax import envs

from rlstable.config import ConfigError
from rlstable.config.guards import GuardsConfig
from rlstable.config.run import EnvConfig
from rlstable.device.packed import PackedRows
from rlstable.envs.load import load_env
from rlstable.envs.vector import VectorEnv, pool_of
from rlstable.guards.env import EnvContext, env_guards

NAMES = sorted(envs._envs)
BACKENDS = ("mjx", "spring", "generalized", "positional")
REFUSED = {("swimmer", backend) for backend in BACKENDS if backend != "generalized"}

OWN = '''
import functools
import os
from os import system
from subprocess import run


class Room:
    """An environment of one's own."""

    action_size = 1

    def __init__(self, size=3, walls=None, backend="none"):
        if size < 0:
            raise ValueError(f"size {size} is negative\\nand this is a second line")
        self.size, self.walls, self.backend = size, walls, backend

    def reset(self, rng):
        return None

    def step(self, state, action):
        return None


class Ruin:
    def reset(self, rng):
        return None


def build(size=3):
    return Room(size=2 * size)


@functools.cache
def build_once():
    return Room(size=7)


SIZE = 4
'''


@pytest.fixture
def rooms(tmp_path, monkeypatch) -> str:
    """A module of the user's in the folder the command is typed in."""
    (tmp_path / "rlstable_test_rooms.py").write_text(OWN)
    (tmp_path / "rlstable_test_broken.py").write_text("import rlstable_test_no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
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


# --- Brax's


def test_table_has_all_of_braxs_environments():
    assert len(NAMES) == 12


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_every_environment_of_brax_loads(name, backend):
    """With its own backend and with each it supports."""
    config = EnvConfig(name=name, backend=backend)
    if (name, backend) in REFUSED:
        text = refusal(config)
        assert name in text and f"Unsupported backend: {backend}" in text and "env.backend" in text
        return
    env = load_env(config)
    if name != "fast":  # it has no physics to choose
        assert env.backend == (backend or "generalized")


def test_the_swimmer_swims():
    """Of Brax's environments it alone has a fluid, whose model jax 0.10 does not take as it stands."""
    env = load_env(EnvConfig(name="swimmer"))
    step = jax.eval_shape(lambda key: env.step(env.reset(key), jnp.zeros(env.action_size)), jax.random.PRNGKey(0))
    assert step.obs.shape == (8,)


@pytest.mark.parametrize(
    ("name", "hint"), [("humanoyd", "did you mean humanoid?"), ("half_cheetah", "did you mean halfcheetah?"), ("zzz",
    "there are: ant, fast")]
)  # fmt: skip
def test_an_unknown_name(name, hint):
    text = refusal(EnvConfig(name=name))
    assert repr(name) in text and hint in text


def test_kwargs_reach_the_environment():
    env = load_env(EnvConfig(name="ant", backend="spring", kwargs={"healthy_reward": 5.5, "n_frames": 3}))
    assert (env._healthy_reward, env._n_frames, env.backend) == (5.5, 3, "spring")


def test_extra_kwargs_win():
    """What evaluation asks for is laid over what training has; the rest stays."""
    config = EnvConfig(name="ant", backend="spring", kwargs={"healthy_reward": 5.5, "n_frames": 3})
    env = load_env(config, {"n_frames": 7, "backend": "generalized"})
    assert (env._healthy_reward, env._n_frames, env.backend) == (5.5, 7, "generalized")
    assert config.kwargs == {"healthy_reward": 5.5, "n_frames": 3}


@pytest.mark.parametrize(
    ("kwargs", "said"), [({"no_such_thing": 1}, "no_such_thing"), ({"obs_mode": "nonsense"}, "obs_mode='nonsense'")]
)
def test_kwargs_that_are_not_taken(kwargs, said):
    name = "humanoid" if "no_such_thing" in kwargs else "fast"
    text = refusal(EnvConfig(name=name, kwargs=kwargs))
    assert text.startswith("env.kwargs: ") and name in text and said in text


# --- by import path


def test_an_environment_of_ones_own(rooms):
    """Class or function, from the working folder, with its arguments."""
    assert load_env(imported(f"{rooms}:Room")).size == 3
    assert load_env(imported(f"{rooms}:Room", size=5)).size == 5
    assert load_env(imported(f"{rooms}:Room", size=5, walls=[1]), {"size": 6}).size == 6
    assert load_env(imported(f"{rooms}:build", size=5)).size == 10
    assert load_env(imported(f"{rooms}:build_once")).size == 7
    assert load_env(EnvConfig(source="import", name=f"{rooms}:Room", backend="mjx")).backend == "mjx"


def test_a_class_in_a_package():
    assert type(load_env(imported("brax.envs.fast:Fast"))) is envs._envs["fast"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rlstable_test_no_such_module:Room", ["no module 'rlstable_test_no_such_module'", "installed"]),
        ("brax.no_such_part:Room", ["no module 'brax.no_such_part'"]),
        ("rlstable_test_broken:Room", ["no module 'rlstable_test_no_such_dependency'", "rlstable_test_broken:Room"]),
        ("rlstable_test_rooms:Roam", ["no 'Roam'", "did you mean Room?"]),
        ("rlstable_test_rooms:Zzz", ["no 'Zzz'"]),
        ("rlstable_test_rooms:SIZE", ["is not called: it is neither a class", "defined in rlstable_test_rooms"]),
        ("rlstable_test_rooms:Ruin", ["no method step", "Brax's Env interface"]),
    ],
)
def test_what_is_not_there(rooms, name, said):
    text = refusal(imported(name))
    for part in said:
        assert part in text


@pytest.mark.parametrize(
    "name", ["Room", "a.b.Room", "a:b:Room", ":Room", "rooms:", "a b:Room", ".rooms:Room", "rooms:Room()", "", ":"]
)
def test_what_is_no_import_path(name):
    """Refused before anything is imported."""
    with pytest.raises(ValueError, match=r"'package\.module:Class'"):
        EnvConfig(source="import", name=name)


def test_arguments_that_ones_own_does_not_take(rooms):
    """The environment's own words, their first line."""
    text = refusal(imported(f"{rooms}:Room", size=-1))
    assert "size=-1" in text and "size -1 is negative" in text and "second line" not in text
    assert "no_such" in refusal(imported(f"{rooms}:Room", no_such=1))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("os:system", "is in Python's standard library"),
        ("subprocess:run", "is in Python's standard library"),
        ("builtins:exec", "is in Python's standard library"),
        ("concurrent.futures:ThreadPoolExecutor", "is in Python's standard library"),
        ("rlstable_test_rooms:system", "is not called"),  # a builtin under a name of the user's module
        ("rlstable_test_rooms:run", "is not called"),  # a function that another module defines
        ("rlstable_test_rooms:os", "is not called"),
        ("rlstable_test_rooms:Popen", "has no 'Popen'"),
        ("rlstable.io.run_folder:write_atomically", "functions of rlstable are not called"),
        ("brax.io.model:load_params", "functions of brax are not called"),  # it unpickles
        ("rlstable.io.writer:Writer", "has no method reset"),
    ],
)
def test_only_environment_classes_and_functions_of_the_named_module_are_called(rooms, tmp_path, name, said):
    """Whatever arguments come with it."""
    called = tmp_path / "called"
    for kwargs in ({"command": f"touch {called}"}, {"args": ["touch", str(called)]}, {"path": str(called)}):
        assert said in refusal(imported(name, **kwargs))
    assert not called.exists()


def test_standard_library_module_is_rejected_before_it_is_imported(rooms):
    before = list(sys.path)
    sys.modules.pop("antigravity", None)  # it opens a browser
    refusal(imported("antigravity:fly"))
    assert "antigravity" not in sys.modules
    assert sys.path == before, "and before the current folder is put into it"


# --- healthy environments do not trip the default limits


def trips_of(name: str, backend: str | None, steps: int) -> dict[str, int]:
    """What the default quarantine counts in a few environments under random actions, first states included."""
    env = load_env(EnvConfig(name=name, backend=backend))
    guards = env_guards(GuardsConfig())
    vector = VectorEnv(env, 1000, 1, guards)
    count = 4

    def run(first: Any, pool: PackedRows, key: jax.Array) -> Any:
        context = EnvContext(first, jnp.zeros((count, env.action_size)), jnp.ones(count, bool))
        verdict = guards["quarantine"].apply(context, guards["quarantine"].init())

        def step(carry: Any, key: jax.Array) -> Any:
            state, guard_state = carry
            action = jax.random.uniform(key, (count, env.action_size), minval=-1.0, maxval=1.0)
            result = vector.step(state, action, pool, key, guard_state)
            return (result.state, result.guard_state), None

        carry = (first, {"quarantine": verdict.state})
        (_, guard_state), _ = jax.lax.scan(step, carry, jax.random.split(key, steps))
        return guard_state["quarantine"].trips

    key = jax.random.PRNGKey(0)
    first = jax.jit(vector.reset)(jax.random.split(key, count))
    trips = jax.jit(run)(first, pool_of(jax.device_get(first)), key)
    return {cause: int(n) for cause, n in zip(guards["quarantine"].causes, trips, strict=True) if n}


@pytest.mark.parametrize(
    ("name", "backend"), [("fast", None), pytest.param("reacher", "spring", marks=pytest.mark.slow)]
)
def test_healthy_environments_do_not_trip(name, backend):
    """Reset and 50 random steps."""
    assert trips_of(name, backend, 50) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["generalized", "mjx", "spring"])
def test_no_healthy_environment_trips(name, backend):
    """The same for all of Brax's, compiled in full: with `quick_compile` the pusher takes minutes a step."""
    if (name, backend) in REFUSED or (name == "fast" and backend != "mjx"):
        pytest.skip("not supported")
    assert trips_of(name, backend, 50) == {}
