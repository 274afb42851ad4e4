"""Names and parameters of terms are checked before anything compiles; a mistake is one line with the key."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest
from moments import config, environment

from rlstable.io.private_folder import code_named
from rlstable.robot import commands, endings, observations, resets, rewards, terms


def lean(robot: Any, data: Any, past: Any, action: Any, *, gain: float = 2.0) -> jax.Array:
    """A term of the user."""
    return gain * robot.rotation(data)[2, 0]


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


MODULES = {module.__name__: module for module in (observations, rewards, endings, commands, resets)}


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_every_term_has_a_docstring_and_typed_parameters(module: Any) -> None:
    for name, function in module.TERMS.items():
        assert function.__doc__ and "\n" not in function.__doc__, name
        assert isinstance(terms.parameters_of(function), dict)
