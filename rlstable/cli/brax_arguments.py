"""Arguments of `brax.training.agents.ppo.train` as overrides of rlstable's configuration."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Any

from rlstable.config import ConfigError

# Brax's arguments with the meaning and the name of a key of `ppo`.
_PPO = (
    "num_envs",
    "batch_size",
    "num_minibatches",
    "num_updates_per_batch",
    "unroll_length",
    "discounting",
    "gae_lambda",
    "bootstrap_on_timeout",
    "reward_scaling",
    "normalize_advantage",
    "normalize_observations",
    "normalize_observations_mode",
    "normalize_observations_std_eps",
    "normalize_until_count",
    "entropy_cost",
    "clipping_epsilon",
    "clipping_epsilon_value",
    "vf_loss_coefficient",
    "max_grad_norm",
    "learning_rate",
)
_ADAPTIVE_KL = ("desired_kl", "learning_rate_schedule_min_lr", "learning_rate_schedule_max_lr")
# Brax ignores these with distribution_type='tanh_normal'.
_NORMAL_ONLY = (
    "noise_std_type",
    "init_noise_std",
    "state_dependent_std",
    "mean_clip_scale",
    "mean_kernel_init_fn",
    "mean_kernel_init_kwargs",
)
_INITIALIZERS = ("policy_network_kernel_init_fn", "value_network_kernel_init_fn", "mean_kernel_init_fn")
# Functions that wrap an environment as rlstable's own vectorisation does, by package and name.
_KNOWN_WRAPPERS = {
    ("brax", "wrap"),
    ("mujoco_playground", "wrap_for_brax_training"),
}


def iterations_per_epoch(arguments: Mapping[str, Any]) -> int:
    """Iterations between two of Brax's resets, rounded up as in Brax.

    Args:
        arguments: Of `ppo.train`, by name.
    """
    parts = epochs(arguments) * steps_per_iteration(arguments) * max(arguments["num_resets_per_eval"], 1)
    return math.ceil(arguments["num_timesteps"] / parts)


def epochs(arguments: Mapping[str, Any]) -> int:
    """Parts of the training after each of which Brax evaluates."""
    return max(arguments["num_evals"] - 1, 1)


def steps_per_iteration(arguments: Mapping[str, Any]) -> int:
    """Environment steps of one iteration, action repeat included."""
    names = ("batch_size", "unroll_length", "num_minibatches", "action_repeat")
    return math.prod(int(arguments[name]) for name in names)


def overrides_of(arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Configuration keys and values with the meaning of Brax's arguments.

    Args:
        arguments: Of `ppo.train`, by name.

    Raises:
        ConfigError: An argument asks for what rlstable does not do.
    """
    _check(arguments)
    schedule = arguments["learning_rate_schedule"]
    schedule = getattr(schedule, "value", schedule) or "NONE"
    adaptive = schedule == "ADAPTIVE_KL"
    evaluates = arguments["run_evals"] and arguments["num_evals"] > 0
    resets, per_epoch = arguments["num_resets_per_eval"], iterations_per_epoch(arguments)
    steps = epochs(arguments) * max(resets, 1) * per_epoch * steps_per_iteration(arguments)
    devices = arguments["max_devices_per_host"]
    repeat, length = arguments["action_repeat"], arguments["episode_length"]
    values: list[tuple[str, Any]] = [
        *((f"ppo.{name}", arguments[name]) for name in _PPO),
        *((f"ppo.{name}", arguments[name]) for name in _ADAPTIVE_KL if adaptive),
        ("ppo.learning_rate_schedule", schedule),
        # Without evaluations the schedule of resets counts from the whole run.
        ("ppo.num_resets_per_eval", resets if evaluates else resets * epochs(arguments)),
        ("env.episode_length", length),
        ("env.action_repeat", repeat),
        ("total_steps", steps),
        ("seed", arguments["seed"]),
        ("eval.num_evals", epochs(arguments) if evaluates else 0),
        ("eval.at_start", bool(evaluates and arguments["num_evals"] > 1)),
        ("eval.num_envs", arguments["num_eval_envs"]),
        ("eval.deterministic", arguments["deterministic_eval"]),
        ("eval.target_return", None),
        ("logging.log_every", 1),
        *([] if devices is None else [("devices", devices)]),
    ]
    keywords = getattr(arguments["wrap_env_fn"], "keywords", {})
    if keywords.get("full_reset"):
        values.append(("env.reset", "pool"))
    values += _network(arguments)
    return [(key, _plain(value)) for key, value in values]


def _check(arguments: Mapping[str, Any]) -> None:
    """Rejects what rlstable does not do, before anything compiles."""
    if arguments["vision"] or arguments["augment_pixels"]:
        raise ConfigError("vision: rlstable does not train on pixels; leave vision and augment_pixels false")
    if arguments["episode_length"] is None:
        raise ConfigError("episode_length: must be given, for example episode_length=1000")
    if not arguments["wrap_env"]:
        raise ConfigError(
            "wrap_env: rlstable vectorises the environment itself; pass one environment and leave wrap_env=True"
        )
    wrapper = arguments["wrap_env_fn"]
    function = getattr(wrapper, "func", wrapper)
    package = str(getattr(function, "__module__", None)).partition(".")[0]
    known = (package, getattr(function, "__name__", None)) in _KNOWN_WRAPPERS
    if function is not None and not known:
        raise ConfigError(
            f"wrap_env_fn: {getattr(function, '__name__', function)!r} is not known; rlstable vectorises the "
            "environment itself: wrap the single environment before you pass it, or leave wrap_env_fn out"
        )
    ignored = set(getattr(wrapper, "keywords", {})) - {"full_reset"}
    if ignored:
        raise ConfigError(f"wrap_env_fn: the keyword arguments {', '.join(sorted(ignored))} are not known")


def _network(arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Keys of the group `network` for a `network_factory`.

    Raises:
        ConfigError: The factory is not Brax's `make_ppo_networks` or a `functools.partial` of it.
    """
    from brax.training.agents.ppo import networks as ppo_networks

    factory = arguments["network_factory"]
    given: dict[str, Any] = {}
    while isinstance(factory, functools.partial):
        if factory.args:
            raise ConfigError("network_factory: give the arguments of the partial by name")
        given = {**factory.keywords, **given}
        factory = factory.func
    if factory is not ppo_networks.make_ppo_networks:
        raise ConfigError(
            f"network_factory: {getattr(factory, '__name__', factory)!r} is not supported; allowed are "
            "brax.training.agents.ppo.networks.make_ppo_networks and functools.partial of it"
        )
    if "preprocess_observations_fn" in given:
        raise ConfigError("network_factory: leave preprocess_observations_fn out; set normalize_observations instead")
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is not inspect.Parameter.empty and name != "preprocess_observations_fn"
    }
    unknown = given.keys() - defaults.keys()
    if unknown:
        raise ConfigError(f"network_factory: make_ppo_networks has no argument {', '.join(sorted(unknown))}")
    settings = {**defaults, **given}
    if settings["distribution_type"] == "tanh_normal":
        ignored = [name for name in _NORMAL_ONLY if settings[name] != defaults[name]]
        if ignored:
            warnings.warn(
                f"network_factory: {', '.join(ignored)} has no effect with distribution_type='tanh_normal'",
                stacklevel=4,
            )
        settings |= {name: defaults[name] for name in _NORMAL_ONLY}
    distributional = arguments["use_distributional_critic"]
    if distributional != settings["use_distributional_critic"]:
        raise ConfigError(
            "use_distributional_critic: must be the same in ppo.train and in network_factory, as Brax needs it"
        )
    settings["activation"] = _name_of(settings["activation"], "activation")
    for name in _INITIALIZERS:
        if settings[name] is not None:
            settings[name] = _name_of(settings[name], name)
    return [(f"network.{name.replace('_init_fn', '_init')}", value) for name, value in settings.items()]


def _name_of(function: Any, argument: str) -> str:
    """The name of an activation or initializer of jax.nn or flax.linen; names stay as they are."""
    name = function if isinstance(function, str) else getattr(function, "__name__", None)
    if name is None:
        raise ConfigError(f"network_factory: {argument} has no name; give a function of jax.nn")
    return str(name)


def _plain(value: Any) -> Any:
    """NumPy and JAX numbers as Python's, in nested containers too."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    import numpy as np  # slow to import, and the first line of a run waits for this module

    return np.asarray(value).tolist()
