"""Model files: MJCF, URDF with its meshes, a robot of the package `robot_descriptions`, and the copy of a run."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import mujoco

from rlstable import play
from rlstable.config import ConfigError
from rlstable.config.extras import install
from rlstable.config.robot import DESCRIPTIONS, MENAGERIE
from rlstable.envs import menagerie
from rlstable.io.files import one_line, read

_MAIN_URDF = "robot.urdf"
_ADVICE = {
    play.LATE: "; make it smaller",
    play.CRASHED: "; it may be damaged, attach or include itself, or need too much memory",
}
_LARGEST = 2**29  # bytes of an unpacked model; an archive of 1 MB may hold 50 MB more than 16
_GROWTH, _ALWAYS = 50, 2**24
_STEPS = (1e-6, 1.0)  # seconds, least and greatest time step
# Attributes of MJCF that name a file or a folder by an absolute path.
_ABSOLUTE = re.compile(rb'\b(file|meshdir|texturedir|assetdir)(\s*=\s*)"(/[^"]*)"')


@contextlib.contextmanager
def opened(xml: str) -> Iterator[mujoco.MjSpec]:
    """The editable model of `env.xml`; it can be compiled within the context. A ConfigError if it cannot be read."""
    with contextlib.ExitStack() as stack:
        path, folder = _located(xml), None
        if path.suffix == ".zip":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
            path = _unpacked(path, folder)
        try:
            urdf = _urdf(path)
            text = "" if urdf is None else _text(urdf, _meshes(urdf, path))
            wrong = _tried(path, path.stat().st_mtime_ns, text)
            # `build` may have a better line for a mistake in the model.
            if wrong and (not wrong.startswith("cannot be compiled") or "allocate" in wrong):
                raise ConfigError(f"env.xml: {xml} {wrong}{_ADVICE.get(wrong, '')}")
            outside = [] if folder is None else [file for file in _needed(path) if not file.is_relative_to(folder)]
            if outside:
                raise ConfigError(f"env.xml: {xml} needs {outside[0]}, which is not in it; give the model's own file")
            spec = mujoco.MjSpec.from_string(text) if text else mujoco.MjSpec.from_file(str(path))
            _check_names(spec, xml)
        except ConfigError:
            raise
        except (ValueError, OSError, RecursionError) as error:
            raise ConfigError(f"env.xml: {xml} cannot be read: {' '.join(str(error).split())[:300]}") from None
        yield spec


@functools.lru_cache(maxsize=64)
def _tried(path: Path, _: int, text: str) -> str:
    """Result of `play.trial` for a file with this time of change."""
    return play.trial(path, text)


def _check_names(spec: mujoco.MjSpec, xml: str) -> None:
    """Refuses names that are not UTF-8, and time steps with which no simulation makes sense."""
    _ = [element.name for kind in (spec.bodies, spec.joints, spec.geoms, spec.sites) for element in kind]
    low, high = _STEPS
    if not low <= spec.option.timestep <= high:
        raise ConfigError(
            f"env.xml: {xml} has a time step of {spec.option.timestep:g} s; set timestep of <option> between {low:g} "
            f"and {high:g}"
        )


def bundle(xml: str) -> bytes:
    """The model file with all files that it names, unchanged, as a zip archive; a URDF gets new names of meshes."""
    path = _located(xml)
    if path.suffix == ".zip":
        return read(path)
    urdf = _urdf(path)
    if urdf is None:
        files = {file: file.read_bytes() for file in _needed(path) if file.is_file()}
        root = Path(os.path.commonpath([file.parent for file in files]))
        contents = {str(file.relative_to(root)): _relative(content, path.resolve()) for file, content in files.items()}
        return _archive(str(path.resolve().relative_to(root)), contents)
    meshes = _meshes(urdf, path)
    names = {mesh: f"meshes/{i}_{mesh.name}" for i, mesh in enumerate(sorted({*meshes.values()}))}
    renamed = {name: PurePosixPath(names[mesh]) for name, mesh in meshes.items()}
    contents = {name: mesh.read_bytes() for mesh, name in names.items()}
    return _archive(_MAIN_URDF, {_MAIN_URDF: _text(urdf, renamed).encode(), **contents})


def _needed(path: Path) -> list[Path]:
    """A model file and all files that it names."""
    urdf = _urdf(path)
    names = mujoco.mju_getXMLDependencies(str(path)) if urdf is None else _meshes(urdf, path).values()
    return [path.resolve(), *(Path(name).resolve() for name in names)]


def _archive(main: str, contents: dict[str, bytes]) -> bytes:
    """A zip archive whose comment names the main file, with the same bytes for the same contents."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            archive.writestr(zipfile.ZipInfo(name), contents[name], zipfile.ZIP_DEFLATED)
        archive.comment = main.encode()
    return buffer.getvalue()


def _relative(content: bytes, main: Path) -> bytes:
    """A file of a model with paths relative to the main file, so that the copy does not read the user's files."""
    if not content.lstrip().startswith(b"<"):
        return content

    def shorter(match: re.Match[bytes]) -> bytes:
        relative = os.path.relpath(os.path.realpath(os.fsdecode(match[3])), main.parent)
        return match[1] + match[2] + b'"' + os.fsencode(relative) + b'"'

    return _ABSOLUTE.sub(shorter, content)


def _unpacked(path: Path, folder: Path) -> Path:
    """Extracts an archive of `bundle`; returns the path of the main file.

    Raises `ConfigError` if the archive is damaged or too large.
    """
    content = read(path)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
            if size > min(_LARGEST, _ALWAYS + _GROWTH * len(content)):
                raise ConfigError(f"env.xml: {path} would unpack to {size / 2**20:,.0f} MiB; it is not unpacked")
            archive.extractall(folder)
            main = (folder / archive.getinfo(archive.comment.decode()).filename).resolve()
            if not main.is_relative_to(folder):
                raise ValueError("its main file is outside of it")
            return main
    except ConfigError:
        raise
    except Exception as error:  # zipfile raises many kinds for damaged archives
        raise ConfigError(
            f"env.xml: {path}, the copy of the model that a run keeps, is damaged: {one_line(error)}; copy it from a "
            "backup, or give the model's own file in env.xml"
        ) from None


def _located(xml: str) -> Path:
    """The path of a model file."""
    if xml.startswith(MENAGERIE):
        return menagerie.model(xml.removeprefix(MENAGERIE))
    path = Path(_described(xml.removeprefix(DESCRIPTIONS)) if xml.startswith(DESCRIPTIONS) else xml)
    if not path.is_file():
        raise ConfigError(f"env.xml: there is no file {path}; give the path of an MJCF or URDF file")
    if path.suffix == ".xacro":
        raise ConfigError(
            f"env.xml: {path} has macros; expand them first: xacro {path.name} > {path.stem}, and give that"
        )
    return path


def _described(name: str) -> str:
    """The file of a robot of `robot_descriptions`, which keeps clones of repositories in a folder of the user."""
    if importlib.util.find_spec("robot_descriptions") is None:
        raise ConfigError(f"env.xml: {DESCRIPTIONS}{name} needs a package; {install('robots')}")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(f"robot_descriptions.{name}")
    except Exception as error:  # no such robot; or of git, if the files are not there and cannot be downloaded
        text = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"env.xml: {DESCRIPTIONS}{name} is not in ROBOT_DESCRIPTIONS_CACHE (~/.cache/robot_descriptions), and "
            f"cannot be downloaded: {text}; its page lists the robots, such as go2_mj_description"
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
