"""Words of the training command, before Hydra reads them: folders as typed, `resume=latest`, and mistakes."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from rlstable.cli.options import latest_run
from rlstable.compilation import compatibility
from rlstable.config import Config, ConfigError
from rlstable.config.overrides import literal
from rlstable.config.schema import expand_home, keys_named

_FLAG = re.compile(r"--?(?P<key>[A-Za-z][\w.-]+)(=(?P<value>.*))?", re.DOTALL)
_FOLDERS = ("resume", "hydra.run.dir", "hydra.sweep.dir", "compile_cache")


def prepared(words: Sequence[str]) -> list[str]:
    """The words of a command line as Hydra reads them.

    An existing folder after a key of `_FOLDERS` is quoted in Hydra's grammar, and `~` becomes the home folder.
    `resume=latest` becomes the newest run folder, and `distributed=true` becomes `distributed.enabled=true`.

    Raises:
        ConfigError: A word is no override but was meant as one; names the right spelling.
    """
    for index, word in enumerate(words):
        if index and "=" not in word and (typed := folder_in_pieces(words, index)) is not None:
            key, folder = typed
            raise ConfigError(
                f"{key}: the shell split the folder at its spaces; write {shlex.quote(f'{key}={literal(folder)}')}"
            )
        _reject_other_spelling(word, words[index + 1] if index + 1 < len(words) else "")
    _reject_unknown_flags(words)
    return [_as_hydra_reads(word) for word in words]


def folder_in_pieces(words: Sequence[str], index: int) -> tuple[str, str] | None:
    """The key and the existing folder that the shell split at spaces; None if there is no such folder.

    Args:
        words: Words of a command line.
        index: The second piece; the first one is `key=<piece>`.
    """
    key, equals, first = words[index - 1].partition("=")
    for end in range(index + 1, len(words) + 1) if equals else ():
        folder = " ".join([first, *words[index:end]])
        if Path(folder.strip("'\"")).is_dir():
            return key, folder.strip("'\"")
    return None


def _reject_other_spelling(word: str, following: str) -> None:
    """Rejects `--env x`, `--env=x` and `env x`.

    Args:
        word: A word.
        following: The next word, or the empty string.

    Raises:
        ConfigError: The word is a key or a group of the configuration.
    """
    has_value = following != "" and "=" not in following and not following.startswith("-")
    flag = _FLAG.fullmatch(word)
    if flag is None and ("=" in word or not has_value):
        return
    name = (flag["key"] if flag else word).replace("-", "_")
    value = (flag and flag["value"]) or (following if has_value else "<value>")
    keys = [name] if name.split(".")[0] in Config.model_fields else keys_named(Config, name)
    if keys:
        typed = f"{word} {following}" if has_value and not (flag and flag["value"]) else word
        raise ConfigError(f"cannot read {typed!r}: write {' or '.join(f'{key}={value}' for key in keys[:3])}")


def _reject_unknown_flags(words: Sequence[str]) -> None:
    """Rejects flags that Hydra does not know, for which it would print its usage.

    Raises:
        ConfigError: A flag is unknown, or its value is missing or not allowed.
    """
    parser = compatibility.hydra_flags()
    if parser is None:
        return
    parser.exit_on_error = False
    words = [word for word in words if word != "--version"]  # would print and exit here
    try:
        unknown = [word for word in parser.parse_known_args(words)[1] if word.startswith("-")]
    except argparse.ArgumentError as error:
        raise ConfigError(str(error).removeprefix("argument ")) from None
    if unknown:
        raise ConfigError(
            f"unknown flag {unknown[0]!r}; settings are written key=value, and the flags are --multirun, --cfg job, "
            "--help and -v"
        )


def _as_hydra_reads(word: str) -> str:
    key, equals, folder = word.partition("=")
    if key == "distributed" and equals:
        return f"distributed.enabled={folder}"
    if key not in _FOLDERS or not equals:
        return word
    if word == "resume=latest":
        try:
            return f"resume={literal(latest_run())}"
        except ValueError as error:
            raise ConfigError(f"resume: {error}") from None
    bare = folder.strip("'\"")
    if bare.startswith("~"):
        return f"{key}={literal(expand_home(bare))}"
    return f"{key}={literal(folder)}" if folder not in ("auto", "null") and Path(folder).is_dir() else word
