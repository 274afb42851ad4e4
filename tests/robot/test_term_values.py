"""Every observation, reward and ending term returns the number that its docstring promises, on a known state."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from moments import HOME_HEIGHT, moment, robot, turned

from rlstable.config.curriculum import Curriculum
from rlstable.robot import endings, observations, rewards
from rlstable.robot.model import Robot

QUADRUPED = robot("quadruped", "feet", "accelerometer", touching=("trunk", "front_left_foot"))
CART_POLE, ARM, SLOW = robot("cart_pole"), robot("arm"), robot("slow_pole")
WEIGHT = 1.1 * 9.81  # of the cart-pole, in newtons


class Case(NamedTuple):
    """The value of a term, on a robot in a state, with its parameters and parts of the past."""

    expected: Any
    robot: Robot = QUADRUPED
    parameters: dict[str, Any] | None = None
    qpos: Any = None
    qvel: Any = None
    ctrl: Any = None
    past: dict[str, Any] | None = None


def trunk(*velocities: float) -> np.ndarray:
    """Velocities of the quadruped, those of its joints 0."""
    return np.array([*velocities, *np.zeros(18 - len(velocities))])


def lifted(height: float) -> np.ndarray:
    return turned(QUADRUPED, 0, 0.0, height)


ON_SIDE = turned(QUADRUPED, 0, 90.0, 1.0)
FORWARD = {"command": {"velocity": np.array([1.0, 0.0, 0.5])}}
TWO_ACTIONS = {"actions": np.array([[3.0], [1.0]])}
GEOMS = {"geoms": ("trunk", "front_left_foot")}

OBSERVATIONS = {
    "joint_positions": Case([0.5, 0.2], CART_POLE, qpos=[0.5, 0.2]),
    "joint_directions": Case([np.sin(0.2), np.cos(0.2)], CART_POLE, qpos=[0.5, 0.2]),
    "joint_velocities": Case([3.0, 4.0], CART_POLE, qvel=[3.0, 4.0]),
    "projected_gravity": Case([0.0, -1.0, 0.0], qpos=ON_SIDE),
    "gyro": Case([0.1, 0.2, 0.3], qpos=lifted(1.0), qvel=trunk(1, 2, 3, 0.1, 0.2, 0.3)),
    "accelerometer": Case([0.0, 0.0, 0.0], qpos=lifted(1.0)),  # in free fall
    "linear_velocity": Case([1.0, 3.0, -2.0], qpos=ON_SIDE, qvel=trunk(1, 2, 3)),
    "height": Case([HOME_HEIGHT + 1.0], qpos=lifted(1.0)),
    "height_scan": Case([-0.5] * 6, parameters={"length": 0.2, "width": 0.1}, qpos=lifted(0.5)),
    "last_action": Case([3.0], CART_POLE, past=TWO_ACTIONS),
    "command": Case([1.0, 0.0, 0.5], past=FORWARD),
    "phase": Case([1.0, 0.0], parameters={"frequency": 2.5}, past={"steps": 5.0}),  # a quarter of a turn
    "site_position": Case([0.0, 0.0, 1.05], ARM),
    "site_to_target": Case([0.1, 0.0, -0.05], ARM, past={"command": {"pose": np.array([0.1, 0.0, 1.0])}}),
    "sensor": Case([1.0], ARM, {"name": "elbow angle"}, qpos=[0.0, 1.0]),
    "activations": Case([0.0], SLOW),
    "contact": Case([0.0, 1.0], parameters=GEOMS, qpos=lifted(-0.002)),
    "foot_contacts": Case([0.0, 0.0, 0.0, 0.0], qpos=lifted(1.0)),
}
REWARDS = {
    "track_linear_velocity": Case(np.exp(-1), qpos=lifted(1.0), qvel=trunk(1, 0.5, 7), past=FORWARD),
    "track_angular_velocity": Case(np.exp(-1), qpos=lifted(1.0), qvel=trunk(0, 0, 0, 2, 2, 1), past=FORWARD),
    "vertical_velocity": Case(4.0, qpos=lifted(1.0), qvel=trunk(1, 1, 2)),
    "rolling": Case(0.05, qpos=lifted(1.0), qvel=trunk(0, 0, 0, 0.1, 0.2, 3)),
    "upright": Case(0.5, qpos=ON_SIDE),
    "height": Case(np.exp(-1), qpos=lifted(0.25 * HOME_HEIGHT)),
    "raised": Case(0.0, CART_POLE, qpos=[1.0, np.pi]),
    "alive": Case(1.0),
    "energy": Case(10.0 * 0.5 * 2.0 / WEIGHT, CART_POLE, qvel=[2.0, 5.0], ctrl=[0.5]),
    "torque": Case(0.25, CART_POLE, ctrl=[0.5]),
    "action_rate": Case(4.0, CART_POLE, past=TWO_ACTIONS),
    "joint_limits": Case(0.08, CART_POLE, qpos=[1.7, 9.0]),
    "pose": Case(np.exp(-2), ARM, qpos=[0.0, 1.0]),
    "joint_speed": Case(12.5, CART_POLE, qvel=[3.0, 4.0]),
    "short_steps": Case(5.0, past={**FORWARD, "landed_after": np.array([0.05, 0.3, 0, 0])}),  # 0.1 s in 0.02 s
    "slip": Case(
        26.0,
        past={
            "contact": np.array([1, 0, 0, 1.0]),
            "foot_velocities": np.array([[3, 4, 9], [5, 5, 5], [0] * 3, [1, 0, 0.0]]),
        },
    ),
    "dragging": Case(  # half of the height is missing at 3 m/s, all of it at 1 m/s, and nothing
        0.25 * 3.0 + 1.0,
        parameters={"target": 8.0},
        past={
            "foot_positions": np.array([[9, 9, 4.0], [9, 9, 0.0], [9, 9, 20.0], [9, 9, 0.0]]),
            "foot_velocities": np.array([[3, 0, 9], [0, 1, 0], [5, 5, 5], [0, 0, 0.0]]),
        },
    ),
    "reach": Case(np.exp(-1), ARM, past={"command": {"pose": np.array([0.0, 0.0, 0.95])}}),
    "contact": Case(1.0, parameters=GEOMS, qpos=lifted(-0.002)),
}  # fmt: skip
ENDINGS = {
    "fallen": Case(True, parameters={"angle": 89.0}, qpos=ON_SIDE),
    "too_low": Case(True, qpos=lifted(-0.2)),
    "contact": Case(True, parameters=GEOMS, qpos=lifted(-0.002)),
    "time": Case(True, parameters={"seconds": 2.0}, past={"steps": 100.0}),
}
LISTS = ((observations.TERMS, OBSERVATIONS), (rewards.TERMS, REWARDS), (endings.TERMS, ENDINGS))
CASES = [
    pytest.param(terms[name], case, id=f"{terms[name].__module__.rpartition('.')[2]}-{name}")
    for terms, cases in LISTS
    for name, case in cases.items()
]


def value(term: Any, case: Case) -> np.ndarray:
    arguments = moment(case.robot, case.qpos, case.qvel, case.ctrl, **(case.past or {}))
    return np.asarray(term(*arguments, **(case.parameters or {})))


@pytest.mark.parametrize("terms, cases", LISTS)
def test_every_term_of_a_list_has_an_expectation(terms: dict[str, Any], cases: dict[str, Case]) -> None:
    assert terms.keys() == cases.keys()


@pytest.mark.parametrize("term, case", CASES)
def test_term_returns_what_it_promises(term: Any, case: Case) -> None:
    np.testing.assert_allclose(value(term, case), case.expected, atol=1e-4)


UNMET = {
    "fallen": Case(False, parameters={"angle": 91.0}, qpos=ON_SIDE),
    "too_low": Case(False, qpos=lifted(-0.1)),
    "contact": Case(False, parameters={"geoms": ("trunk",)}, qpos=lifted(-0.002)),
    "time": Case(False, parameters={"seconds": 2.0}, past={"steps": 99.0}),
}


@pytest.mark.parametrize("name", UNMET)
def test_episode_goes_on_while_an_ending_is_not_reached(name: str) -> None:
    assert not value(endings.TERMS[name], UNMET[name])


@pytest.mark.parametrize("name", ["fallen", "too_low"])
def test_physics_that_is_not_a_number_ends_the_episode(name: str) -> None:
    arguments = moment(QUADRUPED)
    arguments.data.xmat, arguments.data.xpos = np.full((99, 3, 3), np.nan), np.full((99, 3), np.nan)
    assert endings.TERMS[name](*arguments).all()


def test_energy_of_strong_motors_is_clipped() -> None:
    strong = Case(0.1, CART_POLE, {"most": 0.1}, qvel=[2.0, 5.0], ctrl=[0.5])
    np.testing.assert_allclose(value(rewards.energy, strong), 0.1)


def test_centre_of_mass_of_a_standing_pole_is_at_its_highest() -> None:
    np.testing.assert_allclose(value(rewards.raised, Case(1.0, CART_POLE)), 1.0, atol=1e-4)


def test_hinges_that_turn_may_be_left_out_of_the_joint_positions() -> None:
    case = Case([0.5], CART_POLE, {"turning": False}, qpos=[0.5, 0.2])
    np.testing.assert_allclose(value(observations.joint_positions, case), case.expected)


def test_feet_on_the_floor_are_in_contact_at_home() -> None:
    assert value(observations.foot_contacts, Case(None, qpos=lifted(-0.002))).tolist() == [1, 1, 1, 1]


def test_gyro_of_a_model_without_one_is_that_of_the_root_body() -> None:
    case = Case(None, robot("hopper"), qvel=[0, 0, 0.7, 0, 0, 0])
    np.testing.assert_allclose(value(observations.gyro, case), [0, 0.7, 0], atol=1e-6)


def test_short_steps_cost_nothing_if_the_command_is_to_stand() -> None:
    still = {"command": {"velocity": np.zeros(3)}, "landed_after": np.array([0.05, 0, 0, 0])}
    assert value(rewards.short_steps, Case(0.0, past=still)) == 0


@pytest.mark.parametrize("trained, lacks", [(0, 0.0), (500_000, 0.025), (2_000_000, 0.1)])
def test_target_of_short_steps_may_grow_with_the_steps_trained(trained: int, lacks: float) -> None:
    past = {**FORWARD, "landed_after": np.array([0.05, 0.3, 0, 0]), "trained": np.int32(trained)}
    case = Case(lacks / 0.02, past=past, parameters={"target": Curriculum(0.0, 0.15, 1_000_000)})
    np.testing.assert_allclose(value(rewards.short_steps, case), case.expected, rtol=1e-5)
