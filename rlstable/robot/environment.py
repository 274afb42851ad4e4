"""The environment of a robot: one model file, and lists of terms that the configuration names.

The same Python code runs on MJX and on C MuJoCo; only `simulator` differs. Terms read arrays that both compute.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import mujoco

from rlstable.config import ConfigError
from rlstable.config.extras import install
from rlstable.config.robot import TaskConfig
from rlstable.config.schema import INT32_MAX, first_line
from rlstable.device.compatibility import without_solver_lines
from rlstable.device.reflection import Mirror
from rlstable.device.trees import PRESERVED, TRAINED_STEPS, Observation, PyTree
from rlstable.envs.gymnasium_env import State
from rlstable.envs.simulator import MjxSimulator, Simulator
from rlstable.robot import actions, commands, terms
from rlstable.robot.lists import KEY, Lists, seen_by_critic
from rlstable.robot.model import Robot
from rlstable.robot.observing import Observer
from rlstable.robot.past import Past
from rlstable.robot.terrain import Levels

LEVEL = "terrain_level"  # metric: level of the tile on which an episode began
PAST = "memory"  # the entry of `info`; checkpoints hold this name
_SECONDS_A_PART, _SHARE_OF_RANGE = 2.0, 0.8  # of a course


class RobotEnv:
    """A robot with a task, with the interface of Playground's tasks.

    `observers` are those of the policy, `state`, and of the critic, `privileged_state`.

    `impl` is the implementation of MJX, None without MJX.

    Raises ConfigError, with the key, for a model or a term that cannot be used, before anything compiles.
    """

    course: jax.Array | None = None  # velocities asked for in turn, [parts, 3]; None: random ones, as in training

    def __init__(self, path: str, task: TaskConfig, impl: str | None = None):
        self.task = task
        self.lists = lists = Lists.of(task)
        every = lists.every()
        needs = {need for function in every.values() for need in terms.needs_of(function)}
        touching, sites = terms.touching(every), sorted(terms.sites(every))
        self._built = lambda task: Robot(path, task, touching, needs, sites)
        self.robot = robot = self._built(task)
        for key, functions in lists.keyed().items():
            terms.check_needs(robot, key, functions, lists.commands)
        self._tracks_feet = "feet" in needs
        self.observers = {"state": Observer(robot, f"{KEY}.observations", lists.observations, task.observations)}
        if lists.critic_observations:
            key = f"{KEY}.critic_observations"
            self.observers["privileged_state"] = Observer(robot, key, lists.critic_observations, seen_by_critic(task))
        self.mjx_model = None if impl is None else _on_device(robot.model, impl, path)
        self.simulator: Simulator = MjxSimulator(robot.model, impl or "jax")
        self._weights = {name: config.weight for name, config in task.rewards.items()}
        self._check_terms()

    # --- the interface of Playground's tasks

    @property
    def mj_model(self) -> mujoco.MjModel:
        return self.robot.model

    @property
    def action_size(self) -> int:
        return len(self.robot.actuators)

    @property
    def n_substeps(self) -> int:
        return self.robot.substeps

    @property
    def dt(self) -> float:
        return self.robot.control_dt

    @property
    def unwrapped(self) -> RobotEnv:
        return self

    @property
    def header(self) -> list[tuple[str, str]]:
        """Lines about the task that a run prints before it trains, as names and values."""
        ranges, terrain = self.velocities, self.robot.terrain
        lines = [] if ranges is None else [("command", commands.text(*ranges))]
        return lines if terrain is None else [*lines, ("terrain", terrain.header)]

    @property
    def velocities(self) -> tuple[jax.Array, jax.Array] | None:
        """The least and the greatest velocities of the command `velocity`, `[3]`; None without this command."""
        function = self.lists.commands.get("velocity")
        if function is None or self.task.commands["velocity"].path("velocity") != "velocity":
            return None
        return commands.velocity_ranges(self.robot, **terms.arguments(terms.with_grown(function, INT32_MAX)))

    def on_course(self) -> RobotEnv:
        """A copy that asks for the same velocities in every episode, so that films can be compared.

        The robot stands, goes forward, turns, goes sideways and backwards, as far as its range of commands has them.
        """
        copied = copy.copy(self)
        if (ranges := self.velocities) is not None:
            low, high = (jnp.diag(_SHARE_OF_RANGE * x) for x in ranges)
            parts = [part for part in (high[0], high[2], high[1], low[0]) if part.any()]
            copied.course = jnp.stack([jnp.zeros(3), *parts])
        return copied

    def mirror(self, asked: str, history: int) -> tuple[Mirror | None, str | None]:
        """The mirror of `history` observations and of actions for `ppo.symmetry`, or the reason why there is none."""
        from rlstable.robot.symmetry.mirror import mirror_if_asked

        env, terrain = self, self.robot.terrain
        if asked and terrain is not None:  # on a floor, because the triangles of a height field have no mirror image
            env = copy.copy(self)
            env.robot = self._built(self.task.model_copy(update={"terrain": None}))
            env.robot.terrain = terrain
        return mirror_if_asked(env, asked, history)

    def motion(self, state: State) -> tuple[jax.Array, jax.Array]:
        """Velocity forward and sideways and turning rate, `[3]`: as commanded, and as the root body moves."""
        linear, angular = self.robot.linear_velocity(state.data), self.robot.angular_velocity(state.data)
        return state.info[PAST].command["velocity"], jnp.stack([linear[0], linear[1], angular[2]])

    @property
    def names_of_policy(self) -> dict[str, list[str]]:
        """Names of the actions, and by key of the parts of each observation: what a policy was trained for."""
        seen = {key: [part.name for part in observer.parts] for key, observer in self.observers.items()}
        return {"actions": [actuator.name for actuator in self.robot.actuators], **seen}

    def reset(self, rng: jax.Array) -> State:
        keys = jax.random.split(rng, 3)
        ((_, reset),) = self.lists.reset.items()
        qpos, qvel = reset(self.robot, keys[0])
        center = levels = None
        if (terrain := self.robot.terrain) is not None:
            levels = terrain.drawn(jax.random.fold_in(rng, 1))
            center = terrain.center(levels)
            qpos = self.robot.moved(qpos, center)
        ctrl = jnp.asarray(self.robot.of_actuators("home"))
        act = jnp.asarray(self.robot.activation, jnp.float32)
        data = self.simulator.start(self.mjx_model, qpos=qpos, qvel=qvel, ctrl=ctrl, act=act)
        past = self.past_at_reset(data, keys[1], keys[2]).replace(center=center)
        obs, past = self._observe(data, past, jnp.zeros(self.action_size), first=True)
        zero = jnp.zeros(())
        metrics = {name: zero for name in self._metric_names()}
        info = {PAST: past, TRAINED_STEPS: past.trained}
        return State(data, obs, zero, zero, metrics, {**info, PRESERVED: levels} if self._has_levels else info)

    def step(self, state: State, action: jax.Array) -> State:
        config, robot = self.task.actions, self.robot
        action = actions.clipped(action, config)
        past = state.info[PAST].replace(trained=state.info[TRAINED_STEPS])
        data, first, levels = state.data, past.steps == 0, state.info.get(PRESERVED)
        if levels is not None:
            data, past, levels = self._placed(data, past, levels)
        past = actions.remembered(past, action, config)
        data = self._pushed(data, past)
        ctrl = actions.controls(robot, past.filtered, config)
        data = self.simulator.steps(self.mjx_model, data, ctrl, robot.substeps)
        past = self._advanced(data, past)
        rewarded = {
            name: self._weights[name] * robot.control_dt * f(robot, data, past, action)
            for name, f in self.lists.rewards.items()
        }
        ended = {name: f(robot, data, past, action) for name, f in self.lists.endings.items()}
        done, fell, info = self._done(ended, state.info)
        past = self._commanded(past)
        obs, past = self._observe(data, past, action)
        metrics = {f"reward/{name}": x for name, x in rewarded.items()}
        metrics |= {f"ending/{name}": x.astype(jnp.float32) for name, x in ended.items()}
        if levels is not None and past.center is not None:
            info = {**info, PRESERVED: levels.replace(walked=robot.walked(data, past.center), fell=fell)}
            metrics[LEVEL] = jnp.where(first, levels.level, 0).astype(jnp.float32)  # its sum over the episode
        reward = sum(rewarded.values(), jnp.zeros(()))
        return state.replace(data=data, obs=obs, reward=reward, done=done, metrics=metrics, info={**info, PAST: past})

    # --- parts of a step

    def past_at_reset(self, data: PyTree, key: jax.Array, key_command: jax.Array) -> Past:
        """The past at a reset."""
        robot, config, feet = self.robot, self.task.actions, len(self.robot.feet)
        zeros = jnp.zeros((actions.buffer_length(config), self.action_size))
        key, key_delay = jax.random.split(key)
        names, trained = enumerate(self.lists.commands), jnp.int32(INT32_MAX)
        past = Past(
            rng=key,
            steps=jnp.zeros(()),
            command={name: self._drawn(name, jax.random.fold_in(key_command, i), trained) for i, name in names},
            actions=zeros,
            delay=jax.random.randint(key_delay, (), config.delay[0], config.delay[1] + 1),
            filtered=zeros[0],
            contact=robot.foot_contacts(data),
            air_time=jnp.zeros(feet),
            landed_after=jnp.zeros(feet),
            foot_positions=robot.foot_positions(data),
            foot_velocities=jnp.zeros((feet, 3)),
            history={},
            lags={},
            trained=trained,
        )
        return self._on_course(past)

    def _drawn(self, name: str, key: jax.Array, trained: jax.Array | int) -> jax.Array:
        command = terms.with_grown(self.lists.commands[name], trained)
        return jnp.asarray(command(self.robot, key), jnp.float32)

    def _pushed(self, data: PyTree, past: Past) -> PyTree:
        """The state, with a random horizontal velocity added to the root body every few seconds."""
        pushes = self.task.pushes
        if pushes is None or not self.robot.moves:
            return data
        every = max(1, round(pushes.every / self.dt))
        due = (past.steps > 0) & (jnp.mod(past.steps, every) == 0)
        # `_commanded` splits the same key, and the parts are the keys that `fold_in` makes with 0, 1, 2 and so on.
        angle = jax.random.uniform(jax.random.fold_in(past.rng, 99), maxval=2 * jnp.pi)
        push = jnp.where(due, terms.grown(pushes.speed, past.trained), 0.0) * jnp.stack(
            [jnp.cos(angle), jnp.sin(angle)]
        )
        return data.replace(qvel=self.robot.pushed(data.qvel, push))

    def _advanced(self, data: PyTree, past: Past) -> Past:
        """The past after the physics: one step later, with what the feet did."""
        past = past.replace(steps=past.steps + 1)
        if not self._tracks_feet:
            return past
        contact, positions = self.robot.foot_contacts(data), self.robot.foot_positions(data)
        in_air = past.air_time + self.dt
        return past.replace(
            contact=contact,
            landed_after=contact * jnp.where(past.air_time > 0, in_air, 0.0),
            air_time=(1 - contact) * in_air,
            foot_velocities=(positions - past.foot_positions) / self.dt,
            foot_positions=positions,
        )

    def _commanded(self, past: Past) -> Past:
        """The past with a new random key, and new commands where they are due.

        A reset does not know the steps trained, so that a command with a curriculum is also drawn after the first step.
        """
        command = dict(past.command)
        rng, *keys = jax.random.split(past.rng, 1 + len(command))
        for key, (name, config) in zip(keys, self.task.commands.items(), strict=True):
            due = jnp.zeros((), bool)
            if config.resample is not None:
                due |= jnp.mod(past.steps, max(1, round(config.resample / self.dt))) == 0
            if terms.has_curriculum(self.lists.commands[name]):
                due |= past.steps == 1
            elif config.resample is None:
                continue
            drawn = self._drawn(name, key, past.trained)
            command[name] = jnp.where(due, drawn, command[name])
        return self._on_course(past.replace(rng=rng, command=command))

    def _on_course(self, past: Past) -> Past:
        if self.course is None:
            return past
        part = jnp.mod(past.steps * self.dt // _SECONDS_A_PART, len(self.course)).astype(int)
        return past.replace(command={**past.command, "velocity": self.course[part]})

    def _observe(self, data: PyTree, past: Past, action: jax.Array, first: bool = False) -> tuple[Observation, Past]:
        obs = {}
        for i, (name, observer) in enumerate(self.observers.items()):
            key = jax.random.fold_in(past.rng, 100 + i)
            obs[name], past = observer.observe(data, past, action, key, first)
        return (obs if len(obs) > 1 else obs["state"]), past

    def _placed(self, data: PyTree, past: Past, levels: Levels) -> tuple[PyTree, Past, Levels]:
        """In the first step of an episode moves the robot, as it is, to the tile of its level.

        A first state comes from a pool, which does not know the level. Its observation is of another tile.
        """
        terrain, first = self.robot.terrain, past.steps == 0
        assert terrain is not None and past.center is not None
        levels = jax.tree.map(lambda new, old: jnp.where(first, new, old), terrain.next(levels, past.rng), levels)
        center = jnp.where(first, terrain.center(levels), past.center)
        data = data.replace(qpos=self.robot.moved(data.qpos, center - past.center))
        return data, past.replace(center=center), levels

    def _done(
        self, ended: Mapping[str, jax.Array], info: dict[str, PyTree]
    ) -> tuple[jax.Array, jax.Array, dict[str, PyTree]]:
        """Whether the episode ends, and whether by a failure; an ending by time alone is a truncation."""
        in_time = [name for name, f in self.lists.endings.items() if terms.truncates(f)]
        failed = sum((x for name, x in ended.items() if name not in in_time), jnp.zeros((), bool))
        over = sum((ended[name] for name in in_time), jnp.zeros((), bool))
        if in_time and "truncation" in info:
            info = {**info, "truncation": (over & ~failed).astype(jnp.float32)}
        return (failed | over).astype(jnp.float32), failed, info

    @property
    def _has_levels(self) -> bool:
        return self.task.terrain is not None and self.task.terrain.curriculum

    def _metric_names(self) -> list[str]:
        names = [f"reward/{name}" for name in self.lists.rewards] + [f"ending/{name}" for name in self.lists.endings]
        return [*names, LEVEL] if self._has_levels else names

    # --- checks

    def _check_terms(self) -> None:
        """Traces every term on the model at home; raises ConfigError for the first that fails or is no number."""
        data, zeros, key = self.robot.forward(), jnp.zeros(self.action_size), jax.random.PRNGKey(0)

        def shape(name: str, call: Any, argument: PyTree) -> Any:
            traced = jax.eval_shape(lambda x: terms.called(f"{KEY}.{name}", call, x), argument)
            return getattr(traced, "shape", None)

        for name, function in self.lists.commands.items():
            shape(f"commands.{name}", functools.partial(terms.with_grown(function, INT32_MAX), self.robot), key)
        for name, function in self.lists.reset.items():
            shape(f"reset.{name}", functools.partial(function, self.robot), key)
        past = jax.eval_shape(lambda k: self.past_at_reset(data, k, k), key)
        for observer in self.observers.values():
            observer.measure(data, past, zeros)
        for kind in ("rewards", "endings"):
            for name, function in getattr(self.lists, kind).items():
                found = shape(f"{kind}.{name}", lambda m, f=function: f(self.robot, data, m, zeros), past)
                if found != ():
                    raise ConfigError(f"{KEY}.{kind}.{name}: returns shape {found}; it must return a number")


def _on_device(model: mujoco.MjModel, impl: str, path: str) -> PyTree:
    from mujoco import mjx

    if impl == "warp" and importlib.util.find_spec("warp") is None:
        raise ConfigError(f"env.impl: warp needs warp-lang, which is not installed; {install('warp')}")
    try:
        return without_solver_lines(mjx.put_model(model, impl=impl))
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"env.xml: MJX cannot simulate {path}: {first_line(error)}; change the model, or set env.backend=native "
            "for C MuJoCo on a CPU"
        ) from None
