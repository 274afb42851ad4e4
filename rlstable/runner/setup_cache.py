"""Cache of training setups and evaluators: one per precision level and memory plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from rlstable.compilation.xla import Compiling
from rlstable.config import Config
from rlstable.device.precision import Level
from rlstable.envs.load import load_env
from rlstable.envs.mujoco_model import model_of
from rlstable.envs.objects import Environments
from rlstable.envs.wrappers import without_training_wrappers
from rlstable.guards.base import MoreGuards
from rlstable.policy.evaluator import Evaluator, make_evaluator
from rlstable.ppo.state import TrainState
from rlstable.render.recording import EpisodeRecorder, seconds_per_step
from rlstable.runner.setup import TrainingSetup
from rlstable.supervise.memory_plan import MemoryPlan

LogEvent = Callable[..., None]

# A precision level and a memory plan: each pair is compiled once.
ProgramKey = tuple[Level, str]


@dataclasses.dataclass(frozen=True)
class Factories:
    """Factories of training setups and evaluators.

    Attributes:
        setup: Takes the arguments of `TrainingSetup`.
        evaluator: Takes the arguments of `make_evaluator`.
        shared: Whether several seeds share the programs, so that no seed may change one.
        devices: Number of devices that several seeds are divided over.
        environments: Environment objects of the user; None to load the configured environment.
    """

    setup: Callable[..., TrainingSetup] = TrainingSetup
    evaluator: Callable[..., Evaluator] = make_evaluator
    shared: bool = False
    devices: int = 1
    environments: Environments | None = None


DEFAULT_FACTORIES = Factories()


class SetupCache:
    """Builds training setups and evaluators, each once.

    Args:
        config: The whole configuration.
        mesh: The devices.
        more_guards: The user's guards, by site and name.
        compiling: Context manager that shows the name of the program that is compiling.
        event: Called as `event(kind, **fields)`.
        factories: Factories of setups and evaluators; None for an ordinary run.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        more_guards: MoreGuards,
        compiling: Compiling,
        event: LogEvent,
        factories: Factories | None,
    ):
        self._config = config
        self._mesh = mesh
        self._more_guards = more_guards
        self._compiling = compiling
        self._event = event
        self._factories = DEFAULT_FACTORIES if factories is None else factories
        self._setups: dict[ProgramKey, TrainingSetup] = {}
        self._evaluators: dict[Level, Evaluator] = {}

    def setup(self, level: Level, plan: MemoryPlan) -> TrainingSetup:
        """The training setup of a precision level and a memory plan."""
        key = level, str(plan)
        if key not in self._setups:
            config = plan.of(self._at(level))
            args = config, self._mesh, self._more_guards, self._compiling
            self._setups[key] = self._factories.setup(*args, self._train_env)
        return self._setups[key]

    def evaluator(self, level: Level, plan: MemoryPlan) -> Evaluator:
        """The evaluator of a precision level, at the configured size, whatever the memory plan."""
        if level not in self._evaluators:
            setup = self.setup(level, plan)
            self._evaluators[level] = self._factories.evaluator(
                self._at(level), setup.ppo.networks, self._compiling, self._event, self._evaluation_env(setup)
            )
        return self._evaluators[level]

    def recorder(self, level: Level, plan: MemoryPlan) -> EpisodeRecorder:
        """A recorder of one episode of at most `render.seconds`, in the environment of evaluations."""
        setup, config = self.setup(level, plan), self._at(level)
        env = self._evaluation_env(setup)
        if env is None:
            env = load_env(config.env, config.eval.env_kwargs, randomize=config.eval.randomize)
        per_action = seconds_per_step(env, model_of(env)) * config.env.action_repeat
        steps = max(1, round(config.render.seconds / per_action)) * config.env.action_repeat
        shorter = config.env.model_copy(update={"episode_length": min(steps, config.env.episode_length)})
        config = config.model_copy(update={"env": shorter})
        return EpisodeRecorder(config, setup.ppo.networks, env, setup.loaded.backend, 1, self._compiling)

    def shapes(self, level: Level, num_envs: int, restore_info: bool) -> TrainState:
        """Shapes of a training state at a precision level, a number of environments and a way to reset them."""
        config = self._at(level)
        ppo = config.ppo.model_copy(update={"num_envs": num_envs})
        env = config.env.model_copy(update={"restore_info": restore_info})
        config = config.model_copy(update={"ppo": ppo, "env": env})
        return TrainingSetup(config, self._mesh, self._more_guards, single=self._train_env).shapes()

    def _evaluation_env(self, setup: TrainingSetup) -> Any:
        """The environment of evaluations, if it is loaded; None if it must be loaded.

        Training and evaluation share one environment if both are the same. A user's environment may own a simulator,
        which both would disturb; on several devices each environment has a share of the cores.
        """
        if self._factories.environments is not None:
            return without_training_wrappers(self._factories.environments.evaluate)[0]
        config = self._config
        alone = self._mesh.size * self._factories.devices == 1
        same = config.env.source in ("brax", "playground") and not config.eval.env_kwargs and alone
        same = same and (config.eval.randomize or not config.env.is_randomized)
        return setup.single if same else None

    @property
    def _train_env(self) -> Any:
        environments = self._factories.environments
        return None if environments is None else environments.train

    def _at(self, level: Level) -> Config:
        """The configuration at a precision level."""
        precision = self._config.precision.model_copy(update=level._asdict())
        return self._config.model_copy(update={"precision": precision})
