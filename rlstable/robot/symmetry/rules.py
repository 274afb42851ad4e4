"""Mirror rules of observation terms and commands, and the reflections of whole observations that follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstable.config import ConfigError
from rlstable.device.reflection import Reflection, joined
from rlstable.robot import build, observations, terms
from rlstable.robot.observing import Observer, Part
from rlstable.robot.symmetry.pairs import AXIAL, VECTOR, Pairs, refused

# In mirrored states a value may differ by this share of its largest size in all states: velocities after a step,
# observations, rewards. A value that is always smaller than a share of the others' counts as that large.
SHARE_OF_STEP, _SMALL = 0.05, 0.01
_SETTINGS = ("scale", "noise", "clip", "history", "delay")  # the same for a term and its mirror image


class _View(NamedTuple):
    """The reflection of a term's numbers; named parts of the model that it shows, and their mirror images.

    A term that shows named parts is mirrored by the term of the same function that shows their images.
    """

    reflection: Reflection
    labels: tuple[Any, ...] = ()
    images: tuple[Any, ...] = ()


class Rules:
    """Reflections of a task's commands and observations by the mirror rules of their terms.

    Sensors have no rule: their signs follow from `samples`, the data of states and of their mirror images.
    """

    def __init__(self, pairs: Pairs, commands: Mapping[str, Callable[..., Any]], samples: Sequence[tuple[Any, Any]]):
        self._pairs, self._robot, self._samples = pairs, pairs.robot, samples
        self.commands = {name: self._of_command(name, function) for name, function in commands.items()}

    def of_observer(self, observer: Observer) -> tuple[Reflection, Reflection]:
        """The reflections of an observation vector, and of one without history, which has one step of each term."""
        views = {part.name: self._view(observer, part) for part in observer.parts}
        images = [self._image(observer, part, views) for part in observer.parts]
        blocks = [_in_order(views[part.name], views[image]) for part, image in zip(observer.parts, images, strict=True)]

        def vector(lengths: dict[str, int]) -> Reflection:
            starts = dict(zip(lengths, np.cumsum([0, *lengths.values()]), strict=False))
            whole = [b.repeated(n // len(b.order)) for b, n in zip(blocks, lengths.values(), strict=True) if n]
            order = [b.order + starts[i] for b, i in zip(whole, (i for i in images if lengths[i]), strict=True)]
            return Reflection(np.concatenate(order), np.concatenate([b.sign for b in whole]))

        sizes = {part.name: part.size for part in observer.parts}
        return vector({part.name: part.size * part.config.history for part in observer.parts}), vector(sizes)

    def _of_command(self, name: str, function: Callable[..., Any]) -> Reflection:
        known = {"vector": VECTOR, "axial": AXIAL, "velocity_command": Reflection.of_signs(1, -1, -1)}
        if (kind := terms.mirror_rule_of(function)) in known:
            return known[kind]
        if kind != "scalar":
            raise _without_rule(f"env.task.commands.{name}", kind)
        size = jax.eval_shape(lambda key: function(self._robot, key), jax.random.PRNGKey(0)).shape[0]
        return _unchanged(size)

    def _image(self, observer: Observer, part: Part, views: Mapping[str, _View]) -> str:
        """The term that shows the mirror image of a term: the same function, with the images of the named parts."""
        functions, config = observer.functions, {each.name: each.config for each in observer.parts}
        shown = sorted(map(str, views[part.name].images))
        for other in (part.name, *views):
            same = _plain(functions[other]) is _plain(functions[part.name])
            alike = all(getattr(config[other], name) == getattr(part.config, name) for name in _SETTINGS)
            if same and alike and sorted(map(str, views[other].labels)) == shown:
                return other
        raise refused(f"{observer.key}.{part.name}: its mirror image is not observed in the same way")

    def _view(self, observer: Observer, part: Part) -> _View:
        function, pairs, key = observer.functions[part.name], self._pairs, f"{observer.key}.{part.name}"
        kind, values = terms.mirror_rule_of(function), terms.arguments(function)
        if kind == "site":
            site = self._robot.site(values["site"])
            return _View(VECTOR, (site,), (int(pairs.sites[site]),))
        if kind == "contact":
            geoms = tuple(values["geoms"])
            return _View(_unchanged(part.size), geoms, tuple(self._image_of_geom(geom) for geom in geoms))
        if kind == "sensor":
            return self._of_sensor(key, int(self._robot.model.sensor(values["name"]).id))
        if kind in observations.INERTIAL:
            return self._of_sensor(key, self._robot.root_sensor(observations.INERTIAL[kind]))
        rules: dict[str, Callable[[], Reflection]] = {
            "vector": lambda: VECTOR,
            "axial": lambda: AXIAL,
            "scalar": lambda: _unchanged(part.size),
            "clock": lambda: Reflection.of_signs(*[-1.0] * part.size),  # half a cycle later: left and right alternate
            "action": lambda: pairs.actuators,
            "joints": lambda: pairs.of_joints(part.size < len(self._robot.joints)),
            "directions": lambda: _sines_and_cosines(pairs.of_joints(False, turning=True)),
            "command": lambda: joined([self.commands[name] for name in sorted(self.commands)]),
            "grid": lambda: _grid(observations.scan_grid(**values).shape[:2]),
            "feet": lambda: Reflection(pairs.feet, np.ones(part.size, np.float32)),
        }
        if kind not in rules:
            raise _without_rule(key, kind)
        return _View(rules[kind]() if part.size else _unchanged(0))

    def _image_of_geom(self, name: str) -> str:
        """The name of the mirror image of a geom, or of a body."""
        model = self._robot.model
        names = [build.name_of(model, "geom", geom) for geom in range(model.ngeom)]
        if name in names:
            return names[self._pairs.geoms[names.index(name)]]
        return str(model.body(self._pairs.bodies[model.body(name).id]).name)

    def _of_sensor(self, key: str, sensor: int) -> _View:
        image = self._image_of_sensor(sensor)
        values = np.stack([self._robot.numbers(data, sensor) for data, _ in self._samples])
        images = np.stack([self._robot.numbers(data, image) for _, data in self._samples])
        allowed = SHARE_OF_STEP * largest(values)
        signs = np.where(np.abs(images - values).max(axis=0) <= allowed, 1.0, -1.0)
        if (np.abs(images - signs * values).max(axis=0) > allowed).any():
            raise refused(f"{key}: sensor {self._robot.model.sensor(sensor).name} has no mirror image")
        return _View(Reflection.of_signs(*signs), (sensor,), (image,))

    def _image_of_sensor(self, sensor: int) -> int:
        """The sensor of the same kind at the mirror image of the object; else the sensor itself."""
        model = self._robot.model
        fields = ("type", "objtype", "objid", "reftype", "refid")
        objects = np.stack([getattr(model, f"sensor_{field}") for field in fields], axis=1).tolist()
        own = list(objects[sensor])
        for i in (2, 4):
            if own[i] >= 0 and own[i - 1] in self._pairs.images:
                own[i] = int(self._pairs.images[own[i - 1]][own[i]])
        return objects.index(own) if own in objects else sensor


def largest(values: np.ndarray) -> np.ndarray:
    """Largest absolute value of each element over all states `[states, n]`, at least a share of the largest of all."""
    each = np.abs(values).max(axis=0)
    return np.asarray(np.maximum(each, max(_SMALL * float(each.max(initial=0.0)), 1e-6)))


def _in_order(view: _View, image: _View) -> Reflection:
    """The reflection of a term whose image shows the named parts in another order."""
    if len(view.labels) < 2:
        return view.reflection
    return Reflection(np.array([image.labels.index(x) for x in view.images]), view.reflection.sign)


def _sines_and_cosines(angles: Reflection) -> Reflection:
    return joined([angles, Reflection(angles.order, np.ones_like(angles.sign))])


def _grid(shape: Sequence[int]) -> Reflection:
    """Rows from right to left become rows from left to right."""
    order = np.arange(math.prod(shape)).reshape(shape)[:, ::-1].ravel()
    return Reflection(order, np.ones(order.size, np.float32))


def _unchanged(size: int) -> Reflection:
    return Reflection(np.arange(size), np.ones(size, np.float32))


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a term without its parameters."""
    return getattr(function, "func", function)


def _without_rule(key: str, kind: str | None) -> ConfigError:
    rule = "no mirror rule" if kind is None else f"the unknown mirror rule {kind!r}"
    return refused(f"{key}: has {rule}; decorate its function with rlstable.robot.terms.mirrors")
