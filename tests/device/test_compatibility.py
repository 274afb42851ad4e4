"""Private names of libraries: in one file only, and what happens with a version of a library that lacks one."""

from __future__ import annotations

import argparse
import ast
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlstable.cli.mistakes import reject_unknown_flags
from rlstable.config import ConfigError
from rlstable.config.distributed import DistributedConfig
from rlstable.config.run import EnvConfig
from rlstable.config.schema import validate
from rlstable.device import compatibility, hosts
from rlstable.envs.load import load_env
from rlstable.envs.mujoco_batch import Unsupported
from rlstable.envs.native import with_native_physics

PACKAGE = Path(compatibility.__file__).parents[1]
# Python's own names with an underscore, which every version has.
OF_PYTHON = {"_asdict", "_replace", "_fields", "_make", "_exit"}
# Functions that take a name as text.
BY_TEXT = ("getattr", "hasattr", "setattr", "importlib.import_module")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.AST) -> Iterator[str]:
    """Names with an underscore that a file of the package defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def private_uses(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private modules, attributes and texts of a file that no file of the package defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            paths = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            texts = [part for path in paths for part in path.split(".")]
        elif isinstance(node, ast.Attribute):
            texts = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_TEXT:
            values = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            texts = [part for value in values if isinstance(value, str) for part in value.split(".")]
        else:
            continue
        yield from (f"line {node.lineno}: {text}" for text in texts if is_private(text) and text not in own)


def test_private_names_of_libraries_stand_in_one_file() -> None:
    trees = {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}
    own = OF_PYTHON.union(*map(own_names, trees.values()))
    found = {str(file.relative_to(PACKAGE)): list(private_uses(tree, own)) for file, tree in trees.items()}
    assert {file: uses for file, uses in found.items() if uses and file != "device/compatibility.py"} == {}
    assert found["device/compatibility.py"] != []


@pytest.mark.parametrize(
    "text",
    ["from jax._src import core", "import hydra._internal.utils", "jax.config._state", "getattr(env, '_n_frames', 1)"],
)
def test_scan_finds_a_private_name(text: str) -> None:
    assert list(private_uses(ast.parse(text), set())) != []


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Makes private names of libraries look as if they were gone."""
    private = compatibility._private
    monkeypatch.setattr(
        compatibility, "_private", lambda module, name: None if name in names else private(module, name)
    )


def test_missing_module_or_name_is_none() -> None:
    assert compatibility._private("jax._src.no_such_module", "name") is None
    assert compatibility._private("jax._src.distributed", "no_such_name") is None
    assert compatibility._private("mujoco.mjx._src", "io") is importlib.import_module("mujoco.mjx._src.io")
    with pytest.raises(ModuleNotFoundError):
        compatibility._private("no_such_library._src", "name")


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        ("global_state", compatibility.coordination, r"distributed: rlstable does not know jax \d.*; install an older"),
        ("_envs", compatibility.brax_environments, r"env: .* not know brax \d.*env\.name=brax\.envs\.ant:Ant$"),
        ("io", compatibility.mjx_io, r"distributed: rlstable does not know mujoco-mjx \d"),
    ],
)
def test_unknown_part_of_a_library_is_one_line(
    name: str, call: Callable[[], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call() is not None
    without(monkeypatch, name)
    with pytest.raises(ConfigError, match=f"^{message}"):
        call()
    assert not hosts._is_wanted(validate(DistributedConfig, {}))  # a single process needs none of it


def test_unknown_cluster_detection_leaves_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": "7", "STEP_NODELIST": "n[1-2]", "NTASKS": "2", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert compatibility.processes_of_cluster() == 2
    without(monkeypatch, "ClusterEnv")
    assert compatibility.processes_of_cluster() is None


def test_unknown_flags_of_hydra_are_left_to_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown flag '--nonsense'"):
        reject_unknown_flags(["--nonsense"])
    without(monkeypatch, "get_args_parser")
    reject_unknown_flags(["--nonsense"])


def test_environment_of_brax_without_a_known_pipeline_has_no_native_physics(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EnvConfig(name="inverted_pendulum", backend="mjx")
    monkeypatch.setattr(compatibility, "BRAX_PIPELINE", "_no_such_pipeline")
    with pytest.raises(Unsupported, match="no pipeline that can be replaced"):
        with_native_physics(load_env(config))


def test_hydra_parser_is_made_if_python_checks_the_help_of_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def check_help(parser: argparse.ArgumentParser, action: argparse.Action) -> None:  # as in Python 3.14
        assert "%" not in action.help
        checked.append(action.dest)

    monkeypatch.setattr(argparse.ArgumentParser, "_check_help", check_help, raising=False)
    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", adding(argparse.ArgumentParser.add_argument))
    for _ in range(2):
        assert compatibility.hydra_flags() is not None
    assert "multirun" in checked and "shell_completion" not in checked


def adding(add_argument: Any) -> Any:
    """`add_argument` of Python 3.14, which checks the help of the new flag."""

    def add(self: Any, *names: str, **options: Any) -> Any:
        action = add_argument(self, *names, **options)
        self._check_help(action)
        return action

    return add
