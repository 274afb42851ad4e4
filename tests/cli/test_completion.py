"""Shell completion: the printed scripts offer commands and options."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from rlstable.__main__ import COMMANDS
from rlstable.cli import completion
from rlstable.config.defaults import config_dir

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
needs_zsh = pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh; apt-get install zsh")


def offered(line: str) -> list[str]:
    """The words that bash offers at the end of a line."""
    code = f"""{completion.script("bash", list(COMMANDS))}
COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=(${{COMP_LINE//=/ = }})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); [[ $COMP_LINE == *[\\ =] ]] && COMP_CWORD=$(( COMP_CWORD + 1 ))
_rlstable; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


EXAMPLES = pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rlstable ", list(COMMANDS)),
        ("rlstable re", ["render", "report", "replay"]),
        ("rlstable train env=humanoid", ["humanoid", "humanoidstandup"]),
        ("rlstable train env=ant ppo=halfc", ["halfcheetah", "halfcheetah_cpu"]),
        ("rlstable doctor guards=", ["default", "off", "strict"]),
        ("rlstable train resume=", ["latest", "auto"]),
        ("rlstable evaluate ru", ["run=latest"]),
        ("rlstable render run=", ["latest"]),
        ("rlstable sweep-report ", ["sweep=latest"]),
        ("rlstable completion ", ["bash", "zsh"]),
        ("rlstable train env=nothing", []),
        ("rlstable version ", []),
    ],
)


@needs_bash
@EXAMPLES
def test_bash_completes_commands_and_options(line: str, words: list[str]) -> None:
    assert offered(line) == words


@needs_zsh
@EXAMPLES
def test_zsh_completes_commands_and_options(line: str, words: list[str]) -> None:
    """With stand-ins for the functions of zsh's completion system, which need a terminal."""
    code = f"""compdef() {{ }}; compadd() {{ shift; print -l -- ${{(M)@:#$typed*}} }}
{completion.script("zsh", list(COMMANDS))}
words=(${{=1}}); [[ $1 == *\\  ]] && words+=(""); CURRENT=$#words; typed=$words[-1]; _rlstable"""
    done = subprocess.run(["zsh", "-f", "-c", code, "zsh", line], capture_output=True, text=True, check=True)
    assert [word.rpartition("=")[2] if "=" in line else word for word in done.stdout.split()] == words


def test_both_scripts_know_every_option_of_every_group() -> None:
    words = completion.option_words(config_dir())
    assert {"env=ant", "ppo=ant_cpu", "guards=off", "recipe_for=cpu", "sweep=optuna"} <= set(words)
    for shell in ("bash", "zsh"):
        assert " ".join(words) in completion.script(shell, list(COMMANDS))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: shell; --help"),
        (["fish"], "argument shell: invalid choice: 'fish' (choose from "),
    ],
)
def test_unknown_shell_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        completion.main(list(COMMANDS), words)
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rlstable: {message}") and line.endswith("; --help lists what is allowed")
