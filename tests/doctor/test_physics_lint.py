"""The whole physics lint on the tasks of Brax and on changed options."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from models import arm, found, world

from rlstable.config.run import EnvConfig
from rlstable.doctor.contact_lint import candidates, contact_count
from rlstable.doctor.physics_lint import lint
from rlstable.envs.load import load_env
from rlstable.envs.mujoco_model import model_of


@pytest.mark.parametrize("name", ["ant", "humanoid", "pusher", "walker2d"])
def test_tasks_of_brax_have_no_warning_and_the_contacts_of_mjx(name: str) -> None:
    env = load_env(EnvConfig(name=name, backend="mjx"))
    model = model_of(env)
    assert {finding.severity for finding in lint(model, env.backend)} <= {"note"}
    from mujoco.mjx._src import collision_driver  # by now the environment has imported it

    pairs = candidates(model)
    assert sorted(pairs) == sorted((int(a), int(b)) for a, b, _ in collision_driver.geom_pairs(model))
    assert contact_count(model, pairs) == collision_driver.make_condim(model).size


def test_contact_count_of_every_pair_of_shapes_equals_mjx() -> None:
    from mujoco.mjx._src import collision_driver

    shapes = {
        "sphere": "0.1", "capsule": "0.1 0.1", "ellipsoid": "0.1 0.1 0.1", "cylinder": "0.1 0.1", "box": "0.1 0.1 0.1",
    }  # fmt: skip
    for first in ("plane", *shapes):
        for second in shapes:
            size = shapes.get(first, "1 1 1")
            floor = f'<geom type="{first}" size="{size}"/>'
            model = world(f'{floor}<body><freejoint/><geom type="{second}" size="{shapes[second]}"/></body>')
            pairs = candidates(model)
            if collision_driver.has_collision_fn(*(model.geom_type[geom] for geom in pairs[0])):
                assert contact_count(model, pairs) == collision_driver.make_condim(model).size, (first, second)


def test_lint_uses_the_physics_options_of_the_environment() -> None:
    model = arm()
    changed = SimpleNamespace(timestep=0.25, iterations=3, disableflags=32768, solver=None)
    env = SimpleNamespace(sys=SimpleNamespace(mj_model=model, opt=changed))
    seen = model_of(env)
    assert (seen.opt.timestep, seen.opt.iterations, seen.opt.disableflags) == (0.25, 3, 32768)
    assert seen.opt.solver == model.opt.solver
    assert model.opt.timestep == 0.001


def test_model_of_an_environment_without_a_model_is_none() -> None:
    model = arm()
    copied = model_of(SimpleNamespace(mj_model=model))
    assert copied is not model and copied.nbody == model.nbody
    assert model_of(SimpleNamespace(sys=SimpleNamespace())) is None
    assert model_of(SimpleNamespace()) is None


def test_worst_finding_comes_first_and_other_engines_skip_the_rules_of_mujoco() -> None:
    motor = '<actuator><motor name="a" joint="j"/></actuator>'
    model = arm(joint='stiffness="4.2e6"', mass="1e-4", more=motor, option='iterations="100"')
    assert found(lint(model)) == [
        ("error", "stiffness", ("j",)),
        ("warning", "small mass", ("b",)),
        ("warning", "actuator limit", ("a",)),
        ("note", "solver", ()),
    ]
    assert [finding.check for finding in lint(model, "spring")] == ["small mass", "actuator limit"]
