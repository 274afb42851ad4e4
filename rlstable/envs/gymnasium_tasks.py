"""Observations, rewards, terminations and resets of Gymnasium's MuJoCo tasks, as functions of the physics state.

The formulas are those of `gymnasium/envs/mujoco/*_v5.py` (Gymnasium 1.x). As there, quantities that MuJoCo derives,
such as `xpos`, are those of the last physics step before its integration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mujoco

from rlstable.device.compatibility import mjx_arrays

_IMPL = ("cinert", "cfrc_ext")  # arrays that MJX keeps in a part of its state


@dataclasses.dataclass(frozen=True)
class View:
    """A physics state with its model and the arguments of the task."""

    model: mujoco.MjModel
    data: Any  # of MJX or of native physics
    arguments: dict[str, Any]
    first: bool = False  # whether no step has been taken, so that there are no contact forces

    def __getattr__(self, name: str) -> Any:
        """An argument of the task."""
        if name.startswith("__") or name == "arguments":
            raise AttributeError(name)
        return self.arguments[name]

    def array(self, name: str) -> jax.Array:
        owner = mjx_arrays(self.data) if name in _IMPL else self.data
        return getattr(owner, name)

    def body(self, name: str | int) -> jax.Array:
        """Position of a body, `[3]`."""
        return self.array("xpos")[self.model.body(name).id]

    def forces(self) -> jax.Array:
        """Contact forces and torques of every body, `[nbody, 6]`."""
        return jnp.zeros((self.model.nbody, 6)) if self.first else self.array("cfrc_ext")

    def coordinates(self, left_out: int, bound: float = jnp.inf) -> list[jax.Array]:
        """Positions, the first ones left out if the task asks so, and velocities up to a bound."""
        start = left_out if self.exclude_current_positions_from_observation else 0
        return [self.data.qpos[start:], jnp.clip(self.data.qvel, -bound, bound)]


class Transition(NamedTuple):
    """One action: the states before and after, the controls and the seconds in between."""

    before: View
    after: View
    ctrl: jax.Array
    seconds: float

    def effort(self, weight: str) -> jax.Array:
        return self.after.arguments[weight] * jnp.sum(jnp.square(self.ctrl))

    def speed(self, position: Callable[[View], jax.Array]) -> jax.Array:
        return (position(self.after) - position(self.before)) / self.seconds


Parts = dict[str, jax.Array]  # terms of the reward by Gymnasium's name, which add up to it
Judged = tuple[Parts, jax.Array]  # and whether the task ends
Drawn = tuple[jax.Array, jax.Array]  # first positions and velocities


class Task(NamedTuple):
    """The formulas of a task."""

    observe: Callable[[View], list[jax.Array]]
    judge: Callable[[Transition], Judged]
    draw: Callable[[View, jax.Array], Drawn]
    forces: Callable[[dict[str, Any]], bool] = lambda arguments: False  # whether the arguments need contact forces


# --- resets


def _noisy(normal_velocity: bool) -> Callable[[View, jax.Array], Drawn]:
    """Uniform noise of positions, and uniform or normal noise of velocities."""

    def draw(view: View, key: jax.Array) -> Drawn:
        keys, scale, model = jax.random.split(key), view.reset_noise_scale, view.model
        qpos = model.qpos0 + jax.random.uniform(keys[0], (model.nq,), minval=-scale, maxval=scale)
        if normal_velocity:
            return qpos, scale * jax.random.normal(keys[1], (model.nv,))
        return qpos, jax.random.uniform(keys[1], (model.nv,), minval=-scale, maxval=scale)

    return draw


def _reacher_draw(view: View, key: jax.Array) -> Drawn:
    """A target in a disc of radius 0.2, and an arm that almost rests."""
    keys, model = jax.random.split(key, 4), view.model
    angle, radius = jax.random.uniform(keys[0], maxval=2 * jnp.pi), 0.2 * jnp.sqrt(jax.random.uniform(keys[1]))
    goal = radius * jnp.array([jnp.cos(angle), jnp.sin(angle)])
    qpos = model.qpos0 + jax.random.uniform(keys[2], (model.nq,), minval=-0.1, maxval=0.1)
    qvel = jax.random.uniform(keys[3], (model.nv,), minval=-0.005, maxval=0.005)
    return qpos.at[-2:].set(goal), qvel.at[-2:].set(0.0)


def _pusher_draw(view: View, key: jax.Array) -> Drawn:
    """A cylinder in a rectangle, at least 0.17 from the goal at the origin."""
    first, rest = jax.random.split(key)
    low, high = jnp.array([-0.3, -0.2]), jnp.array([0.0, 0.2])

    def again(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key, own = jax.random.split(carry[0])
        return key, jax.random.uniform(own, (2,), minval=low, maxval=high)

    # The origin itself is too close, so at least one place is drawn.
    _, place = jax.lax.while_loop(lambda carry: ~(jnp.linalg.norm(carry[1]) > 0.17), again, (rest, jnp.zeros(2)))
    qvel = jax.random.uniform(first, (view.model.nv,), minval=-0.005, maxval=0.005)
    qpos = jnp.asarray(view.model.qpos0).at[-4:].set(jnp.concatenate([place, jnp.zeros(2)]))
    return qpos, qvel.at[-4:].set(0.0)


# --- bodies that run


def _within(x: jax.Array, bounds: tuple[float, float]) -> jax.Array:
    return jnp.all((bounds[0] < x) & (x < bounds[1]))


def _survived(view: View, healthy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The reward for a healthy state, and whether the task ends."""
    return view.healthy_reward * healthy, ~healthy & view.terminate_when_unhealthy


def _forward(step: Transition, position: Callable[[View], jax.Array]) -> Parts:
    speed = step.speed(position)
    return {"reward_forward": step.after.forward_reward_weight * speed, "reward_ctrl": -step.effort("ctrl_cost_weight")}


def _contact_cost(view: View, weight: str, limit: str | None) -> jax.Array:
    scale = view.arguments[weight]
    if not scale:
        return jnp.zeros(())
    if limit is None:  # the ant's forces are clipped, the humanoids' cost
        return scale * jnp.sum(jnp.square(jnp.clip(view.forces(), *view.contact_force_range)))
    return jnp.clip(scale * jnp.sum(jnp.square(view.forces())), *view.arguments[limit])


def _ant_observation(view: View) -> list[jax.Array]:
    parts = view.coordinates(2)
    if view.include_cfrc_ext_in_observation:
        parts.append(jnp.clip(view.forces()[1:], *view.contact_force_range))
    return parts


def _ant(step: Transition) -> Judged:
    view = step.after
    low, high = view.healthy_z_range
    finite = jnp.all(jnp.isfinite(view.data.qpos)) & jnp.all(jnp.isfinite(view.data.qvel))
    survive, done = _survived(view, finite & (low <= view.data.qpos[2]) & (view.data.qpos[2] <= high))
    contact = {"reward_contact": -_contact_cost(view, "contact_cost_weight", None), "reward_survive": survive}
    return _forward(step, lambda view: view.body(view.main_body)[0]) | contact, done


def _runs(step: Transition) -> Judged:
    """The half cheetah and the swimmer, which cannot fall."""
    return _forward(step, lambda view: view.data.qpos[0]), jnp.zeros((), bool)


def _hopper(step: Transition) -> Judged:
    view, (height, angle) = step.after, step.after.data.qpos[1:3]
    rest = jnp.concatenate([view.data.qpos, view.data.qvel])[2:]
    healthy = _within(rest, view.healthy_state_range)
    healthy &= _within(height, view.healthy_z_range) & _within(angle, view.healthy_angle_range)
    survive, done = _survived(view, healthy)
    return _forward(step, lambda view: view.data.qpos[0]) | {"reward_survive": survive}, done


def _walker(step: Transition) -> Judged:
    view, (height, angle) = step.after, step.after.data.qpos[1:3]
    healthy = _within(height, view.healthy_z_range) & _within(angle, view.healthy_angle_range)
    survive, done = _survived(view, healthy)
    return _forward(step, lambda view: view.data.qpos[0]) | {"reward_survive": survive}, done


def _humanoid_observation(view: View) -> list[jax.Array]:
    parts = view.coordinates(2)
    parts += [view.array("cinert")[1:]] if view.include_cinert_in_observation else []
    parts += [view.array("cvel")[1:]] if view.include_cvel_in_observation else []
    parts += [view.array("qfrc_actuator")[6:]] if view.include_qfrc_actuator_in_observation else []
    return parts + ([view.forces()[1:]] if view.include_cfrc_ext_in_observation else [])


def _mass_centre(view: View) -> jax.Array:
    """Its first coordinate."""
    mass = jnp.asarray(view.model.body_mass)
    return jnp.sum(mass * view.array("xipos")[:, 0]) / jnp.sum(mass)


def _humanoid(step: Transition) -> Judged:
    view = step.after
    survive, done = _survived(view, _within(view.data.qpos[2], view.healthy_z_range))
    contact = -_contact_cost(view, "contact_cost_weight", "contact_cost_range")
    return _forward(step, _mass_centre) | {"reward_contact": contact, "reward_survive": survive}, done


def _standup(step: Transition) -> Judged:
    """Gymnasium's reward has no factor `uph_cost_weight`, and a constant that no part of its `info` contains."""
    view = step.after
    parts = {
        "reward_linup": view.data.qpos[2] / view.model.opt.timestep,
        "reward_quadctrl": -step.effort("ctrl_cost_weight"),
        "reward_impact": -_contact_cost(view, "impact_cost_weight", "impact_cost_range"),
        "reward_constant": jnp.ones(()),
    }
    return parts, jnp.zeros((), bool)


# --- pendulums and arms


def _pendulum(step: Transition) -> Judged:
    done = ~(jnp.abs(step.after.data.qpos[1]) <= 0.2)
    return {"reward_survive": 1.0 - done}, done


def _double_pendulum_observation(view: View) -> list[jax.Array]:
    qpos, speed = view.data.qpos, jnp.clip(view.data.qvel, -10, 10)
    return [qpos[:1], jnp.sin(qpos[1:]), jnp.cos(qpos[1:]), speed, jnp.clip(view.array("qfrc_constraint"), -10, 10)[:1]]


def _double_pendulum(step: Transition) -> Judged:
    view = step.after
    x, _, height = view.array("site_xpos")[0]
    done = ~(height > 1)
    parts = {
        "reward_survive": view.healthy_reward * (1.0 - done),
        "distance_penalty": -(0.01 * x**2 + (height - 2) ** 2),
        "velocity_penalty": -(0.001 * view.data.qvel[1] ** 2 + 0.005 * view.data.qvel[2] ** 2),
    }
    return parts, done


def _distance(view: View, one: str, other: str) -> jax.Array:
    return jnp.linalg.norm(view.body(one) - view.body(other))


def _pusher_observation(view: View) -> list[jax.Array]:
    bodies = [view.body(name) for name in ("tips_arm", "object", "goal")]
    return [view.data.qpos[:7], view.data.qvel[:7], *bodies]


def _pusher(step: Transition) -> Judged:
    view = step.after
    parts = {
        "reward_dist": -view.reward_dist_weight * _distance(view, "object", "goal"),
        "reward_ctrl": -step.effort("reward_control_weight"),
        "reward_near": -view.reward_near_weight * _distance(view, "object", "tips_arm"),
    }
    return parts, jnp.zeros((), bool)


def _reacher_observation(view: View) -> list[jax.Array]:
    qpos, angles = view.data.qpos, view.data.qpos[:2]
    reach = (view.body("fingertip") - view.body("target"))[:2]
    return [jnp.cos(angles), jnp.sin(angles), qpos[2:], view.data.qvel[:2], reach]


def _reacher(step: Transition) -> Judged:
    distance = -step.after.reward_dist_weight * _distance(step.after, "fingertip", "target")
    return {"reward_dist": distance, "reward_ctrl": -step.effort("reward_control_weight")}, jnp.zeros((), bool)


def _needs(weight: str) -> Callable[[dict[str, Any]], bool]:
    return lambda arguments: bool(arguments["include_cfrc_ext_in_observation"] or arguments[weight])


TASKS = {
    "Ant-v5": Task(_ant_observation, _ant, _noisy(True), _needs("contact_cost_weight")),
    "HalfCheetah-v5": Task(lambda view: view.coordinates(1), _runs, _noisy(True)),
    "Hopper-v5": Task(lambda view: view.coordinates(1, 10.0), _hopper, _noisy(False)),
    "Humanoid-v5": Task(_humanoid_observation, _humanoid, _noisy(False), _needs("contact_cost_weight")),
    "HumanoidStandup-v5": Task(_humanoid_observation, _standup, _noisy(False), _needs("impact_cost_weight")),
    "InvertedDoublePendulum-v5": Task(_double_pendulum_observation, _double_pendulum, _noisy(True)),
    "InvertedPendulum-v5": Task(lambda view: [view.data.qpos, view.data.qvel], _pendulum, _noisy(False)),
    "Pusher-v5": Task(_pusher_observation, _pusher, _pusher_draw),
    "Reacher-v5": Task(_reacher_observation, _reacher, _reacher_draw),
    "Swimmer-v5": Task(lambda view: view.coordinates(2), _runs, _noisy(False)),
    "Walker2d-v5": Task(lambda view: view.coordinates(1, 10.0), _walker, _noisy(False)),
}
