"""Names and parameters of terms are checked before anything compiles; a mistake is one line with the key."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from moments import MODELS, config, environment

from rlstable.config import ConfigError
from rlstable.io.private_folder import code_named
from rlstable.robot import commands, endings, observations, resets, rewards, terms


def lean(robot: Any, data: Any, past: Any, action: Any, *, gain: float = 2.0) -> jax.Array:
    """A term of the user."""
    return gain * robot.rotation(data)[2, 0]


def vector(robot: Any, data: Any, past: Any, action: Any) -> jax.Array:
    return jnp.zeros(3)


def broken(robot: Any, data: Any, past: Any, action: Any) -> jax.Array:
    raise KeyError("speed")


MISTAKES = {
    "unknown term": (
        ["+env.task.rewards.uprigth={weight: 1}"],
        "env.task.rewards.uprigth: there is no term 'uprigth'; did you mean upright?",
    ),
    "unknown parameter": (
        ["+env.task.rewards.height.widht=1"],
        "env.task.rewards.height.widht: unknown key; did you mean width?",
    ),
    "parameter out of range": (
        ["+env.task.rewards.height.width=-1"],
        "env.task.rewards.height.width: input should be greater than 0, got -1",
    ),
    "gain out of range": (
        ["env.task.actions.control=position", "env.task.actions.stiffness=-1"],
        "env.task.actions.stiffness: input should be greater than 0, got -1",
    ),
    "weight that is no number": (
        ["env.task.rewards.upright.weight=much"],
        "env.task.rewards.upright.weight: 'much' must be a number, not text",
    ),
    "weight that is missing": (["+env.task.rewards.slip={}"], "env.task.rewards.slip.weight: is missing; set it"),
    "reversed range": (
        ["env.task.actions.delay=[2, 0]"],
        "env.task.actions.delay: [2, 0] is reversed; write the lower number first: [0, 2]",
    ),
    "reversed range of a command": (
        ["+env.task.commands.velocity={forward: [1, -1], sideways: [0, 0], turn: [0, 0]}"],
        "env.task.commands.velocity.forward: [1, -1] is reversed",
    ),
    "two resets": (["+env.task.reset.random={}"], "env.task.reset: has 2 terms; it must have one"),
    "missing command": (
        ["+env.task.rewards.track_linear_velocity={weight: 1}"],
        "env.task.rewards.track_linear_velocity: needs the command velocity; add env.task.commands.velocity",
    ),
    "missing module": (
        ["+env.task.rewards.mine={term: 'no_such_module:f', weight: 1}"],
        "env.task.rewards.mine: no module 'no_such_module'",
    ),
    "reward that is no number": (
        ["+env.task.rewards.mine={term: 'test_terms:vector', weight: 1}"],
        "env.task.rewards.mine: returns shape (3,); it must return a number",
    ),
    "term that fails": (
        ["+env.task.rewards.mine={term: 'test_terms:broken', weight: 1}"],
        "env.task.rewards.mine: raises KeyError: 'speed'",
    ),
    "unknown sensor": (
        ["+env.task.observations.sensor={name: compass}"],
        "env.task.observations.sensor.name: the model has no sensor 'compass'; it has gyro, accelerometer",
    ),
    "engine of Brax": (
        ["env.backend=spring"],
        "env.backend: spring is for Brax's environments; choose auto, native or mjx for env=robot",
    ),
}


@pytest.mark.parametrize("words, message", MISTAKES.values(), ids=MISTAKES)
def test_mistake_in_a_task_is_one_line_that_names_the_key(words: list[str], message: str) -> None:
    from rlstable.envs.load import load

    with pytest.raises(ConfigError) as caught:
        load(config("robot", "quadruped", *words).env)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_function_of_the_user_is_a_term_with_parameters() -> None:
    env = environment("robot", "hopper", "+env.task.rewards.lean={term: 'test_terms:lean', weight: 1, gain: 3.0}")
    value = env.lists.rewards["lean"](env.robot, env.robot.forward([0, 0, 0.1, 0, 0, 0]), None, None)
    assert float(value) == pytest.approx(-3.0 * math.sin(0.1), abs=1e-6)


def test_foreign_run_folder_with_terms_of_its_own_names_code() -> None:
    word = "+env.task.rewards.lean={term: 'test_terms:lean', weight: 1}"
    assert code_named(config("robot", "hopper", word).env) == {"test_terms:lean": "env.task"}
    assert code_named(config("robot", "hopper").env) == {}


def test_null_removes_a_term_and_keeps_the_others() -> None:
    task = config("robot", "hopper", "env.task.rewards.height=null").env.task
    assert task is not None and "height" not in task.rewards and "upright" in task.rewards


def test_model_and_task_belong_to_robots_alone() -> None:
    from rlstable.cli.compose import compose

    with pytest.raises(ConfigError, match=r"^env.xml: needs env=robot, not env.source=brax"):
        compose(["env=ant", f"env.xml={MODELS / 'arm.xml'}"])
    with pytest.raises(ConfigError, match=r"^env.xml: is missing"):
        compose(["env=robot"])


MODULES = {module.__name__: module for module in (observations, rewards, endings, commands, resets)}


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_every_term_has_a_docstring_and_typed_parameters(module: Any) -> None:
    for name, function in module.TERMS.items():
        assert function.__doc__ and "\n" not in function.__doc__, name
        assert isinstance(terms.parameters_of(function), dict)
