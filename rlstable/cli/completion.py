"""The command `rlstable completion bash`: prints a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlstable.cli.command import OneLineParser
from rlstable.config.defaults import config_dir

_EPILOG = """
examples:
  eval "$(rlstable completion bash)"      in ~/.bashrc
  eval "$(rlstable completion zsh)"       in ~/.zshrc, after compinit
"""
_OF_A_RUN = ("run=latest", "which=best", "which=latest")

# Bash completes only the text behind the last `=`, because `=` separates words there.
_BASH = """_rlstable() {{
  local before="${{COMP_LINE:0:COMP_POINT}}" word
  word="${{before##* }}"
  local offered="{commands}"
  if (( COMP_CWORD > 1 )); then
    case "${{COMP_WORDS[1]}}" in
{cases}
      *) offered="" ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$offered" -- "$word"))
  if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then
    COMPREPLY=("${{COMPREPLY[@]#"${{word%%=*}}="}}")
  fi
}}
complete -F _rlstable rlstable
"""
_ZSH = """_rlstable() {{
  local offered="{commands}"
  if (( CURRENT > 2 )); then
    case "$words[2]" in
{cases}
      *) offered="" ;;
    esac
  fi
  compadd -- ${{=offered}}
}}
compdef _rlstable rlstable
"""


def main(commands: Sequence[str], argv: Sequence[str] | None = None) -> None:
    """Prints the script.

    Args:
        commands: Names of all commands.
        argv: The shell; None for the arguments of this process.
    """
    parser = OneLineParser(
        prog="rlstable completion",
        description="Prints a script that completes commands and options.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    print(script(parser.parse_args(argv).shell, commands), end="")


def script(shell: str, commands: Sequence[str]) -> str:
    """The script for a shell. The words are part of the script, so that a key press starts no Python.

    Args:
        shell: `bash` or `zsh`.
        commands: Names of all commands.
    """
    groups = option_words(config_dir())
    words = {
        "train": [*groups, "resume=latest", "resume=auto", "--help", "--multirun"],
        "doctor": groups,
        "evaluate|render|export": _OF_A_RUN,
        "report": ("run=latest", "sweep=latest"),
        "sweep-report": ("sweep=latest",),
        "completion": ("bash", "zsh"),
    }
    cases = "\n".join(f'      {command}) offered="{" ".join(offered)}" ;;' for command, offered in words.items())
    template = _ZSH if shell == "zsh" else _BASH
    return template.format(commands=" ".join(commands), cases=cases)


def option_words(folder: Path) -> list[str]:
    """Every option of every configuration group as `group=option`, such as `env=ant`.

    Args:
        folder: The folder `configs`.
    """
    return sorted(f"{file.parent.name}={file.stem}" for file in folder.glob("*/*.yaml"))
