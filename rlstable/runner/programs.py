"""The devices and the programs of a run, by precision level and memory plan; each program is compiled once."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from rlstable.compilation import sources
from rlstable.compilation.xla import Compiling, disable_async_dispatch, enable_program_cache
from rlstable.config import Config, ConfigError
from rlstable.config.run import EnvConfig, EvalConfig
from rlstable.config.supervise import MATMUL_LEVELS, X64
from rlstable.device import hosts
from rlstable.device import machine as processor
from rlstable.device.mesh import device_kind, make_mesh
from rlstable.device.mjx import uses_warp
from rlstable.device.precision import Level
from rlstable.device.trees import Env
from rlstable.envs.history import with_history
from rlstable.envs.load import load_env
from rlstable.envs.mujoco_model import model_of
from rlstable.envs.objects import Environments
from rlstable.io.versions import versions
from rlstable.policy.evaluator import Evaluator, make_evaluator, require_same_observation
from rlstable.policy.policy import Policy
from rlstable.ppo.guards import MoreGuards, check_more
from rlstable.ppo.state import TrainState
from rlstable.runner.host_state import HostState
from rlstable.runner.setup import Program, TrainingSetup
from rlstable.supervise.memory import MemoryPlanner, is_out_of_memory
from rlstable.supervise.stop_reasons import StopReason

_CURED_BY_PRECISION = (StopReason.state_not_finite, StopReason.no_update_accepted, StopReason.physics_unstable)


def mesh_of(devices: int | None, env: EnvConfig, played: EvalConfig) -> Mesh:
    """So many devices, all if None, for environments to train and to play; a `ConfigError` if they are not available.

    Must run before JAX is initialised; JAX ignores the dispatch flag afterwards.
    """
    kwargs = (env.kwargs or {}, played.env_kwargs or {})
    if not {"native", "auto"}.isdisjoint((env.backend, *(one.get("backend") for one in kwargs))):
        disable_async_dispatch()
    mesh = make_mesh(devices if hosts.count() == 1 else None)
    if devices not in (None, mesh.size):
        raise ConfigError(
            f"devices: {devices} requested, but {hosts.count()} processes train on all of their {mesh.size} "
            "devices; set devices=null, and start each process with fewer devices"
        )
    return mesh


def require_same_run(seeds: int, settings: Mapping[str, Any], mesh: Mesh) -> None:
    """Raises `ConfigError` if there are several processes that cannot train a configuration together."""
    if hosts.count() == 1:
        return
    if seeds > 1:
        raise ConfigError(
            f"seeds: {seeds} seeds train together in one process, not in {hosts.count()}; set seeds=1, or "
            "distributed=false"
        )
    remedy = "start all processes with the same command, or set distributed=false if they train separate runs"
    hosts.require_same("configuration", settings, remedy)
    own = hosts.gather("devices", len(mesh.local_devices))
    if len(set(own)) > 1:
        raise ConfigError(f"distributed: the processes have {own} devices; start them with equally many each")


@dataclasses.dataclass(eq=False)
class Programs:
    """Training setups, evaluators and compiled iterations of a run, each made once and used by all seeds.

    A `HostState` argument selects the precision level and the memory plan. Raises `ConfigError` if the environment or
    the guards are unusable.
    """

    config: Config
    mesh: Mesh
    more_guards: MoreGuards
    compiling: Compiling
    environments: Environments | None = None
    teacher: Policy | None = None
    _reported_constants: bool = False

    def __post_init__(self) -> None:
        check_more(self.more_guards, self.config.guards.model_dump().keys())
        self.shared = self.config.seeds > 1  # then no seed can change its precision
        if self.shared:
            self.config, self.mesh = self.config.of_seed(self.config.seed, ""), make_mesh(1)
        config, mesh = self.config, self.mesh
        config.ppo.require_devices(mesh.size)
        self.listeners: list[Callable[..., None]] = []  # called as `listener(kind, **fields)` with every event
        self.notices: list[tuple[str, dict[str, Any]]] = []  # events of the start, for the log of every seed
        self.iterations: dict[tuple[Level, str], Program] = {}
        self._single = None if self.environments is None else self.environments.train
        self._setups: dict[tuple[Level, str], TrainingSetup] = {}
        self._evaluators: dict[Level, Evaluator] = {}
        if (cache_error := enable_program_cache(config.compile_cache)) is not None:
            self.notices.append(("compile_cache_unusable", {"error": cache_error}))
        self.memory = MemoryPlanner(config.supervise.memory, config.ppo, config.env, mesh, self.event)
        setup = self.setup(HostState())
        self._examine(setup)
        if config.eval.env_kwargs:
            require_same_observation(setup.single, self.played_env(HostState()))

    def event(self, kind: str, **fields: Any) -> None:
        """Logs an event of all seeds."""
        for listener in self.listeners:
            listener(kind, **fields)

    def level(self, host: HostState) -> Level:
        steps = host.attempts.precision_steps
        return self._levels[min(steps, len(self._levels) - 1)] if steps else self._configured_level

    def levels_for(self, cause: StopReason) -> int:
        """Number of precision levels above the configured one that may cure a cause of failure."""
        if not self.config.supervise.ladder.enabled or cause not in _CURED_BY_PRECISION:
            return 0
        physics = cause is StopReason.physics_unstable  # networks do not compute in float64
        return sum(physics or level.matmul != X64 for level in self._levels[1:])

    def key(self, host: HostState) -> tuple[Level, str]:
        return self.level(host), str(host.plan)

    def setup(self, host: HostState) -> TrainingSetup:
        key = self.key(host)
        if key not in self._setups:
            ppo, env = host.plan.of(self.config.ppo, self.config.env)
            config = self.config.with_precision(key[0]._asdict(), ppo=ppo, env=env)
            args = self.more_guards, self.compiling, self._single, self.teacher, self._report_constants
            self._setups[key] = TrainingSetup(config, self.mesh, *args)
        return self._setups[key]

    def evaluator(self, host: HostState) -> Evaluator:
        """The evaluator at the configured size, whatever the memory plan."""
        level = self.level(host)
        if level not in self._evaluators:
            args = self.setup(host).ppo.networks, self.compiling, self.event, self.played_env(host)
            self._evaluators[level] = make_evaluator(self.config.with_precision(level._asdict()), *args)
        return self._evaluators[level]

    def played_env(self, host: HostState) -> Env:
        """The environment of evaluations, that of training if both are the same, else loaded for each call.

        A user's environment may own a simulator, which both would disturb; on several devices each environment has a
        share of the cores.
        """
        config = self.config
        if self.environments is not None:
            return with_history(self.environments.evaluate, config.env.history)
        known = config.env.source in ("brax", "gymnasium", "playground", "robot")
        same = known and not config.eval.env_kwargs and self.mesh.size == 1
        if same and (config.eval.randomize or not config.env.is_randomized):
            return self.setup(host).single
        return load_env(config.env, config.eval.env_kwargs, randomize=config.eval.randomize)

    def num_envs(self, host: HostState) -> int:
        ppo, _ = host.plan.of(self.config.ppo, self.config.env)
        return ppo.num_envs

    def iteration(self, host: HostState, states: tuple[TrainState, ...]) -> tuple[Program | None, int | None]:
        """Compiles the iteration of several states, and checks it against the memory of the device.

        Returns the program, None if it does not fit, and the bytes that a new program needs, if known.
        """
        key = self.key(host)
        if key in self.iterations:
            return self.iterations[key], None
        program: Program | None = None
        needed: int | None = None
        try:
            program = self.setup(host).compiled(*states)
            needed = self.memory.needed(program)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # A program that does not fit in one process is smaller in all of them, by the same plan.
        answers = hosts.gather("fits", [needed, program is not None and self.memory.fits(needed)])
        needs = [need for need, _ in answers if need is not None]
        needed = max(needs) if len(needs) == len(answers) else None
        if program is None or not all(fits for _, fits in answers):
            return None, needed
        self.iterations[key] = program
        return program, needed

    def converted(self, host: HostState, state: TrainState, key: jax.Array) -> TrainState:
        """Converts a state of another precision level to the present one; the key is for its pool of first states."""
        setup = self.setup(host)
        return setup.convert_state(setup.refill_pool(state, key) if setup.env.uses_pool else state)

    def shapes(self, host: HostState, level: Level, num_envs: int, restore_info: bool) -> TrainState:
        """Shapes of a training state at a precision level, a number of environments and a way to reset them."""
        setup = self.setup(host)
        if (level, num_envs, restore_info) == (self.level(host), self.num_envs(host), setup.env.restore_info):
            return setup.shapes()
        ppo = self.config.ppo.model_copy(update={"num_envs": num_envs})
        env = self.config.env.model_copy(update={"restore_info": restore_info})
        config = self.config.with_precision(level._asdict(), ppo=ppo, env=env)
        return TrainingSetup(config, self.mesh, self.more_guards, single=self._single).shapes()

    @functools.cached_property
    def versions(self) -> dict[str, str]:
        """Versions of rlstable and its libraries, and the kind of device."""
        return {**versions(), "device": device_kind(self.mesh)}

    @property
    def machine(self) -> dict[str, Any]:
        """Device and versions, for `machine.json`."""
        return {**self.versions, "devices": self.mesh.size, "processors": os.cpu_count()}

    @property
    def _configured_level(self) -> Level:
        return Level(self.config.precision.matmul, self.config.precision.network)

    @functools.cached_property
    def _levels(self) -> tuple[Level, ...]:
        """The configured level, then networks in float32, then higher levels of matrix products."""
        ladder, start = self.config.supervise.ladder, self._configured_level
        matmul = [name for name in ladder.matmul if MATMUL_LEVELS.index(name) > MATMUL_LEVELS.index(start.matmul)]
        if jax.default_backend() == "cpu":  # whose products are float32 at every level
            matmul = [name for name in matmul if name == X64]
        if uses_warp(self.setup(HostState()).single):
            matmul = [name for name in matmul if name != X64]
        return tuple(dict.fromkeys((start, *(Level(name, "float32") for name in (start.matmul, *matmul)))))

    def _examine(self, setup: TrainingSetup) -> None:
        """Checks the environment and, with several processes, that all of them compute the same numbers.

        Raises `ConfigError`: recordings need a MuJoCo model, and processes need equal software, sources, device,
        physics, processor and guards.
        """
        config, loaded = self.config, setup.loaded
        if config.render.every and model_of(setup.single) is None:
            raise ConfigError(
                f"render.every: {config.env.name} has no MuJoCo model to draw; set render.every=0, or choose an "
                "environment of MuJoCo"
            )
        if config.env.backend == "auto":
            more = {} if loaded.fallback_reason is None else {"because": loaded.fallback_reason}
            self.notices.append(("backend_fallback" if more else "backend_chosen", {"backend": loaded.backend, **more}))
        if setup.without_mirror is not None:
            self.notices.append(("symmetry_not_used", {"because": setup.without_mirror}))
        if hosts.count() == 1:
            return
        users = [getattr(setup.single, "unwrapped", setup.single)]
        users += [guard for guards in self.more_guards.values() for guard in guards.values()]
        own = {name: version for name, version in self.versions.items() if name != "python"} | {
            "device": sorted({device.device_kind for device in self.mesh.local_devices}),
            "processor": processor.fingerprint() if jax.default_backend() == "cpu" else None,
            "physics": loaded.backend,
            "mirror": setup.without_mirror,
            "more_guards": {site: sorted(guards) for site, guards in self.more_guards.items()},
            "sources": sources.digest_of_modules("__main__", *sorted({type(each).__module__ for each in users})),
        }
        hosts.require_same("machine", own, "use equal machines with the same packages, sources and script")

    def _report_constants(self, size: int) -> None:
        """Logs the size of the arrays that the environment makes part of a program, once."""
        if not self._reported_constants:
            self._reported_constants = True
            problem = "arrays of the environment are part of each program, which takes time and memory to compile"
            self.event("large_constants", megabytes=size // 10**6, problem=f"{problem}; make the arrays smaller")
