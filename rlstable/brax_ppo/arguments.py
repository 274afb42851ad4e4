"""Arguments of `brax.training.agents.ppo.train` as overrides of rlstable's configuration."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import jax
from brax.training.agents.ppo import networks as ppo_networks
from brax.training.agents.ppo import train as brax_train

from rlstable.config import ConfigError
from rlstable.config.networks import NORMAL_ONLY
from rlstable.config.ppo import PPOConfig, brax_epochs

SIGNATURE = inspect.signature(brax_train.train)
_COUNT = 52  # arguments of Brax 0.14.2
_PREPROCESS = "preprocess_observations_fn"
_ADAPTIVE_KL = ("desired_kl", "learning_rate_schedule_min_lr", "learning_rate_schedule_max_lr")
# Functions that wrap an environment as rlstable's own vectorisation does, by package and name.
_KNOWN_WRAPPERS = {("brax", "wrap"), ("mujoco_playground", "wrap_for_brax_training")}


def require(accepted: object, message: str) -> None:
    """Raises ConfigError unless an argument is accepted."""
    if not accepted:
        raise ConfigError(message)


def overrides_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Configuration keys and values with the meaning of Brax's arguments; a ConfigError if rlstable lacks one."""
    known = len(SIGNATURE.parameters) == _COUNT
    require(known, "brax_ppo: ppo.train of this Brax has other arguments than that of Brax 0.14.2; install it")
    _check(arguments)
    ppo = {name: arguments[name] for name in PPOConfig.model_fields if name in arguments}
    schedule = arguments["learning_rate_schedule"]
    ppo["learning_rate_schedule"] = getattr(schedule, "value", schedule)
    if ppo["learning_rate_schedule"] != "ADAPTIVE_KL":  # Brax ignores them
        ppo = {name: value for name, value in ppo.items() if name not in _ADAPTIVE_KL}
    epochs, evaluates = brax_epochs(arguments), arguments["run_evals"] and arguments["num_evals"] > 0
    if not evaluates:  # the schedule of resets then counts from the whole run
        ppo["num_resets_per_eval"] *= epochs.parts
    settings = {
        **{f"ppo.{name}": value for name, value in ppo.items()},
        **{f"network.{name}": value for name, value in _network(arguments).items()},
        "env.episode_length": arguments["episode_length"],
        "env.action_repeat": arguments["action_repeat"],
        "total_steps": epochs.parts * epochs.steps,
        "seed": arguments["seed"],
        "eval.num_evals": epochs.parts if evaluates else 0,
        "eval.at_start": bool(evaluates and arguments["num_evals"] > 1),
        "eval.num_envs": arguments["num_eval_envs"],
        "eval.deterministic": arguments["deterministic_eval"],
        "eval.target_return": None,
        "logging.log_every": 1,
    }
    if arguments["max_devices_per_host"]:
        settings["devices"] = min(arguments["max_devices_per_host"], jax.local_device_count())
    if getattr(arguments["wrap_env_fn"], "keywords", {}).get("full_reset"):
        settings["env.reset"] = "pool"
    return settings


def _check(arguments: Mapping[str, Any]) -> None:
    """Rejects what rlstable does not do, before anything compiles."""
    wrapper = arguments["wrap_env_fn"]
    function = getattr(wrapper, "func", wrapper)
    name = getattr(function, "__name__", function)
    package = str(getattr(function, "__module__", None)).partition(".")[0]
    known = function is None or (package, name) in _KNOWN_WRAPPERS
    keywords = sorted(set(getattr(wrapper, "keywords", {})) - {"full_reset"})
    pixels = arguments["vision"] or arguments["augment_pixels"]
    itself = "rlstable vectorises the environment itself"
    require(not pixels, "vision: rlstable does not train on pixels; leave vision and augment_pixels false")
    given = arguments["episode_length"] is not None
    require(given, "episode_length: must be given, for example episode_length=1000")
    require(arguments["wrap_env"], f"wrap_env: {itself}; pass one environment and leave wrap_env=True")
    single = "wrap the single environment before you pass it, or leave wrap_env_fn out"
    require(known, f"wrap_env_fn: {name!r} is not known; {itself}: {single}")
    require(not keywords, f"wrap_env_fn: the keyword arguments {', '.join(keywords)} are not known")


def _network(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the group `network` for a `network_factory`: `make_ppo_networks` or a `functools.partial` of it."""
    factory = arguments["network_factory"]
    function, args, given = factory, (), {}
    if isinstance(factory, functools.partial):
        function, args, given = factory.func, factory.args, factory.keywords
    name, allowed = getattr(function, "__name__", function), "brax.training.agents.ppo.networks.make_ppo_networks"
    known = function is ppo_networks.make_ppo_networks
    require(known, f"network_factory: {name!r} is not supported; allowed are {allowed} and functools.partial of it")
    require(not args, "network_factory: give the arguments of the partial by name")
    plain = _PREPROCESS not in given
    require(plain, f"network_factory: leave {_PREPROCESS} out; set normalize_observations instead")
    parameters = inspect.signature(function).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty and one.name != _PREPROCESS}
    unknown = sorted(given.keys() - defaults.keys())
    require(not unknown, f"network_factory: make_ppo_networks has no argument {', '.join(unknown)}")
    settings = {**defaults, **given}
    same = arguments["use_distributional_critic"] == settings["use_distributional_critic"]
    require(same, "use_distributional_critic: must be the same in ppo.train and in network_factory, as Brax needs it")
    if settings["distribution_type"] == "tanh_normal":
        unused = [name for name in defaults if name.replace("_init_fn", "_init") in NORMAL_ONLY]
        if ignored := [name for name in unused if settings.pop(name) != defaults[name]]:
            message = f"network_factory: {', '.join(ignored)} has no effect with distribution_type='tanh_normal'"
            warnings.warn(message, stacklevel=4)
    for name, value in settings.items():
        if callable(value):  # an activation or an initializer
            settings[name] = getattr(value, "__name__", None)
            require(settings[name], f"network_factory: {name} has no name; give a function of jax.nn")
    return {name.replace("_init_fn", "_init"): value for name, value in settings.items()}
