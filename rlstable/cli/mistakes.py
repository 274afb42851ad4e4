"""One sentence for each common mistake on a command line that Hydra reads."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Sequence

from rlstable.config import Config, ConfigError
from rlstable.config.defaults import config_dir
from rlstable.config.extras import install
from rlstable.config.schema import keys_named, unknown_key
from rlstable.device import compatibility

_QUOTES = "close each bracket and quote, and quote values with spaces or commas"
_DEVICE = (
    "device: there is no such key; JAX trains on a GPU if it finds one, and the environment variable "
    "JAX_PLATFORMS=cuda or cpu demands one kind; recipe_for=accelerator or cpu selects the recipe"
)
# Lines of OmegaConf's and Hydra's errors that name nothing that the user typed.
_NOISE = (
    "full_key:", "object_type=", "reference_type=", "Set the environment variable", "Config search path", "See https:",
)  # fmt: skip


def _unknown_option(match: re.Match[str]) -> str:
    group, option, listed = match.groups()
    if group == "env" and option.endswith((".xml", ".urdf", ".mjb")):
        return f"env: {option} is a robot's file; write env=robot_velocity env.xml={option}, or another task of robots"
    options = listed.split()
    # Without the version of a name of Gymnasium, such as `InvertedPendulum-v5`.
    plain = re.sub(r"-v\d+$", "", option.lower()).replace("_", "")
    close = [own for own in options if own.replace("_", "") == plain]
    close = close or difflib.get_close_matches(option, options, n=1, cutoff=0.7)
    return f"{group}: unknown option {option!r}; " + (
        f"did you mean {close[0]}?" if close else f"choose one of {', '.join(options)}"
    )


def _meant(word: str) -> str:
    """Meaning of a word without `=`: a task is an option of `env`."""
    return f"env={word}" if (config_dir() / "env" / f"{word}.yaml").is_file() else "key=value"


# A pattern in an error of Hydra or OmegaConf, and the sentence in its place. The first match counts.
_SENTENCES: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (
        r"Could not find 'hydra/(launcher|sweeper)/(joblib|optuna|ray|submitit)",
        lambda m: f"hydra/{m[1]}: {m[2]} is not installed; {install(m[2])}",
    ),
    (r"Could not find '([^'/]+)/([^']+)' Available options in '[^']+': (.*?) provider=", _unknown_option),
    (r"Could not override 'device'", lambda _: _DEVICE),
    (
        r"Could not override '(env\.task\.(?:\w+\.[^']+|commands|(?:critic_)?observations|rewards|endings|reset))'",
        lambda m: f"{m[1]}: names what the task does not have yet; write + to add it: +{m[1]}=<value>",
    ),
    (r"Could not override '([^']+)'", lambda m: str(unknown_key(Config, m[1]))),
    (r"Could not delete from config\. '([^']+)'", lambda m: str(unknown_key(Config, m[1]))),
    (r"Interpolation key '([^']+)' not found", lambda m: f"${{{m[1]}}}: {unknown_key(Config, m[1])}"),
    (
        r"Ambiguous value for argument '([^'=]+)=(.*?)' 1\. ",
        lambda m: f"{m[1]}: {m[2]} are several values; add --multirun for a sweep, or write [{m[2]}] for a list",
    ),
    (
        r"Error parsing override '(.*?)' missing EQUAL",
        lambda m: f"cannot read {m[1]!r}: '=' is missing; write {_meant(m[1])}, and quote values with spaces",
    ),
    (r"Error parsing override '(.*?)'", lambda m: f"cannot read {m[1]!r}: {_QUOTES}"),
    (r"no viable alternative at input '(.*)'", lambda m: f"cannot read {m[1]!r}: {_QUOTES}"),
    (r"LexerNoViableAltException: (.*?) *\^", lambda m: f"cannot read {m[1]!r}: write key=value; {_QUOTES}"),
)


def explain(error: BaseException) -> ConfigError:
    """A composition error of Hydra or OmegaConf as one line that names the key or the word."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith(_NOISE))
    # OmegaConf adds this prefix to an error of a resolver, once per nested resolver.
    text = re.sub(r"^(ConfigError raised while resolving interpolation: )+", "", text)
    for pattern, sentence in _SENTENCES:
        if match := re.search(pattern, text):
            return ConfigError(sentence(match))
    return ConfigError(text)


def reject_unknown_flags(words: Sequence[str]) -> None:
    """Raises ConfigError for a flag that Hydra does not know, for which Hydra would print its usage."""
    parser = compatibility.hydra_flags()
    if parser is None:
        return
    parser.exit_on_error = False
    words = [word for word in words if word != "--version"]  # would print and exit here
    try:
        unknown = [word for word in parser.parse_known_args(words)[1] if word.startswith("-")]
    except argparse.ArgumentError as error:
        raise ConfigError(str(error).removeprefix("argument ")) from None
    if not unknown:
        return
    flag, _, value = unknown[0].partition("=")
    following = "".join(words[words.index(unknown[0]) + 1 :][:1])
    if not following.startswith("-") and "=" not in following:
        value = value or following
    name = flag.lstrip("-").replace("-", "_")
    keys = [name] if name.split(".")[0] in Config.model_fields else keys_named(Config, name)
    if keys:
        meant = " or ".join(f"{key}={value or '<value>'}" for key in keys[:3])
        raise ConfigError(f"cannot read {flag!r}: write {meant}")
    raise ConfigError(
        f"unknown flag {flag!r}; settings are written key=value, and the flags are --multirun, --cfg job, --help and "
        "--help=all"
    )
