"""Typed, frozen configuration of a run, which rejects invalid settings before anything compiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from rlstable.config.defaults import defaults
from rlstable.config.distributed import DistributedConfig
from rlstable.config.faults import FaultConfig
from rlstable.config.guards import GuardsConfig
from rlstable.config.networks import NetworkConfig
from rlstable.config.ppo import PPOConfig
from rlstable.config.precision import PrecisionConfig
from rlstable.config.robot import NAMED, TaskConfig
from rlstable.config.schema import (
    Count,
    CountOrZero,
    Finite,
    Flag,
    FolderName,
    Positive,
    Section,
    Seed,
    Total,
    expand_home,
    require,
    validate,
)
from rlstable.config.supervise import SuperviseConfig

# Packages whose environments need no trust=true, even if another user's run folder names them.
_KNOWN_PACKAGES = frozenset({"rlstable", "brax", "mujoco_playground"})
_LITTLE = 2**22  # products per layer of a minibatch; 1.2 times as fast in one thread with 2**20, 0.9 with 2**23
_LONG_EPISODE = 100_000  # steps; an evaluation of shorter episodes ends soon
_AUTO_EPISODES = (16, 128)  # least and most episodes of an evaluation with eval.num_envs=auto


_YAML_FLOATS = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}


def _as_yaml(value: Any) -> Any:
    """Numbers that YAML writes with a leading dot, and Hydra reads as text; paths in the home folder."""
    if isinstance(value, dict):
        return {key: _as_yaml(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_as_yaml(one) for one in value]
    if isinstance(value, str) and value.startswith("~/"):
        return str(expand_home(value))
    return _YAML_FLOATS.get(value.lower(), value) if isinstance(value, str) else value


Arguments = Annotated[dict[str, Any], BeforeValidator(_as_yaml)]


def _absolute(path: str) -> str:
    return path if path.startswith(NAMED) else str(expand_home(path).absolute())


ModelFile = Annotated[str, Field(min_length=1), AfterValidator(_absolute)]


class EnvConfig(Section, at="env"):
    """The training environment."""

    source: Literal["brax", "gymnasium", "import", "object", "playground", "robot"]
    name: str
    backend: Literal["auto", "native", "mjx", "spring", "generalized", "positional"] | None
    episode_length: Count
    training_episode_length: Count | None
    action_repeat: Count
    reset: Literal["cached", "pool"]
    restore_info: Flag
    stagger: Flag
    history: Count
    reset_pool_size: Count
    reset_pool_refresh: CountOrZero
    envs_per_pass: Count | None
    kwargs: Arguments | None
    randomization_fn: str | None
    randomize: Flag
    impl: Literal["auto", "jax", "warp"]
    xml: ModelFile | None
    task: TaskConfig | None
    _copy: str | None = PrivateAttr(None)

    @property
    def model_file(self) -> str:
        """The file of a robot's model, or its copy in a run folder, which is neither configured nor saved."""
        return self._copy or self.xml or ""

    def with_model_file(self, path: str) -> EnvConfig:
        copied = self.model_copy()
        copied._copy = path
        return copied

    @property
    def training_length(self) -> int:
        """Environment steps after which a training episode is truncated."""
        return min(self.training_episode_length or self.episode_length, self.episode_length)

    @property
    def package(self) -> str:
        return self.name.partition(":")[0].partition(".")[0]

    @property
    def has_name(self) -> bool:
        """Whether commands can load the environment, which is no object of Python."""
        return self.source != "object"

    @property
    def is_randomized(self) -> bool:
        by_ranges = self.task is not None and self.task.is_randomized
        return self.randomize or self.randomization_fn is not None or by_ranges

    @property
    def is_foreign(self) -> bool:
        """Whether the environment's code is outside rlstable, Brax and Playground."""
        return self.source == "import" and self.package not in _KNOWN_PACKAGES

    @property
    def own_terms(self) -> list[str]:
        """Import paths of the user's own terms of a robot's task."""
        return [] if self.task is None else self.task.own_functions

    @property
    def may_keep_counters(self) -> bool:
        """Whether a reset keeps `info` of a user's environment; tasks known by name and robots are made for that."""
        known = self.source in ("brax", "gymnasium", "playground", "robot") or self.package in _KNOWN_PACKAGES
        return not known and self.reset == "cached" and not self.restore_info

    def _check(self) -> None:
        source, function, form = self.source, self.randomization_fn, "must have the form package.module:"
        path = source != "import" or _is_import_path(self.name)
        require(path, "name", f"{self.name!r} {form}Class when env.source=import")
        path = function is None or _is_import_path(function)
        require(path, "randomization_fn", f"{function!r} {form}function")
        own = source == "playground" and function is None
        require(own or not self.randomize, "randomize", "needs env=playground, and env.randomization_fn=null")
        for key in ("backend", "kwargs", "randomization_fn") if source == "object" else ():
            require(getattr(self, key) is None, key, "must be null: an environment object cannot be changed")
        other = "needs env=playground or env=robot; env.backend chooses the physics of other environments"
        require(self.impl == "auto" or source in ("playground", "robot"), "impl", other)
        of_mjx = self.impl == "auto" or self.backend != "native"
        require(of_mjx, "impl", f"{self.impl} is of MJX; set env.backend=mjx, or env.impl=auto for C MuJoCo")
        for key in ("xml", "task"):
            is_robot, given = source == "robot", getattr(self, key) is not None
            needed = "is missing; give the model's file: env.xml=robot.xml" if key == "xml" else "needs env=robot"
            require(given or not is_robot, key, needed)
            require(is_robot or not given, key, f"needs env=robot, not env.source={source}")
        twice = function is not None and self.task is not None and self.task.is_randomized
        require(not twice, "randomization_fn", "must be null with env.task.randomization; choose one of both")
        repeat = self.action_repeat
        for key in ("episode_length", "training_episode_length"):
            length = getattr(self, key) or repeat
            fits = f"{length - length % repeat or repeat} would fit"
            whole = f"{length} is not a multiple of env.action_repeat={repeat}; {fits}"
            require(length % repeat == 0, key, whole)


def _is_import_path(path: str) -> bool:
    module, _, attribute = path.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), attribute))


class EvalConfig(Section, at="eval"):
    """Evaluation of the policy."""

    num_evals: CountOrZero
    num_envs: Count
    at_start: Flag
    deterministic: Flag
    randomize: Flag
    env_kwargs: Arguments | None
    target_return: Finite | None


class WandbConfig(Section, at="logging.wandb"):
    """Weights & Biases."""

    mode: Literal["online", "offline", "disabled"]
    project: str
    entity: str | None
    group: str | None
    name: str | None
    tags: tuple[str, ...]


class LoggingConfig(Section, at="logging"):
    """Destinations of metrics. `metrics.jsonl` and `events.jsonl` are always written."""

    console: Literal["auto", "lines", "off"]
    tensorboard: Flag
    wandb: WandbConfig
    report: Flag
    signs: Flag
    log_every: Count


class CheckpointConfig(Section, at="checkpoint"):
    """Checkpoints during and after training."""

    enabled: Flag
    every: Count
    every_minutes: Positive | None
    keep: Count
    keep_best: CountOrZero
    confirm_best: CountOrZero
    keep_period: Count | None
    asynchronous: Flag


class RenderConfig(Section, at="render"):
    """Recordings of the current policy while it trains."""

    every: CountOrZero
    seconds: Positive


class Config(Section, at=""):
    """The whole configuration of a run."""

    env: EnvConfig
    ppo: PPOConfig
    network: NetworkConfig
    guards: GuardsConfig
    precision: PrecisionConfig
    eval: EvalConfig
    logging: LoggingConfig
    checkpoint: CheckpointConfig
    render: RenderConfig
    fault: FaultConfig
    supervise: SuperviseConfig
    total_steps: Total
    seed: Seed
    seeds: Annotated[Count, Field(le=1000)]
    recipe_for: Literal["auto", "cpu", "accelerator"]
    devices: Count | None
    deterministic: Flag
    compile_cache: FolderName | None
    quick_compile_iterations: CountOrZero
    resume: FolderName | None
    # Only valid for the command they are typed for, so they are never saved.
    trust: Annotated[Flag, Field(exclude=True)]
    distributed: Annotated[DistributedConfig, Field(exclude=True)]

    @model_validator(mode="before")
    @classmethod
    def _count_evaluation_episodes(cls, data: Any) -> Any:
        """Replaces `eval.num_envs: auto`, so that evaluations play at most a quarter of the training's steps."""
        evaluation = data.get("eval") if isinstance(data, Mapping) else None
        if not isinstance(evaluation, Mapping) or evaluation.get("num_envs") != "auto":
            return data
        evaluation, env = {**defaults("eval"), **evaluation}, defaults("env")
        env |= data["env"] if isinstance(data.get("env"), Mapping) else {}
        sizes = (data.get("total_steps", defaults("")["total_steps"]), evaluation["num_evals"], env["episode_length"])
        least, most = _AUTO_EPISODES
        try:
            total, evals, length = map(int, sizes)
            episodes = total // (4 * max(evals, 1) * length)
        except (TypeError, ValueError, OverflowError, ZeroDivisionError):
            episodes = most  # the check of that key reports the mistake
        return {**data, "eval": {**evaluation, "num_envs": min(max(episodes, least), most)}}

    def _check(self) -> None:
        if self.network.value_obs_key == "auto":
            key = "privileged_state" if self.env.task and self.env.task.critic_observations else "state"
            object.__setattr__(self, "network", self.network.model_copy(update={"value_obs_key": key}))
        last = f"the last of {self.seeds} seeds from seed={self.seed} must be below 2**32; set a smaller seed"
        require(self.seed + self.seeds <= 2**32, "seeds", last)
        apart = f"{self.devices} devices cannot train seeds={self.seeds} together"
        remedy = "train the seeds on one device, or start one process per device with CUDA_VISIBLE_DEVICES"
        require(self.seeds == 1 or self.devices in (None, 1), "devices", f"{apart}; {remedy}")
        normalizes = self.fault.site != "normalizer" or self.ppo.normalize_observations
        require(normalizes, "fault.site", "normalizer needs ppo.normalize_observations=true")
        unchanged = self.env.source != "object" or (self.eval.env_kwargs is None and not self.eval.randomize)
        require(unchanged, "eval.env_kwargs", "must be null and eval.randomize false with an environment object")
        recordings, evals = self.render.every, self.eval.num_evals
        fits = self.env.episode_length <= self.longest_played or not (evals or self.eval.at_start)
        far = f"is far above total_steps={self.total_steps}, and an evaluation plays whole episodes"
        text = f"{self.env.episode_length} {far}; it must be at most {self.longest_played}, unless eval.num_evals=0"
        require(fits, "env.episode_length", text)
        few = f"{recordings} must not exceed eval.num_evals={evals}, because evaluations record"
        require(recordings <= evals, "render.every", few)
        huber = not self.network.use_distributional_critic or self.ppo.clipping_epsilon_value is not None
        needs = "network.use_distributional_critic=true needs it, as the bound of its Huber loss; 1.0 is usual"
        require(huber, "ppo.clipping_epsilon_value", needs)
        plain = self.ppo.symmetry != "auto" or self.network.recurrent is None
        require(plain, "ppo.symmetry", "auto needs network.recurrent=null: the memory of a GRU has no mirror image")
        mirrored = self.ppo.symmetry is None or self.env.source == "robot"
        require(mirrored, "ppo.symmetry", "needs env=robot, whose observations have names; set it to null")

    @property
    def longest_played(self) -> int:
        """Steps of the longest episode that evaluations and the return watch play."""
        return max(10 * self.total_steps, _LONG_EPISODE)

    @property
    def watches_return(self) -> bool:
        enabled = self.guards.return_watch.enabled and self.supervise.recovery.enabled
        return enabled and self.env.episode_length <= self.longest_played

    @property
    def speeds_up_critic(self) -> bool:
        """Whether the supervisor has a remedy for a critic that lags behind; the rates are then separate."""
        recovery = self.supervise.recovery
        return self.guards.return_watch.enabled and recovery.enabled and recovery.lagging_critic_rate is not None

    @property
    def each_seed(self) -> range:
        return range(self.seed, self.seed + self.seeds)

    def with_precision(self, precision: Mapping[str, str], **sections: Section) -> Config:
        """This configuration with other values of the section `precision`, and other sections."""
        own = self.precision.model_copy(update=precision)
        return self.model_copy(update={"precision": own, **sections})

    def of_seed(self, seed: int, group: str) -> Config:
        """The configuration of one seed as a single run; `group` of Weights & Biases, unless one is configured."""
        wandb = self.logging.wandb
        if wandb.mode != "disabled":
            names = {"group": wandb.group or group, "name": f"{wandb.name or group} seed {seed}"}
            wandb = wandb.model_copy(update=names)
        return self.model_copy(
            update={
                "seed": seed,
                "seeds": 1,
                "devices": 1,
                "quick_compile_iterations": self.quick_compile_iterations // self.seeds,  # a fleet shares one program
                # A seed without a checkpoint starts again.
                "resume": self.resume and "auto",
                "logging": self.logging.model_copy(update={"wandb": wandb}),
            }
        )

    @property
    def env_steps_per_iteration(self) -> int:
        return self.ppo.env_steps_per_iteration(self.env.action_repeat)

    @property
    def compiles_quickly(self) -> bool:
        """Whether the run is too short for programs that are compiled with all optimisations."""
        iterations = -(-self.total_steps // self.env_steps_per_iteration) * self.seeds
        return iterations <= self.quick_compile_iterations

    @property
    def may_tighten_clipping(self) -> bool:
        """Whether a remedy may tighten clipping, so that JAX must trace the bounds; that needs an enabled guard."""
        guards, recovery = self.guards, self.supervise.recovery
        stopping = (guards.finite_update, guards.finite_state, guards.storm, guards.value_loss, guards.policy)
        remedies = recovery.remedies if any(guard.enabled for guard in stopping) else ()
        remedies += recovery.collapse_remedies if guards.return_watch.enabled else ()
        return recovery.enabled and any(remedy.name == "tighten_clipping" for remedy in remedies)

    @property
    def computes_little(self) -> bool:
        """Whether minibatches are so small that one thread of a CPU is as fast as several (docs/benchmarks.md)."""
        layers = (*self.network.policy_hidden_layer_sizes, *self.network.value_hidden_layer_sizes)
        samples = self.seeds * self.ppo.batch_size * self.ppo.unroll_length
        little = samples * max(layers, default=1) ** 2 < _LITTLE
        # The physics of the user's own environment may need XLA's threads.
        return little and self.env.source not in ("import", "object") and self.env.backend in ("auto", "native")

    @property
    def may_separate_rates(self) -> bool:
        guards, recovery = self.guards, self.supervise.recovery
        after_collapse = guards.return_watch.enabled and recovery.enabled
        separate = {"scale_policy_rate", "scale_critic_rate", "refit_critic"}
        by_remedy = recovery.enabled and any(remedy.name in separate for remedy in recovery.remedies)
        return guards.limiters.kl is not None or after_collapse or by_remedy


def load(data: Mapping[str, object]) -> Config:
    """Builds the configuration from nested mappings; ConfigError names the first mistake in one line."""
    return validate(Config, data)
