"""Builds environments, PPO and first states from a configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rlstable import faults
from rlstable.compilation import background, host_keys
from rlstable.compilation.trace_cache import compiler_of
from rlstable.compilation.xla import Compiling
from rlstable.config import Config, ConfigError
from rlstable.config.faults import FaultConfig
from rlstable.config.networks import NetworkConfig
from rlstable.device import sharding
from rlstable.device.mjx import uses_warp
from rlstable.device.packed import PackedRows
from rlstable.device.precision import Precision, level
from rlstable.device.reflection import Mirror
from rlstable.device.transforms import vmap_seeds
from rlstable.device.trees import PRESERVED, EnvState
from rlstable.envs.float64 import Float64Physics
from rlstable.envs.history import with_history
from rlstable.envs.interface import check, require_unwrapped
from rlstable.envs.load import Loaded, load
from rlstable.envs.recurrent import with_memory
from rlstable.envs.resets import Resets
from rlstable.envs.vector import MODEL, VectorEnv, pool_of
from rlstable.guards.base import all_finite, select
from rlstable.policy.policy import Policy
from rlstable.ppo.guards import MoreGuards, guards_of
from rlstable.ppo.initial import init_program, with_environments
from rlstable.ppo.iteration import PPO
from rlstable.ppo.networks import Networks
from rlstable.ppo.optimizer import Optimizer
from rlstable.ppo.rollout import TrainingEnv
from rlstable.ppo.settings import Settings
from rlstable.ppo.state import SPECS, Metrics, TrainState
from rlstable.runner.kept_teacher import teacher_of
from rlstable.supervise.memory import require_states


class Program(NamedTuple):
    """The compiled iteration."""

    executable: Any  # of JAX
    precision: Precision

    def __call__(self, state: TrainState) -> tuple[TrainState, Metrics]:
        return self.each((state,))[0]

    def each(self, states: tuple[TrainState, ...]) -> tuple[tuple[TrainState, Metrics], ...]:
        """Runs one iteration of several states, all of them donated; the program is compiled for their number."""
        with self.precision.compiled():
            results: tuple[tuple[TrainState, Metrics], ...] = self.executable(states)
            return results


def make_ppo(
    config: Config,
    env: TrainingEnv,
    action_size: int,
    more_guards: MoreGuards | None = None,
    mirror: Mirror | None = None,
) -> PPO:
    """Builds settings, networks, optimizer and guards of an iteration; `more_guards` are by site and name."""
    ppo, guards, precision = config.ppo, config.guards, level(config.precision)
    sites = guards_of(guards, ppo, more_guards or {})
    settings = Settings(
        ppo=ppo,
        limits=guards.limiters,
        env_steps_per_iteration=config.env_steps_per_iteration,
        total_steps=config.total_steps,
        tightens=config.may_tighten_clipping,
        watches_policy=guards.policy.enabled,
        captures=config.supervise.incident.enabled,
        staggered=config.env.stagger,
    )
    return PPO(
        settings=settings,
        env=env,
        networks=Networks(config.network, guards.limiters, action_size, ppo.normalize_observations, precision.network),
        optimizer=Optimizer(ppo, guards.limiters, config.may_separate_rates),
        precision=precision,
        batch_guards=sites["batch"],
        update_guards=sites["update"],
        state_guards=sites["state"],
        mirror=mirror,
    )


@dataclasses.dataclass(eq=False)
class TrainingSetup:
    """Environments, PPO and the training program of one configuration, at the configured precision.

    `single` is an environment object of the user, None to load the configured environment. `teacher` is the policy of
    `ppo.teacher`. Raises `ConfigError` if the environment cannot be made, or does not fit the configuration or the
    teacher.
    """

    config: Config
    mesh: Mesh
    more_guards: MoreGuards | None = None
    compiling: Compiling = lambda _: contextlib.nullcontext()
    single: Any = None
    teacher: Policy | None = None
    report_constants: Callable[[int], None] = lambda size: None  # `Compiler.on_large_constants`

    def __post_init__(self) -> None:
        config, mesh, single, more, teacher = self.config, self.mesh, self.single, self.more_guards or {}, self.teacher
        if single is None:
            self.loaded = load(config.env, None, len(mesh.local_devices))
        else:
            require_unwrapped(single)
            self.loaded = Loaded(with_history(single, config.env.history), getattr(single, "backend", None))
        self.single = single = self.loaded.env
        if config.env.source in ("import", "object"):  # tracing takes time, and Brax's environments need no check
            check(single, config.env.name, config.network)
        self.precision = level(config.precision)
        if self.precision.x64 and uses_warp(single):
            raise ConfigError(
                f"precision.matmul: x64 needs physics in float64, and {config.env.name} simulates with MJX-Warp, which "
                "computes in float32; set precision.matmul=highest, or use impl=jax"
            )
        self.env = VectorEnv(
            with_memory(Float64Physics(single) if self.precision.x64 else single, config.network),
            config.env.training_length,
            config.env.action_repeat,
            guards_of(config.guards, config.ppo, more)["env"],
            config.env.reset == "pool",
            config.env.envs_per_pass,
            config.env.restore_info,
        )
        self.env = faults.faulty_env(self.env, config.fault)
        mirror, self.without_mirror = _mirror_of(single, config.ppo.symmetry, config.env.history, config.network)
        ppo = make_ppo(config, self.env, single.action_size, more, mirror)
        self.ppo: PPO = faults.arm(ppo, config.precision.matmul, config.fault)
        # A guard given as an object and the numbers of a teacher have no key for the trace cache.
        self._compiler = compiler_of(config, mesh, single, cached=not more and teacher is None)
        self._compiler.on_large_constants = self.report_constants
        self._parameters: Future[Any] | None = None
        self._training: Future[Any] | None = None
        batch = min(config.env.reset_pool_size, config.ppo.num_envs)
        self._resets = Resets(self.env, batch, self._compiler, mesh.size)
        if teacher is not None:
            seen = self._resets.shapes(config.ppo.num_envs).obs
            self.ppo = dataclasses.replace(self.ppo, teacher=teacher_of(teacher, single, config.env.history, seen))

    def first_state(self, key: jax.Array, key_resets: jax.Array, fault: FaultConfig, ahead: bool = False) -> TrainState:
        """The training state before the first iteration: clean first states, initial parameters, placed on the devices.

        With `ahead`, the training program for this state starts to compile in the background. Raises `ConfigError` if
        the environments' states do not fit into memory, or hardly any reset is clean.
        """
        # Other seeds of the same setup use the same compiled programs.
        shapes = self._first_states()
        ppo, played, pool = self.config.ppo.num_envs, self.config.eval.num_envs, self.config.env.reset_pool_size
        if self.config.supervise.memory.adapt:
            counts = {"ppo.num_envs": ppo, "eval.num_envs": played, "env.reset_pool_size": pool}
            require_states(shapes, ppo, counts)
        with self.compiling("resets") if self._parameters is None else contextlib.nullcontext():
            resets = self._resets.begin()
            if ahead:
                self.begin()  # first, because its compilation takes longest
            if self._parameters is None:
                self._parameters = self._compiler.build(
                    "untrained", self._untrained, lambda: (key,), rarely_used=True, at_once=ahead
                )
            resets.result()
            env_state, pool = self._draw(key_resets)
            state = self._initial(self._parameters.result()(key), env_state, pool, fault)
        return sharding.place(state, self.mesh, SPECS)

    def shapes(self) -> TrainState:
        """Shapes, dtypes and shardings of the first training state; nothing is reset, stepped or allocated."""

        def shapes_of(function: Callable[..., Any], *args: Any) -> Any:
            def narrow(*args: Any) -> Any:
                with self.precision.narrow():
                    return function(*args)

            with self.precision.compiled():
                return jax.eval_shape(narrow, *args)

        config, pool = self.config, None
        if self.env.uses_pool:
            # Packing a pool on the host needs arrays, not shapes; a pool is small.
            pool = pool_of(jax.tree.map(_blank, self._resets.shapes(config.env.reset_pool_size * self.mesh.size)))
        state = shapes_of(self._untrained, host_keys.shape())
        state = shapes_of(functools.partial(self._initial, fault=config.fault), state, self._first_states(), pool)
        return sharding.placeholders(state, self.mesh, SPECS)

    def begin(self) -> None:
        """Starts compiling the training program for one state in the background, if that is possible."""
        if background.available():
            self._training = self._begin(1, lambda: (self.shapes(),))

    def compiled(self, *states: TrainState) -> Program:
        """The training program of these states or their `shapes`, one per seed; compiled before its first call."""
        compiling, self._training = self._training, None
        with self.compiling("training"):
            executable = (compiling or self._begin(len(states), lambda: states)).result()
            return Program(executable, self.precision)

    def convert_state(self, state: TrainState) -> TrainState:
        """Converts a training state of another precision to this one; its pool of first states must fit already."""

        def widened(x: Any, like: Any) -> Any:
            if isinstance(x, PackedRows):
                return x if x.shapes == like.shapes else jax.jit(lambda rows: rows.cast_like(like))(x)
            return x if x.dtype == like.dtype else x.astype(like.dtype)

        shapes = self.shapes()
        with jax.enable_x64(True):
            env_state = jax.tree.map(
                widened, state.env_state, shapes.env_state, is_leaf=lambda x: isinstance(x, PackedRows)
            )
        scale, now = self.precision.loss_scale, state.tuning.loss_scale
        # Without a loss scale the value is 1; a search for a loss scale starts at the initial value.
        now = jnp.ones_like(now) if scale is None else jnp.where(now > 1.0, now, scale.initial).astype(now.dtype)
        tuning = dataclasses.replace(state.tuning, loss_scale=now)
        slots = jax.tree.map(_blank, shapes.incident)
        parts = {"env_state": env_state, "tuning": tuning, "incident": slots}
        return sharding.place(dataclasses.replace(state, **parts), self.mesh, SPECS)

    def with_empty_slots(self, state: TrainState) -> TrainState:
        """Adds empty incident slots to a state; a saved state has none."""
        return self._with(state, incident=jax.tree.map(_blank, self.shapes().incident))

    def reset_envs_and_pool(self, state: TrainState, key: jax.Array, keep_models: bool = True) -> TrainState:
        """The state with new first states; with `keep_models` the environments keep their randomised models."""
        env_state, pool = self._draw(key)
        env_state = _with_kept_of(state.env_state, env_state) if keep_models else env_state
        return self._with(state, env_state=env_state, reset_pool=pool)

    def reset_envs(self, state: TrainState, key: jax.Array) -> TrainState:
        return self._with(state, env_state=_with_kept_of(state.env_state, self._draw_environments(key)))

    def refill_pool(self, state: TrainState, key: jax.Array) -> TrainState:
        """The state with a new pool of clean first states."""
        return self._with(state, reset_pool=self._pool(key))

    def _begin(self, count: int, states: Callable[[], tuple[TrainState, ...]]) -> Future[Any]:
        """Starts compiling the training program for a number of states, in a background thread."""
        program = sharding.over_devices(
            vmap_seeds(self.ppo.iteration),
            self.mesh,
            ((SPECS,) * count,),
            ((SPECS, sharding.REPLICATED),) * count,
            donate=(0,),
        )
        return self._compiler.build(f"training {count}", program, lambda: (states(),), donates=True)

    def _first_states(self) -> Any:
        """Shapes of the first states; a `ConfigError` if the configuration needs time limits that these do not have."""
        config = self.config
        states = self._resets.shapes(config.ppo.num_envs)
        if config.ppo.bootstrap_on_timeout and "time_out" not in states.info:
            raise ConfigError(
                f"ppo.bootstrap_on_timeout: {config.env.name} has no info['time_out'] that distinguishes a time limit "
                "from a termination; set ppo.bootstrap_on_timeout=false"
            )
        return states

    def _initial(self, untrained: TrainState, env_state: Any, pool: Any, fault: FaultConfig) -> TrainState:
        """The training state before the first iteration, with its injected fault if there is one."""
        return faults.armed_state(with_environments(untrained, self.ppo, env_state, pool, self.mesh.size), fault)

    @functools.cached_property
    def _untrained(self) -> Any:
        """Initialises a training state without environments, compiled once for all seeds."""
        return init_program(self.ppo, self._first_states())

    def _draw(self, key: jax.Array) -> tuple[Any, Any]:
        """First states for every environment, and a pool for every device."""
        key_envs, key_pool = host_keys.split(key)
        return self._draw_environments(key_envs), self._pool(key_pool) if self.env.uses_pool else None

    def _draw_environments(self, key: jax.Array) -> EnvState:
        """First states for every environment, with `env.stagger` at different steps of an episode."""
        state, config = self._resets.draw(key, self.config.ppo.num_envs), self.config.env
        if not config.stagger:
            return state
        steps = np.asarray(state.info["steps"])
        actions = np.arange(steps.size) * (config.training_length // config.action_repeat) // steps.size
        spread = (actions * config.action_repeat).reshape(steps.shape).astype(steps.dtype)
        return state.replace(info={**state.info, "steps": spread})

    def _pool(self, key: jax.Array) -> Any:
        return self._resets.pool(key, self.config.env.reset_pool_size * self.mesh.size)

    def _with(self, state: TrainState, **parts: Any) -> TrainState:
        placed = {name: sharding.place(part, self.mesh, sharding.SPLIT) for name, part in parts.items()}
        return dataclasses.replace(state, **placed)


def _mirror_of(env: Any, asked: str | None, history: int, network: NetworkConfig) -> tuple[Mirror | None, str | None]:
    """The mirror of a robot for `ppo.symmetry`, or why there is none; the configuration has checked the source."""
    if asked is None or network.recurrent is not None:
        return None, asked and "the memory of a GRU has no mirror image"
    mirror: tuple[Mirror | None, str | None] = env.unwrapped.mirror(asked, history)
    return mirror


def _with_kept_of(before: Any, after: Any) -> Any:
    """First states with the randomised models and the finite preserved values of as many environments before."""
    kept = {name: before.info[name] for name in (MODEL, PRESERVED) if name in before.info}
    lost = any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(kept))  # after out of memory
    if not kept or lost or before.done.shape != after.done.shape:
        return after
    kept = jax.device_get(sharding.gathered(kept))
    if PRESERVED in kept:  # a bad value would survive every rollback
        own, first = kept[PRESERVED], after.info[PRESERVED]
        kept[PRESERVED] = jax.device_get(select(all_finite(own, 1), own, first))
    return after.replace(info={**after.info, **kept})


def _blank(x: jax.ShapeDtypeStruct) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), x.shape)
    return np.zeros(x.shape, x.dtype)
