"""Composes a configuration with Hydra."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlstable.cli import playground
from rlstable.cli.mistakes import explain, reject_unknown_flags
from rlstable.cli.options import latest_run
from rlstable.config import Config, ConfigError, load, recipes
from rlstable.config.defaults import config_dir
from rlstable.config.overrides import literal
from rlstable.config.schema import expand_home
from rlstable.envs.gymnasium_specs import spec_of
from rlstable.io.private_folder import require_trust
from rlstable.io.run_folder import default_run_dir, read_settings

# Sources of environments that an option of the group `env` selects, with an example of `env.name`.
_EXAMPLES = {"gymnasium": "Ant-v5", "import": "<package.module:Class>", "playground": "CartpoleBalance"}
_PATHS = ("resume", "hydra.run.dir", "hydra.sweep.dir", "compile_cache", "env.xml")
_composing = threading.RLock()


def prepared(words: Sequence[str]) -> list[str]:
    """The words of a command line as Hydra reads them; checks flags.

    Values outside of Hydra's grammar are quoted. After a key of `_PATHS`, `~` becomes the home folder. `resume=latest`
    becomes the newest run folder, and `distributed=true` becomes `distributed.enabled=true`. With a resumed folder,
    terms of its task can be changed like other keys. Raises ConfigError without a run, and for a key without a value.
    """
    reject_unknown_flags(words)
    read = [_as_hydra_reads(word) for word in words]
    if any(word.startswith("resume=") and word not in ("resume=auto", "resume=null") for word in read):
        # Hydra composes the default environment, which has no task; `with_saved` changes that of the saved run.
        read = [f"++{word}" if word.startswith("env.task.") else word for word in read]
    return read


def _as_hydra_reads(word: str) -> str:
    key, equals, folder = word.partition("=")
    if equals and not folder.strip() and not key.startswith("-"):
        raise ConfigError(f"{key}: has no value; write {key}=<value>, or leave it out")
    if key == "distributed" and equals:
        return f"distributed.enabled={folder}"
    if key not in _PATHS or not equals:
        return _quoted(word)
    if word == "resume=latest":
        return f"resume={literal(latest_run())}"
    bare = folder.strip("'\"")
    if bare.startswith("~"):
        return f"{key}={literal(expand_home(bare))}"
    return f"{key}={literal(folder)}" if folder not in ("auto", "null") and Path(folder).exists() else _quoted(word)


def _quoted(word: str) -> str:
    """A word with quotes around what Hydra's grammar does not know, such as brackets and Chinese letters in a path."""
    import yaml
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, text = word.partition("=")
    with contextlib.suppress(HydraException):
        OverridesParser.create().parse_override(word)
        return word
    if not text or text[0] in "'\"$":
        return word
    try:
        value = yaml.safe_load(text) if text[0] in "[{" else text
    except yaml.YAMLError:
        return word
    return f"{key}={literal(value)}"


def register_resolvers() -> None:
    """Registers the resolvers of the configuration files, all as `${rlstable.<name>:...}`."""
    # Cached, because Hydra resolves it more than once and the name contains the time.
    OmegaConf.register_new_resolver("rlstable.run_dir", default_run_dir, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("rlstable.env_name", _env_name, replace=True)
    OmegaConf.register_new_resolver("rlstable.recipe", recipes.recipe, replace=True)
    OmegaConf.register_new_resolver("rlstable.playground", playground.resolve, replace=True)
    OmegaConf.register_new_resolver("rlstable.many_actuators", playground.many_actuators, replace=True)
    OmegaConf.register_new_resolver("rlstable.short_episodes", playground.short_episodes, replace=True)
    OmegaConf.register_new_resolver("rlstable.wandb_mode", _wandb_mode, replace=True)
    OmegaConf.register_new_resolver("rlstable.gymnasium_time_limit", _time_limit, replace=True)


def _wandb_mode(default: str) -> str:
    """The mode of Weights & Biases: never more than what its own variable allows."""
    own = os.environ.get("WANDB_MODE", "")
    return own if own in ("offline", "disabled") else default


def _env_name(_root_: DictConfig) -> str:
    """The environment's name for the run folder."""
    return OmegaConf.select(_root_, "env.name") or "import"


def _time_limit(_root_: DictConfig) -> int:
    """Gymnasium's own time limit of a task."""
    task = OmegaConf.select(_root_, "env.name")
    if task is None:
        raise ConfigError("env.name: is missing; name a task of Gymnasium, e.g. env.name=Ant-v5")
    return spec_of(str(task)).episode_length


def with_saved(composed: DictConfig, overrides: Sequence[str]) -> Config:
    """The configuration to run. With `resume=<folder>`, the saved configuration with the overrides applied.

    Raises ConfigError with the first mistake, or if the folder names code that this user does not trust.
    """
    typed = {key.lstrip("+~"): value for key, _, value in (override.partition("=") for override in overrides)}
    resume = composed.get("resume")
    if resume in (None, "auto"):
        source = composed.env.source
        if source in _EXAMPLES and "env.source" in typed and typed.get("env") != source and "ppo" not in typed:
            raise ConfigError(
                f"env.source: {source} alone keeps the recipe of another environment; write env={source} "
                f"env.name={typed.get('env.name', _EXAMPLES[source])}, and ppo=<recipe> to choose another recipe"
            )
        try:
            data: Any = OmegaConf.to_container(composed, resolve=True)
        except OmegaConfBaseException as error:
            raise explain(error) from error
        return load({key: value for key, value in data.items() if key != "hydra"})
    folder = expand_home(str(resume))
    settings = read_settings(folder)
    saved: Any = OmegaConf.create({**settings, "trust": False})  # trust counts only on the command line
    env = settings.get("env")
    trained_on = env.get("name") if isinstance(env, dict) else None
    if "env" in typed and (name := OmegaConf.select(composed, "env.name")) not in (None, trained_on):
        raise ConfigError(f"env: {resume} was trained on {trained_on}, not on {name}; leave env out when resuming")
    for key in typed:
        if key in ("env", "sweep"):  # the launcher is not part of a run
            continue
        value = OmegaConf.select(composed, key)
        value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        OmegaConf.update(saved, key, value, merge=False, force_add=True)
    plain: Any = OmegaConf.to_container(saved, resolve=False)  # `${oc.env:NAME}` in a saved file stays a text
    config = load(plain)
    require_trust(folder / "config.yaml", config.env, config.trust, typed=typed.values())
    return config


def compose(overrides: Sequence[str]) -> Config:
    """The configuration that a command line with these overrides would run; a ConfigError with the first mistake."""
    import hydra
    from hydra.errors import HydraException

    words = prepared(overrides)
    with _own_hydra():
        register_resolvers()
        try:
            with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
                return with_saved(hydra.compose("config", overrides=words), words)
        except (HydraException, OmegaConfBaseException) as error:
            raise explain(error) from error


@contextlib.contextmanager
def _own_hydra() -> Iterator[None]:
    """Gives one thread the global state of Hydra, and then restores that of the user's program."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import VersionBase

    with _composing:
        instance, version = GlobalHydra.instance(), VersionBase.instance()
        hydra, base = instance.hydra, version.getbase()
        instance.clear()
        try:
            yield
        finally:
            GlobalHydra.set_instance(instance)  # Hydra has replaced it by a copy
            instance.hydra, version.version_base = hydra, base
