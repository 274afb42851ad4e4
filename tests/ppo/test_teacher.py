"""Distillation: the imitation loss, its mask and schedule, and a student that becomes its teacher."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_mirror_image import MIRROR, Collecting, collected, ppo
from toys import (
    NamedPointMass,
    assemble,
    assert_close,
    compiled,
    experience,
    minibatch_of,
    on_one_device,
    placed,
    tiny_config,
)

from rlstable.config import ConfigError
from rlstable.device.counter import WideCounter
from rlstable.guards import masked
from rlstable.ppo.distributions import Normal, TanhNormal
from rlstable.ppo.gradient import LossGradient
from rlstable.ppo.loss import Loss, imitation
from rlstable.ppo.mirror_image import with_mirror_image
from rlstable.ppo.networks import Networks
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.records import Lesson
from rlstable.ppo.teacher import Teacher

pytestmark = pytest.mark.usefixtures("quick_compile")
T, B = 5, 8
ALONE = {"teacher": "its/folder", "imitation_only": 1.0, "imitation_end": 1.0}


def teacher(key: str = "privileged_state", size: int = 5) -> Teacher:
    """An untrained policy with large actions for observations of this size."""
    config = tiny_config(network={"policy_obs_key": key, "value_obs_key": key})
    networks = Networks(config.network, config.guards.limiters, 2, True)
    params = networks.init(jax.random.PRNGKey(7), jnp.zeros(size))
    params = jax.tree.map(lambda x: 2.0 * x, params)
    return Teacher(networks, params, Statistics(WideCounter.of(1), jnp.zeros(size), jnp.ones(size), jnp.ones(size)))


def test_imitation_loss_is_the_squared_distance_of_the_mean_actions() -> None:
    loc, scale, taught = jnp.array([0.5, -2.0]), jnp.full(2, 9.0), jnp.array([0.0, -1.0])
    assert float(imitation(Normal(loc, scale), taught)) == 0.25 + 1.0
    squashed = TanhNormal(jnp.arctanh(jnp.array([0.5, -0.5])), scale)
    np.testing.assert_allclose(imitation(squashed, taught), 0.25 + 0.25, rtol=1e-6)


@pytest.mark.parametrize(
    ("step", "weight", "practice"), [(0, 2, False), (199, 2, False), (200, 2, True), (400, 1, True), (600, 0, True)]
)
def test_student_imitates_alone_then_both_count_then_ppo_alone(step: int, weight: float, practice: bool) -> None:
    config = tiny_config(ppo={"teacher": "x", "imitation_weight": 2.0, "imitation_only": 0.2, "imitation_end": 0.6}).ppo
    total, trained = ({name: WideCounter.of(n)} for name, n in (("total_steps", 1000), ("env_steps", step)))
    state: Any = SimpleNamespace(tuning=SimpleNamespace(**total), counters=SimpleNamespace(**trained))
    lesson = teacher().lesson(config, state, {"privileged_state": jnp.ones((3, 5))})
    np.testing.assert_allclose(lesson.weight, np.full(3, weight), rtol=1e-5)
    np.testing.assert_array_equal(lesson.practice, np.full(3, practice))
    stack = jnp.concatenate([jnp.zeros((3, 5)), jnp.ones((3, 5))], axis=1)  # the newest observation is read
    stacked = teacher().lesson(config, state, {"privileged_state": stack})
    np.testing.assert_array_equal(stacked.action, lesson.action)


def test_schedule_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^ppo.imitation_only: 0.7 must not exceed ppo.imitation_end=0.6; lower it$"):
        tiny_config(ppo={"imitation_only": 0.7})


def gradient(weight: float, practice: bool, parts: int = 1, poison: float = 0.0) -> tuple[Any, dict[str, Any]]:
    """Gradient and metrics of a minibatch with an uneven mask; invalid samples have the poison in the lesson."""
    settings = tiny_config(ppo={"gradient_accumulation": parts, "teacher": "x", "entropy_cost": 0.1})
    networks = teacher("state", 4).networks
    params, statistics, data, *_ = experience(networks, T, B)
    valid = np.random.default_rng(3).random((T, B)) > 0.3
    valid[:, :2] = False  # the first of four parts has no valid sample
    action = jnp.where(valid[..., None], jnp.linspace(-1, 1, T * B * 2).reshape(T, B, 2), poison)
    lesson = Lesson(action, *(jnp.full((T, B), x) for x in (weight, practice)))
    data = data._replace(valid=jnp.array(valid), lesson=lesson)
    objective = LossGradient(Loss(networks, settings.ppo, settings.guards.limiters), False, False)
    tuning: Any = SimpleNamespace(clip_scale=None)

    @on_one_device
    def call(params: Any, data: Any) -> Any:
        minibatch = minibatch_of(data, jnp.zeros((T, B, 2)))
        return objective.gradient(params, statistics, minibatch, masked.share(data.valid), tuning)

    result: tuple[Any, dict[str, Any]] = call(params, data)
    distribution, _ = networks.distribution(params, statistics, data.observation)
    expected = np.square(np.tanh(distribution.loc) - action).sum(-1)[valid].mean()
    np.testing.assert_allclose(result[1]["training/imitation_error"], expected, rtol=1e-5)
    return result


def test_gradient_of_a_lesson_is_masked_accumulated_and_added_to_that_of_ppo() -> None:
    both, imitating, ppo_alone = gradient(1.0, True), gradient(1.0, False), gradient(0.0, True)
    jax.tree.map(np.testing.assert_array_equal, gradient(1.0, True, poison=np.nan), both)
    assert_close(gradient(1.0, True, parts=4)[0], both[0])
    value = gradient(0.0, False)[0]  # the critic always learns
    assert all(float(jnp.abs(x).max()) == 0.0 for x in jax.tree.leaves(value["policy"]))
    assert_close(both[0], jax.tree.map(lambda a, b, c: a + b - c, imitating[0], ppo_alone[0], value))
    assert float(imitating[1]["training/policy_loss"]) == float(imitating[1]["training/entropy_loss"]) == 0.0


def test_mirror_image_of_a_sample_has_the_mirrored_lesson() -> None:
    params, statistics, data = collected()
    lesson = Lesson(data.raw_action, data.reward, data.reward)
    state: Any = Collecting(params, statistics)
    image = with_mirror_image(data._replace(lesson=lesson), MIRROR, ppo().networks, state, 2)
    assert image.lesson is not None
    np.testing.assert_array_equal(image.lesson.action, image.raw_action)


def test_imitation_alone_makes_the_mean_action_that_of_the_teacher() -> None:
    """The student does not see what the teacher sees, the squared distance; default guards limit its steps."""
    sizes = {"num_updates_per_batch": 8, "learning_rate": 1e-2}
    settings = tiny_config(guards={}, network={"policy_hidden_layer_sizes": (32,)}, ppo=ALONE | sizes)
    plain, state = assemble(settings, NamedPointMass())
    iterate = compiled(dataclasses.replace(plain, teacher=teacher()))
    state, errors = placed(state), []
    for _ in range(60):
        state, metrics = iterate(state)
        errors.append(dict(metrics.values)["training/imitation_error"])
    assert errors[0] > 0.5 and max(errors[-5:]) < 0.01
    assert float(dict(metrics.values)["training/policy_loss"]) == 0.0
