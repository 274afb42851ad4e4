"""Model files: MJCF, URDF with its meshes, a robot of the package `robot_descriptions`, and the copy of a run."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import mujoco

from rlstable.config import ConfigError
from rlstable.config.extras import install
from rlstable.config.robot import DESCRIPTIONS
from rlstable.config.schema import first_line
from rlstable.io.files import read

_MAIN_URDF = "robot.urdf"


@contextlib.contextmanager
def opened(xml: str) -> Iterator[mujoco.MjSpec]:
    """The editable model of `env.xml`; it can be compiled within the context. A ConfigError if it cannot be read."""
    with contextlib.ExitStack() as stack:
        path = _located(xml)
        if path.suffix == ".zip":
            path = _unpacked(path, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        try:
            urdf = _urdf(path)
            if urdf is None:
                spec = mujoco.MjSpec.from_file(str(path))
            else:
                spec = mujoco.MjSpec.from_string(_text(urdf, _meshes(urdf, path)))
        except ConfigError:
            raise
        except (ValueError, OSError) as error:
            raise ConfigError(f"env.xml: {xml} cannot be read: {' '.join(str(error).split())[:300]}") from None
        yield spec


def bundle(xml: str) -> bytes:
    """The model file with all files that it names, unchanged, as a zip archive; a URDF gets new names of meshes."""
    path = _located(xml)
    if path.suffix == ".zip":
        return read(path)
    urdf = _urdf(path)
    if urdf is None:
        found = [Path(name) for name in mujoco.mju_getXMLDependencies(str(path))]
        files = {file: file.read_bytes() for one in (path, *found) if (file := one.resolve()).is_file()}
        root = Path(os.path.commonpath([file.parent for file in files]))
        contents = {str(file.relative_to(root)): content for file, content in files.items()}
        return _archive(str(path.resolve().relative_to(root)), contents)
    meshes = _meshes(urdf, path)
    names = {mesh: f"meshes/{i}_{mesh.name}" for i, mesh in enumerate(sorted({*meshes.values()}))}
    renamed = {name: PurePosixPath(names[mesh]) for name, mesh in meshes.items()}
    contents = {name: mesh.read_bytes() for mesh, name in names.items()}
    return _archive(_MAIN_URDF, {_MAIN_URDF: _text(urdf, renamed).encode(), **contents})


def _archive(main: str, contents: dict[str, bytes]) -> bytes:
    """A zip archive whose comment names the main file, with the same bytes for the same contents."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            archive.writestr(zipfile.ZipInfo(name), contents[name], zipfile.ZIP_DEFLATED)
        archive.comment = main.encode()
    return buffer.getvalue()


def _unpacked(path: Path, folder: Path) -> Path:
    """Extracts an archive of `bundle`; returns the path of the main file."""
    try:
        with zipfile.ZipFile(io.BytesIO(read(path))) as archive:
            archive.extractall(folder)
            return folder / archive.getinfo(archive.comment.decode()).filename
    except (zipfile.BadZipFile, OSError, KeyError, ValueError) as error:
        raise ConfigError(f"env.xml: {path} is not a model that a run has saved: {first_line(error)}") from None


def _located(xml: str) -> Path:
    """The path of a model file."""
    path = Path(_described(xml.removeprefix(DESCRIPTIONS)) if xml.startswith(DESCRIPTIONS) else xml)
    if not path.is_file():
        raise ConfigError(f"env.xml: there is no file {path}; give the path of an MJCF or URDF file")
    return path


def _described(name: str) -> str:
    """The file of a robot of `robot_descriptions`, which keeps clones of repositories in a folder of the user."""
    if importlib.util.find_spec("robot_descriptions") is None:
        raise ConfigError(f"env.xml: {DESCRIPTIONS}{name} needs a package; {install('robots')}")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(f"robot_descriptions.{name}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"env.xml: robot_descriptions has no robot {name!r} ({first_line(error)}); its page lists them, such as "
            "go2_mj_description"
        ) from None
    except Exception as error:  # of git, if the files are not there and cannot be downloaded
        text = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"env.xml: {DESCRIPTIONS}{name} is not in ROBOT_DESCRIPTIONS_CACHE (~/.cache/robot_descriptions), and "
            f"cannot be downloaded: {text}; give the path of a model file"
        ) from None
    path = getattr(module, "MJCF_PATH", None) or getattr(module, "URDF_PATH", None)
    if path is None:
        raise ConfigError(f"env.xml: {DESCRIPTIONS}{name} has neither an MJCF nor a URDF file; choose another robot")
    return str(path)


# --- URDF


def _urdf(path: Path) -> ElementTree.Element | None:
    """The root element of a URDF file; None for another file, in which MuJoCo finds the mistakes."""
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError:
        return None
    return root if root.tag == "robot" else None


def _compiler(urdf: ElementTree.Element) -> ElementTree.Element:
    """The element `<mujoco><compiler>` of a URDF, with MuJoCo's options; made if it is missing."""
    parent = urdf
    for tag in ("mujoco", "compiler"):
        found = parent.find(tag)
        parent = ElementTree.SubElement(parent, tag) if found is None else found
    return parent


def _mesh_elements(urdf: ElementTree.Element) -> list[ElementTree.Element]:
    """The meshes that MuJoCo reads: it discards those of visuals unless the options say otherwise."""
    shown = _compiler(urdf).get("discardvisual", "true") == "false"
    kinds = ("collision", "visual") if shown else ("collision",)
    return [mesh for kind in kinds for mesh in urdf.iterfind(f".//{kind}//mesh")]


def _meshes(urdf: ElementTree.Element, path: Path) -> dict[str, Path]:
    """The files of the meshes, by the names in the URDF; a ConfigError for the first that is missing."""
    folder = path.parent / _compiler(urdf).get("meshdir", "")
    return {name: _mesh_file(name, path, folder) for mesh in _mesh_elements(urdf) if (name := mesh.get("filename", ""))}


def _mesh_file(name: str, path: Path, folder: Path) -> Path:
    """A mesh beside the URDF, or for `package://` in a folder of the package's name above it."""
    scheme, _, rest = name.rpartition("://")
    candidates = [path.parent / rest, folder / rest]
    if scheme == "package":
        package, _, inner = rest.partition("/")
        parents = path.resolve().parents
        candidates = [parent / package / inner for parent in parents]
        candidates += [parent / inner for parent in parents if parent.name == package] + [parents[0] / inner]
    for candidate in (*candidates, folder / Path(rest).name):
        if candidate.is_file():
            return candidate.resolve()
    where = "beside it, or in a folder of the package's name above it"
    raise ConfigError(f"env.xml: {path} needs the mesh {name}, which is missing; put it {where}")


def _text(urdf: ElementTree.Element, meshes: dict[str, Path] | dict[str, PurePosixPath]) -> str:
    """The URDF with other paths of meshes."""
    copied = ElementTree.fromstring(ElementTree.tostring(urdf))
    for mesh in _mesh_elements(copied):
        mesh.set("filename", str(meshes[mesh.get("filename", "")]))
    compiler = _compiler(copied)
    compiler.attrib.pop("meshdir", None)
    compiler.set("strippath", "false")
    return ElementTree.tostring(copied, encoding="unicode")
