"""The command `rlstable`: it lists and starts the other commands."""

from __future__ import annotations

import functools
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from commands import ROOT, exit_code, printed_by

from rlstable import __main__ as rlstable

main = functools.partial(exit_code, rlstable.main)


def test_listing_has_one_line_per_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(rlstable.COMMANDS)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("trian", "unknown command 'trian'; did you mean train?"),
        ("sweep_report", "unknown command 'sweep_report'; did you mean sweep-report?"),
        ("env=ant", "'env=ant' is no command; write rlstable train env=ant"),
        (
            "fly",
            "unknown command 'fly'; allowed are demo, train, evaluate, render, report, export, play, doctor, "
            "replay, sweep-report, version",
        ),
    ],
)
def test_unknown_command_is_one_line_and_exit_code_2(
    typed: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"rlstable: {message}\n")


def test_every_command_has_a_function() -> None:
    for function, _ in rlstable.COMMANDS.values():
        module, _, function = function.partition(":")
        assert callable(getattr(import_module(module), function))


def test_installed_script_starts_this_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["rlstable"] == "rlstable.__main__:main"


def test_program_outside_of_the_path_is_named_by_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    typed = tmp_path / "rlstable"
    typed.write_text("#!")
    typed.chmod(0o755)
    for folder, named in ((tmp_path / "other", str(typed)), (tmp_path, "rlstable")):
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.setattr(sys, "argv", [str(typed)])
        rlstable.main(["version"])
        assert sys.argv == [f"{named} version"]


def test_words_after_the_command_are_its_arguments(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("train", "lr=1e-3") == 2
    assert main("evaluate", "run=nowhere", "episods=3") == 2
    assert main("sweep-report", "nowhere") == 2
    assert main("sweep-report") == 2
    assert capsys.readouterr().err.splitlines() == [
        "rlstable: lr: unknown key; did you mean ppo.learning_rate?",
        "rlstable: episods: unknown key; did you mean episodes?",
        "rlstable: sweep: there is no folder nowhere; sweeps are in runs/sweeps/<time>",
        "rlstable: sweep: there is no sweep in runs/sweeps yet; make one with rlstable train --multirun seed=0,1, or "
        "write sweep=<folder>",
    ]


PRINTING = [
    ("rlstable.__main__", ([], ["--version"], ["trian"]), "jax brax mujoco flax orbax"),
    (
        "rlstable.train", (["--help"], ["env=ant", "--cfg", "job"], ["env=nowhere"], ["ppo.num_envs=0"]),
        "jax brax mujoco flax orbax wandb",
    ),
    ("rlstable.doctor.__main__", (["--help"],), "jax brax mujoco hydra"),
    ("rlstable.demo.__main__", (["humanoid"],), "jax brax"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "commands", "heavy"), PRINTING, ids=[module for module, *_ in PRINTING])
def test_jax_is_not_imported_for_listings_helps_mistakes_and_pages(
    module: str, commands: tuple[list[str], ...], heavy: str, here: Path
) -> None:
    code = (
        f"import sys\nfrom {module} import main\nfor sys.argv[1:] in {commands}:\n"
        "    try: main()\n    except SystemExit: pass\n"
        f"print(sorted(set({heavy.split()}) & set(sys.modules)))"
    )
    assert printed_by(code)[-1] == "[]"
