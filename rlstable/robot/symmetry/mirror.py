"""The mirror of a robot's task, checked on the model itself: in mirrored states everything must be mirrored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from rlstable.config import ConfigError
from rlstable.device.reflection import Mirror, Reflection
from rlstable.robot import actions, terms
from rlstable.robot.environment import RobotEnv
from rlstable.robot.lists import KEY
from rlstable.robot.model import Robot
from rlstable.robot.observing import Observer
from rlstable.robot.past import Past
from rlstable.robot.symmetry.pairs import Pairs, refused
from rlstable.robot.symmetry.rules import SHARE_OF_STEP, Rules, largest

_STATES = 8  # random states near home in which the mirror is checked
_NOISE, _SPEED = 0.1, 0.5  # largest changes of positions from home, in m and rad, and velocities, in m/s and rad/s

Random = np.random.Generator


class _State(NamedTuple):
    """A state of the physics, with C MuJoCo's data in the shapes of MJX."""

    qpos: np.ndarray
    qvel: np.ndarray
    ctrl: np.ndarray
    data: Any


def mirror_if_asked(env: RobotEnv, asked: str, history: int) -> tuple[Mirror | None, str | None]:
    """The mirror of a robot's task, or with `if_symmetric` the reason why there is none or why it shows nothing new."""
    if asked == "if_symmetric" and not env.robot.steerable[1:].any():
        return None, "the robot moves in a plane"
    try:
        return mirror_of(env, history), None
    except ConfigError as error:
        if asked == "auto":
            raise
        return None, str(error).partition(";")[0]


def mirror_of(env: RobotEnv, history: int = 1) -> Mirror:
    """The mirror of `history` observations and of actions; raises ConfigError that names what has no mirror image."""
    pairs, random = Pairs(env.robot), np.random.default_rng(0)
    states = [_state_and_image(env, pairs, random) for _ in range(_STATES)]
    _check_steps(pairs, states)
    rules = Rules(pairs, env.lists.commands, [(state.data, image.data) for state, image in states])
    moments = [_moments(env, pairs, rules.commands, *both, random) for both in states]
    observations = {}
    for name, observer in env.observers.items():
        whole, newest = rules.of_observer(observer)
        _check_observation(env, observer, newest, moments)
        observations[name] = whole.repeated(history)
    _check_rewards(env, moments)
    return Mirror(observations, pairs.actuators)


def _state_and_image(env: RobotEnv, pairs: Pairs, random: Random) -> tuple[_State, _State]:
    """A random state near home, and its mirror image."""
    robot, model = env.robot, env.robot.model
    qpos = robot.home.copy()
    for joint in range(model.njnt):
        at = int(model.jnt_qposadr[joint])
        if model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_FREE:
            turn = np.zeros(4)
            mujoco.mju_euler2Quat(turn, random.uniform(-_NOISE, _NOISE, 3), "xyz")
            mujoco.mju_mulQuat(qpos[at + 3 : at + 7], robot.home[at + 3 : at + 7], turn)
            continue
        qpos[at] += random.uniform(-_NOISE, _NOISE)
        if model.jnt_limited[joint]:
            qpos[at] = np.clip(qpos[at], *model.jnt_range[joint])
    qvel = random.uniform(-_SPEED, _SPEED, model.nv)
    action = random.uniform(-1, 1, model.nu)
    ctrl, mirrored = (np.array(actions.controls(robot, x, env.task.actions)) for x in (action, pairs.actuators(action)))
    images = pairs.qpos(qpos), pairs.dofs(qvel), mirrored
    return _State(qpos, qvel, ctrl, robot.forward(qpos, qvel, ctrl)), _State(*images, robot.forward(*images))


def _check_steps(pairs: Pairs, states: list[tuple[_State, _State]]) -> None:
    """Compares the mirror image of a control step with the control step of the mirror image."""
    changes, errors = [], []
    for state, image in states:
        after = _stepped(pairs.robot, state)
        changes.append(pairs.dofs(after - state.qvel))
        errors.append(pairs.dofs(after) - _stepped(pairs.robot, image))
    beyond = np.abs(np.stack(errors)).max(axis=0) / largest(np.stack(changes))
    worst = int(np.argmax(beyond))
    if not beyond[worst] <= SHARE_OF_STEP:
        joint = pairs.named("joint", int(pairs.model.dof_jntid[worst]))
        raise refused(f"a step of the mirrored robot is not the mirrored step: {joint} moves differently")


def _stepped(robot: Robot, state: _State) -> np.ndarray:
    """Velocities after a control step."""
    data = mujoco.MjData(robot.model)
    data.qpos[:], data.qvel[:], data.ctrl[:] = state.qpos, state.qvel, state.ctrl
    data.act[:] = robot.activation
    mujoco.mj_step(robot.model, data, robot.substeps)
    return np.array(data.qvel)


_Moment = tuple[Any, Past, jax.Array]


def _moments(
    env: RobotEnv, pairs: Pairs, commands: Mapping[str, Reflection], state: _State, image: _State, random: Random
) -> tuple[_Moment, _Moment]:
    """The arguments of terms in a state, with random commands and actions before, and in its mirror image."""
    robot = env.robot

    def drawn(*shape: int) -> np.ndarray:
        return random.uniform(-1, 1, shape).astype(np.float32)

    key = jax.random.PRNGKey(0)
    shapes = jax.eval_shape(lambda k: env.past_at_reset(state.data, k, k), key)
    past = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes).replace(
        command={name: drawn(len(reflection.order)) for name, reflection in commands.items()},
        actions=drawn(*shapes.actions.shape),
        contact=np.asarray(robot.foot_contacts(state.data)),
        foot_positions=np.asarray(robot.foot_positions(state.data)),
    )
    mirrored = past.replace(
        command={name: commands[name](x) for name, x in past.command.items()},
        actions=pairs.actuators(past.actions),
        contact=np.asarray(robot.foot_contacts(image.data)),
        foot_positions=np.asarray(robot.foot_positions(image.data)),
    )
    here, there = jax.tree.map(jnp.asarray, (past, mirrored))  # JAX's arrays, as in training
    return (state.data, here, here.actions[0]), (image.data, there, there.actions[0])


def _check_observation(
    env: RobotEnv, observer: Observer, newest: Reflection, moments: list[tuple[_Moment, _Moment]]
) -> None:
    names = [part.name for part in observer.parts for _ in range(part.size)]
    clocks = np.array([terms.mirror_rule_of(observer.functions[name]) == "clock" for name in names])

    def vector(moment: _Moment) -> np.ndarray:
        parts = observer.functions.items()
        return np.concatenate([terms.called(f"{observer.key}.{n}", f, env.robot, *moment) for n, f in parts])

    here = np.stack([newest(vector(one)) for one, _ in moments])
    there = np.stack([vector(other) for _, other in moments])
    # A clock does not depend on the state, so its mirror image, half a cycle later, cannot be compared.
    apart = np.where(clocks, 0.0, np.abs(here - there).max(axis=0) / largest(here))
    worst = int(np.argmax(apart))
    if not apart[worst] <= SHARE_OF_STEP:
        raise refused(f"{observer.key}.{names[worst]}: in the mirrored state it is not the mirror image")


def _check_rewards(env: RobotEnv, moments: list[tuple[_Moment, _Moment]]) -> None:
    """Rewards and endings are the same in a state and in its mirror image."""
    for kind in ("rewards", "endings"):
        for name, function in getattr(env.lists, kind).items():
            key = f"{KEY}.{kind}.{name}"
            here, there = np.array([[float(terms.called(key, function, env.robot, *m)) for m in p] for p in moments]).T
            if not np.abs(here - there).max() <= SHARE_OF_STEP * max(np.abs(here).max(), 1e-6):
                raise refused(f"{key}: in the mirrored state its value is another")
