"""Composes a configuration with Hydra, and turns Hydra's errors into one line."""

from __future__ import annotations

import contextlib
import difflib
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlstable.cli import playground
from rlstable.cli.resolvers import reject_resolvers
from rlstable.cli.typed_words import prepared
from rlstable.compilation import compatibility
from rlstable.config import Config, ConfigError, load, recipes
from rlstable.config.defaults import config_dir
from rlstable.config.extras import install
from rlstable.config.schema import expand_home, unknown_key
from rlstable.io.private_folder import require_trust
from rlstable.io.run_folder import default_run_dir, read_settings

# Sources of environments that an option of the group `env` selects, with an example of `env.name`.
_EXAMPLES = {"import": "<package.module:Class>", "playground": "CartpoleBalance"}
# Here and not in `rlstable.train`, whose variables a launcher of a sweep would pickle.
_undo = contextlib.ExitStack()
_composing = threading.RLock()


def register_resolvers() -> None:
    """Registers the resolvers `run_dir`, `env_name`, `recipe` and `playground`, all as `${rlstable.<name>:...}`."""
    # Cached, because Hydra resolves it more than once and the name contains the time.
    OmegaConf.register_new_resolver("rlstable.run_dir", default_run_dir, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("rlstable.env_name", _env_name, replace=True)
    OmegaConf.register_new_resolver("rlstable.recipe", recipes.recipe, replace=True)
    OmegaConf.register_new_resolver("rlstable.playground", playground.resolve, replace=True)


def compose_quickly(words: Sequence[str]) -> None:
    """Makes OmegaConf parse YAML in C, and Hydra not compose twice just to read `hydra.mode`; see `compose_as_usual`.

    Args:
        words: The command line. Hydra still composes twice if a word can set its mode: a flag, an option of Hydra, or
            an option of `sweep`.
    """
    replacements: list[tuple[Any, str, Any]] = [(yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader))]
    if not any(word.lstrip("+~").startswith(("-", "hydra.mode", "hydra=", "hydra/", "sweep")) for word in words):
        hydra_class = compatibility.hydra_with_mode()
        if hydra_class is not None:
            replacements.append((hydra_class, "get_mode", lambda *_, **__: None))
    for owner, name, value in replacements:
        _undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def compose_as_usual() -> None:
    """Undoes `compose_quickly`, so that a run has Hydra and PyYAML as they are; may be called again."""
    _undo.close()


def _env_name(_root_: DictConfig) -> str:
    """The environment's name for the run folder. Also rejects resolvers, before Hydra creates the folder."""
    _reject_resolvers(_root_)
    return OmegaConf.select(_root_, "env.name") or "import"


def _reject_resolvers(composed: DictConfig) -> None:
    """Rejects resolvers in composed settings, except in the section `hydra`."""
    data: Any = OmegaConf.to_container(composed, resolve=False)
    reject_resolvers({key: value for key, value in data.items() if key != "hydra"})


def to_config(composed: DictConfig) -> Config:
    """Checks composed settings and returns the typed configuration.

    Raises:
        ConfigError: The first mistake.
    """
    try:
        data: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise explain(error) from error
    return load({key: value for key, value in data.items() if key != "hydra"})


def with_saved(composed: DictConfig, overrides: Sequence[str], run_dir: str | Path | None = None) -> Config:
    """The configuration to run. With `resume=<folder>`, the saved configuration with the overrides applied.

    Args:
        composed: Settings that Hydra composed.
        overrides: Overrides on the command line.
        run_dir: The run folder, if already known; `resume=auto` may find a run there.

    Raises:
        ConfigError: The first mistake, or code that this user does not trust (`require_trust`).
    """
    _reject_resolvers(composed)
    resume = composed.get("resume")
    if resume in (None, "auto"):
        resumes = resume == "auto" and run_dir is not None and (Path(run_dir) / "config.yaml").is_file()
        if run_dir is None or not resumes:
            _reject_inherited_recipe(composed, overrides)
            return to_config(composed)
        return to_config(playground.with_saved_values(composed, read_settings(Path(run_dir))))
    saved_file = expand_home(str(resume)) / "config.yaml"
    if not saved_file.is_file():
        raise ConfigError(f"resume: {resume} is not a run folder, it has no config.yaml; give runs/<env>/<time>")
    settings = read_settings(saved_file.parent)
    reject_resolvers(settings, str(saved_file))
    saved: Any = OmegaConf.create({**settings, "trust": False})  # trust counts only on the command line
    keys = [override.split("=", 1)[0].lstrip("+~") for override in overrides]
    for key in keys:
        if key == "sweep":
            continue  # the launcher is not part of a run
        if key == "env":
            name = OmegaConf.select(composed, "env.name")
            if name not in (None, saved.env.name):
                raise ConfigError(
                    f"env: {resume} was trained on {saved.env.name}, not on {name}; leave env out when resuming"
                )
            continue
        OmegaConf.update(saved, key, OmegaConf.select(composed, key), merge=False, force_add=True)
    config = to_config(saved)
    # A cache folder on the command line is this user's choice and needs no trust.
    checked = config.model_copy(update={"compile_cache": None}) if "compile_cache" in keys else config
    require_trust(saved_file, checked, config.trust)
    return config


def _reject_inherited_recipe(composed: DictConfig, overrides: Sequence[str]) -> None:
    """Rejects `env.source=import` and `playground` if the environment would inherit another environment's recipe.

    Args:
        composed: Settings that Hydra composed.
        overrides: Overrides on the command line; a recipe among them is accepted.

    Raises:
        ConfigError: The recipe was made for another environment.
    """
    overridden = {
        key.lstrip("+~"): value.strip("'\"") for key, _, value in (override.partition("=") for override in overrides)
    }
    source = composed.env.source
    if source not in _EXAMPLES or "env.source" not in overridden or "ppo" in overridden:
        return
    name = overridden.get("env") or recipes.default_environment()
    entry = recipes.entry_of(name)  # None: a configuration file of the user in another folder
    if entry is None or name in _EXAMPLES:
        return
    whose = "your class" if source == "import" else "the task"
    raise ConfigError(
        f"env.source: {source} with env={name} would train {whose} with ppo={recipes.published(entry)}, "
        f"the recipe of another environment; write env={source} "
        f"env.name={overridden.get('env.name', _EXAMPLES[source])}, and ppo=<recipe> to choose another recipe"
    )


def compose(overrides: Sequence[str], run_dir: str | Path | None = None) -> Config:
    """The configuration that a command line with these overrides would run. Starts no run.

    Args:
        overrides: Overrides, each `key=value` as on the command line.
        run_dir: The run folder, if already known.

    Raises:
        ConfigError: The first mistake.
    """
    words = prepared(overrides)
    with _composed(words) as composed:
        return with_saved(composed, words, None if run_dir is None else expand_home(run_dir))


def resolved_settings(overrides: Sequence[str]) -> str:
    """The settings for overrides in the form of `--cfg job`, with Playground's numbers instead of references to them.

    Hydra's flag `--resolve` cannot replace a reference by a list.

    Raises:
        ConfigError: The first mistake.
    """
    with _composed(overrides) as composed:
        _reject_resolvers(composed)
        return OmegaConf.to_yaml(OmegaConf.create(OmegaConf.to_container(composed, resolve=True)))


@contextlib.contextmanager
def _composed(overrides: Sequence[str]) -> Iterator[DictConfig]:
    """Settings that Hydra composed, and its errors in one line.

    Raises:
        ConfigError: The first mistake.
    """
    import hydra
    from hydra.errors import HydraException

    with _own_hydra():
        register_resolvers()
        try:
            with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
                yield hydra.compose("config", overrides=list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise explain(error) from error


@contextlib.contextmanager
def _own_hydra() -> Iterator[None]:
    """Gives one thread the global state of Hydra and OmegaConf, and then restores that of the user's program."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import VersionBase

    with _composing, compatibility.same_resolvers():
        instance, version = GlobalHydra.instance(), VersionBase.instance()
        hydra, base = instance.hydra, version.getbase()
        instance.clear()
        try:
            yield
        finally:
            GlobalHydra.set_instance(instance)  # Hydra has replaced it by a copy
            instance.hydra, version.version_base = hydra, base


def explain(error: BaseException) -> ConfigError:
    """Turns a composition error of Hydra into one line that names the key."""
    # OmegaConf adds this prefix to an error of a resolver, once per nested resolver.
    text = re.sub(r"^(ConfigError raised while resolving interpolation: )+", "", first_line(error))
    if match := re.search(r"Could not find 'hydra/(launcher|sweeper)/(joblib|optuna|ray|submitit)", text):
        kind, extra = match.groups()
        return ConfigError(f"hydra/{kind}: {extra} is not installed; {install(extra)}")
    if match := re.search(r"Could not override '([^']+)'", text):
        return unknown_key(Config, match.group(1))
    if match := re.search(r"Could not find '([^'/]+)/([^']+)' Available options in '[^']+': (.*?) provider=", text):
        group, option, options = match.groups()
        same = [own for own in options.split() if _spelled_alike(own, option)]
        close = same or difflib.get_close_matches(option, options.split(), n=1, cutoff=0.7)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(options.split())}"
        return ConfigError(f"{group}: unknown option {option!r}; {hint}")
    if match := re.search(r"Error parsing override '(.*?)' (.*?)( See https.*)?$", text):
        return ConfigError(
            f"cannot read {match.group(1)!r}: {match.group(2)}; write key=value, and quote values with spaces"
        )
    return ConfigError(text)


def _spelled_alike(option: str, typed: str) -> bool:
    """Whether an option is written like `typed`, which may be a name of Gymnasium, such as `InvertedPendulum-v5`."""
    return option.replace("_", "") == re.sub(r"-v\d+$", "", typed.lower()).replace("_", "")


def first_line(error: BaseException) -> str:
    """The lines of a library's error joined into one line, without OmegaConf's details at the end."""
    noise = (
        "full_key:",
        "object_type=",
        "reference_type=",
        "Set the environment variable",
        "Config search path",
    )
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(noise))
